"""Windows of sharded models (FSDP2): when to reduce is a trade of memory against communication, the update is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from gradaccum.errors import WindowError
from tests.reference import FLOAT64
from tests.torch.distributed import sharded_cases as cases
from tests.torch.distributed.processes import Processes

SLOW = pytest.mark.slow
RAGGED = [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]]
GROUPS = 2  # of parameters that are reduced together: the two layers


@pytest.mark.parametrize(
    ("sync", "reductions", "way"),
    [
        *(("window", 2, way) for way in ("batches", "batches, backward", "plain")),
        ("micro_batch", 6, "plain"),
        *(pytest.param("micro_batch", 6, way, marks=SLOW) for way in ("batches", "batches, backward")),
    ],
)
def test_sharded_models_make_the_update_of_all_rows(ranks: Processes, sync: str, reductions: int, way: str) -> None:
    for error, counts, updates in ranks.run(cases.train, RAGGED, 4, sync, way):
        assert error <= FLOAT64
        assert updates == 2
        assert counts["reduce_scatter"] == reductions * GROUPS


@pytest.mark.parametrize(
    ("optimizer", "sync"),
    [
        ("sgd", "window"),
        ("adam", "micro_batch"),
        *(pytest.param(*one, marks=SLOW) for one in (("sgd", "micro_batch"), ("adam", "window"))),
    ],
)
def test_clipping_sees_the_norm_over_all_shards(ranks: Processes, sync: str, optimizer: str) -> None:
    for error, _, _ in ranks.run(cases.train, RAGGED, 4, sync, optimizer=optimizer, clip=0.05):
        assert error <= FLOAT64


def test_mixed_precision_sums_in_the_reduce_dtype(ranks: Processes) -> None:
    for error, dtype in ranks.run(cases.mixed_precision):
        assert error <= 2**-8
        assert dtype == "torch.float32"


def test_parameters_stay_gathered_in_a_window_that_reduces_once(ranks: Processes) -> None:
    for counts in ranks.run(cases.kept_gathered, "window"):
        assert counts["all_gather"] <= GROUPS + 1  # FSDP prefetches one layer for a forward pass that is over
    for counts in ranks.run(cases.kept_gathered, "micro_batch"):
        assert counts["all_gather"] >= 4 * GROUPS


@pytest.mark.parametrize(
    ("overflow_at", "sync"),
    [
        ((0, 5), "window"),
        ((1, 4), "micro_batch"),
        *(pytest.param(at, "window", marks=SLOW) for at in (None, (1, 4), (1, 3))),
        *(pytest.param(at, "micro_batch", marks=SLOW) for at in (None, (0, 5), (1, 3))),
    ],
)
def test_an_overflow_in_one_shard_costs_all_ranks_one_window_and_one_halving(
    ranks: Processes, overflow_at: tuple[int, int] | None, sync: str
) -> None:
    for error, scales, updates in ranks.run(cases.scaler, overflow_at, 1000, sync):
        assert error <= FLOAT64
        assert updates == (4 if overflow_at is None else 3)
        assert scales == ([1024.0] * 4 if overflow_at is None else [1024.0, 512.0, 512.0, 512.0])


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_a_scale_that_grows_inside_a_window_keeps_the_sum_exact(ranks: Processes, sync: str) -> None:
    for error, scales, updates in ranks.run(cases.scaler, None, 2, sync):
        assert error <= FLOAT64
        assert updates == 4
        assert scales == [2048.0, 8192.0, 16384.0, 65536.0]


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_an_overflow_in_a_window_that_is_flushed_makes_no_update(ranks: Processes, sync: str) -> None:
    for error, updates in ranks.run(cases.scaler_and_flush, sync):
        assert error <= FLOAT64
        assert updates == 1


def test_a_distributed_checkpoint_at_a_closed_window(ranks: Processes, tmp_path: Path) -> None:
    assert max(ranks.run(cases.distributed_checkpoint, str(tmp_path))) <= FLOAT64


WHERE = {2: "in the first window", 3: "closed", 4: "in the second window"}
CHECKPOINTS = [
    ("window", "adam", "get_state_dict", False),
    ("window", "sgd", "get_state_dict", True),
    ("window", "adam", "state_dict", False),
    ("micro_batch", "sgd", "get_state_dict", False),
    ("micro_batch", "adam", "get_state_dict", True),
]
QUICK = [(2, 2), (4, 3), (3, 4)]
"""Each of their values, and each place."""


@pytest.mark.parametrize(
    ("first", "sync", "optimizer", "way", "flat"),
    [
        pytest.param(
            first,
            *checkpoint,
            id=f"{where} {' '.join(map(str, checkpoint))}",
            marks=[] if (first, number) in QUICK else pytest.mark.slow,
        )
        for first, where in WHERE.items()
        for number, checkpoint in enumerate(CHECKPOINTS)
    ],
)
def test_a_distributed_checkpoint_of_an_open_window_goes_on_in_new_processes_bit_for_bit(
    ranks: Processes, new_ranks: Processes, tmp_path: Path, first: int, sync: str, optimizer: str, way: str, flat: bool
) -> None:
    saved = ranks.run(cases.saved_inside, str(tmp_path), first, sync, optimizer, way, flat)
    assert new_ranks.run(cases.loaded_inside, str(tmp_path), first, sync, optimizer, way, flat) == saved


def test_a_full_state_dict_holds_the_open_window(ranks: Processes) -> None:
    for saved, loaded in ranks.run(cases.full_state_dict):
        assert saved == loaded


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_open_window_goes_on_on_one_rank(ranks: Processes, one_rank: None, tmp_path: Path, optimizer: str) -> None:
    ranks.run(cases.saved_inside, str(tmp_path), 2, "window", optimizer)
    assert cases.loaded_elsewhere(0, str(tmp_path), 3, optimizer) <= FLOAT64


def test_an_open_window_keeps_its_length_over_another_number_of_ranks(
    ranks: Processes, one_rank: None, tmp_path: Path
) -> None:
    ranks.run(cases.saved_inside, str(tmp_path), 2, "window", "sgd")
    with pytest.raises(WindowError, match="when `updated` is True"):
        cases.loaded_elsewhere(0, str(tmp_path), 2, "sgd")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_open_window_goes_on_over_more_ranks(
    ranks: Processes, three_ranks: Processes, tmp_path: Path, optimizer: str
) -> None:
    ranks.run(cases.saved_inside, str(tmp_path), 2, "window", optimizer)
    assert max(three_ranks.run(cases.loaded_elsewhere, str(tmp_path), 3, optimizer)) <= FLOAT64


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "scatters", "reduces"), [("window", 2, 2), ("micro_batch", 6, 2)])
def test_hybrid_sharding_reduces_across_replicas_once_per_window(
    four_ranks: Processes, sync: str, scatters: int, reduces: int
) -> None:
    for error, counts, updates in four_ranks.run(cases.train, [*RAGGED, *RAGGED], 4, sync, hybrid=True):
        assert error <= FLOAT64
        assert updates == 2
        assert counts["reduce_scatter"] == scatters * GROUPS
        assert counts["all_reduce"] == reduces * GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_hybrid_sharding_with_a_grad_scaler_and_checkpoints(four_ranks: Processes, sync: str, tmp_path: Path) -> None:
    for error, scales, _ in four_ranks.run(cases.scaler, (1, 4), 1000, sync):
        assert error <= FLOAT64
        assert scales[-1] == 512.0
    saved = four_ranks.run(cases.saved_inside, str(tmp_path), 2, sync, "adam")
    assert four_ranks.run(cases.loaded_inside, str(tmp_path), 2, sync, "adam") == saved


def test_an_older_torch_is_named(ranks: Processes) -> None:
    for said in ranks.run(cases.with_an_older_torch):
        assert said.startswith("A model under fully_shard needs torch 2.13 or later, and this is 2.12.1")
