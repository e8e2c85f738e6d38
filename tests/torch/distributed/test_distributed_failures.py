"""What goes wrong on one rank is a clear error on every rank; nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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


def test_a_rank_that_does_not_answer_is_an_error_after_the_process_group_s_timeout(fragile_ranks: Processes) -> None:
    first, second = fragile_ranks.try_run(failures.sleeps, 3.0, limit=LIMIT)
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert isinstance(second, Raised)


@pytest.mark.parametrize("case", ["out_of_step", "sharded_raises", "sharded_out_of_memory"])
def test_ranks_of_a_sharded_model_that_wait_in_its_passes_wait_no_longer_than_the_process_group(
    fragile_ranks: Processes, case: str
) -> None:
    first, second = fragile_ranks.try_run(getattr(failures, case), limit=LIMIT)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    if case != "out_of_step":
        assert second.kind in ("ArithmeticError", "OutOfMemoryError")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("why", ["rows", "loader"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_a_batch_that_cannot_be_used_on_one_rank_is_an_error_on_the_others_at_once(
    ranks: Processes, at: int, why: str, engine: str
) -> None:
    first, second = ranks.try_run(failures.bad_batch, engine, at, why, limit=LIMIT)
    assert isinstance(second, Raised)
    assert second.kind == {"rows": "ValueError", "loader": "ArithmeticError"}[why]
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert "Rank 1 left in the middle" in first.message
