"""What each rank does in the tests of windows over several ranks. Every case compares itself with one ordinary process.

The oracle on each rank is a plain model that sees all ranks' rows of a window at once.
"""

import copy  # no postponed annotations here: DDP reads those of its hooks
import gc
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

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
    train_on,
    whole,
    windows,
    wrap,
    wrap_over,
)
from tests.torch.distributed.together_cases import NoMemory


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


def train(
    rank: int,
    sizes: Sequence[Sequence[int]],
    steps: int,
    way: str = "batches",
    optimizer: str = "sgd",
    epochs: int = 2,
    ddp: dict[str, Any] | None = None,
    clip: float | None = None,
    hook_first: bool = True,
    **keywords: Any,
) -> tuple[float, float, int]:
    """Train on ragged rows. Returns (error, reductions, updates); with several buckets, reductions of an element."""
    model = network()
    oracle = Oracle(model, optimizer, clip)
    replica = DistributedDataParallel(model, **(ddp or {}))
    count = Count(replica) if hook_first else None
    reductions = Collectives().__enter__()
    wrapped = Optimizer(
        OPTIMIZERS[optimizer](replica.parameters()), steps=steps, model=replica, clip_grad_norm=clip, **keywords
    )
    count = count or Count(replica)
    error = 0.0
    for epoch in range(epochs):
        ranks = data(sizes, epoch)
        oracle.see(ranks, steps)
        loader = wrapped.batches(ranks[rank]) if way.startswith("batches") else ranks[rank]
        for rows in loader:
            wrapped.zero_grad()
            loss = loss_of(replica, rows)
            if way == "batches":
                loss.backward()
            elif way == "batches, backward":
                wrapped.backward(loss)
            else:
                wrapped.backward(loss, weight=len(rows[0]))
            wrapped.step()
        if way == "plain":
            wrapped.flush()
        error = max(error, oracle.error(model))
    reductions.__exit__()
    if ddp and "find_unused_parameters" in ddp:  # without DDP's hook
        return error, reductions.counts["all_reduce"], wrapped.updates
    if ddp and "bucket_cap_mb" in ddp:
        return error, count.elements / sum(p.numel() for p in model.parameters()), wrapped.updates
    return error, count.buckets, wrapped.updates


def static_graph(rank: int) -> list[str]:
    return lines_of(lambda: wrap(network(), 2, {"static_graph": True}))


def sparse_table(rank: int) -> None:
    wrap(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 3)), 2)


def communication_hook(rank: int, name: str) -> float:
    """A hook of torch's own; the last window is reduced by hand, since `flush` closes it."""
    model = network()
    oracle = Oracle(model)
    replica = DistributedDataParallel(model)
    if name == "powerSGD_hook":
        state: Any = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        replica.register_comm_hook(None, getattr(default_hooks, name))
    optimizer = Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=2, model=replica)
    ranks = data([[4, 3, 2, 5, 4], [2, 5, 1, 2, 2]])
    oracle.see(ranks, 2)
    train_on(replica, optimizer, ranks[rank], weighed=True)
    optimizer.flush()
    assert optimizer.updates == 3
    return oracle.error(model)


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


