"""One window over all ranks: the update of one process that sees all rows, with one reduction per window."""

import copy  # no postponed annotations here: DDP reads those of its hooks
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from gradaccum.errors import WindowError
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.distributed.problems import (
    OPTIMIZERS,
    RAGGED,
    SIX,
    SYNCS,
    Heads,
    Oracle,
    collectives,
    concatenated,
    data,
    lines_of,
    loss_of,
    network,
    reducing,
    sgd,
    slowly,
    spread,
    train_on,
    windows,
    wrap,
)
from tests.torch.distributed.processes import on_ranks
from tests.torch.problems import Does

LAYERS = 2
"""What is sharded together."""


def train(
    rank, sizes, steps, way="batches", *, engine="ddp", loss=loss_of, build=network, ddp=None, weights=None, heads=None,
    bad=(), hook="", compiles="", skips=((), ()), optimizer="sgd", clip=None, epochs=1, first=None, dtype=torch.float64,
    bound=FLOAT64, **keywords,
):  # fmt: skip
    """The user's loop makes the oracle's updates, with one reduction for each, or of each micro-batch if asked to.

    `way`: in batches(), or in a plain loop that is flushed; with the wrapper's backward() or the losses' own. `loss`:
    one, or several, which go backward one by one. What micro-batches weigh in place of their rows, which head they use,
    whose loss is infinite (`bad`) and which are passed over (`skips`), by rank; weight 0 has a loss of NaN.
    """
    model = build() if dtype is torch.float64 else build(dtype)
    oracle = Oracle(model, optimizer, clip)
    if compiles == "inside":
        model.compile(backend="eager")
    used = spread(engine, model, **(ddp or {}))
    elements = []
    if engine == "ddp" and not hook:
        used.register_comm_hook(elements.append, reducing)
    if hook == "powerSGD_hook":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
        used.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook:
        used.register_comm_hook(None, getattr(default_hooks, hook))
    used = torch.compile(used, backend="eager") if compiles == "outside" else used
    inner = OPTIMIZERS[optimizer](model.parameters())
    wrapped = Optimizer(inner, steps=steps, model=used, clip_grad_norm=clip, **keywords)
    sums, closed = keywords.get("reduction") == "sum", 0

    def losses(m, rows, place):
        found = loss(m, rows) if heads is None else loss(lambda x: m(x, heads[place[0]][place[1]]), rows)
        return found if isinstance(found, list) else [found]

    def weight(place, rows):
        return len(rows[0]) if weights is None else weights[place[0]][place[1]]

    with collectives() as counts:
        for epoch in range(epochs):
            ranks = data(first if first and epoch == 0 else sizes, epoch, dtype)
            kept = [[((r, i), x) for i, x in enumerate(own) if i not in skips[r % 2]] for r, own in enumerate(ranks)]
            for window in windows(kept, steps):
                closed += 1
                seen = [(weight(p, rows), p, rows) for p, rows in window if p not in bad and len(rows[0])]
                total = 1 if sums and weights is None else sum(w for w, *_ in seen)
                skipped = keywords.get("nonfinite") == "skip_window" and any(p in bad for p, _ in window)

                def whole_loss(m, _, seen=seen, total=total):
                    return sum(
                        sum(losses(m, rows, p)) * ((1 if sums else w) / total) for w, p, rows in seen if w or sums
                    )

                if total and not skipped:
                    oracle.update(None, whole_loss)
            loader = list(enumerate(ranks[rank]))
            if "batches" in way:
                given = None if weights is None else lambda one: weight((rank, one[0]), one[1])
                loader = wrapped.batches(loader, weight=given)
            for i, rows in loader:
                if i in skips[rank % 2]:
                    continue
                wrapped.zero_grad()
                factor = float("inf") if (rank, i) in bad else 1.0 if weight((rank, i), rows) else float("nan")
                parts = losses(used, rows, (rank, i))
                for part in parts:
                    if "backward" in way:
                        wrapped.backward(part * factor, weight=None if "batches" in way else weight((rank, i), rows))
                    else:
                        (part * factor).backward(retain_graph=part is not parts[-1])
                wrapped.step()
            if "batches" not in way:
                wrapped.flush()
    oracle.check(model, bound)
    assert wrapped.updates == oracle.updates
    if engine in ("fsdp2", "fsdp2 parts"):
        reduced = len(sizes[0]) * epochs if keywords.get("sync") == "micro_batch" else closed
        assert counts["reduce_scatter"] == LAYERS * reduced
        assert dist.get_world_size() == 2 or counts["all_reduce"] == LAYERS * closed
    elif elements:  # in several buckets, perhaps
        assert sum(elements) == sum(p.numel() for p in model.parameters()) * closed
    elif engine == "ddp" and not hook:
        assert counts["all_reduce"] == closed


