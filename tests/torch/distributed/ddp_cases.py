"""What each rank does in the tests of windows over several ranks. Every case compares itself with one ordinary process.

The oracle on each rank is a plain model that sees all ranks' rows of a window at once.
"""

import copy  # no postponed annotations here: DDP reads those of its hooks
import gc
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradaccum import WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.distributed.channel import Channel
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.problems import (
    OPTIMIZERS,
    Collectives,
    Count,
    Oracle,
    Rows,
    concatenated,
    data,
    lines_of,
    loss_of,
    network,
    scaled,
    shard,
    spread,
    train_on,
    whole,
    windows,
    wrap,
    wrap_over,
)
from tests.torch.distributed.together_cases import NoMemory


def train(
    rank: int,
    sizes: Sequence[Sequence[int]],
    steps: int,
    way: str = "batches",
    *,
    engine: str = "ddp",
    loss: Callable[..., Any] = loss_of,
    build: Callable[[], nn.Module] = network,
    ddp: dict[str, Any] | None = None,
    weights: Any = None,
    heads: Any = None,
    bad: Any = (),
    hook: str = "",
    compiles: str = "",
    skips: Any = ((), ()),
    optimizer: str = "sgd",
    clip: float | None = None,
    epochs: int = 1,
    **keywords: Any,
) -> tuple[float, float, int]:
    """The user's loop. Returns (error, reductions of an element, updates).

    `way`: in batches(), or in a plain loop that is flushed; with the wrapper's backward() or the losses' own. `loss`:
    one, or several, which go backward one by one. What micro-batches weigh in place of their rows, which head they use,
    whose loss is infinite (`bad`) and which are passed over (`skips`), by rank; weight 0 has a loss of NaN.
    """
    model = build()
    oracle = Oracle(model, optimizer, clip)
    if compiles == "inside":
        model.compile(backend="eager")
    used = spread(engine, model, ddp or {})
    count = Count(used) if engine == "ddp" and not hook else None
    if hook == "powerSGD_hook":
        state: Any = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
        used.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook:
        used.register_comm_hook(None, getattr(default_hooks, hook))
    used = torch.compile(used, backend="eager") if compiles == "outside" else used
    inner = OPTIMIZERS[optimizer](model.parameters())
    wrapped = Optimizer(inner, steps=steps, model=used, clip_grad_norm=clip, **keywords)

    def losses(m: Any, rows: Rows, place: tuple[int, int]) -> list[Tensor]:
        found = loss(m, rows) if heads is None else loss(lambda x: m(x, heads[place[0]][place[1]]), rows)
        return found if isinstance(found, list) else [found]

    def named_losses(m: Any, rows: Rows) -> Any:
        return sum(part for part, weight in loss(m, rows).values() if weight)

    def weight(place: tuple[int, int], rows: Rows) -> float:
        return len(rows[0]) if weights is None else weights[place[0]][place[1]]

    with Collectives() as collectives:
        for epoch in range(epochs):
            ranks = data(sizes, epoch)
            kept = [[((r, i), x) for i, x in enumerate(own) if i not in skips[r % 2]] for r, own in enumerate(ranks)]
            for window in windows(kept, steps):
                seen = [(weight(p, rows), p, rows) for p, rows in window if p not in bad and len(rows[0])]
                sums = keywords.get("reduction") == "sum"
                total = 1 if sums and weights is None else sum(w for w, *_ in seen)
                skipped = keywords.get("nonfinite") == "skip_window" and any(p in bad for p, _ in window)

                def whole_loss(m: nn.Module, _: Any, seen: Any = seen, total: float = total, sums: bool = sums) -> Any:
                    return sum(sum(losses(m, rows, p)) * ((1 if sums else w) / total) for w, p, rows in seen)

                if loss is by_name:
                    oracle.update(concatenated([rows for _, rows in window]), named_losses)
                elif total and not skipped:
                    oracle.update(None, whole_loss)  # type: ignore[arg-type]
            loader: Any = list(enumerate(ranks[rank]))
            if "batches" in way:
                given = None if weights is None else lambda one: weight((rank, one[0]), one[1])
                loader = wrapped.batches(loader, weight=given)
            for i, rows in loader:
                if i in skips[rank % 2]:
                    continue
                wrapped.zero_grad()
                factor = float("inf") if (rank, i) in bad else 1.0 if weight((rank, i), rows) else float("nan")
                for part in losses(used, rows, (rank, i)):
                    if loss is by_name:
                        wrapped.backward(part)
                    elif "backward" in way:
                        wrapped.backward(part * factor, weight=None if "batches" in way else weight((rank, i), rows))
                    else:
                        (part * factor).backward()
                wrapped.step()
            if "batches" not in way:
                wrapped.flush()
    reductions: float = collectives.counts["all_reduce" if engine.startswith("ddp") else "reduce_scatter"]
    if engine == "fsdp2 hybrid":
        assert collectives.counts["all_reduce"] == LAYERS * wrapped.updates
    if count is not None and count.elements:  # several buckets, perhaps
        reductions = count.elements / sum(p.numel() for p in model.parameters())
    return oracle.error(model), reductions, wrapped.updates


