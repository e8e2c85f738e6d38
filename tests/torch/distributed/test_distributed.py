"""One window over all ranks: the update of one process that sees all rows, with one reduction per window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reference import FLOAT32, FLOAT64
from tests.torch.distributed import ddp_cases as cases
from tests.torch.distributed import failure_cases as failures
from tests.torch.distributed import sharded_cases as sharded
from tests.torch.distributed import together_cases as together
from tests.torch.distributed.processes import Processes

SLOW = pytest.mark.slow
EVEN = [[4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4]]
RAGGED = [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]]
UNEVEN = [[4, 4, 4, 4, 4, 4, 4, 4, 3], [4, 4, 4, 2]]
SHORT = [[4, 3, 2, 5, 4], [2, 5, 1, 2, 2]]
ONES, SOME = [[1] * 6] * 2, [[4, 0, 3, 2, 4, 4], [2, 5, 0, 4, 4, 0]]
CLOSED_BY_NOTHING = [[4, 0, 3, 2, 4, 0], [2, 0, 0, 4, 4, 5]]
SAME, DIFFERENT = [[0, 1, 0, 1, 1, 0]] * 2, [[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]]
SYNCS = "window", "micro_batch"
HALF, FOLLOWS_ROUNDING = 2**-9, 2**-10
FLUSHED, BUCKETS, VIEWS = {"way": "backward"}, {"bucket_cap_mb": 1e-4}, {"gradient_as_bucket_view": True}


def product(*values: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for own in values:
        found = [(*before, one) for before in found for one in own]
    return found


LOOPS: dict[str, tuple[Any, int, dict[str, Any], int | None]] = {
    # Rows of each rank's micro-batches, steps, the rest, updates: each makes one reduction.
    "even, twice": (EVEN, 4, {"epochs": 2}, 4),
    **{f"ragged, {way}": (RAGGED, 4, {"way": way}, 2) for way in ("batches", "batches backward", "backward")},
    **{f"uneven, {way}": (UNEVEN, 4, {"way": way}, 3) for way in ("batches", "batches backward", "backward")},
    "plain DDP": (RAGGED, 1, {}, 6),
    "Adam": (UNEVEN, 4, {"optimizer": "adam"}, 3),
    "clipped": (UNEVEN, 4, {"clip": 0.1}, 3),
    "gradients are views of buckets": (UNEVEN, 4, {"ddp": VIEWS}, 3),
    "find_unused_parameters": (UNEVEN, 4, {"ddp": {"find_unused_parameters": True}}, 3),
    "static_graph": (UNEVEN, 4, {"ddp": {"static_graph": True}}, 3),
    "static_graph and views, flushed": (UNEVEN, 4, {"ddp": {"static_graph": True, **VIEWS}, **FLUSHED}, 3),
    "several buckets, each reduced once": (UNEVEN, 4, {"ddp": BUCKETS}, 3),
    "sync='micro_batch' is for sharded models": (RAGGED, 4, {"sync": "micro_batch", "epochs": 2}, 4),
    "an empty last batch on one rank counts nothing": ([[4, 3, 2, 0], [2, 2, 5, 4]], 2, {}, 2),
    "micro-batches that a rank passes over": (RAGGED, 2, {"skips": [[1, 5], [0, 3, 4]]}, 2),
    "sums": ([[4, 3, 5], [2, 5, 1, 4, 2]], 2, {"loss": cases.total_loss, "reduction": "sum"}, 3),
    "sums over weights": (
        [[4, 3, 5], [2, 5, 1, 4, 2]],
        2,
        {"loss": cases.total_loss, "reduction": "sum", "weights": [[8, 6, 10], [4, 10, 2, 8, 4]], **FLUSHED},
        3,
    ),
    **{
        f"losses by name, {steps=}": (sizes, steps, {"loss": cases.by_name, "epochs": 2, **FLUSHED}, updates)
        for sizes, steps, updates in ((EVEN, 4, 4), (RAGGED, 2, 6), (RAGGED, 1, 12), ([[4, 4, 4, 4, 3], [4, 2]], 2, 6))
    },
    "two forward passes": (RAGGED, 2, {"loss": cases.both_passes}, 3),
    "two backward passes": (RAGGED, 2, {"loss": cases.separate_passes}, 3),
    "a penalty on weights": (RAGGED, 2, {"loss": cases.unreached_penalty}, 3),
    "torch.autograd.grad through DDP": (RAGGED, 2, {"loss": cases.through_grad, **FLUSHED}, 3),
    "a gradient penalty": (RAGGED, 2, {"loss": cases.gradient_penalty, **FLUSHED}, 3),
    **{
        f"{build.__name__}, {static=}": (SHORT, 2, {"build": build, "ddp": {"static_graph": static}}, 3)
        for build in (cases.Checkpointed, cases.AllCheckpointed, cases.CheckpointedWithoutReentry)
        for static in (True, False)
    },
    "compiled": (EVEN, 3, {"compiles": "outside"}, 2),
}
HOOKS = {"allreduce_hook": FLOAT64, "fp16_compress_hook": FOLLOWS_ROUNDING, "powerSGD_hook": FOLLOWS_ROUNDING}


@pytest.mark.parametrize(("sizes", "steps", "keywords", "updates"), LOOPS.values(), ids=LOOPS)
def test_a_loop_makes_the_update_of_all_ranks_rows_with_one_reduction_per_window(
    ranks: Processes, sizes: Any, steps: int, keywords: dict[str, Any], updates: int
) -> None:
    for error, reductions, made in ranks.run(cases.train, sizes, steps, **keywords):
        assert error <= FLOAT64
        assert reductions == made == updates


HEADS: dict[str, Any] = {"build": cases.Heads, "ddp": {"find_unused_parameters": True}}
AT_ONCE, NESTED = {"build": cases.Heads, "engine": "fsdp2 at once"}, {"build": cases.Heads, "engine": "fsdp2 nested"}
TWO_DTYPES = {**AT_ONCE, "ddp": {"mp_policy": cases.TWO_DTYPES}}
WEIGHTS = [[3, 0, 5, 2, 0, 0, 4, 0], [0, 7, 1, 0, 0, 0, 0, 0]]
SHARDED_WEIGHTS = [WEIGHTS[0], [0, 7, 1, 0, 2, 0, 0, 0]]
MICRO_BATCH = {"sync": "micro_batch"}
USED: dict[str, tuple[Any, dict[str, Any], float]] = {
    # What micro-batches weigh, what else, and the bound. Heads: one of them never has a turn.
    "token weights, batches": (WEIGHTS, {}, FLOAT64),
    "token weights, backward": (WEIGHTS, FLUSHED, FLOAT64),
    "token weights, shards, batches": (SHARDED_WEIGHTS, {"engine": "fsdp2"}, FLOAT64),
    "token weights, shards, backward": (SHARDED_WEIGHTS, {"engine": "fsdp2", **FLUSHED}, FLOAT64),
    "heads": (SOME, {**HEADS, "heads": SAME}, FLOAT64),
    "heads, flushed": (SOME, {**HEADS, "heads": SAME, **FLUSHED}, FLOAT64),
    "different heads": (SOME, {**HEADS, "heads": DIFFERENT, "way": "batches backward"}, FLOAT64),
    "different heads, flushed, AdamW": (SOME, {**HEADS, "heads": DIFFERENT, "optimizer": "adamw", **FLUSHED}, FLOAT64),
    "heads, closed by nothing, AdamW": (CLOSED_BY_NOTHING, {**HEADS, "heads": SAME, "optimizer": "adamw"}, FLOAT64),
    "heads, closed by nothing": (CLOSED_BY_NOTHING, {**HEADS, "heads": SAME, "way": "batches backward"}, FLOAT64),
    "heads, static_graph": (
        ONES,
        {"build": cases.Heads, "ddp": {"static_graph": True}, "heads": SAME, "optimizer": "adamw"},
        FLOAT64,
    ),
    "heads of shards": (ONES, {**AT_ONCE, "heads": DIFFERENT, "optimizer": "adam"}, FLOAT64),
    "heads of shards, AdamW": (SOME, {**AT_ONCE, "heads": DIFFERENT, "optimizer": "adamw"}, FLOAT64),
    "heads of shards, closed by nothing": (
        CLOSED_BY_NOTHING,
        {**AT_ONCE, "heads": SAME, "optimizer": "adam", **MICRO_BATCH},
        FLOAT64,
    ),
    "sums in a dtype of their own": (ONES, {**TWO_DTYPES, "heads": DIFFERENT, **FLUSHED}, FLOAT32),
    "the same, reduced at once": (ONES, {**TWO_DTYPES, "heads": DIFFERENT, **MICRO_BATCH}, FLOAT32),
    "parts sharded by themselves": (ONES, {**NESTED, "heads": SAME}, FLOAT64),
    "the same, reduced each time": (ONES, {**NESTED, "heads": SAME, **MICRO_BATCH}, FLOAT64),
}
USED_SLOWLY: dict[str, tuple[Any, dict[str, Any], float]] = {
    f"{weights} {heads} {how.get('engine', 'ddp')} {more} {optimizer}": (
        weights,
        {**how, "heads": heads, "optimizer": optimizer, **more},
        FLOAT64,
    )
    for weights, heads in ((SOME, SAME), (SOME, DIFFERENT), (CLOSED_BY_NOTHING, SAME))
    for how, others in ((HEADS, FLUSHED), (AT_ONCE, MICRO_BATCH))
    for more in ({}, others)
    for optimizer in ("sgd", "adam")
}


@pytest.mark.parametrize(
    ("weights", "keywords", "bound"),
    [
        pytest.param(*one, id=name, marks=[SLOW] * (name in USED_SLOWLY))
        for name, one in {**USED, **USED_SLOWLY}.items()
    ],
)
def test_ranks_that_use_different_parts_or_weigh_nothing_make_the_update_of_all_rows(
    ranks: Processes, weights: Any, keywords: dict[str, Any], bound: float
) -> None:
    """Nobody hangs, and weight 0 leaves out a loss that is NaN."""
    sizes = [[4] * len(own) for own in weights]
    for error, _, updates in ranks.run(cases.train, sizes, 2, weights=weights, **keywords):
        assert error <= bound
        assert updates == sum(any(own[i] or own[i + 1] for own in weights) for i in range(0, len(weights[0]), 2))


@pytest.mark.parametrize(
    ("engine", "mode", "expected"),
    [("ddp", "skip_micro_batch", 3), ("ddp", "skip_window", 1), ("fsdp2", "skip_window", 1)],
)
def test_one_rank_that_skips_what_is_not_finite_keeps_the_others_exact(
    ranks: Processes, engine: str, mode: str, expected: int
) -> None:
    sizes, bad = [[4, 3, 2] * 3, [2, 2, 5] * 3], {(1, 1), (0, 5)}
    for error, _, updates in ranks.run(cases.train, sizes, 3, engine=engine, bad=bad, nonfinite=mode):
        assert error <= FLOAT64
        assert updates == expected


@pytest.mark.slow
def test_a_model_that_is_compiled_inside_of_ddp(ranks: Processes) -> None:
    assert all(error <= FLOAT64 for error, *_ in ranks.run(cases.train, EVEN, 3, compiles="inside"))


@pytest.mark.parametrize(("hook", "bound"), HOOKS.items())
def test_communication_hooks_see_every_reduction(ranks: Processes, hook: str, bound: float) -> None:
    """The last window is reduced by hand, since `flush` closes it."""
    assert all(error <= bound for error, *_ in ranks.run(cases.train, SHORT, 2, "backward", hook=hook))


EXACT: dict[str, tuple[Any, list[tuple[Any, ...]], float]] = {
    "several models share a window": (cases.towers, [()], FLOAT64),
    "every rank resumes its part of an open window": (
        cases.resumed,
        [("ddp", VIEWS), ("ddp", {"find_unused_parameters": True}), ("fsdp2", {}), ("fsdp2", {}, "micro_batch")],
        FLOAT64,
    ),
    "a loop that runs in the model's forward pass, as Lightning's does": (
        cases.loop_in_forward,
        [(1, True), (2, False), (3, True), (3, False)],
        FLOAT64,
    ),
    "what is reduced in float16 is of the gradients' size, whatever the weights are": (
        cases.half_reduction,
        [
            ("ddp", 131072.0, "plain"),
            ("ddp", 1e-6, "batches"),
            ("ddp", 131072.0, "TrainStep"),
            ("ddp", 131072.0, "TrainStep of sums"),
            ("fsdp2", 1e-6, "plain"),
            ("fsdp2", 131072.0, "batches"),
            ("fsdp2", 131072.0, "micro_batch"),
            ("fsdp2", 1e-6, "TrainStep"),
            ("fsdp2", 131072.0, "TrainStep of sums"),
        ],
        HALF,
    ),
    "bfloat16 gradients are reduced in the dtype they are summed in": (cases.wide, [()], 2**-8),
    "TrainStep where one rank runs out of memory": (cases.out_of_memory, [(False,), (True,)], FLOAT64),
    "TrainStep leaves parameters alone that no rank uses": (
        cases.unused_in_train_step,
        [("ddp",), ("fsdp2",)],
        FLOAT64,
    ),
    "two optimizers on parts of one model": (
        cases.optimizers_of_parts,
        [
            ((1, 1), ("a", "b"), True),
            ((2, 3), ("a", "b"), False),
            ((2, 3), ("ab", "ab"), True),
            ((2, 2), ("ab", "ab"), False),
        ],
        FLOAT64,
    ),
    "losses by name go on after a checkpoint": (cases.names_after_a_checkpoint, [(2,), (3,), (4,)], FLOAT64),
    # Sharded models.
    "an open window of shards under a GradScaler is saved unscaled": (sharded.saved_with_scaler, [()], FLOAT64),
    "a discarded window of shards leaves nothing behind": (sharded.discarded, [()], FLOAT64),
    "a restored window is flushed before any forward pass": (sharded.flushed_at_once, product(SYNCS), FLOAT64),
    "a state dict before the first update changes nothing": (sharded.saved_before_training, [()], FLOAT64),
    "TrainStep with a sharded model drops a batch that failed": (sharded.train_step_goes_on, [()], FLOAT64),
    "code that goes on after any error keeps no rank waiting": (together.swallowed, [()], FLOAT64),
    "ranks of a replicated model search, pack and run out of memory each for itself": (
        together.replicated,
        [("auto",), ("max_tokens",)],
        FLOAT64,
    ),
}


@pytest.mark.parametrize(
    ("case", "arguments", "bound"),
    [
        pytest.param(case, arguments, bound, id=f"{claim}-{i}")
        for claim, (case, several, bound) in EXACT.items()
        for i, arguments in enumerate(several)
    ],
)
def test_ranks_make_the_update_of_one_process(
    ranks: Processes, case: Any, arguments: tuple[Any, ...], bound: float
) -> None:
    assert max(ranks.run(case, *arguments)) <= bound


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


SCALED: list[tuple[str, tuple[int, int] | None, int, str]] = [
    # Where a loss overflows, by rank and micro-batch; after how many the scale grows.
    *(("ddp", at, 1000, "window") for at in (None, (1, 4), (0, 5), (1, 3))),
    ("ddp", None, 4, "window"),
    ("ddp", (1, 4), 4, "window"),
    ("fsdp2", (0, 5), 1000, "window"),
    ("fsdp2", (1, 4), 1000, "micro_batch"),
    ("fsdp2", None, 2, "window"),
    ("fsdp2", None, 2, "micro_batch"),
]
SCALED_SLOWLY = [("fsdp2", at, 1000, sync) for at in (None, (1, 3)) for sync in SYNCS]


@pytest.mark.parametrize(
    ("engine", "overflow_at", "interval", "sync"), [*SCALED, *(pytest.param(*one, marks=SLOW) for one in SCALED_SLOWLY)]
)
def test_an_overflow_on_one_rank_costs_all_ranks_one_window_and_one_halving(
    ranks: Processes, engine: str, overflow_at: tuple[int, int] | None, interval: int, sync: str
) -> None:
    """Scales that grow at different times are brought together; one that grows in a window keeps its sum exact."""
    for error, scales, updates in ranks.run(cases.scaler, engine, overflow_at, interval, sync):
        assert error <= FLOAT64
        assert updates == (4 if overflow_at is None else 3)
        assert interval < 1000 or scales == [1024.0, *([512.0 if overflow_at else 1024.0] * 3)]
        assert interval != 2 or scales == [2048.0, 8192.0, 16384.0, 65536.0]


def test_layers_are_reduced_while_the_backward_pass_goes_on(ranks: Processes) -> None:
    """DDP makes its buckets by the order of the first reduction, which is the wrapper's own."""
    for events in ranks.run(cases.overlapping):
        assert events.index("reduction") < events.index("first layer")


