"""TrainStep over several ranks: each brings its own large batch; the update and the loss are those of all rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference import FLOAT64
from tests.torch.distributed import ddp_cases as cases
from tests.torch.distributed.processes import Processes

SIZES, MICRO = [[9, 8, 4], [3, 7, 12]], [4, 3]
SHARDED, THREE = [[8, 3, 8], [6, 9, 0]], [3, 3]
FEWER = [[9, 8, 0], [3, 7, 5]]
QUICK: list[tuple[Any, ...]] = [
    *(("ddp", SIZES, MICRO, kind) for kind in ("rows", "told", "sum")),
    ("ddp", SIZES, MICRO, "classes", "adam"),
    ("ddp", [[4, 0, 3], [5, 6, 0]], [2, 2], "rows"),  # a rank without rows
    ("ddp", [[0, 4, 3], [5, 6, 0]], [2, 2], "scaler"),  # which is its first update
    ("ddp", FEWER, MICRO, "terms", "adam"),
    ("ddp", FEWER, MICRO, "terms, counted", "adam"),
    ("ddp", [[0, 4], [3, 12]], MICRO, "terms", "adam"),
    ("ddp", [[0, 4], [3, 12]], MICRO, "terms, counted", "adam"),
    ("fsdp2", SHARDED, THREE, "weight"),
    ("fsdp2", SHARDED, THREE, "told", "sgd", "micro_batch"),
]
SLOWLY: list[tuple[Any, ...]] = [
    *(("ddp", SIZES, MICRO, kind, "adam") for kind in ("rows", "told", "sum")),
    *(
        ("fsdp2", SHARDED, THREE, kind, "sgd", sync)
        for kind in ("rows", "classes", "told", "weight", "scaler")
        for sync in ("window", "micro_batch")
    ),
]


@pytest.mark.parametrize("arguments", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOWLY)], ids=str)
def test_the_update_and_the_loss_are_those_of_all_ranks_rows(ranks: Processes, arguments: tuple[Any, ...]) -> None:
    """Each of several losses is divided by its weight on all ranks."""
    for error, loss_error, reductions, others in ranks.run(cases.train_step, *arguments):
        assert max(error, loss_error) <= FLOAT64
        if arguments[1] is SIZES:
            assert reductions == 3
            assert others == 1  # who takes part, with which weight and loss


@pytest.mark.parametrize("way", ["broadcast", "each its own", "sharded"])
def test_a_rank_without_rows_has_the_buffers_of_one_that_has_some(ranks: Processes, way: str) -> None:
    for error, buffers in ranks.run(cases.buffers_without_rows, [[4, 0, 7, 3], [5, 6, 0, 2]], way):
        assert error <= FLOAT64
        assert buffers <= FLOAT64