LAYERS = 2
"""What is sharded together."""


def total_loss(m: nn.Module, rows: Rows) -> Tensor:
    return nn.functional.cross_entropy(m(rows[0]), rows[1], reduction="sum") * 0.1


def second(m: nn.Module, rows: Rows) -> Tensor:
    return m(rows[0] * 0.5).square().sum(1).mean()


def both_passes(m: nn.Module, rows: Rows) -> Tensor:
    return loss_of(m, rows) + second(m, rows)


def separate_passes(m: nn.Module, rows: Rows) -> list[Tensor]:
    return [loss_of(m, rows), second(m, rows)]


def unreached_penalty(m: nn.Module, rows: Rows) -> list[Tensor]:
    """A penalty on weights, which no output of the model leads to."""
    return [loss_of(m, rows), sum(p.square().sum() for p in m.parameters())]  # type: ignore[list-item]


def through_grad(m: nn.Module, rows: Rows) -> Tensor:
    """A look, by torch.autograd.grad, at what the input matters."""
    x = rows[0].clone().requires_grad_()
    torch.autograd.grad(m(x).sum(), x)
    return loss_of(m, rows)


def gradient_penalty(m: nn.Module, rows: Rows) -> Tensor:
    x = rows[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return loss_of(m, rows) + gradient.square().sum(1).mean()


def by_name(m: nn.Module, rows: Rows) -> Any:
    """Two losses with denominators of their own: one over rows, one over those whose first entry is positive."""
    outputs, kept = m(rows[0]), rows[0][:, 0] > 0
    second = outputs[kept].square().mean() if kept.any() else outputs.sum() * 0.0
    return {"rows": (nn.functional.cross_entropy(outputs, rows[1]), len(rows[0])), "kept": (second, int(kept.sum()))}


class Checkpointed(nn.Module):
    """A layer, or all of them, run again in the backward pass."""

    reentrant, all_of_it = True, False

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        if self.all_of_it:
            return checkpoint(self.layers, x.requires_grad_(), use_reentrant=self.reentrant)
        hidden = torch.tanh(self.layers[0](x))  # type: ignore[index]
        return checkpoint(self.layers[2], hidden, use_reentrant=self.reentrant)  # type: ignore[index]


class AllCheckpointed(Checkpointed):
    all_of_it = True


class CheckpointedWithoutReentry(Checkpointed):
    reentrant = False


def train_two(rank: int, sizes: Sequence[Sequence[int]], steps: int) -> tuple[list[float], list[int]]:
    """Two models in one loop, whose windows close in turns. Returns (errors, updates)."""
    models = [network(), network()]
    oracles, ranks = [Oracle(model) for model in models], data(sizes)
    replicas, optimizers = zip(*(wrap(model, steps) for model in models), strict=True)
    for _ in range(2):
        for rows in optimizers[1].batches(optimizers[0].batches(ranks[rank])):
            for replica, optimizer in zip(replicas, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(replica, rows).backward()
                optimizer.step()
        for oracle in oracles:
            oracle.see(ranks, steps)
    errors = [oracle.error(model) for oracle, model in zip(oracles, models, strict=True)]
    return errors, [optimizer.updates for optimizer in optimizers]


def half_reduction(rank: int, engine: str, weight: float, way: str) -> float:
    """Gradients are reduced in float16; micro-batches weigh as many tokens as large batches have, or next to none."""
    model = network(torch.float32)
    oracle = Oracle(model)
    wrapped: nn.Module
    if engine == "ddp":
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)  # type: ignore[operator]
    else:
        wrapped = shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    inner = OPTIMIZERS["sgd"](wrapped.parameters())
    ranks = data([[4, 3, 2, 5, 4, 4], [2, 5, 1, 2, 2, 3]], dtype=torch.float32)
    if way in ("TrainStep", "TrainStep of sums"):
        adds = "sum" if "sums" in way else "mean"
        step = TrainStep(
            wrapped,
            inner,
            compute_loss=lambda m, x, y: (
                nn.functional.cross_entropy(m(x), y, reduction=adds) * factor,
                weight * len(x),
            ),
            micro_batch_size=2,
            reduction=adds,
        )
        factor = weight if adds == "sum" else 1.0
        oracle.see(ranks, 1)
        for rows in ranks[rank]:
            step(*rows)
        return oracle.error(wrapped)
    optimizer = Optimizer(inner, steps=2, model=wrapped, sync="micro_batch" if "micro_batch" in way else "window")
    oracle.see(ranks, 2)
    for rows in optimizer.batches(ranks[rank]) if "batches" in way else ranks[rank]:
        optimizer.zero_grad()
        optimizer.backward(loss_of(wrapped, rows), weight=weight * len(rows[0]))
        optimizer.step()
    assert optimizer.updates == 3
    return oracle.error(wrapped)


def resumed(rank: int, engine: str, how: dict[str, Any], sync: str = "window") -> float:
    """Each rank saves in the middle of a window, trains on; and a new model and optimizer go on from there."""
    ranks = data([[4, 3, 5, 1, 2], [2, 5, 1, 4, *[2] * (engine != "ddp")]])
    model = network()
    oracle = Oracle(model)
    oracle.see(ranks, 3)
    used, optimizer = wrap_over(engine, model, 3, how, sync=sync)
    first, later = ranks[rank][:2], ranks[rank][2:]
    train_on(used, optimizer, first, weighed=True)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy([p.detach() for p in whole(model)])
    if engine != "ddp":
        train_on(used, optimizer, later, weighed=True)
        optimizer.flush()
        assert oracle.error(used) <= FLOAT64
    again = network()
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), weights, strict=True):
            parameter.copy_(value)
    used, optimizer = wrap_over(engine, again, 3, how, sync=sync)
    optimizer.load_state_dict(state)
    train_on(used, optimizer, optimizer.batches(iter(later)))
    return oracle.error(used)