def second(m, rows):
    return m(rows[0] * 0.5).square().sum(1).mean()


def with_decay(m, rows):
    return [loss_of(m, rows), sum(p.square().sum() for p in m.parameters())]


def looks(m, rows, penalty=False):
    """A look, by torch.autograd.grad through the model, at what the input matters, and a penalty on that."""
    x = rows[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(m(x).sum(), x, create_graph=penalty)
    return loss_of(m, rows) + (gradient.square().sum(1).mean() if penalty else 0.0)


class TwoOutputs(Heads):
    """Two heads at once, of which each loss reaches one; a third is never used."""

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.heads[0](hidden), self.heads[1](hidden)


def each_output(m, rows):
    first, second = m(rows[0])
    return [cross_entropy(first, rows[1]), second.square().sum(1).mean()]


def checkpointed(which, reentrant):
    """The first layer, the last, or all of them, run again in the backward pass."""

    def run(m, x):
        if which == "all":
            return checkpoint(m.layers, x.requires_grad_(), use_reentrant=reentrant)
        if which == "first":
            first = checkpoint(m.layers[0], x.requires_grad_(), use_reentrant=reentrant)
            return m.layers[2](torch.tanh(first))
        return checkpoint(m.layers[2], torch.tanh(m.layers[0](x)), use_reentrant=reentrant)

    return Does(run, layers=network())


EVEN, UNEVEN = [[4] * 6] * 2, [[4, 4, 4, 4, 4, 4, 4, 4, 3], [4, 4, 4, 2]]
SHORT, UNSUMMED = [[4, 3, 2, 5, 4], [2, 5, 1, 2, 2]], [[4, 3, 5], [2, 5, 1, 4, 2]]
ONES, SOME = [[1] * 6] * 2, [[4, 0, 3, 2, 4, 4], [2, 5, 0, 4, 4, 0]]
CLOSED_BY_NOTHING = [[4, 0, 3, 2, 4, 0], [2, 0, 0, 4, 4, 5]]
SAME, DIFFERENT = [[0, 1, 0, 1, 1, 0]] * 2, [[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]]
WEIGHTS = [[3, 0, 5, 2, 0, 0, 4, 0], [0, 7, 1, 0, 0, 0, 0, 0]]
SHARDED_WEIGHTS = [WEIGHTS[0], [0, 7, 1, 0, 2, 0, 0, 0]]
FLUSHED, BUCKETS, VIEWS = {"way": "backward"}, {"bucket_cap_mb": 1e-4}, {"gradient_as_bucket_view": True}
SUMS = {"loss": lambda m, rows: cross_entropy(m(rows[0]), rows[1], reduction="sum") * 0.1, "reduction": "sum"}
MICRO_BATCH, UNUSED, FSDP2 = {"sync": "micro_batch"}, {"find_unused_parameters": True}, {"engine": "fsdp2"}
ADAM, ADAMW = {"optimizer": "adam"}, {"optimizer": "adamw"}
WAYS = [{"way": way} for way in ("batches", "batches backward", "backward")]
HEADS = {"build": Heads, "ddp": UNUSED}
AT_ONCE, NESTED = {"build": Heads, "engine": "fsdp2 at once"}, {"build": Heads, "engine": "fsdp2 nested"}
POLICY = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
TWO_DTYPES = {**AT_ONCE, "ddp": {"mp_policy": POLICY}, "heads": DIFFERENT, "bound": FLOAT32}
PARTS = {
    # What micro-batches weigh, and what else. Heads: one of them never has a turn.
    "token weights, batches": (WEIGHTS, {}),
    "token weights, backward": (WEIGHTS, FLUSHED),
    "token weights, shards, batches": (SHARDED_WEIGHTS, FSDP2),
    "token weights, shards, backward": (SHARDED_WEIGHTS, {**FSDP2, **FLUSHED}),
    "heads": (SOME, {**HEADS, "heads": SAME}),
    "heads, flushed": (SOME, {**HEADS, "heads": SAME, **FLUSHED}),
    "different heads": (SOME, {**HEADS, "heads": DIFFERENT, "way": "batches backward"}),
    "different heads, flushed, AdamW": (SOME, {**HEADS, "heads": DIFFERENT, **ADAMW, **FLUSHED}),
    "heads, closed by nothing, AdamW": (CLOSED_BY_NOTHING, {**HEADS, "heads": SAME, **ADAMW}),
    "heads, closed by nothing": (CLOSED_BY_NOTHING, {**HEADS, "heads": SAME, "way": "batches backward"}),
    "heads, static_graph": (ONES, {"build": Heads, "ddp": {"static_graph": True}, "heads": SAME, **ADAMW}),
    "heads of shards": (ONES, {**AT_ONCE, "heads": DIFFERENT, **ADAM}),
    "heads of shards, AdamW": (SOME, {**AT_ONCE, "heads": DIFFERENT, **ADAMW}),
    "heads of shards, closed by nothing": (CLOSED_BY_NOTHING, {**AT_ONCE, "heads": SAME, **ADAM, **MICRO_BATCH}),
    "sums in a dtype of their own": (ONES, {**TWO_DTYPES, **FLUSHED}),
    "the same, reduced at once": (ONES, {**TWO_DTYPES, **MICRO_BATCH}),
    "parts sharded by themselves": (ONES, {**NESTED, "heads": SAME}),
    "the same, reduced each time": (ONES, {**NESTED, "heads": SAME, **MICRO_BATCH}),
}
HALF_SHARDS = {**FSDP2, "ddp": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}}
HALF, IN_FLOAT32 = {"hook": "fp16_compress_hook"}, {"dtype": torch.float32, "bound": 2**-9}
HALVES = [(131072.0, {**HALF, **FLUSHED}), (1e-6, HALF), (1e-6, {**HALF_SHARDS, **FLUSHED}), (131072.0, HALF_SHARDS)]
HALVES = [*HALVES, (131072.0, {**HALF_SHARDS, **MICRO_BATCH, **FLUSHED})]
TOTALS = [[8, 6, 10], [4, 10, 2, 8, 4]]


