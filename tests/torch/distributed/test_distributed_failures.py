"""What goes wrong on one rank is a clear error on every rank; nobody waits for ever."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.torch.distributed import failure_cases as failures
from tests.torch.distributed.processes import Processes, Raised

LIMIT = 20.0
"""Seconds in which every rank must have said what is wrong."""


@pytest.fixture
def fragile_ranks(new_ranks: Processes) -> Iterator[Processes]:
    """Ranks whose process group may go to pieces, and waits no longer than a second and a half."""
    new_ranks.regroup(1.5)
    yield new_ranks
    new_ranks.regroup(30.0)


def test_a_model_wrapped_after_the_optimizer_was_built_is_refused_on_every_rank(ranks: Processes) -> None:
    for result in ranks.try_run(failures.wrapped_later, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "after the optimizer was built" in result.message


def test_a_ddp_model_that_the_optimizer_is_not_told_of_is_named(ranks: Processes) -> None:
    for lines in ranks.run(failures.unknown, 1, limit=LIMIT):
        assert len([line for line in lines if "Pass model=ddp" in line]) == 1
    for result in ranks.try_run(failures.unknown, 2, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "Pass model=ddp" in result.message


def test_a_sharded_model_that_the_optimizer_is_not_told_of_is_named(ranks: Processes) -> None:
    for lines in ranks.run(failures.sharded_unknown, 1, limit=LIMIT):
        assert len([line for line in lines if "Pass model=, the sharded model" in line]) == 1
    for result in ranks.try_run(failures.sharded_unknown, 2, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "Pass model=, the sharded model" in result.message


@pytest.mark.parametrize(
    ("engine", "option", "values"),
    [
        ("ddp", "clip_grad_norm", (None, 0.05)),
        ("ddp", "reduction", ("mean", "sum")),
        ("ddp", "nonfinite", ("propagate", "skip_window")),
        ("ddp", "accumulate_dtype", (None, torch.float64)),
        ("ddp", "noise_scale", (True, False)),
        ("ddp", "sync", ("window", "micro_batch")),
        ("train step", "clip_grad_norm", (1.0, 0.05)),
        ("train step", "reduction", ("mean", "sum")),
        ("train step", "accumulate_dtype", (None, torch.float64)),
        ("train step", "weight", (len, None)),
        ("train step", "batch_norm", ("pooled", "frozen")),
    ],
)
def test_ranks_that_disagree_about_an_option_are_told_at_the_start(
    ranks: Processes, engine: str, option: str, values: tuple[object, object]
) -> None:
    shown = [value and "given" if option == "weight" else value for value in values]
    for result in ranks.try_run(failures.different_options, engine, option, values, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert f"`{option}` must be the same on every rank" in result.message
        assert option == "noise_scale" or f"{shown[0]!r} on rank 0, {shown[1]!r} on rank 1" in result.message


def test_ranks_of_which_some_weigh_their_micro_batches_are_told_before_the_update(ranks: Processes) -> None:
    for result in ranks.try_run(failures.weighed_on_one_rank, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "WindowError"
        assert "weighed on rank 0, without a weight on rank 1" in result.message


@pytest.mark.parametrize("which", ["optimizer", "train step"])
def test_a_rank_whose_constructor_raises_is_an_error_on_the_others_at_once(ranks: Processes, which: str) -> None:
    ranks.run(failures.cannot_be_built, which, limit=LIMIT)


def test_a_rank_that_builds_nothing_is_an_error_after_the_process_group_s_timeout(fragile_ranks: Processes) -> None:
    first, _ = fragile_ranks.try_run(failures.never_built, limit=LIMIT)
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert "waited for the other ranks to build their Optimizer or TrainStep" in first.message


@pytest.mark.parametrize("way", ["optimizer", "train step"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_optimizer_that_evaluates_closures_is_refused_on_several_ranks(
    ranks: Processes, engine: str, way: str
) -> None:
    for result in ranks.try_run(failures.evaluates_closures, engine, way, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "LBFGS evaluates its closure several times in an update, and each time 2 ranks" in result.message


def test_optimizers_on_parts_of_one_sharded_model_are_refused(ranks: Processes) -> None:
    ranks.run(failures.two_on_one_sharded_model, limit=LIMIT)


def test_ranks_that_disagree_about_steps_are_told_at_the_start(ranks: Processes) -> None:
    for result in ranks.try_run(failures.different_steps, False, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "2 on rank 0, 4 on rank 1" in result.message


def test_schedules_that_disagree_are_told_at_the_window(ranks: Processes) -> None:
    for result in ranks.try_run(failures.different_steps, True, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "WindowError"
        assert "2 on rank 0, 4 on rank 1" in result.message


def test_an_optimizer_wrapped_twice_is_refused_on_every_rank(ranks: Processes) -> None:
    for result in ranks.try_run(failures.wrapped_twice, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"


def test_parameters_that_no_rank_would_reduce_are_refused(ranks: Processes) -> None:
    for result in ranks.try_run(failures.parameters_outside, limit=LIMIT):
        assert isinstance(result, Raised)
        assert "in none of `model`'s" in result.message


def test_one_rank_s_open_window_is_not_another_s(ranks: Processes) -> None:
    first, second = ranks.try_run(failures.another_rank, limit=LIMIT)
    assert first is None
    assert isinstance(second, Raised)
    assert "on rank 0 of 2" in second.message


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["batches", "plain"])
def test_a_rank_that_raises_inside_a_window_is_an_error_on_every_rank(ranks: Processes, way: str, where: str) -> None:
    first, second = ranks.try_run(failures.raises, where, way, limit=LIMIT)
    assert isinstance(second, Raised)
    assert second.kind == "ArithmeticError"
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert "Rank 1 left in the middle" in first.message


def test_a_rank_that_breaks_off_alone_is_an_error_on_the_others(ranks: Processes) -> None:
    first, _ = ranks.try_run(failures.breaks, limit=LIMIT)
    assert isinstance(first, Raised)
    assert "Rank 1 left in the middle" in first.message


def test_the_process_group_is_usable_after_such_errors(ranks: Processes) -> None:
    for result in ranks.try_run(failures.wrapped_twice, limit=LIMIT):
        assert isinstance(result, Raised)


def test_a_rank_whose_process_dies_is_an_error_on_the_others(fragile_ranks: Processes) -> None:
    first, second = fragile_ranks.try_run(failures.dies, limit=LIMIT)
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert "is gone" in first.message
    assert isinstance(second, Raised)


def test_a_rank_that_does_not_answer_is_an_error_after_the_process_group_s_timeout(
    fragile_ranks: Processes, tmp_path: pathlib.Path
) -> None:
    first, second = fragile_ranks.try_run(failures.is_late, tmp_path / "given up", limit=LIMIT)
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert isinstance(second, Raised)


@pytest.mark.parametrize("case", ["out_of_step", "sharded_raises"])
def test_ranks_of_a_sharded_model_that_wait_in_its_passes_wait_no_longer_than_the_process_group(
    fragile_ranks: Processes, case: str
) -> None:
    first, second = fragile_ranks.try_run(getattr(failures, case), limit=LIMIT)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    if case != "out_of_step":
        assert second.kind == "ArithmeticError"


def test_a_sharded_model_that_needs_rows_on_a_rank_that_has_none_is_named_on_all(ranks: Processes) -> None:
    first, second = ranks.try_run(failures.rows_needed, limit=LIMIT)
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert isinstance(second, Raised)
    assert second.kind == "ValueError"
    assert "for which this rank has no rows" in second.message


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("why", ["rows", "loader"])
@pytest.mark.parametrize("at", [pytest.param(at, marks=[pytest.mark.slow] * (at % 2)) for at in range(5)])
def test_a_batch_that_cannot_be_used_on_one_rank_is_an_error_on_the_others_at_once(
    ranks: Processes, at: int, why: str, engine: str
) -> None:
    first, second = ranks.try_run(failures.bad_batch, engine, at, why, limit=LIMIT)
    assert isinstance(second, Raised)
    assert second.kind == {"rows": "ValueError", "loader": "ArithmeticError"}[why]
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert "Rank 1 left in the middle" in first.message


def test_a_schedule_that_misses_updates_on_one_rank_is_named_on_all_with_both_values(ranks: Processes) -> None:
    for result in ranks.try_run(failures.schedule_stepped_in_the_body, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "WindowError"
        assert "Ranks have different hyperparameters: lr is 0.025 on rank 0, 0.05 on rank 1" in result.message


@pytest.mark.parametrize(
    ("name", "values", "way"),
    [
        ("betas", ((0.9, 0.99), (0.9, 0.95)), "optimizer"),
        ("lr", (torch.tensor(0.5), torch.tensor(0.25)), "optimizer"),
        ("weight_decay", (0.1, 0.2), "step"),
        ("weight_decay", (0.1, 0.2), "layers, update='in_backward'"),
    ],
)
def test_hyperparameters_that_differ_from_rank_to_rank_are_named_on_all_before_the_update(
    ranks: Processes, name: str, values: tuple[Any, Any], way: str
) -> None:
    first, second = [[*v] if isinstance(v, tuple) else float(v) for v in values]
    for result in ranks.try_run(failures.different_hyperparameters, name, values, way, limit=LIMIT):
        assert isinstance(result, Raised)
        assert result.kind == "WindowError"
        assert f"{name} of group 2 is {first} on rank 0, {second} on rank 1. Nothing was updated" in result.message