def scaler(
    rank: int, engine: str, overflow_at: tuple[int, int] | None, interval: int, sync: str = "window"
) -> tuple[float, list[float], int]:
    """GradScaler, whose update() comes with every micro-batch; one rank's loss overflows."""
    model = network()
    oracle = Oracle(model)
    used, optimizer = wrap_over(engine, model, 3, sync=sync)
    scales = scaled(rank, used, optimizer, oracle, overflow_at, interval)
    return oracle.error(model), scales, optimizer.updates


TWO_DTYPES = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)


class Heads(nn.Module):
    """A trunk, and a head that the batch chooses; another one never has a turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 7).double()
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(3)).double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def counted(ranks: Any) -> list[int]:
    """How many messages this rank has sent, as the last number of a list that counts on."""
    channel, messages = ranks.channel, [0]
    send = channel.send

    def counting(*numbers: float) -> Any:
        messages[-1] += 1
        return send(*numbers)

    channel.send = counting
    return messages


def distributed_checkpoint(rank: int, folder: str, micro_batches: int) -> tuple[float, list[str]]:
    """torch.distributed.checkpoint keeps nothing of an open window. Returns the error of what goes on, and warnings."""
    ranks = data([[4, 3, 5, 1, 2], [2, 5, 1, 4, 2]])
    model, again = network(), network()
    oracle = Oracle(model, "adam")
    ends = micro_batches - micro_batches % 2
    oracle.see([[*own[:ends], *own[micro_batches:]] for own in ranks], 2)
    replica, other = DistributedDataParallel(model), DistributedDataParallel(again)
    optimizer, new = (Optimizer(OPTIMIZERS["adam"](m.parameters()), steps=2, model=m) for m in (replica, other))
    train_on(replica, optimizer, ranks[rank][:micro_batches], weighed=True)
    states = get_state_dict(replica, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=folder)
    states = get_state_dict(other, new)
    dcp.load(dict(zip(("model", "optimizer"), states)), checkpoint_id=folder)

    def load() -> None:
        set_state_dict(other, new, model_state_dict=states[0], optim_state_dict=states[1])

    warnings = lines_of(load)
    train_on(other, new, ranks[rank][micro_batches:], weighed=True)
    new.flush()
    return oracle.error(again), warnings


class Parts(nn.Module):
    """Two networks in one, of which a forward pass runs one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = network(), network()

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.a(x) + self.b(x) if which == "ab" else getattr(self, which)(x)