def weighing(weight):
    return [[weight * size for size in own] for own in SIX]


def of_weights(weights, options):
    return [[4] * len(own) for own in weights], 2, {"weights": weights, **options}


LOOPS = {
    # Rows of each rank's micro-batches, steps, the rest.
    "even, twice": (EVEN, 4, {"epochs": 2}),
    **{f"ragged, {way['way']}": (RAGGED, 4, way) for way in WAYS},
    **{f"uneven, {way['way']}": (UNEVEN, 4, way) for way in WAYS},
    "plain DDP": (RAGGED, 1, {}),
    "Adam": (UNEVEN, 4, {"optimizer": "adam"}),
    "clipped": (UNEVEN, 4, {"clip": 0.1}),
    "gradients are views of buckets": (UNEVEN, 4, {"ddp": VIEWS}),
    "find_unused_parameters": (UNEVEN, 4, {"ddp": UNUSED}),
    "static_graph": (UNEVEN, 4, {"ddp": {"static_graph": True}}),
    "static_graph and views": (UNEVEN, 4, {"ddp": {"static_graph": True, **VIEWS}, **FLUSHED}),
    "several buckets, each reduced once": (UNEVEN, 4, {"ddp": BUCKETS}),
    "sync='micro_batch' is for sharded models": (RAGGED, 4, {"epochs": 2, **MICRO_BATCH}),
    "an empty last batch on one rank counts nothing": ([[4, 3, 2, 0], [2, 2, 5, 4]], 2, {}),
    "micro-batches that a rank passes over": (RAGGED, 2, {"skips": [[1, 5], [0, 3, 4]]}),
    "several models share a window": (UNSUMMED, 2, {"engine": "ddp parts"}),
    "sums": (UNSUMMED, 2, SUMS),
    **{
        f"sums over weights, {steps} steps": (UNSUMMED, steps, {**SUMS, **FLUSHED, "weights": TOTALS, "ddp": how})
        for steps, how in ((1, VIEWS), (2, {}))
    },
    "two forward passes": (RAGGED, 2, {"loss": lambda m, rows: loss_of(m, rows) + second(m, rows)}),
    **{
        f"a backward pass for each output, {steps} steps, {how}": (
            RAGGED, steps, {"loss": each_output, "build": TwoOutputs, "ddp": {**UNUSED, **how}, **ADAMW},
        )
        for steps in (1, 2) for how in ({}, VIEWS)
    },
    "two backward passes": (RAGGED, 2, {"loss": lambda m, rows: [loss_of(m, rows), second(m, rows)]}),
    "a penalty on weights, which no output leads to": (RAGGED, 2, {"loss": with_decay}),
    "torch.autograd.grad through DDP": (RAGGED, 2, {"loss": looks, **FLUSHED}),
    "a gradient penalty": (RAGGED, 2, {"loss": partial(looks, penalty=True), **FLUSHED}),
    **{
        f"checkpointed, {of}, {how}": (SHORT, 2, {"build": partial(checkpointed, *of), "ddp": how})
        for of in (("last", True), ("all", True), ("last", False), ("first", True))
        for how in ({"static_graph": True}, {})
    },
    "compiled": (EVEN, 3, {"compiles": "outside"}),
    # Sharded models: when to reduce is a trade of memory against communication.
    **{f"shards, {way['way']}": (RAGGED, 4, {**FSDP2, **way}) for way in WAYS},
    "shards, micro_batch": (RAGGED, 4, {**FSDP2, **MICRO_BATCH, **FLUSHED}),
    "shards, micro_batch, clipped, with Adam": (RAGGED, 4, {"optimizer": "adam", "clip": 0.05, **FSDP2, **MICRO_BATCH}),
    "shards, clipped": (RAGGED, 4, {"clip": 0.05, **FSDP2}),
    "a list of sharded parts": (RAGGED, 2, {"engine": "fsdp2 parts", "way": "batches backward"}),
    "a list of sharded parts, plain": (RAGGED, 2, {"engine": "fsdp2 parts"}),
    "shards, compiled": (RAGGED, 2, {"compiles": "outside", **FSDP2, **MICRO_BATCH}),
    # Communication hooks see every reduction. The last window is reduced by hand, since `flush` closes it.
    **{
        hook: (SHORT, 2, {"hook": hook, "bound": bound, **FLUSHED})
        for hook, bound in (("allreduce_hook", FLOAT64), ("fp16_compress_hook", 2**-10), ("powerSGD_hook", 2**-10))
    },
    # What is reduced in float16 is of the gradients' size, for as many tokens as large batches have, or next to none.
    **{
        f"{weight} per row in float16, {how}": (SIX, 2, {**IN_FLOAT32, "weights": weighing(weight), **how})
        for weight, how in HALVES
    },
    **{
        f"one rank skips what is not finite, {engine}, {mode}": (
            [[4, 3, 2] * 3, [2, 2, 5] * 3], 3, {"engine": engine, "bad": {(1, 1), (0, 5)}, "nonfinite": mode},
        )
        for engine, mode in (("ddp", "skip_window"), ("fsdp2", "skip_window"))
    },
    # Ranks use different parts, or weigh nothing: weight 0 leaves out a loss that is NaN.
    **{name: of_weights(*one) for name, one in PARTS.items()},
}  # fmt: skip
LOOPS_SLOWLY = {
    "compiled inside": (EVEN, 3, {"compiles": "inside"}),
    "shards, compiled, window": (RAGGED, 2, {"compiles": "outside", **FSDP2}),
    **{f"shards, compiled inside, {s}": (RAGGED, 2, {"compiles": "inside", "sync": s, **FSDP2}) for s in SYNCS},
}  # fmt: skip


