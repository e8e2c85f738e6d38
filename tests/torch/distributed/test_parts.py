"""Ranks and micro-batches that use different parts of a model."""

from __future__ import annotations

import pytest

from tests.reference import FLOAT32, FLOAT64
from tests.torch.distributed import parts_cases as cases
from tests.torch.distributed.processes import Processes, Raised

ONES, SOME = [[1] * 6] * 2, [[4, 0, 3, 2, 4, 4], [2, 5, 0, 4, 4, 0]]
CLOSED_BY_NOTHING = [[4, 0, 3, 2, 4, 0], [2, 0, 0, 4, 4, 5]]
SAME, DIFFERENT = [[0, 1, 0, 1, 1, 0]] * 2, [[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]]


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["backward", "batches", "batches backward"])
@pytest.mark.parametrize(("weights", "chosen"), [(SOME, SAME), (SOME, DIFFERENT), (CLOSED_BY_NOTHING, SAME)])
def test_unused_parameters_weight_0_and_alternating_heads_under_ddp(
    ranks: Processes, weights: list[list[int]], chosen: list[list[int]], way: str, optimizer: str
) -> None:
    assert max(ranks.run(cases.heads, weights, chosen, "ddp", way, optimizer)) <= FLOAT64


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("weights", "chosen", "way"),
    [
        (ONES, DIFFERENT, "batches"),
        (CLOSED_BY_NOTHING, SAME, "batches micro_batch"),
        (SOME, DIFFERENT, "batches"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (ONES, DIFFERENT, "batches micro_batch"),
                (CLOSED_BY_NOTHING, SAME, "batches"),
                (SOME, DIFFERENT, "batches micro_batch"),
            )
        ),
    ],
)
def test_a_head_that_the_batch_chooses_under_fsdp2(
    ranks: Processes, weights: list[list[int]], chosen: list[list[int]], way: str, optimizer: str
) -> None:
    assert max(ranks.run(cases.heads, weights, chosen, "fsdp2", way, optimizer)) <= FLOAT64


@pytest.mark.parametrize("way", ["batches", "backward", "batches micro_batch"])
def test_sums_in_a_dtype_of_their_own_go_with_parameters_that_a_window_or_all_but_its_end_leaves_out(
    ranks: Processes, way: str
) -> None:
    assert max(ranks.run(cases.heads, ONES, DIFFERENT, "fsdp2 in two dtypes", way)) <= FLOAT32


@pytest.mark.parametrize("way", ["batches", "batches micro_batch"])
def test_parts_sharded_by_themselves_that_are_the_same_on_every_rank(ranks: Processes, way: str) -> None:
    assert max(ranks.run(cases.heads, ONES, SAME, "fsdp2 nested", way)) <= FLOAT64


@pytest.mark.parametrize("way", ["batches", "batches micro_batch", "backward"])
def test_parts_sharded_by_themselves_that_ranks_choose_differently_are_named_in_the_first_window(
    ranks: Processes, way: str
) -> None:
    for result in ranks.try_run(cases.heads, ONES, DIFFERENT, "fsdp2 nested", way, limit=20):
        assert isinstance(result, Raised)
        assert result.kind == "WindowError"
        assert "different parts" in result.message


@pytest.mark.parametrize("penalty", [True, False])
def test_autograd_grad_through_ddp_is_no_backward_pass(ranks: Processes, penalty: bool) -> None:
    assert max(ranks.run(cases.through_grad, penalty)) <= FLOAT64


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("reentrant", "whole"), [(True, False), (True, True), (False, True)])
def test_checkpointed_layers_under_ddp(ranks: Processes, reentrant: bool, whole: bool, static: bool) -> None:
    assert max(ranks.run(cases.checkpointed, reentrant, whole, static)) <= FLOAT64


def test_join_is_refused_on_every_rank(ranks: Processes) -> None:
    for result in ranks.try_run(cases.joined, limit=20):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "Leave it out" in result.message


@pytest.mark.parametrize("hook", [True, False])
def test_local_sgd_is_refused(ranks: Processes, hook: bool) -> None:
    for result in ranks.try_run(cases.local_sgd, hook, limit=20):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "post_localSGD_hook" in result.message if hook else "PostLocalSGDOptimizer(Optimizer(" in result.message


@pytest.mark.parametrize("sizes", [[[4] * 4] * 2, [[4, 2, 3, 1], [3, 3, 1, 5]]])
def test_a_list_of_sharded_parts_in_a_plain_loop(ranks: Processes, sizes: list[list[int]]) -> None:
    assert max(ranks.run(cases.parts_of_equal_rows, sizes)) <= FLOAT64


def test_parameters_that_nobody_sharded_are_refused(ranks: Processes) -> None:
    for result in ranks.try_run(cases.not_sharded, limit=20):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"
        assert "are not sharded" in result.message


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_train_step_leaves_parameters_alone_that_no_rank_uses(ranks: Processes, engine: str) -> None:
    assert max(ranks.run(cases.unused_in_train_step, engine)) <= FLOAT64


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_model_is_as_it_was_found_when_its_wrapper_is_gone(ranks: Processes, engine: str) -> None:
    for hooks, same in ranks.run(cases.hooks_left, engine):
        assert hooks == 0
        assert same