def optimizers_of_parts(rank: int, steps: Sequence[int], which: Sequence[str], unused: bool) -> float:
    """Two optimizers on parts of one DDP module, whose windows close in turns, as a GAN's."""
    model = Parts()
    plain, replica = copy.deepcopy(model), DistributedDataParallel(model, find_unused_parameters=unused)
    parts, others = [replica.module.a, replica.module.b], [plain.a, plain.b]
    optimizers = [Optimizer(OPTIMIZERS["sgd"](m.parameters()), n, model=replica) for m, n in zip(parts, steps)]
    expected, weights = [OPTIMIZERS["sgd"](m.parameters()) for m in others], [0, 0]
    ranks = data([[4, 3, 2, 5, 4, 4], [2, 5, 1, 2, 2, 3]])
    for i, own in enumerate(ranks[rank]):
        for k, (optimizer, name) in enumerate(zip(optimizers, which)):
            optimizer.zero_grad()
            parts[1 - k].requires_grad_(False)
            weight = len(own[0])
            optimizer.backward(nn.functional.cross_entropy(replica(own[0], name), own[1]), weight=weight)
            optimizer.step()
            parts[1 - k].requires_grad_(True)
            x, y = concatenated([both[i] for both in ranks])  # with the other part as it is now
            loss = nn.functional.cross_entropy(plain(x, name), y, reduction="sum")
            loss.backward(inputs=[*others[k].parameters()])
            weights[k] += len(x)
            if optimizer.updated:
                for parameter in others[k].parameters():
                    parameter.grad /= weights[k]
                expected[k].step()
                expected[k].zero_grad()
                weights[k] = 0
    return max(relative_error(list(m.parameters()), list(o.parameters())) for m, o in zip(parts, others))


class InForward(nn.Module):
    """Runs the loop's body in its forward pass, as a DistributedDataParallel's that Lightning calls does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, body: Any) -> None:
        body(self.model)


def loop_in_forward(rank: int, steps: int, part: bool) -> float:
    """Lightning's manual optimization: forward, backward and step() within the forward pass of the DDP module."""
    model = InForward()
    oracle = Oracle(model.model)
    replica = DistributedDataParallel(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps, model=model.model if part else replica)
    ranks = data([[4, 3, 2, 5, 4, 4], [2, 5, 1, 2, 2, 3]])
    oracle.see(ranks, steps)

    def body(rows: Rows) -> Any:
        def run(m: nn.Module) -> None:
            optimizer.zero_grad()
            loss = loss_of(m, rows)
            if replica.require_backward_grad_sync:  # what Lightning does before each backward pass
                replica.reducer._rebuild_buckets()  # type: ignore[attr-defined]
                replica.reducer.prepare_for_backward([])  # type: ignore[attr-defined]
            optimizer.backward(loss, weight=len(rows[0]))
            optimizer.step()
            replica.require_backward_grad_sync = False

        return run

    for rows in ranks[rank]:
        replica(body(rows))
        replica.require_backward_grad_sync = True
    assert optimizer.updates == 6 // steps
    return oracle.error(model.model)


WAYS = ["plain", "batches", "backward", "batches backward", "TrainStep", "GradScaler"]