@pytest.mark.parametrize("loop", slowly(LOOPS, LOOPS_SLOWLY))
@on_ranks()
def test_a_loop_makes_the_update_of_all_ranks_rows_with_one_reduction_per_window(rank, loop):
    sizes, steps, options = {**LOOPS, **LOOPS_SLOWLY}[loop]
    train(rank, sizes, steps, **options)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@on_ranks()
def test_bfloat16_gradients_are_summed_and_reduced_in_float32(rank, engine):
    """As good as the gradients' own rounding."""
    replicated = engine == "ddp"
    model = network(torch.bfloat16 if replicated else torch.float32)
    reference, ranks = copy.deepcopy(model).bfloat16(), data([[4] * 6] * 2, dtype=torch.float32)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
    for x, y in [rows for own in ranks for rows in own]:
        for total, gradient in zip(
            sums, torch.autograd.grad(loss_of(reference, (x.bfloat16(), y)), [*reference.parameters()])
        ):
            total += gradient.double() / 12
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    used = spread(engine, model, **({} if replicated else {"mp_policy": policy}))
    wide = {"accumulate_dtype": torch.float32} if replicated else {}
    optimizer = Optimizer(torch.optim.SGD(used.parameters(), lr=0.1), steps=6, model=used, **wide)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad for p in used.parameters()))
    own = [(x.bfloat16() if replicated else x, y) for x, y in ranks[rank]]
    train_on(used, optimizer, optimizer.batches(own))
    assert replicated or {gradient.dtype for gradient in seen} == {torch.float32}
    found = [gradient if replicated else gradient.full_tensor() for gradient in seen]
    assert relative_error(found, [total.bfloat16() for total in sums] if replicated else sums) <= 2**-8