def weight_0(rank: int, engine: str, way: str) -> float:
    """Weights that only the batch tells; some micro-batches weigh nothing on one rank, with a loss that is NaN.

    On DDP one window weighs nothing at all.
    """
    weights = [[3, 0, 5, 2, 0, 0, 4, 0], [0, 7, 1, 0, 2 * (engine != "ddp"), 0, 0, 0]]
    model = network()
    oracle = Oracle(model)
    used, optimizer = wrap_over(engine, model, 2)
    ranks = data([[4] * 8, [4] * 8])
    totals = []
    for first in range(0, 8, 2):
        chosen = [(ranks[r][i], weights[r][i]) for r in range(2) for i in (first, first + 1)]
        totals.append(sum(weight for _, weight in chosen))
        if totals[-1]:
            oracle.update(None, lambda m, _, c=chosen, t=totals[-1]: sum(loss_of(m, rows) * w for rows, w in c) / t)  # type: ignore[misc]
    loader: Any = list(zip(ranks[rank], weights[rank]))
    for i, (rows, weight) in enumerate(
        optimizer.batches(loader, weight=lambda b: b[1]) if way == "batches" else loader
    ):
        optimizer.zero_grad()
        loss = loss_of(used, rows) * (1.0 if weight else float("nan"))
        if way == "batches":
            loss.backward()
        else:
            optimizer.backward(loss, weight=weight)
        optimizer.step()
        assert optimizer.updated == (i % 2 == 1 and totals[i // 2] > 0)
    return oracle.error(used)


def nonfinite(rank: int, engine: str, mode: str) -> tuple[float, int]:
    """One rank has a micro-batch that is not finite, in the middle and at the end of a window."""
    model = network()
    oracle = Oracle(model)
    used, optimizer = wrap_over(engine, model, 3, nonfinite=mode)
    ranks = data([[4, 3, 2] * 3, [2, 2, 5] * 3])
    bad = {(1, 1), (0, 5)}
    for w in range(3):
        places = [(r, i) for r in range(2) for i in range(3 * w, 3 * w + 3)]
        if mode == "skip_micro_batch":
            oracle.update(concatenated([ranks[r][i] for r, i in places if (r, i) not in bad]))
        elif not bad & {*places}:
            oracle.update(concatenated([ranks[r][i] for r, i in places]))
    for i, rows in enumerate(optimizer.batches(ranks[rank])):
        optimizer.zero_grad()
        (loss_of(used, rows) * (float("inf") if (rank, i) in bad else 1.0)).backward()
        optimizer.step()
    return oracle.error(used), optimizer.updates


def resumed(rank: int, engine: str, how: dict[str, Any], **keywords: Any) -> float:
    """Each rank saves in the middle of a window, trains on; and a new model and optimizer go on from there."""
    ranks = data([[4, 3, 5, 1, 2], [2, 5, 1, 4, *[2] * (engine != "ddp")]])
    model = network()
    oracle = Oracle(model)
    oracle.see(ranks, 3)
    used, optimizer = wrap_over(engine, model, 3, how, **keywords)
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
    used, optimizer = wrap_over(engine, again, 3, how, **keywords)
    optimizer.load_state_dict(state)
    train_on(used, optimizer, optimizer.batches(iter(later)))
    return oracle.error(used)


def empty_batch(rank: int) -> float:
    """The last batch of a rank has no rows: its mean is NaN, and it weighs nothing."""
    sizes = [[4, 3, 2, 0], [2, 2, 5, 4]]
    model = network()
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 2)
    ranks = data(sizes)
    oracle.see(ranks, 2)
    train_on(replica, optimizer, optimizer.batches(ranks[rank]))
    return oracle.error(model)


def continued(rank: int) -> float:
    """Some batches are skipped by `continue`: no forward, no backward, no step; a rank's last one, too."""
    skipped = [[1, 5], [0, 3, 4]]
    model = network()
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 2)
    ranks = data([[4, 3, 2, 5, 1, 6], [2, 2, 5, 4, 3, 2]])
    kept = [[rows for i, rows in enumerate(own) if i not in skipped[r]] for r, own in enumerate(ranks)]
    oracle.see(kept, 2)
    for i, rows in enumerate(optimizer.batches(ranks[rank])):
        if i in skipped[rank]:
            continue
        optimizer.zero_grad()
        loss_of(replica, rows).backward()
        optimizer.step()
    return oracle.error(model)


def scaler(rank: int, overflow_at: tuple[int, int] | None, interval: int) -> tuple[float, list[float], int]:
    """GradScaler, whose update() comes with every micro-batch; one rank overflows."""
    model = network()
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 3)
    scales = scaled(rank, replica, optimizer, oracle, overflow_at, interval)
    return oracle.error(model), scales, optimizer.updates