def collectives(rank: int, way: str) -> tuple[list[int], list[str]]:
    """Collectives of each window, messages and reductions, and the order of things in the last one."""
    model = network()
    replica = DistributedDataParallel(model)
    inner = OPTIMIZERS["sgd"](replica.parameters())
    ranks, scaler = data([[4] * 40, [3] * 40])[rank], torch.amp.GradScaler("cpu", init_scale=4.0)
    if way == "TrainStep":
        step: Any = TrainStep(replica, inner, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2, verify=False)
        ranks_of = step.ranks
    else:
        optimizer = Optimizer(inner, steps=2, model=replica)
        ranks_of = optimizer._windows.ranks
    channel, events = ranks_of.channel, list[str]()
    for name in ("send", "receive"):
        setattr(channel, name, _noted(events, name, getattr(channel, name)))
    model[-1].weight.register_hook(lambda _: events.append("first gradient"))
    replica.register_comm_hook(events, _noting)
    found, begun = [], channel.line.begun
    with Collectives() as reductions:
        for i, rows in enumerate(optimizer.batches(ranks) if "batches" in way else ranks):
            if way == "TrainStep":
                step(*rows)
            else:
                optimizer.zero_grad()
                loss = loss_of(replica, rows)
                if way == "GradScaler":
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.backward(loss, weight=len(rows[0])) if "backward" in way else loss.backward()
                    optimizer.step()
            if way == "TrainStep" or i % 2:
                found.append(channel.line.begun - begun + reductions.counts["all_reduce"])
                begun, reductions.counts["all_reduce"], last = channel.line.begun, 0, events.copy()
                events.clear()
    return found, last


def overlapping(rank: int) -> list[str]:
    """What happens in the last of some windows, of a model whose layers are reduced one by one."""
    model, events = network(), list[str]()
    replica = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=1, model=replica)
    model[0].weight.register_hook(lambda _: events.append("first layer"))  # type: ignore[index]
    replica.register_comm_hook(events, _noting)
    for rows in data([[4] * 5] * 2)[rank]:
        events.clear()
        train_on(replica, optimizer, [rows])
    return events


def _noted(events: list[str], name: str, function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        events.append(name)
        return function(*arguments)

    return call


def _noting(events: list[str], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    events.append("reduction")
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def penalty_later(rank: int, of: Sequence[int], together: bool) -> None:
    """The backward pass of a penalty, for the first time when the third window closes, on some ranks.

    `together`: both forward passes come before both backward passes.
    """
    replica, optimizer = wrap(network(), 2)
    for i, rows in enumerate(optimizer.batches(data([[4, 3] * 5, [2, 5] * 5])[rank])):
        optimizer.zero_grad()
        losses = [lambda rows=rows: loss_of(replica, rows)]
        if i == 5 and rank in of:
            losses.append(lambda rows=rows: replica(rows[0] * 0.5).square().sum(1).mean())
        for loss in [found() for found in losses] if together else losses:
            (loss if isinstance(loss, Tensor) else loss()).backward()
        optimizer.step()


def wide(rank: int) -> float:
    """bfloat16 parameters, summed and reduced in float32: as good as the gradients' own rounding."""
    model = network(torch.bfloat16)
    ranks = data([[4] * 6, [4] * 6], dtype=torch.bfloat16)
    reference = copy.deepcopy(model)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
    for own in ranks:
        for rows in own:
            gradients = torch.autograd.grad(loss_of(reference, rows), list(reference.parameters()))
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient.double() / 12
    replica = DistributedDataParallel(model)
    optimizer = Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), steps=6, model=replica, accumulate_dtype=torch.float32
    )
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.double() for p in model.parameters()))
    train_on(replica, optimizer, optimizer.batches(ranks[rank]))
    return relative_error(seen, [total.bfloat16() for total in sums])


def towers(rank: int) -> float:
    """Two DDP models, one optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 4), nn.Linear(4, 3)]).double()
    reference = copy.deepcopy(model)
    plain = OPTIMIZERS["sgd"](reference.parameters())
    replicas = nn.ModuleList([DistributedDataParallel(part) for part in model])
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=2, model=replicas)
    ranks = data([[4, 3, 2], [2, 5, 1, 2, 2]])

    def loss(parts: Any, rows: Rows) -> Tensor:
        return nn.functional.cross_entropy(parts[1](torch.tanh(parts[0](rows[0]))), rows[1])

    for window in windows(ranks, 2):
        plain.zero_grad()
        loss(reference, concatenated(window)).backward()
        plain.step()
    for rows in optimizer.batches(ranks[rank]):
        optimizer.zero_grad()
        loss(replicas, rows).backward()
        optimizer.step()
    return relative_error(list(model.parameters()), list(reference.parameters()))


def broken_off(rank: int) -> tuple[float, int]:
    """All ranks leave their loops at the same update, flushed or not, and start another epoch."""
    model = network()
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 2)
    ranks = data([[4, 3, 2, 5, 4], [2, 5, 1, 2, 2]])
    for _epoch, flush in enumerate((True, False)):
        kept = [own[: 3 if flush else 2] for own in ranks]
        oracle.see(kept, 2)
        for i, rows in enumerate(optimizer.batches(ranks[rank])):
            optimizer.zero_grad()
            loss_of(replica, rows).backward()
            optimizer.step()
            if i == 2:
                if flush:
                    optimizer.flush()
                break
    oracle.see(ranks, 2)
    train_on(replica, optimizer, optimizer.batches(ranks[rank]))
    return oracle.error(model), optimizer.updates


CLASSES = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64), ignore_index=1)


def first_half(x: Tensor, y: Tensor) -> Tensor:
    """What rows weigh: nothing, if they are of the first class."""
    return (y > 0).double()


def of_half(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(m(x), y, reduction="none") * first_half(x, y)
    return each.sum() / first_half(x, y).sum()


def summed_loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(m(x), y, reduction="sum") / 10


def terms(m: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Several losses, with a denominator each; of the third, ranks and micro-batches have nothing now and then."""
    outputs = m(x)
    found = {
        "ce": (nn.functional.cross_entropy(outputs, y, ignore_index=1), (y != 1).sum()),
        "rows": (outputs.square().mean(), len(x)),
        "rare": (outputs[y == 2].sum() / (y == 2).sum(), (y == 2).sum()),
    }
    return {name: term for name, term in found.items() if term[1] > 0}


