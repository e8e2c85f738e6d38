"""Windows of sharded models (FSDP2): when to reduce is a trade of memory against communication, the update is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference import FLOAT64
from tests.torch import sharded_cases as cases
from tests.torch.processes import Processes, Raised


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


RAGGED = [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]]
GROUPS = 2  # of parameters that are reduced together: the two layers


@pytest.mark.parametrize("way", ["batches", "batches, backward", "plain"])
@pytest.mark.parametrize(("sync", "reductions"), [("window", 2), ("micro_batch", 6)])
def test_sharded_models_make_the_update_of_all_rows(ranks: Processes, sync: str, reductions: int, way: str) -> None:
    for error, counts, updates in ranks.run(cases.train, RAGGED, 4, sync, way):
        assert error <= FLOAT64
        assert updates == 2
        assert counts["reduce_scatter"] == reductions * GROUPS


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_clipping_sees_the_norm_over_all_shards(ranks: Processes, sync: str, optimizer: str) -> None:
    for error, _, _ in ranks.run(cases.train, RAGGED, 4, sync, optimizer=optimizer, clip=0.05):
        assert error <= FLOAT64


@pytest.mark.parametrize("way", ["batches", "backward"])
def test_weight_0_on_one_rank_hangs_nobody_and_counts_nothing(ranks: Processes, way: str) -> None:
    assert max(ranks.run(cases.weight_0, way)) <= FLOAT64


def test_a_list_of_sharded_parts(ranks: Processes) -> None:
    assert max(ranks.run(cases.parts)) <= FLOAT64


def test_mixed_precision_sums_in_the_reduce_dtype(ranks: Processes) -> None:
    for error, dtype in ranks.run(cases.mixed_precision):
        assert error <= 2**-8
        assert dtype == "torch.float32"


def test_parameters_stay_gathered_in_a_window_that_reduces_once(ranks: Processes) -> None:
    for counts in ranks.run(cases.kept_gathered, "window"):
        assert counts["all_gather"] <= GROUPS + 1  # FSDP prefetches one layer for a forward pass that is over
    for counts in ranks.run(cases.kept_gathered, "micro_batch"):
        assert counts["all_gather"] >= 4 * GROUPS


def test_a_gradient_that_is_not_finite_in_one_shard_skips_the_window_on_all(ranks: Processes) -> None:
    for error, updates in ranks.run(cases.skip_window):
        assert error <= FLOAT64
        assert updates == 1


def test_a_discarded_window_leaves_nothing_behind(ranks: Processes) -> None:
    assert max(ranks.run(cases.discarded)) <= FLOAT64


def test_ranks_with_different_numbers_of_micro_batches_are_told(ranks: Processes) -> None:
    for result in ranks.try_run(cases.uneven, limit=20):
        assert isinstance(result, Raised)
        assert "same number of micro-batches" in result.message


def test_a_model_sharded_after_the_optimizer_was_built_is_refused(ranks: Processes) -> None:
    for result in ranks.try_run(cases.sharded_later, limit=20):
        assert isinstance(result, Raised)
        assert result.kind == "ValueError"


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_every_rank_resumes_its_part_of_an_open_window(ranks: Processes, sync: str) -> None:
    assert max(ranks.run(cases.resumed, sync)) <= FLOAT64


def test_a_distributed_checkpoint_at_a_closed_window(ranks: Processes, tmp_path: Path) -> None:
    assert max(ranks.run(cases.distributed_checkpoint, str(tmp_path))) <= FLOAT64


def test_train_step_with_a_sharded_model(ranks: Processes) -> None:
    assert max(ranks.run(cases.train_step, [[8, 7, 12], [6, 8, 9]])) <= FLOAT64


def test_train_step_with_different_numbers_of_micro_batches_is_told(ranks: Processes) -> None:
    for result in ranks.try_run(cases.train_step, [[8], [9]], limit=20):
        assert isinstance(result, Raised)
        assert "2 on rank 0, 3 on rank 1" in result.message


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "scatters", "reduces"), [("window", 2, 2), ("micro_batch", 6, 2)])
def test_hybrid_sharding_reduces_across_replicas_once_per_window(sync: str, scatters: int, reduces: int) -> None:
    processes = Processes(4)
    try:
        for error, counts, updates in processes.run(cases.train, [*RAGGED, *RAGGED], 4, sync, hybrid=True):
            assert error <= FLOAT64
            assert updates == 2
            assert counts["reduce_scatter"] == scatters * GROUPS
            assert counts["all_reduce"] == reduces * GROUPS
    finally:
        processes.close()
