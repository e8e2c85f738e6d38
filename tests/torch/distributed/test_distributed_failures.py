"""What goes wrong on one rank is a clear error on every rank; nobody waits for ever."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.torch.distributed import ddp_cases, sharded_cases
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


UNEVEN = [[4, 4, 4, 4, 4, 4, 4, 4, 3], [4, 4, 4, 2]]
OPTIONS: list[tuple[str, str, Any, Any]] = [
    ("ddp", "clip_grad_norm", None, 0.05),
    ("ddp", "reduction", "mean", "sum"),
    ("ddp", "nonfinite", "propagate", "skip_window"),
    ("ddp", "accumulate_dtype", None, torch.float64),
    ("ddp", "noise_scale", True, False),
    ("ddp", "sync", "window", "micro_batch"),
    ("train step", "clip_grad_norm", 1.0, 0.05),
    ("train step", "reduction", "mean", "sum"),
    ("train step", "accumulate_dtype", None, torch.float64),
    ("train step", "weight", len, None),
    ("train step", "batch_norm", "pooled", "frozen"),
]
HYPERPARAMETERS: list[tuple[str, Any, Any, str]] = [
    ("betas", (0.9, 0.99), (0.9, 0.95), "optimizer"),
    ("lr", torch.tensor(0.5), torch.tensor(0.25), "optimizer"),
    ("weight_decay", 0.1, 0.2, "step"),
    ("weight_decay", 0.1, 0.2, "layers, update='in_backward'"),
]


def differing_option(engine: str, name: str, first: Any, second: Any) -> tuple[Any, tuple[Any, ...], str, str]:
    shown = [value and "given" if name == "weight" else value for value in (first, second)]
    values = "" if name == "noise_scale" else f". Received: {shown[0]!r} on rank 0, {shown[1]!r} on rank 1"
    arguments = engine, name, (first, second)
    return failures.different_options, arguments, "ValueError", f"`{name}` must be the same on every rank{values}"


def differing_hyperparameter(name: str, first: Any, second: Any, way: str) -> tuple[Any, tuple[Any, ...], str, str]:
    a, b = ([*value] if isinstance(value, tuple) else float(value) for value in (first, second))
    says = f"{name} of group 2 is {a} on rank 0, {b} on rank 1. Nothing was updated"
    return failures.different_hyperparameters, (name, (first, second), way), "WindowError", says


REFUSED: dict[str, list[tuple[Any, tuple[Any, ...], str, str]]] = {
    "what is made": [
        (failures.made, (what,), "ValueError", says)
        for what, says in {
            "wrapped twice": "",
            "wrapped later": "after the optimizer was built",
            "sharded later": "Shard the model first",
            "parameters outside": "in none of `model`'s",
            "parameters not sharded": "are not sharded",
            **dict.fromkeys(
                ("LBFGS", "LBFGS, TrainStep", "LBFGS, shards", "LBFGS, shards, TrainStep"),
                "LBFGS evaluates its closure several times in an update, and each time 2 ranks",
            ),
            "local SGD by a hook": "post_localSGD_hook",
            "local SGD by an optimizer": "PostLocalSGDOptimizer(Optimizer(",
            "a sparse table": "Use sparse=False",
            "join()": "Leave it out",
        }.items()
    ],
    "a data-parallel model that the optimizer doesn't know": [
        (failures.unknown, ("ddp", 2), "ValueError", "Pass model=ddp"),
        (failures.unknown, ("fsdp2", 2), "ValueError", "Pass model=, the sharded model"),
    ],
    "options that differ": [differing_option(*one) for one in OPTIONS],
    "hyperparameters that differ, before the update": [
        *(differing_hyperparameter(*one) for one in HYPERPARAMETERS),
        (
            failures.schedule_stepped_in_the_body,
            (),
            "WindowError",
            "Ranks have different hyperparameters: lr is 0.025 on rank 0, 0.05 on rank 1",
        ),
    ],
    "steps that differ, at the start or at the window": [
        (failures.different_steps, (False,), "ValueError", "2 on rank 0, 4 on rank 1"),
        (failures.different_steps, (True,), "WindowError", "2 on rank 0, 4 on rank 1"),
    ],
    "weights on some ranks": [
        (failures.weighed_on_one_rank, (), "WindowError", "weighed on rank 0, without a weight on rank 1"),
    ],
    "parts sharded by themselves that ranks choose differently, in the first window": [
        (failures.different_parts, (way, sync), "WindowError", "different parts")
        for way, sync in (("batches", "window"), ("batches", "micro_batch"), ("backward", "window"))
    ],
    "clipping inside of a window, or of replicas that are not reduced yet": [
        (failures.edited, one, "WindowError", "The gradients were edited")
        for one in (("fsdp2", 3), ("ddp", 3), ("ddp", 1))
    ],
    "a wrapped sharded model with different numbers of micro-batches": [
        (
            sharded_cases.uneven,
            (way, sync),
            "WindowError",
            "needs the same number of batches on every rank. Whether this batch is the last: False on rank 0",
        )
        for way in ("within", "between", "scaler")
        for sync in ("window", "micro_batch")
    ],
    "two optimizers that share batches, of which ranks have different numbers": [
        (
            ddp_cases.train_two,
            (sizes, steps),
            "WindowError",
            "reached the end of an epoch while other ranks continued",
        )
        for sizes in (UNEVEN, [[], [4, 2, 3]])
        for steps in (1, 2)
    ],
    "a second backward pass that comes for the first time behind a reduction": [
        (ddp_cases.penalty_later, ((0, 1), together), "WindowError", "was changed after a backward pass had reduced it")
        for together in (False, True)
    ],
    "names that come later than the first window": [
        (failures.named_later, (), "WindowError", "Use names from the first window on")
    ],
}


@pytest.mark.parametrize(
    ("case", "arguments", "kind", "says"),
    [pytest.param(*one, id=f"{claim}-{i}") for claim, several in REFUSED.items() for i, one in enumerate(several)],
)
def test_what_cannot_be_right_is_named_on_every_rank(
    ranks: Processes, case: Any, arguments: tuple[Any, ...], kind: str, says: str
) -> None:
    ranks.refuse(case, *arguments, kind=kind, says=says)


@pytest.mark.parametrize(("engine", "says"), [("ddp", "Pass model=ddp"), ("fsdp2", "Pass model=, the sharded")])
def test_a_model_that_the_optimizer_is_not_told_of_is_a_warning_where_it_can_work(
    ranks: Processes, engine: str, says: str
) -> None:
    for lines in ranks.run(failures.unknown, engine, 1, limit=LIMIT):
        assert len([line for line in lines if says in line]) == 1


@pytest.mark.parametrize("which", ["optimizer", "train step"])
def test_a_rank_whose_constructor_raises_is_an_error_on_the_others_at_once(ranks: Processes, which: str) -> None:
    ranks.run(failures.cannot_be_built, which, limit=LIMIT)


def test_optimizers_on_parts_of_one_sharded_model_are_refused(ranks: Processes) -> None:
    ranks.run(failures.two_on_one_sharded_model, limit=LIMIT)


def test_one_rank_s_open_window_is_not_another_s(ranks: Processes) -> None:
    first, second = ranks.try_run(failures.another_rank, limit=LIMIT)
    assert first is None
    assert isinstance(second, Raised)
    assert "on rank 0 of 2" in second.message


LEFT = "Rank 1 stopped in the middle"
ONE_RANK: dict[str, list[tuple[Any, tuple[Any, ...], str, str]]] = {
    "raises inside a window": [
        (failures.fails, ("ddp", way, where), "ArithmeticError", LEFT)
        for where in ("forward", "backward")
        for way in ("batches", "plain")
    ]
    + [(failures.fails, ("ddp", "plain", "closure"), "ArithmeticError", LEFT)],
    "has a second backward pass behind a reduction": [
        (ddp_cases.penalty_later, ((1,), together), "WindowError", LEFT) for together in (False, True)
    ],
    "breaks off alone": [(failures.fails, ("ddp", "batches", "break"), "", LEFT)],
    "raises in TrainStep": [(failures.step_fails, ("labels",), "ValueError", "Rank 1 stopped")],
    "has no rows for a sharded model that needs some": [(failures.step_fails, ("no rows",), "ValueError", "")],
    "runs out of memory before the first pass": [(failures.step_fails, ("memory",), "OutOfMemoryError", "on rank 1")],
    "has a batch that cannot be used": [
        (failures.fails, (engine, "batches", why, at), kind, LEFT)
        for at in range(5)
        for why, kind in (("rows", "ValueError"), ("loader", "ArithmeticError"))
        for engine in ("ddp", "fsdp2")
    ],
}


@pytest.mark.parametrize(
    ("case", "arguments", "kind", "says"),
    [
        pytest.param(*one, id=f"{claim}-{i}", marks=[pytest.mark.slow] * (one[1][-1] in (1, 2, 3)))
        for claim, several in ONE_RANK.items()
        for i, one in enumerate(several)
    ],
)
def test_one_rank_that_fails_is_an_error_on_the_others_at_once(
    ranks: Processes, case: Any, arguments: tuple[Any, ...], kind: str, says: str
) -> None:
    first, second = ranks.try_run(case, *arguments, limit=LIMIT)
    assert isinstance(first, Raised)
    assert first.kind == ("OutOfMemoryError" if kind == "OutOfMemoryError" else "WindowError")
    assert says in first.message
    assert not kind or (isinstance(second, Raised) and second.kind == kind)
    if arguments == ("no rows",):
        assert "This rank has no rows for a pass" in second.message


def test_a_rank_that_builds_nothing_is_an_error_after_the_process_group_s_timeout(fragile_ranks: Processes) -> None:
    first, _ = fragile_ranks.try_run(failures.never_built, limit=LIMIT)
    assert isinstance(first, Raised)
    assert first.kind == "WindowError"
    assert "waited for the other ranks to build their Optimizer or TrainStep" in first.message


@pytest.mark.parametrize(
    ("engine", "what"), [("ddp", "dies"), ("ddp", "is late"), ("fsdp2", "fewer"), ("fsdp2", "forward")]
)
def test_ranks_that_wait_for_one_that_is_gone_wait_no_longer_than_the_process_group(
    fragile_ranks: Processes, tmp_path: pathlib.Path, engine: str, what: str
) -> None:
    at, given_up = 3 if what == "is late" else 2, tmp_path / "given up"
    first, second = fragile_ranks.try_run(failures.fails, engine, "plain", what, at, given_up, limit=LIMIT)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert engine != "ddp" or first.kind == "WindowError"
    assert what != "dies" or "is gone" in first.message
    assert what != "forward" or second.kind == "ArithmeticError"
