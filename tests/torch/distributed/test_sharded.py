"""Windows of sharded models (FSDP2): when to reduce is a trade of memory against communication, the update is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradaccum.errors import WindowError
from tests.reference import FLOAT64
from tests.torch.distributed import ddp_cases
from tests.torch.distributed import sharded_cases as cases
from tests.torch.distributed.processes import Processes

SLOW = pytest.mark.slow
RAGGED = [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]]


LOOPS: dict[str, tuple[Any, int, dict[str, Any], int]] = {
    # Rows of each rank's micro-batches, steps, the rest, and how often each part is reduced.
    **{way: (RAGGED, 4, {"way": way}, 2) for way in ("batches", "batches backward", "backward")},
    "micro_batch": (RAGGED, 4, {"sync": "micro_batch", "way": "backward"}, 6),
    "micro_batch, clipped, with Adam": (RAGGED, 4, {"sync": "micro_batch", "optimizer": "adam", "clip": 0.05}, 6),
    "clipped": (RAGGED, 4, {"clip": 0.05}, 2),
    "a list of parts": (RAGGED, 2, {"engine": "fsdp2 parts", "way": "batches backward"}, 3),
    "a list of parts, plain": (RAGGED, 2, {"engine": "fsdp2 parts"}, 3),
    "compiled": (RAGGED, 2, {"compiles": "outside", "sync": "micro_batch"}, 6),
}
SLOWLY: dict[str, tuple[Any, int, dict[str, Any], int]] = {
    **{f"micro_batch, {way}": (RAGGED, 4, {"sync": "micro_batch", "way": way}, 6) for way in ("batches", "backward")},
    "clipped, with Adam": (RAGGED, 4, {"optimizer": "adam", "clip": 0.05}, 2),
    "compiled, window": (RAGGED, 2, {"compiles": "outside"}, 3),
    "compiled inside": (RAGGED, 2, {"compiles": "inside"}, 3),
    "compiled inside, micro_batch": (RAGGED, 2, {"compiles": "inside", "sync": "micro_batch"}, 6),
}


@pytest.mark.parametrize(
    ("sizes", "steps", "keywords", "reductions"),
    [
        pytest.param(*one, id=name, marks=[SLOW] * (table is SLOWLY))
        for table in (LOOPS, SLOWLY)
        for name, one in table.items()
    ],
)
def test_sharded_models_make_the_update_of_all_rows(
    ranks: Processes, sizes: Any, steps: int, keywords: dict[str, Any], reductions: int
) -> None:
    for error, counts, updates in ranks.run(ddp_cases.train, sizes, steps, **{"engine": "fsdp2", **keywords}):
        assert error <= FLOAT64
        assert updates == -(-6 // steps)
        assert counts == reductions * ddp_cases.LAYERS


def test_mixed_precision_sums_in_the_reduce_dtype(ranks: Processes) -> None:
    for error, dtype in ranks.run(cases.mixed_precision):
        assert error <= 2**-8
        assert dtype == "torch.float32"


def test_parameters_stay_gathered_in_a_window_that_reduces_once(ranks: Processes) -> None:
    for counts in ranks.run(cases.kept_gathered, "window"):
        assert counts["all_gather"] <= ddp_cases.LAYERS + 1  # FSDP prefetches one layer for a forward pass that is over
    for counts in ranks.run(cases.kept_gathered, "micro_batch"):
        assert counts["all_gather"] >= 4 * ddp_cases.LAYERS


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_an_overflow_in_a_window_that_is_flushed_makes_no_update(ranks: Processes, sync: str) -> None:
    for error, updates in ranks.run(cases.scaler_and_flush, sync):
        assert error <= FLOAT64
        assert updates == 1


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
@pytest.mark.parametrize(("sync", "scatters"), [("window", 2), ("micro_batch", 6)])
def test_hybrid_sharding_reduces_across_replicas_once_per_window(
    four_ranks: Processes, sync: str, scatters: int
) -> None:
    sizes = [*RAGGED, *RAGGED]
    for error, counts, updates in four_ranks.run(ddp_cases.train, sizes, 4, engine="fsdp2 hybrid", sync=sync):
        assert error <= FLOAT64
        assert updates == 2
        assert counts == scatters * ddp_cases.LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_hybrid_sharding_with_a_grad_scaler_and_checkpoints(four_ranks: Processes, sync: str, tmp_path: Path) -> None:
    for error, scales, _ in four_ranks.run(ddp_cases.scaler, "fsdp2 hybrid", (1, 4), 1000, sync):
        assert error <= FLOAT64
        assert scales[-1] == 512.0
    saved = four_ranks.run(cases.saved_inside, str(tmp_path), 2, sync, "adam")
    assert four_ranks.run(cases.loaded_inside, str(tmp_path), 2, sync, "adam") == saved


def test_an_older_torch_is_named(ranks: Processes) -> None:
    for said in ranks.run(cases.with_an_older_torch):
        assert said.startswith("A model under fully_shard needs torch 2.13 or later, and this is 2.12.1")
