"""TrainStep on a sharded model whose micro-batches may not fit: all ranks go on together, whatever happens on one."""

from __future__ import annotations

import pytest

from tests.reference import FLOAT64
from tests.torch.distributed import together_cases as cases
from tests.torch.distributed.processes import Processes

LIMIT = 40.0


@pytest.mark.parametrize(
    ("on", "backward"),
    [(1, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, False), (1, False), (0, True)))],
)
def test_a_rank_that_runs_out_of_memory_has_all_begin_again_exactly(ranks: Processes, on: int, backward: bool) -> None:
    places = [1, 3] if backward else [0, 1, 3]
    for rank, found in enumerate(ranks.run(cases.out_of_memory, on, backward, places, limit=LIMIT)):
        for error, loss_error, times, size in found:
            assert error <= FLOAT64
            assert loss_error <= FLOAT64
            assert times == (1 if rank == on else 0)
            assert size == 2


def test_after_a_restart_random_numbers_and_buffers_are_as_if_the_larger_size_had_never_been_tried(
    ranks: Processes,
) -> None:
    for differences, _, calls in ranks.run(cases.begun_again, limit=LIMIT):
        assert max(differences) == 0.0
        assert calls == 2


@pytest.mark.parametrize("kind", ["forward", "backward", "nothing fits", "reduction"])
def test_an_error_that_smaller_micro_batches_do_not_help_is_one_on_every_rank_that_names_the_rank(
    ranks: Processes, kind: str
) -> None:
    (first, error), (second, other) = ranks.run(cases.goes_on, kind, limit=LIMIT)
    assert error <= FLOAT64  # of the next batch
    assert other <= FLOAT64
    if kind in ("forward", "backward"):
        assert second == "ArithmeticError: one rank's own"
        assert first.startswith("WindowError: Rank 1 stopped")
    else:
        assert second.startswith("OutOfMemoryError")
        assert "no memory" in second
        assert first.startswith("OutOfMemoryError")
        assert "on rank 1" in first


@pytest.mark.parametrize("seed", [39, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(39))])
def test_memory_that_runs_out_anywhere_keeps_the_update_exact(ranks: Processes, seed: int) -> None:
    assert max(ranks.run(cases.at_random, seed, limit=LIMIT)) <= FLOAT64


@pytest.mark.parametrize("sync", [pytest.param("window", marks=pytest.mark.slow), "micro_batch"])
def test_auto_is_predicted_by_each_rank_and_all_run_as_many_passes(ranks: Processes, sync: str) -> None:
    limits = (2**30, 3 * 2**20)
    (error, rows, size, _), (other, fewer, small, peak) = ranks.run(cases.predicted, sync, limits, limit=LIMIT)
    assert max(error, other) <= FLOAT64
    assert size == 64  # where nothing is short
    assert 4 < small < 40
    assert len(rows) == len(fewer)  # in both updates
    assert max(fewer) <= small
    assert 0.3 * limits[1] < peak <= limits[1]


def test_auto_on_a_loss_that_fake_tensors_cannot_run_is_an_error_on_every_rank(ranks: Processes) -> None:
    first, second = ranks.run(cases.cannot_be_predicted, limit=LIMIT)
    assert second.startswith("ValueError: With a sharded model, micro_batch_size='auto' predicts memory")
    assert first.startswith("WindowError: Rank 1 stopped")


@pytest.mark.parametrize(("fits", "groups"), [pytest.param(999, None, marks=pytest.mark.slow), (20, None), (999, 2)])
def test_max_tokens_has_as_many_passes_of_about_the_same_cost_on_each_rank(
    ranks: Processes, fits: int, groups: int | None
) -> None:
    (error, tokens), (other, own) = ranks.run(cases.packed, fits, groups, limit=LIMIT)
    assert max(error, other) <= FLOAT64
    assert max(tokens + own) <= 48
    if fits == 999:
        assert len(tokens) == len(own)
        assert max(tokens) <= 12  # 17 tokens in as many passes as 96 take elsewhere, not in one


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_memory_that_runs_out_anywhere_keeps_hybrid_sharding_exact(four_ranks: Processes, seed: int) -> None:
    assert max(four_ranks.run(cases.at_random, seed, limit=LIMIT)) <= FLOAT64