def each_term(m: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {name: loss for name, (loss, _) in terms(m, x, y).items()}


def counts_of_terms(x: Tensor, y: Tensor) -> dict[str, Any]:
    return {"ce": (y != 1).sum(), "rows": len(x), "rare": (y == 2).sum()}


def of_rows(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(m(x), y)


def all_terms(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return sum(each_term(m, x, y).values())  # type: ignore[return-value]


STEPS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    # TrainStep's arguments, and the loss of the large batch.
    "rows": ({"loss_fn": nn.CrossEntropyLoss()}, of_rows),
    "classes": ({"loss_fn": CLASSES}, lambda m, x, y: CLASSES(m(x), y)),
    "told": ({"compute_loss": lambda m, x, y: (of_half(m, x, y), first_half(x, y).sum())}, of_half),
    "weight": ({"compute_loss": of_half, "weight": lambda x, y: first_half(x, y).sum()}, of_half),
    "sum": ({"compute_loss": summed_loss, "reduction": "sum"}, summed_loss),
    "scaler": ({"loss_fn": nn.CrossEntropyLoss()}, of_rows),
    "terms": ({"compute_loss": terms}, all_terms),
    "terms, counted": ({"compute_loss": each_term, "weight": counts_of_terms}, all_terms),
}


def train_step(
    rank: int, engine: str, sizes: Any, micro: Any, kind: str, optimizer: str = "sgd", sync: str = "window"
) -> tuple[float, float, int, int]:
    """TrainStep on batches of different rows.

    Returns:
        The error, the largest error of the losses, all reductions, and the last update's other collectives.
    """
    model = network()
    oracle = Oracle(model, optimizer)
    used = spread(engine, model, {})
    count = Count(used) if engine == "ddp" else None
    keywords, plain = STEPS[kind]
    if kind == "scaler":
        keywords = {**keywords, "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)}
    inner = OPTIMIZERS[optimizer](model.parameters())
    step = TrainStep(used, inner, micro_batch_size=micro[rank], sync=sync, **keywords)  # type: ignore[arg-type]  # window
    ranks, worst, messages, reductions = data(sizes), 0.0, counted(step.ranks), [0]
    for i in range(len(sizes[0])):
        own = [rows[i] for rows in ranks]
        if "terms" in kind:
            own[1] = own[1][0], torch.where(own[1][1] == 2, 0, own[1][1])  # which never has the rare one
        rows = concatenated(own)
        expected = {"": plain(oracle.model, *rows).item()}
        if "terms" in kind:
            expected |= {name: loss.item() for name, loss in each_term(oracle.model, *rows).items()}
        oracle.update(rows, lambda m, rows: plain(m, *rows))
        messages.append(0)
        with Collectives() as others:
            loss = step(*own[rank])
        found = {"": loss.item(), **{name: loss.item() for name, loss in step.losses.items() if not loss.isnan()}}
        assert found.keys() == expected.keys()
        worst = max(worst, *(abs(found[name] - mean) / abs(mean) for name, mean in expected.items()))
        reductions.append(0 if count is None else count.take())
    collectives = messages[-1] + others.counts["all_reduce"] - reductions[-1]
    return oracle.error(model), worst, sum(reductions), collectives


def out_of_memory(rank: int, backward: bool) -> float:
    """Rank 1 alone runs out of memory."""
    model = network()
    oracle = Oracle(model)
    model.insert(1, NoMemory(2 if rank == 1 else 999, backward))  # type: ignore[operator]
    step = TrainStep(
        DistributedDataParallel(model),
        OPTIMIZERS["sgd"](model.parameters()),
        loss_fn=nn.CrossEntropyLoss(),
        micro_batch_size=4,
        verify=False,
    )
    ranks = data([[8, 6], [7, 9]])
    oracle.see(ranks, 1)
    for rows in ranks[rank]:
        step(*rows)
    return oracle.error(model)


def unused_in_train_step(rank: int, engine: str) -> float:
    """A head without a turn, and one that rank 1 alone uses: none of DDP's flags says so."""
    model = Heads()
    oracle = copy.deepcopy(model)
    plain = OPTIMIZERS["adamw"](oracle.parameters())
    used: Any = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
    ranks = data([[4, 6, 5], [3, 5, 2]])

    def loss(m: Any, x: Tensor, y: Tensor, head: int = 0) -> Tensor:
        return nn.functional.cross_entropy(m(x, head), y)

    step = TrainStep(
        used,
        OPTIMIZERS["adamw"](model.parameters()),
        compute_loss=lambda m, x, y: loss(m, x, y, rank),
        micro_batch_size=2,
        verify=False,
    )
    for batches in zip(*ranks):
        total = sum(len(x) for x, _ in batches)
        plain.zero_grad()
        sum(loss(oracle, *rows, r) * (len(rows[0]) / total) for r, rows in enumerate(batches)).backward()  # type: ignore[union-attr]
        plain.step()
        step(*batches[rank])
    return relative_error(whole(model), list(oracle.parameters()))


class Drifts(nn.Module):
    """Moves a buffer in each pass that its outputs depend on, and one that belongs to the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.zeros((), dtype=torch.float64))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.phase += 0.3
        self.rows += len(x)
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.ones((), dtype=torch.float64))
        return x * (self.phase + self.made).cos()


def drifting() -> tuple[nn.Module, Oracle]:
    model = network()
    model.insert(1, Drifts())
    return model, Oracle(model)


def buffers_without_rows(rank: int, sizes: Any, way: str) -> tuple[float, float]:
    """TrainStep, where ranks have no rows in some updates. Returns the errors of parameters and buffers."""
    model, oracle = drifting()
    model = shard(model) if way == "sharded" else model
    used = model if way == "sharded" else DistributedDataParallel(model, broadcast_buffers=way == "broadcast")
    optimizer = OPTIMIZERS["sgd"](used.parameters())
    loss_fn = nn.CrossEntropyLoss()
    step = TrainStep(used, optimizer, loss_fn=loss_fn, micro_batch_size=3, verify=False)
    ranks = data(sizes)
    oracle.see(ranks, 1)
    for rows in ranks[rank]:
        step(*rows)
    found, expected = ([one[1].phase, one[1].made] for one in (model, oracle.model))
    return oracle.error(model), relative_error(found, expected)


def buffers_after_an_epochs_end(rank: int, sizes: Any) -> list[float]:
    """A wrapped optimizer, whose ranks have different numbers of micro-batches. Returns the numbers of passes."""
    model, _ = drifting()
    replica = DistributedDataParallel(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=2, model=replica)
    passes = []
    for epoch in range(2):
        train_on(replica, optimizer, optimizer.batches(data(sizes, epoch)[rank]))
        passes.append(round(model[1].phase.item() / 0.3))
    return passes


def one_after_the_other(rank: int) -> tuple[float, int]:
    """Train with a new optimizer again and again. Returns (error, process groups that were made for the last three)."""
    groups, error = 0, 0.0
    for i in range(4):
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            error = max(error, train(rank, [[4, 2], [3, 3]], 2, epochs=1)[0])
        groups += new_group.call_count if i else 0
        gc.collect()
        dist.barrier()
    return error, groups


def unheard(rank: int) -> tuple[bool, int]:
    """Rank 1's last message is heard by nobody. Returns (later messages arrive, process groups for three channels)."""
    gc.collect()
    arrives, used = True, set()
    for i in range(3):
        channel = Channel([0, 1])
        used.add(channel.line.name if channel.line is not None else "")
        arrives &= [numbers[:2] for numbers in channel.exchange(i, rank)] == [[i, 0], [i, 1]]
        if rank == 1:
            channel.post(7)
        del channel
        dist.barrier()
    return arrives, len(used)


def hooks_left(rank: int, engine: str) -> tuple[int, bool]:
    """Wrap a model again and again. Returns (hooks more than before, whether a plain loop reduces again)."""
    model = network()
    used: Any = DistributedDataParallel(model) if engine == "ddp" else shard(model)
    before = hooks_of(used)
    for _ in range(3):
        optimizer = Optimizer(OPTIMIZERS["sgd"](used.parameters()), steps=2, model=used)
        train_on(used, optimizer, data([[4] * 2] * 2)[rank])
    del optimizer
    gc.collect()
    loss_of(used, data([[4]] * 2)[rank][0]).backward()
    gradient = whole_gradient(model)
    others = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(others, gradient)
    return hooks_of(used) - before, torch.equal(*others)


def hooks_of(model: nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def whole_gradient(model: nn.Module) -> Tensor:
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).reshape(-1) for g in gradients])


class Frozen(nn.Module):
    """Its middle layer is frozen and unfrozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def frozen_and_unfrozen(rank: int, trained: str, way: str, unused: bool) -> tuple[float, str]:
    """`trained` says whether the middle layer is, when DDP wraps, the optimizer is built, and in two epochs."""
    torch.manual_seed(0)
    when_wrapped, when_built, *epochs = [letter == "y" for letter in trained]
    model = Frozen().double()
    plain = copy.deepcopy(model)
    model.middle.requires_grad_(when_wrapped)
    replica = DistributedDataParallel(model, find_unused_parameters=unused)
    model.middle.requires_grad_(when_built)
    inner, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    loss_of_rows, named = nn.CrossEntropyLoss(), way == "names"
    if way == "TrainStep":
        step = TrainStep(replica, inner, loss_fn=loss_of_rows, micro_batch_size=2, verify=False)
    else:
        optimizer = Optimizer(inner, steps=2, model=replica)
    for trains in epochs:
        model.middle.requires_grad_(trains)
        plain.middle.requires_grad_(trains)
        x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))
        own_x, own_y = x.chunk(2)[rank], y.chunk(2)[rank]
        before = [p.detach().clone() for p in model.parameters()]
        try:
            if way == "TrainStep":
                step(own_x, own_y)
            else:
                for i, part in enumerate(own_x.chunk(2)):
                    loss = loss_of_rows(replica(part), own_y.chunk(2)[i])
                    optimizer.zero_grad()
                    if named:
                        optimizer.backward({"rows": (loss, len(part))})
                    else:
                        optimizer.backward(loss, weight=len(part))
                    optimizer.step()
        except WindowError as error:
            return relative_error(list(model.parameters()), before), str(error)
        expected.zero_grad()
        loss_of_rows(plain(x), y).backward()
        expected.step()
    return relative_error(list(model.parameters()), list(plain.parameters())), ""


def names_after_a_checkpoint(rank: int, micro_batches: int) -> float:
    """Losses by name go on after a checkpoint that holds no open window, or one."""

    def build(module: nn.Module) -> tuple[nn.Module, Optimizer]:
        replica = DistributedDataParallel(module)
        return replica, Optimizer(OPTIMIZERS["adamw"](module.parameters()), 2, model=replica)

    model = network()
    plain = copy.deepcopy(model)
    expected, (replica, optimizer) = OPTIMIZERS["adamw"](plain.parameters()), build(model)
    ranks = data([[4, 3, 2, 5, 4, 4], [2, 5, 1, 2, 2, 3]])
    for i, (x, y) in enumerate(ranks[rank]):
        if i == micro_batches:
            state, model = optimizer.state_dict(), copy.deepcopy(model)
            replica, optimizer = build(model)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        optimizer.backward({"rows": (nn.functional.cross_entropy(replica(x), y), len(x))})
        optimizer.step()
        if i % 2:
            x, y = concatenated([batch for own in ranks for batch in own[i - 1 : i + 1]])
            expected.zero_grad()
            nn.functional.cross_entropy(plain(x), y).backward()
            expected.step()
    return relative_error(list(model.parameters()), list(plain.parameters()))
