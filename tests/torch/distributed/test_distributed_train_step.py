"""TrainStep over several ranks: each brings its own large batch; the update and the loss are those of all rows."""

from __future__ import annotations

import pytest

from tests.reference import FLOAT64
from tests.torch.distributed import ddp_cases as cases
from tests.torch.distributed.processes import Processes

SIZES = [[9, 4, 8, 5], [3, 12, 7, 5]]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *((kind, "sgd") for kind in ("rows", "classes", "told", "sum")),
        ("classes", "adam"),
        *(pytest.param(kind, "adam", marks=pytest.mark.slow) for kind in ("rows", "told", "sum")),
    ],
)
def test_the_update_and_the_loss_are_those_of_all_ranks_rows(ranks: Processes, kind: str, optimizer: str) -> None:
    for error, loss_error, reductions, others in ranks.run(cases.train_step, SIZES, [4, 3], kind, optimizer):
        assert error <= FLOAT64
        assert loss_error <= FLOAT64
        assert reductions == 4
        assert others == 1  # who takes part, with which weight and loss


def test_a_batch_without_rows_on_one_rank_counts_nothing(ranks: Processes) -> None:
    for error, loss_error, *_ in ranks.run(cases.train_step, [[4, 0, 3], [5, 6, 0]], [2, 2]):
        assert error <= FLOAT64
        assert loss_error <= FLOAT64


def test_a_rank_without_rows_in_the_first_update_steps_with_a_grad_scaler(ranks: Processes) -> None:
    for error, loss_error, *_ in ranks.run(cases.train_step, [[0, 4, 3], [5, 6, 0]], [2, 2], "scaler"):
        assert error <= FLOAT64
        assert loss_error <= FLOAT64


@pytest.mark.parametrize("way", ["broadcast", "each its own", "sharded"])
def test_a_rank_without_rows_has_the_buffers_of_one_that_has_some(ranks: Processes, way: str) -> None:
    for error, buffers in ranks.run(cases.buffers_without_rows, [[4, 0, 7, 3], [5, 6, 0, 2]], way):
        assert error <= FLOAT64
        assert buffers <= FLOAT64


@pytest.mark.parametrize("told", [False, True])
def test_each_of_several_losses_is_divided_by_its_weight_on_all_ranks(ranks: Processes, told: bool) -> None:
    for error, loss_error in ranks.run(cases.several_losses, [[9, 4, 8, 0], [3, 12, 7, 5]], [4, 3], told):
        assert error <= FLOAT64
        assert loss_error <= FLOAT64
    for error, loss_error in ranks.run(
        cases.several_losses, [[0, 4], [3, 12]], [4, 3], told
    ):  # one has nothing at first
        assert error <= FLOAT64
        assert loss_error <= FLOAT64