THREES = [[4, 3, 2] * 4, [2, 2, 5] * 4]
SCALED = {
    # Where a loss overflows, by rank and micro-batch; after how many the scale grows.
    **{f"an overflow at {at}": {"at": at} for at in (None, (1, 4), (0, 5), (1, 3))},
    **{f"an overflow at {at}, or it grows": {"at": at, "interval": 4} for at in (None, (1, 4))},
    "of shards": {"at": (0, 5), **FSDP2},
    "of shards, micro_batch": {"at": (1, 4), **FSDP2, **MICRO_BATCH},
    **{f"a scale of shards grows, {sync}": {"interval": 2, "sync": sync, **FSDP2} for sync in SYNCS},
    "a scale grows on rank 0 alone": {"interval": (2, 1000)},
    "the first window, reduced in scales that differ, is lost": {"at": (0, 0), "interval": (2, 1000), **FSDP2},
    # One that grows with each micro-batch costs no window of ranks that have more of them. Nor does one that `unscale_`
    # takes out of a sum that a backward pass has reduced, for ranks without any.
    **{
        f"{way}, {sizes}": {"way": way, "epochs": [sizes] * 2, "interval": 1}
        for way, sizes in (
            ("plain", [[4, 3, 2], [2]]), ("plain", [[1], [2, 2]]), ("unscaled", [[4, 3], [2, 2, 3, 1, 2, 5, 1]]),
            ("plain", [[4, 3, 2, 5, 1], [2, 2, 5, 4]]), ("unscaled", [[4, 3, 2, 5, 1], [2, 2, 5, 4]]),
        )
    },
    "one scale on all ranks, which unscale_ keeps to itself": {
        "way": "unscaled", "epochs": [[[4, 3, 2], [2, 2, 1]]], "steps": 1,
    },
    **{
        f"a rank has its first micro-batch in a later window, {first}, {steps} steps": {
            "way": "scaled", "epochs": [first, RAGGED, RAGGED], "steps": steps, "interval": 2000,
        }
        for first in ([[4, 2, 3], []], [[], [4, 2, 3, 1, 2]]) for steps in (1, 2, 3)
    },
}  # fmt: skip
SCALED_SLOWLY = {f"{at} of shards, {s}": {"at": at, "sync": s, **FSDP2} for at in (None, (1, 3)) for s in SYNCS}