class Branches(nn.Module):
    """A layer that only some micro-batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(5, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


def unused(rank: int, static: bool = False) -> tuple[float, bool]:
    """A layer is used on one rank, in a micro-batch that is not the last; another one never."""
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    plain = OPTIMIZERS["sgd"](reference.parameters())
    keywords = {"static_graph": True} if static else {"find_unused_parameters": True}
    replica, optimizer = wrap(model, 2, keywords)
    ranks = data([[4, 3] * 3, [2, 5] * 3])
    both = {(0, 0), (1, 2)} if not static else {(r, i) for r in range(2) for i in range(6)}
    for w in range(3):
        plain.zero_grad()
        places = [(r, i) for r in range(2) for i in (2 * w, 2 * w + 1)]
        total = sum(len(ranks[r][i][0]) for r, i in places)
        for r, i in places:
            x, y = ranks[r][i]
            (nn.functional.cross_entropy(reference(x, (r, i) in both), y) * len(x) / total).backward()
        plain.step()
        for i in (2 * w, 2 * w + 1):
            optimizer.zero_grad()
            x, y = ranks[rank][i]
            optimizer.backward(nn.functional.cross_entropy(replica(x, (rank, i) in both), y), weight=len(x))
            optimizer.step()
    error = relative_error(list(model.parameters()), list(reference.parameters()))
    return error, model.never.weight.grad is None


def several_passes(rank: int, separately: bool) -> tuple[float, list[int]]:
    """Two forward passes per micro-batch, with one backward pass for both or one for each."""
    model = network()
    oracle = Oracle(model)
    replica = DistributedDataParallel(model)
    count = Count(replica)
    optimizer = Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=2, model=replica)
    ranks = data([[4, 3] * 3, [2, 5] * 3])

    def second(m: nn.Module, rows: Rows) -> Tensor:
        return m(rows[0] * 0.5).square().sum(1).mean()

    counts = []
    for i, rows in enumerate(optimizer.batches(ranks[rank])):
        optimizer.zero_grad()
        if separately:
            loss_of(replica, rows).backward()
            second(replica, rows).backward()
        else:
            (loss_of(replica, rows) + second(replica, rows)).backward()
        optimizer.step()
        if optimizer.updated:
            counts.append(count.take())
            window = concatenated([ranks[r][j] for r in range(2) for j in (i - 1, i)])
            oracle.update(window, lambda m, w: loss_of(m, w) + second(m, w))
    return oracle.error(model), counts


def unreached_penalty(rank: int) -> float:
    """A second backward pass that does not go through the model's outputs: a penalty on its weights."""
    model = network()
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 2)
    ranks = data([[4, 3] * 3, [2, 5] * 3])
    for i, rows in enumerate(optimizer.batches(ranks[rank])):
        optimizer.zero_grad()
        loss_of(replica, rows).backward()
        sum(p.square().sum() for p in replica.parameters()).backward()
        optimizer.step()
        if optimizer.updated:
            window = concatenated([ranks[r][j] for r in range(2) for j in (i - 1, i)])
            oracle.update(window, lambda m, w: loss_of(m, w) + sum(p.square().sum() for p in m.parameters()))
    return oracle.error(model)


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


def optimizers_of_parts(rank: int, steps: Sequence[int], which: Sequence[str], unused: bool) -> list[float]:
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
    return [relative_error(list(m.parameters()), list(o.parameters())) for m, o in zip(parts, others)]


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