def test_static_graph_is_named_in_one_line(ranks: Processes) -> None:
    for lines in ranks.run(failures.static_graph):
        assert len([line for line in lines if "step() reduces" in line]) == 1


def test_buffers_are_those_of_a_rank_that_still_had_micro_batches(ranks: Processes) -> None:
    assert ranks.run(cases.buffers_after_an_epochs_end, [[4] * 2, [4] * 7]) == [[7, 14]] * 2
    assert ranks.run(cases.buffers_after_an_epochs_end, [[4] * 5, [4] * 3]) == [[5, 10]] * 2


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_distributed_checkpoint_that_loses_an_open_window_says_so(
    ranks: Processes, tmp_path: Path, micro_batches: int
) -> None:
    for error, warnings in ranks.run(cases.distributed_checkpoint, str(tmp_path), micro_batches):
        assert error <= FLOAT64
        assert any("1 of 2 micro-batches are lost" in warning for warning in warnings) == (micro_batches == 3)


def test_all_ranks_may_break_off_at_once(ranks: Processes) -> None:
    for error, updates in ranks.run(cases.broken_off):
        assert error <= FLOAT64
        assert updates == 2 + 1 + 3


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_model_is_as_it_was_found_when_its_wrapper_is_gone(ranks: Processes, engine: str) -> None:
    for hooks, same in ranks.run(cases.hooks_left, engine):
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


FREEZING = {"yyyn": "", "yyny": "", "ynny": "", "nyyy": "", "nnny": "does not reduce"}
"""What is said where the middle layer is trained when DDP wraps it, when the optimizer is built, in two epochs."""


@pytest.mark.parametrize("trained", FREEZING)
@pytest.mark.parametrize("way", ["backward", "names", "TrainStep"])
@pytest.mark.parametrize("unused", [False, True], ids=["", "find_unused_parameters"])
def test_what_is_frozen_or_unfrozen_after_ddp_has_wrapped_it_is_exact_or_named(
    ranks: Processes, trained: str, way: str, unused: bool
) -> None:
    said = "" if unused else FREEZING[trained]
    if trained == "yyyn" and way == "backward" and not unused:  # the second window is reduced in the backward pass
        said = "has not reduced"
    for error, message in ranks.run(cases.frozen_and_unfrozen, trained, way, unused):
        assert error <= FLOAT64
        assert said in message
        assert bool(said) == bool(message)