def scaled(rank, at=None, *, interval=1000, engine="ddp", sync="window", epochs=(THREES,), steps=3, way="plain"):
    """Epochs under a GradScaler, whose update() comes with every micro-batch."""
    model, epochs = network(), [data(sizes * (dist.get_world_size() // 2), i) for i, sizes in enumerate(epochs)]
    oracle, (used, optimizer) = Oracle(model), wrap(engine, model, steps, sync=sync)
    own, scales = interval[rank] if isinstance(interval, tuple) else interval, []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=own)
    for w, window in enumerate(window for ranks in epochs for window in windows(ranks, steps)):
        if at is None or at[1] // steps != w:
            oracle.update(concatenated(window))

    def train():
        for i, rows in enumerate(rows for ranks in epochs for rows in optimizer.batches(ranks[rank])):
            infinite = (rank, i) == at and isinstance(interval, int)
            train_on((lambda x: used(x) * float("inf")) if infinite else used, optimizer, [rows], way, scaler)
            if i % 3 == 2:
                scales.append(scaler.get_scale())

    warned = "reduced gradients in different scales" in "".join(lines_of(train))
    assert warned == (at is not None and interval == (2, 1000))
    oracle.check(model)
    assert optimizer.updates == oracle.updates
    if interval == 1000 and way == "plain":
        assert scales == [1024.0, *([512.0 if at else 1024.0] * 3)]
    if interval == 2:
        assert scales == [2048.0, 8192.0, 16384.0, 65536.0]
    if interval == (2, 1000):
        own = [[2048.0, 8192.0, 16384.0, 65536.0], [2048.0, 4096.0, 16384.0, 32768.0]]
        assert scales == own[rank]  # of rank 0 with its latest growth; the largest goes on


@pytest.mark.parametrize("how", slowly(SCALED, SCALED_SLOWLY))
@on_ranks()
def test_an_overflow_on_one_rank_costs_all_ranks_one_window_and_one_halving_and_a_growing_scale_none(rank, how):
    """Scales that grow at different times are brought together; one that grows in a window keeps its sum exact."""
    scaled(rank, **{**SCALED, **SCALED_SLOWLY}[how])


@on_ranks()
def test_an_order_that_only_closing_micro_batches_could_show_is_no_change_of_order(rank):
    """Where the ranks agree on a scale in each of them, and the first window has but one micro-batch."""
    model, epochs = network(), [data([[3], [2]]), data([[4, 3] * 6, [2, 5] * 6], 1)]
    oracle, (used, optimizer) = Oracle(model), wrap("ddp", model, 2)
    scaler, stepped = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3), False
    for ranks in epochs:
        for window in windows(ranks, 2):
            oracle.update(concatenated(window))
        for x, y in optimizer.batches(ranks[rank]):
            optimizer.zero_grad()
            if stepped:
                scaler.update()
            scaler.scale(cross_entropy(used(x), y)).backward()
            stepped = scaler.step(optimizer) is None
    oracle.check(model)


@pytest.mark.parametrize("update", ["behind step()", "behind zero_grad()"])
@pytest.mark.parametrize("steps", [(3, 3), (2, 3)])
@on_ranks()
def test_two_optimizers_under_one_scaler_keep_their_sums_in_scales_that_ranks_bring_together(rank, steps, update):
    """Where one window closes, the ranks agree on a scale in the middle of the other optimizer's micro-batch."""
    parts, ranks = [network(), network()], data([[2] * 24] * 2)
    model = Does(lambda both, x: [both.one(x), both.other(x)], one=parts[0], other=parts[1])
    oracles, used = [*map(Oracle, parts)], spread("ddp", model)
    optimizers = [Optimizer(sgd(part), steps=n, model=used) for part, n in zip(parts, steps)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=[2, 1000][rank])
    for oracle, n in zip(oracles, steps):
        oracle.see(ranks, n)
    for i, (x, y) in enumerate(ranks[rank]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if i and update == "behind zero_grad()":
            scaler.update()
        scaler.scale(sum(cross_entropy(output, y) for output in used(x))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        if update == "behind step()":
            scaler.update()
    for oracle, part in zip(oracles, parts):
        oracle.check(part)


HYBRID = {  # over four ranks: reduced across replicas once per window
    "a loop": lambda rank, sync: train(rank, [*RAGGED, *RAGGED], 4, engine="fsdp2", sync=sync),
    "a GradScaler": lambda rank, sync: scaled(rank, (1, 4), engine="fsdp2", sync=sync),
}


@pytest.mark.slow
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("what", HYBRID)
@on_ranks("four_ranks")
def test_hybrid_sharding_makes_the_update_of_all_ranks_rows(rank, what, sync):
    HYBRID[what](rank, sync)


@pytest.mark.parametrize(("sizes", "init"), [([[4, 3, 2], [2]], [1024.0] * 2), ([[4, 3], [2, 2]], [1024.0, 256.0])])
@on_ranks()
def test_a_scale_that_only_unscale_knows_is_refused_where_ranks_may_differ_in_it(rank, sizes, init):
    model, ranks = network(), data(sizes)
    used, optimizer = wrap("ddp", model, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init[rank])
    with pytest.raises(WindowError, match=r"unscale_.*had no micro-batch in this window, or another scale"):
        train_on(used, optimizer, optimizer.batches(ranks[rank]), "unscaled", scaler)
    assert optimizer.updates == 1
