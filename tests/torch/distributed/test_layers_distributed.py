"""Layer by layer on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.distributed import layers_cases as cases
from tests.torch.distributed.processes import Processes

LIMIT = 40.0
IN_BACKWARD = {"update": "in_backward"}
SYNCS = "window", "micro_batch"
NAN = "ValueError: The loss of this batch is nan"


@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_sharded_blocks_are_gathered_once_per_pass_and_reduced_once_per_update(
    ranks: Processes, micro_batch_size: int
) -> None:
    found = ranks.run(cases.against_the_large_batch, micro_batch_size=micro_batch_size, limit=LIMIT)
    for error, loss_error, sent in found:
        assert error <= FLOAT64
        assert loss_error <= FLOAT64
        for counts in sent:  # rank 1 has no rows in the last update
            assert counts["all_gather"] == 3 + 2 + 1  # blocks forward, all but the last backward, all else
            assert counts["reduce_scatter"] == 3 + 1


@pytest.mark.parametrize(("sync", "most"), [("window", 5), ("micro_batch", 2)])
def test_all_sharded_blocks_are_whole_in_forward_passes_or_one_and_the_last(
    ranks: Processes, sync: str, most: int
) -> None:
    assert ranks.run(cases.whole_at_once, sync, limit=LIMIT) == [most, most]


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, 2),
        ({"shard": {"reshard_after_forward": False}}, 2),
        ({"update": "in_backward"}, 2),
        ({"offload": True, "build": cases.frozen, "clip_grad_norm": 0.05}, 2),
    ],
    ids=["plain", "reshard_after_forward=False", "in backward", "frozen, offloaded"],
)
def test_one_sharded_block_at_a_time_is_gathered_in_the_forward_passes(
    ranks: Processes, options: dict[str, Any], again: int
) -> None:
    options = {"sync": "micro_batch", **options}
    for error, loss_error, sent in ranks.run(cases.against_the_large_batch, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64
        for counts in sent:  # on the rank with most, three micro-batches; the last block runs forward once
            assert counts["all_gather"] == 1 + 2 * 3 + 1 + again


def test_sharded_blocks_that_stay_gathered_after_forward_are_gathered_once_per_update(ranks: Processes) -> None:
    options = {"shard": {"reshard_after_forward": False}, "optimizer": "sgd"}
    for error, loss_error, sent in ranks.run(cases.against_the_large_batch, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64
        assert [counts["all_gather"] for counts in sent] == [4] * 2
        assert [counts["reduce_scatter"] for counts in sent] == [4] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}, {"build": cases.frozen}])
def test_hybrid_sharded_blocks_make_the_large_batchs_update(four_ranks: Processes, options: dict[str, Any]) -> None:
    sizes = [[8, 3], [5, 7], [0, 1], [4, 9]]
    for error, loss_error, _ in four_ranks.run(cases.against_the_large_batch, sizes=sizes, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64


def test_a_model_that_fully_shard_replicates_is_updated_in_backward(ranks: Processes) -> None:
    options = {"shard": {"shape": (2, 1)}, **IN_BACKWARD}
    for error, loss_error, sent in ranks.run(cases.against_the_large_batch, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64
        assert [counts["all_gather"] + counts["reduce_scatter"] for counts in sent] == [0] * 2


def test_under_a_scaler_an_overflow_on_one_rank_costs_all_of_them_one_update(ranks: Processes) -> None:
    for error, scales in ranks.run(cases.with_a_scaler, limit=LIMIT):
        assert error <= FLOAT64
        assert scales == [1024.0, 512.0, 512.0]


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_a_rank_that_runs_out_of_memory_in_a_block_has_all_begin_again_exactly(ranks: Processes, sync: str) -> None:
    for outcomes in ranks.run(cases.out_of_memory, [(0, False), (1, True)], limit=LIMIT, sync=sync):
        for error, size in outcomes:
            assert error <= FLOAT64
            assert size == 2


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd"},
        {"shard": {"reshard_after_forward": False}, "build": cases.frozen},
    ],
    ids=["plain", "frozen, stays gathered"],
)
def test_sharded_blocks_are_updated_in_backward_exactly(ranks: Processes, options: dict[str, Any]) -> None:
    for error, loss_error, sent in ranks.run(cases.against_the_large_batch, limit=LIMIT, **IN_BACKWARD, **options):
        assert max(error, loss_error) <= FLOAT64
        if "build" not in options:
            assert [counts["reduce_scatter"] for counts in sent] == [4] * 2


@pytest.mark.parametrize("options", [{}, IN_BACKWARD], ids=["after backward", "in backward"])
def test_a_parameter_of_a_sharded_block_that_no_rank_uses_is_left_alone(
    ranks: Processes, options: dict[str, Any]
) -> None:
    assert max(ranks.run(cases.unused, limit=LIMIT, **options)) <= FLOAT64
    policy = {"param_dtype": torch.float32, "reduce_dtype": torch.float64}
    assert max(ranks.run(cases.unused, policy, limit=LIMIT, **options)) <= FLOAT32


EXACT: dict[str, dict[str, Any]] = {
    "under DDP": {"shard": "ddp", "blocks": "auto"},
    "clipped and offloaded": {"clip_grad_norm": 0.05, "offload": True},
    "frozen": {"build": cases.frozen},
    "auto": {"micro_batch_size": "auto", "memory_limit": "1GiB"},
    "tied blocks, sharded together": {"build": cases.tied, "parts": ("layers.0", "layers.2")},
    "a block and the head, sharded together": {"parts": ("layers.1", "head")},
}


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_blocks_make_the_large_batchs_update(ranks: Processes, options: dict[str, Any]) -> None:
    for error, loss_error, _ in ranks.run(cases.against_the_large_batch, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64


@pytest.mark.parametrize(("told", "options"), [(True, {}), (False, {}), (True, IN_BACKWARD)])
def test_sharded_blocks_take_weights_of_which_some_are_zero(
    ranks: Processes, told: bool, options: dict[str, Any]
) -> None:
    for error, loss_error, _ in ranks.run(cases.with_weights, told, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64


def test_sharded_blocks_draw_the_dropout_masks_that_accumulation_draws(ranks: Processes) -> None:
    assert (
        max(error for error, _ in ranks.run(cases.with_blocks_and_without, cases.dropping_out, limit=LIMIT)) <= FLOAT64
    )


def test_in_mixed_precision_sharded_blocks_make_the_update_that_is_made_without_blocks(ranks: Processes) -> None:
    policy, expected = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, cases.in_float64()
    for error, found in ranks.run(cases.with_blocks_and_without, cases.Chain, policy, limit=LIMIT):
        assert error <= FLOAT32
        assert 1e-4 < relative_error(found, expected) < 0.1


@pytest.mark.parametrize(
    ("what", "options", "own", "others"),
    [
        *(("forward", {"sync": sync}, "ArithmeticError: one rank's own", "WindowError: Rank 1 left") for sync in SYNCS),
        ("backward", {}, "ArithmeticError: one rank's own", "WindowError: Rank 1 left"),
        ("nan", IN_BACKWARD, NAN, NAN),
    ],
)
def test_an_error_of_one_rank_in_a_block_is_one_on_all_and_the_next_batch_is_exact(
    ranks: Processes, what: str, options: dict[str, Any], own: str, others: str
) -> None:
    (first, *others_errors), (second, *errors) = ranks.run(cases.fails, what, limit=LIMIT, **options)
    assert first.startswith(others)
    assert second.startswith(own)
    for moved, error in (others_errors, errors):
        assert moved == 0.0
        assert error <= FLOAT64


def test_an_error_halfway_through_sharded_updates_says_on_every_rank_what_has_been_updated(ranks: Processes) -> None:
    for said, moved, _ in ranks.run(cases.fails, "memory", limit=LIMIT, **IN_BACKWARD):
        assert said.startswith("WindowError")
        assert "those of the blocks 'layers.1', 'layers.2'" in said
        assert "This cannot be taken back" in said
        assert moved > 1e-6


def test_what_does_not_go_with_blocks_on_several_ranks_is_refused_by_name(ranks: Processes) -> None:
    for said in ranks.run(cases.refused, limit=LIMIT):
        assert "of a sharded model each rank has a part" in said["on"]
        assert "'layers.1.dropout' is a SyncBatchNorm, which waits for the other ranks" in said["batch_norm"]
        assert "FSDP1), whose parameters `blocks` can't gather" in said["fsdp1"]
        assert "ranks that replicate a model reduce all gradients together" in said["ddp"]
        assert "shared with a parameter already managed by another FSDP group" in said["tied apart"]
        assert "The block 'layers.2' got a gradient after its turn" in said["borrowed"]
