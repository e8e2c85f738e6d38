"""One window over all ranks: the update of one process that sees all rows, with one reduction per window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reference import FLOAT32, FLOAT64
from tests.torch.distributed import ddp_cases as cases
from tests.torch.distributed import parts_cases as parts
from tests.torch.distributed import sharded_cases as sharded
from tests.torch.distributed import together_cases as together
from tests.torch.distributed.processes import Processes

SLOW = pytest.mark.slow
EVEN = [[4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4]]
RAGGED = [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]]
UNEVEN = [[4, 4, 4, 4, 4, 4, 4, 4, 3], [4, 4, 4, 2]]
ONES, SOME = [[1] * 6] * 2, [[4, 0, 3, 2, 4, 4], [2, 5, 0, 4, 4, 0]]
CLOSED_BY_NOTHING = [[4, 0, 3, 2, 4, 0], [2, 0, 0, 4, 4, 5]]
SAME, DIFFERENT = [[0, 1, 0, 1, 1, 0]] * 2, [[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]]
SYNCS = "window", "micro_batch"
HALF, FOLLOWS_ROUNDING = 2**-9, 2**-10


def product(*values: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for own in values:
        found = [(*before, one) for before in found for one in own]
    return found


EXACT: dict[str, tuple[Any, list[tuple[Any, ...]], float]] = {
    "token weights are summed over ranks, and weight 0 hangs nobody": (
        cases.weight_0,
        product(("ddp", "fsdp2"), ("batches", "backward")),
        FLOAT64,
    ),
    "an empty last batch on one rank counts nothing": (cases.empty_batch, [()], FLOAT64),
    "micro-batches that a rank passes over count nothing": (cases.continued, [()], FLOAT64),
    "sums add up over all ranks": (cases.summed, [(True,), (False,)], FLOAT64),
    "several models share a window": (cases.towers, [()], FLOAT64),
    "every rank resumes its part of an open window": (
        cases.resumed,
        [
            *(
                ("ddp", {"gradient_as_bucket_view": view, "find_unused_parameters": unused})
                for view, unused in product((True, False), (True, False))
            ),
            ("fsdp2", {}),
        ],
        FLOAT64,
    ),
    "a loop that runs in the model's forward pass, as Lightning's does": (
        cases.loop_in_forward,
        product((1, 2, 3), (True, False)),
        FLOAT64,
    ),
    "a penalty on weights, which no output of the model leads to": (cases.unreached_penalty, [()], FLOAT64),
    "communication hooks see every reduction": (cases.communication_hook, [("allreduce_hook",)], FLOAT64),
    "communication hooks that round, or project": (
        cases.communication_hook,
        [("fp16_compress_hook",), ("powerSGD_hook",)],
        FOLLOWS_ROUNDING,
    ),
    "what is reduced in float16 is of the gradients' size, whatever the weights are": (
        cases.half_reduction,
        product(
            ("ddp", "fsdp2"),
            (131072.0, 1e-6),
            ("plain", "batches", "micro_batch", "TrainStep", "TrainStep of sums"),
        ),
        HALF,
    ),
    "bfloat16 gradients are reduced in the dtype they are summed in": (cases.wide, [()], 2**-8),
    "TrainStep where one rank runs out of memory": (cases.out_of_memory, [(False,), (True,)], FLOAT64),
    # What ranks and micro-batches use of a model.
    "unused parameters, weight 0 and alternating heads under DDP": (
        parts.heads,
        [
            (*one, "ddp", way)
            for one in ((SOME, SAME), (SOME, DIFFERENT), (CLOSED_BY_NOTHING, SAME))
            for way in ("backward", "batches", "batches backward")
        ],
        FLOAT64,
    ),
    "a head that the batch chooses, under FSDP2": (
        parts.heads,
        [
            (ONES, DIFFERENT, "fsdp2", "batches", "adam"),
            (CLOSED_BY_NOTHING, SAME, "fsdp2", "batches micro_batch", "adam"),
            (SOME, DIFFERENT, "fsdp2", "batches", "adam"),
        ],
        FLOAT64,
    ),
    "sums in a dtype of their own with parameters that a window, or all but its end, leaves out": (
        parts.heads,
        [(ONES, DIFFERENT, "fsdp2 in two dtypes", way) for way in ("batches", "backward", "batches micro_batch")],
        FLOAT32,
    ),
    "parts sharded by themselves that are the same on every rank": (
        parts.heads,
        [(ONES, SAME, "fsdp2 nested", way) for way in ("batches", "batches micro_batch")],
        FLOAT64,
    ),
    "autograd.grad through DDP is no backward pass": (parts.through_grad, [(True,), (False,)], FLOAT64),
    "checkpointed layers under DDP": (
        parts.checkpointed,
        [(*one, static) for one in ((True, False), (True, True), (False, True)) for static in (True, False)],
        FLOAT64,
    ),
    "TrainStep leaves parameters alone that no rank uses": (
        parts.unused_in_train_step,
        [("ddp",), ("fsdp2",)],
        FLOAT64,
    ),
    # Sharded models.
    "a list of sharded parts": (
        sharded.parts,
        product(([[4] * 4] * 2, [[4, 2, 3, 1], [3, 3, 1, 5]]), (True, False)),
        FLOAT64,
    ),
    "a compiled sharded model": (sharded.compiled, [(True, "micro_batch")], FLOAT64),
    "an open window of shards under a GradScaler is saved unscaled": (sharded.saved_with_scaler, [()], FLOAT64),
    "a discarded window of shards leaves nothing behind": (sharded.discarded, [()], FLOAT64),
    "a restored window is flushed before any forward pass": (sharded.flushed_at_once, product(SYNCS), FLOAT64),
    "a state dict before the first update changes nothing": (sharded.saved_before_training, [()], FLOAT64),
    "TrainStep with a sharded model drops a batch that failed": (sharded.train_step_goes_on, [()], FLOAT64),
    "TrainStep with a sharded model takes ranks of different rows": (
        sharded.train_step,
        [([[8, 7, 3, 9, 8], [6, 18, 9, 2, 0]], *one, 3) for one in (("weight", "window"), ("told", "micro_batch"))],
        FLOAT64,
    ),
    "code that goes on after any error keeps no rank waiting": (together.swallowed, [()], FLOAT64),
    "ranks of a replicated model search, pack and run out of memory each for itself": (
        together.replicated,
        [("auto",), ("max_tokens",)],
        FLOAT64,
    ),
}
SLOWLY: dict[str, tuple[Any, list[tuple[Any, ...]], float]] = {
    "heads, with the other optimizer": (
        parts.heads,
        [
            *(
                (*one, "ddp", way, "adam")
                for one in ((SOME, SAME), (SOME, DIFFERENT), (CLOSED_BY_NOTHING, SAME))
                for way in ("backward", "batches", "batches backward")
            ),
            *(
                (*one, "fsdp2", way, optimizer)
                for one in ((ONES, DIFFERENT), (CLOSED_BY_NOTHING, SAME), (SOME, DIFFERENT))
                for way in ("batches", "batches micro_batch")
                for optimizer in ("sgd", "adam")
            ),
        ],
        FLOAT64,
    ),
    "compiled sharded models": (sharded.compiled, product((True, False), SYNCS), FLOAT64),
    "TrainStep with a sharded model, any loss": (
        sharded.train_step,
        [([[8, 7, 3, 9, 8], [6, 18, 9, 2, 0]], *one, 3) for one in product(sharded.TRAIN_STEPS, SYNCS)],
        FLOAT64,
    ),
}


@pytest.mark.parametrize(
    ("case", "arguments", "bound"),
    [
        pytest.param(case, arguments, bound, id=f"{claim}-{i}", marks=[SLOW] * (table is SLOWLY))
        for table in (EXACT, SLOWLY)
        for claim, (case, several, bound) in table.items()
        for i, arguments in enumerate(several)
    ],
)
def test_ranks_make_the_update_of_one_process(
    ranks: Processes, case: Any, arguments: tuple[Any, ...], bound: float
) -> None:
    assert max(ranks.run(case, *arguments)) <= bound


@pytest.mark.parametrize("way", ["batches", "batches, backward", "plain"])
@pytest.mark.parametrize("sizes", [EVEN, RAGGED, UNEVEN], ids=["even", "ragged", "uneven"])
def test_all_ranks_rows_make_one_update_with_one_reduction(ranks: Processes, sizes: list[list[int]], way: str) -> None:
    for error, reductions, updates in ranks.run(cases.train, sizes, 4, way):
        assert error <= FLOAT64
        assert reductions == updates == 2 * max(-(-len(own) // 4) for own in sizes)


@pytest.mark.parametrize(
    ("sizes", "steps", "keywords"),
    [
        (UNEVEN, 4, {"optimizer": "adam"}),
        (UNEVEN, 4, {"clip": 0.1}),
        (UNEVEN, 4, {"hook_first": False}),
        (UNEVEN, 4, {"ddp": {"gradient_as_bucket_view": True}}),
        (UNEVEN, 4, {"ddp": {"find_unused_parameters": True}}),
        (UNEVEN, 4, {"ddp": {"static_graph": True}}),
        (UNEVEN, 4, {"ddp": {"gradient_as_bucket_view": True, "static_graph": True}, "way": "plain"}),
        (UNEVEN, 4, {"ddp": {"bucket_cap_mb": 1e-4}}),  # several buckets, each reduced once
        (RAGGED, 1, {}),  # plain DDP
    ],
    ids=str,
)
def test_ddp_as_users_configure_it(
    ranks: Processes, sizes: list[list[int]], steps: int, keywords: dict[str, Any]
) -> None:
    for error, reductions, updates in ranks.run(cases.train, sizes, steps, **keywords):
        assert error <= FLOAT64
        assert reductions == updates == (6 if steps == 4 else 12)


def test_sync_micro_batch_is_for_sharded_models_and_reduces_replicas_once_per_window(ranks: Processes) -> None:
    for error, reductions, updates in ranks.run(cases.train, RAGGED, 4, sync="micro_batch"):
        assert error <= FLOAT64
        assert reductions == updates == 4


def test_every_rank_resumes_its_shards_of_a_window_that_reduces_every_micro_batch(ranks: Processes) -> None:
    assert max(ranks.run(cases.resumed, "fsdp2", {}, sync="micro_batch")) <= FLOAT64


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_two_optimizers_that_share_batches_close_their_windows_in_turns(ranks: Processes, steps: int) -> None:
    for errors, updates in ranks.run(cases.train_two, RAGGED, steps):
        assert max(errors) <= FLOAT64
        assert updates == [2 * -(-6 // steps)] * 2


@pytest.mark.parametrize("way", cases.WAYS)
def test_a_window_makes_one_reduction_and_sends_one_message_that_travels_during_the_backward_pass(
    ranks: Processes, way: str
) -> None:
    """A GradScaler finds overflows after the pass, so a second message says it."""
    first = 4 if way == "TrainStep" else 2 + ("batches" in way)  # what losses are and weigh; that an epoch begins
    for found, events in ranks.run(cases.collectives, way):
        assert found == [first, *([2 + (way == "GradScaler")] * (39 if way == "TrainStep" else 19))]
        if way not in ("TrainStep", "GradScaler"):
            assert events == ["first gradient", "send", "first gradient", "receive", "reduction"]


@pytest.mark.parametrize(
    ("engine", "mode", "expected"),
    [("ddp", "skip_micro_batch", 3), ("ddp", "skip_window", 1), ("fsdp2", "skip_window", 1)],
)
def test_one_rank_that_skips_what_is_not_finite_keeps_the_others_exact(
    ranks: Processes, engine: str, mode: str, expected: int
) -> None:
    for error, updates in ranks.run(cases.nonfinite, engine, mode):
        assert error <= FLOAT64
        assert updates == expected


@pytest.mark.parametrize(
    ("overflow_at", "interval"), [(None, 1000), ((1, 4), 1000), ((0, 5), 1000), ((1, 3), 1000), (None, 4), ((1, 4), 4)]
)
def test_an_overflow_on_one_rank_costs_all_ranks_one_window_and_one_halving(
    ranks: Processes, overflow_at: tuple[int, int] | None, interval: int
) -> None:
    """Scales that grow at different times are brought together."""
    for error, scales, updates in ranks.run(cases.scaler, overflow_at, interval):
        assert error <= FLOAT64
        assert updates == (4 if overflow_at is None else 3)
        assert interval == 4 or scales == [1024.0, *([512.0 if overflow_at else 1024.0] * 3)]


@pytest.mark.parametrize("static", [False, True])
def test_a_layer_that_one_rank_uses_once_is_exact_and_one_that_none_uses_stays_without_gradient(
    ranks: Processes, static: bool
) -> None:
    for error, without in ranks.run(cases.unused, static):
        assert error <= FLOAT64
        assert without


def test_static_graph_is_named_in_one_line(ranks: Processes) -> None:
    for lines in ranks.run(cases.static_graph):
        assert len([line for line in lines if "reduced by step()" in line]) == 1


@pytest.mark.parametrize("separately", [False, True])
def test_several_passes_per_micro_batch_are_exact_and_reduced_once(ranks: Processes, separately: bool) -> None:
    for error, counts in ranks.run(cases.several_passes, separately):
        assert error <= FLOAT64
        assert counts == [1, 1, 1]


def test_buffers_are_the_same_on_all_ranks_after_an_uneven_epoch(ranks: Processes) -> None:
    assert all(ranks.run(cases.batch_norm))


def test_buffers_are_those_of_a_rank_that_still_had_micro_batches(ranks: Processes) -> None:
    assert ranks.run(cases.buffers_after_an_epochs_end, [[4] * 2, [4] * 7]) == [[7, 14]] * 2
    assert ranks.run(cases.buffers_after_an_epochs_end, [[4] * 5, [4] * 3]) == [[5, 10]] * 2


@pytest.mark.parametrize("outside", [True, pytest.param(False, marks=SLOW)])
def test_compiled_models(ranks: Processes, outside: bool) -> None:
    for error, reductions in ranks.run(cases.compiled, outside):
        assert error <= FLOAT64
        assert reductions == 2


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_distributed_checkpoint_that_loses_an_open_window_says_so(
    ranks: Processes, tmp_path: Path, micro_batches: int
) -> None:
    for error, warnings in ranks.run(cases.distributed_checkpoint, str(tmp_path), micro_batches):
        assert error <= FLOAT64
        assert any("1 of 2 micro-batches are lost" in warning for warning in warnings) == (micro_batches == 3)


@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("steps", [(1, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("which", [("a", "b"), ("ab", "ab")])
def test_optimizers_on_parts_of_one_model_are_exact(
    ranks: Processes, which: tuple[str, str], steps: tuple[int, int], unused: bool
) -> None:
    for errors in ranks.run(cases.optimizers_of_parts, steps, which, unused):
        assert max(errors) <= FLOAT64


def test_all_ranks_may_break_off_at_once(ranks: Processes) -> None:
    for error, updates in ranks.run(cases.broken_off):
        assert error <= FLOAT64
        assert updates == 2 + 1 + 3


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_model_is_as_it_was_found_when_its_wrapper_is_gone(ranks: Processes, engine: str) -> None:
    for hooks, same in ranks.run(parts.hooks_left, engine):
        assert hooks == 0
        assert same


def test_optimizers_that_come_one_after_the_other_use_one_process_group(ranks: Processes) -> None:
    for error, groups in ranks.run(cases.one_after_the_other):
        assert error <= FLOAT64
        assert groups == 0


def test_a_process_group_in_which_ranks_have_not_met_is_not_used_again(ranks: Processes) -> None:
    for arrives, groups in ranks.run(cases.unheard):
        assert arrives
        assert groups == 3
