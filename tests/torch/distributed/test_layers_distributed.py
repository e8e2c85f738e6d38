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


STAYS, MICRO_BATCH = {"shard": {"reshard_after_forward": False}}, {"sync": "micro_batch"}
ONCE = 3 + 2 + 1  # blocks forward, all but the last backward, all else
EACH = 1 + 2 * 3 + 1 + 2  # on the rank with most, three micro-batches; the last block runs forward once
SENT: dict[str, tuple[dict[str, Any], int | None, int | None]] = {
    # Options, and what each update gathers and reduces, also where rank 1 has no rows; None: not counted.
    "one pass": ({"micro_batch_size": 8}, ONCE, 3 + 1),
    "micro-batches": ({"micro_batch_size": 2}, ONCE, 3 + 1),
    "stay gathered after forward": ({**STAYS, "optimizer": "sgd"}, 4, 4),
    "one block at a time": (MICRO_BATCH, EACH, None),
    "one block at a time, reshard_after_forward=False": ({**MICRO_BATCH, **STAYS}, EACH, None),
    "one block at a time, updated in backward": ({**MICRO_BATCH, **IN_BACKWARD}, EACH, None),
    "one block at a time, frozen and offloaded": (
        {**MICRO_BATCH, "offload": True, "build": cases.frozen, "clip_grad_norm": 0.05},
        EACH,
        None,
    ),
    "updated in backward": ({**IN_BACKWARD, "optimizer": "sgd"}, None, 4),
    "updated in backward, frozen, stay gathered": ({**IN_BACKWARD, **STAYS, "build": cases.frozen}, None, None),
    "replicated by fully_shard, updated in backward": ({"shard": {"shape": (2, 1)}, **IN_BACKWARD}, 0, 0),
    "under DDP": ({"shard": "ddp", "blocks": "auto"}, None, None),
    "clipped and offloaded": ({"clip_grad_norm": 0.05, "offload": True}, None, None),
    "frozen": ({"build": cases.frozen}, None, None),
    "auto": ({"micro_batch_size": "auto", "memory_limit": "1GiB"}, None, None),
    "tied blocks, sharded together": ({"build": cases.tied, "parts": ("layers.0", "layers.2")}, None, None),
    "a block and the head, sharded together": ({"parts": ("layers.1", "head")}, None, None),
    "weights with the loss, some zero": (cases.TOLD, None, None),
    "weights from the batch, some zero": (cases.WEIGHED, None, None),
    "weights with the loss, updated in backward": ({**cases.TOLD, **IN_BACKWARD}, None, None),
}


@pytest.mark.parametrize(("options", "gathers", "scatters"), SENT.values(), ids=SENT)
def test_blocks_make_the_large_batchs_update_and_are_gathered_once_per_pass_and_reduced_once(
    ranks: Processes, options: dict[str, Any], gathers: int | None, scatters: int | None
) -> None:
    for error, loss_error, sent in ranks.run(cases.against_the_large_batch, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64
        for counts in sent:
            assert gathers in (None, counts["all_gather"])
            assert scatters in (None, counts["reduce_scatter"])


@pytest.mark.parametrize(("sync", "most"), [("window", 5), ("micro_batch", 2)])
def test_all_sharded_blocks_are_whole_in_forward_passes_or_one_and_the_last(
    ranks: Processes, sync: str, most: int
) -> None:
    assert ranks.run(cases.whole_at_once, sync, limit=LIMIT) == [most, most]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}, {"build": cases.frozen}])
def test_hybrid_sharded_blocks_make_the_large_batchs_update(four_ranks: Processes, options: dict[str, Any]) -> None:
    sizes = [[8, 3], [5, 7], [0, 1], [4, 9]]
    for error, loss_error, _ in four_ranks.run(cases.against_the_large_batch, sizes=sizes, limit=LIMIT, **options):
        assert max(error, loss_error) <= FLOAT64


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


@pytest.mark.parametrize("options", [{}, IN_BACKWARD], ids=["after backward", "in backward"])
def test_a_parameter_of_a_sharded_block_that_no_rank_uses_is_left_alone(
    ranks: Processes, options: dict[str, Any]
) -> None:
    assert max(ranks.run(cases.unused, limit=LIMIT, **options)) <= FLOAT64
    policy = {"param_dtype": torch.float32, "reduce_dtype": torch.float64}
    assert max(ranks.run(cases.unused, policy, limit=LIMIT, **options)) <= FLOAT32


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
        *(
            ("forward", {"sync": sync}, "ArithmeticError: one rank's own", "WindowError: Rank 1 stopped")
            for sync in SYNCS
        ),
        ("backward", {}, "ArithmeticError: one rank's own", "WindowError: Rank 1 stopped"),
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
        assert "This cannot be undone" in said
        assert moved > 1e-6


def test_what_does_not_go_with_blocks_on_several_ranks_is_refused_by_name(ranks: Processes) -> None:
    for said in ranks.run(cases.refused, limit=LIMIT):
        assert "each rank has only a part of a sharded model" in said["on"]
        assert "'layers.1.dropout' is a SyncBatchNorm, which waits for the other ranks" in said["batch_norm"]
        assert "FSDP1), whose parameters `blocks` can't gather" in said["fsdp1"]
        assert "ranks that replicate a model reduce all gradients together" in said["ddp"]
        assert "shared with a parameter already managed by another FSDP group" in said["tied apart"]
        assert "The block 'layers.2' got a gradient after its turn" in said["borrowed"]