def batch_norm(rank: int) -> bool:
    """Buffers are broadcast once per window, whoever still has micro-batches."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    replica = DistributedDataParallel(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=2, model=replica)
    for epoch in range(2):
        train_on(replica, optimizer, optimizer.batches(data([[4] * 7, [4] * 2], epoch)[rank]))
    tensors = [tensor.double() for tensor in model.state_dict().values()]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    others = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(others, flat)
    return bool(torch.equal(*others))


def compiled(rank: int, outside: bool) -> tuple[float, int]:
    model = network()
    oracle = Oracle(model)
    inner = model if outside else torch.compile(model, backend="eager")
    replica = DistributedDataParallel(inner)
    count = Count(replica)
    used = torch.compile(replica, backend="eager") if outside else replica
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=2, model=used)
    ranks = data([[4, 4, 4, 4], [4, 4, 4, 4]])
    oracle.see(ranks, 2)
    train_on(used, optimizer, optimizer.batches(ranks[rank]))
    return oracle.error(model), count.take()


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


def summed(rank: int, weighed: bool) -> float:
    """Losses that are sums over their rows; divided by the tokens of all ranks, or by nothing."""
    model = network()
    oracle = Oracle(model)
    replica, optimizer = wrap(model, 2, reduction="sum")
    ranks = data([[4, 3, 5], [2, 5, 1, 4, 2]])

    def total(m: nn.Module, rows: Rows) -> Tensor:
        return nn.functional.cross_entropy(m(rows[0]), rows[1], reduction="sum") * 0.1

    for window in windows(ranks, 2):
        rows = concatenated(window)
        oracle.update(rows, lambda m, w: total(m, w) / (2 * len(w[0]) if weighed else 1))
    for rows in optimizer.batches(ranks[rank]):
        optimizer.zero_grad()
        optimizer.backward(total(replica, rows), weight=2 * len(rows[0]) if weighed else None)
        optimizer.step()
    return oracle.error(model)


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


def train_step(
    rank: int, sizes: Any, micro: Any, kind: str = "rows", optimizer: str = "sgd"
) -> tuple[float, float, int, int]:
    """TrainStep on batches of different rows.

    Returns:
        The error, the largest error of the losses, all reductions, and the last update's other collectives.
    """
    model = network()
    oracle = Oracle(model, optimizer)
    replica = DistributedDataParallel(model)
    count = Count(replica)
    weights = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)
    losses: dict[str, Any] = {
        "rows": {"loss_fn": nn.CrossEntropyLoss()},
        "classes": {"loss_fn": nn.CrossEntropyLoss(weight=weights, ignore_index=1)},
        "told": {"compute_loss": lambda m, x, y: (nn.functional.cross_entropy(m(x), y), float(len(x)))},
        "sum": {"compute_loss": lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="sum") / 10},
        "scaler": {"loss_fn": nn.CrossEntropyLoss(), "scaler": torch.amp.GradScaler("cpu", growth_interval=1)},
    }
    keywords = losses[kind]
    if kind == "sum":
        keywords["reduction"] = "sum"
    step = TrainStep(replica, OPTIMIZERS[optimizer](model.parameters()), micro_batch_size=micro[rank], **keywords)

    def plain(m: nn.Module, rows: Rows) -> Tensor:
        if kind == "sum":
            return nn.functional.cross_entropy(m(rows[0]), rows[1], reduction="sum") / 10
        return losses["classes" if kind == "classes" else "rows"]["loss_fn"](m(rows[0]), rows[1])

    ranks, worst, messages, reductions = data(sizes), 0.0, counted(step.ranks), [0]
    for i in range(len(sizes[0])):
        window = concatenated([own[i] for own in ranks])
        expected = plain(oracle.model, window).item()
        oracle.update(window, plain)
        messages.append(0)
        with Collectives() as others:
            loss = step(*ranks[rank][i])
        worst = max(worst, abs(loss.item() - expected) / abs(expected))
        reductions.append(count.take())
    collectives = messages[-1] + others.counts["all_reduce"] - reductions[-1]
    return oracle.error(model), worst, sum(reductions), collectives


def several_losses(rank: int, sizes: Any, micro: Any, told: bool) -> tuple[float, float]:
    """TrainStep with losses of a denominator each. Returns (error, largest error of the losses)."""
    model = network()
    oracle = Oracle(model, "adam")

    def terms(m: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
        outputs = m(x)
        found = {
            "ce": (nn.functional.cross_entropy(outputs, y, ignore_index=1), (y != 1).sum()),
            "rows": (outputs.square().mean(), len(x)),
            "rare": (outputs[y == 2].sum() / (y == 2).sum(), (y == 2).sum()),
        }
        return {name: term for name, term in found.items() if term[1] > 0}

    def counts(x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"ce": (y != 1).sum(), "rows": len(x), "rare": (y == 2).sum()}

    def alone(m: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {name: loss for name, (loss, _) in terms(m, x, y).items()}

    def plain(m: nn.Module, rows: Rows) -> Tensor:
        return sum(alone(m, *rows).values())  # type: ignore[return-value]

    keywords: dict[str, Any] = {"compute_loss": alone, "weight": counts} if told else {"compute_loss": terms}
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = TrainStep(DistributedDataParallel(model), optimizer, micro_batch_size=micro[rank], **keywords)
    ranks, worst = data(sizes), 0.0
    for i in range(len(sizes[0])):
        window = [own[i] for own in ranks]
        window[1] = window[1][0], torch.where(window[1][1] == 2, 0, window[1][1])  # which never has the rare one
        rows = concatenated(window)
        expected = {name: loss.item() for name, loss in alone(oracle.model, *rows).items()}
        oracle.update(rows, plain)
        total = step(*window[rank]).item()
        found = {name: loss.item() for name, loss in step.losses.items() if not loss.isnan()}
        assert found.keys() == expected.keys()
        worst = max(worst, *(abs(found[name] - mean) / abs(mean) for name, mean in expected.items()))
        worst = max(worst, abs(total - sum(expected.values())) / abs(sum(expected.values())))
    return oracle.error(model), worst


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
