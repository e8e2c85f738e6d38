"""Scenarios: training runs as data, and the smaller ones that a failing one is shrunk to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tests.fuzzing import Program, unusual, usual, with_other, without


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows that arrive together: a micro-batch of a wrapped optimizer, a batch of TrainStep or of a chunked module.

    Its event is what happens with it. save: state is saved after it, and a new run resumes. skip: no pass. flush. inf:
    its loss is infinite, or NaN. forward error, backward error, step error (in the inner optimizer), loader error
    (before it is there): raised once. oom, backward oom: no memory for many of its rows. zero_grad: `model.zero_grad()`
    after it. eval: an evaluation before it; of a chunked module, its mode changes between the passes. freeze: the
    trunk's `requires_grad` is switched. gone: an error ends this rank's loop. break: the epoch ends with it. discard:
    after it. by hand: its gradients are added. reload: the optimizer's own state is loaded before it. no pass: a step
    alone. save inside: as save, with a pass, perhaps, and no step; it weighs nothing.
    """

    rows: int = 2
    weight: float | None = None  # None: its rows
    head: int = 0
    event: str = ""


@dataclasses.dataclass(frozen=True)
class Scenario(Program):
    """A training run."""

    seed: int = 0
    kind: str = "wrapper"  # wrapper, TrainStep, or chunked
    epochs: tuple[tuple[MicroBatch, ...], ...] = ((MicroBatch(),),)
    others: tuple[tuple[MicroBatch, ...], ...] = ()  # the epochs of a second rank
    engine: str = ""  # ddp, ddp unused, fsdp2, or nested fsdp2
    sync: str = "window"
    way: str = "backward"
    """plain, closure, backward, batches, or batches backward; of TrainStep: loop, one's own."""
    steps: int = 2
    lengths: str = ""  # what windows' lengths depend on: nothing, epoch, or update
    micro: int = 3  # rows of a micro-batch; 0: as many as fit, found by trying
    memory: int = 0  # rows that fit into memory; 0: all
    optimizer: str = "sgd"
    optimizers: int = 1  # 2: one for the trunk, one for the rest
    schedule: str = ""  # the learning rate's: exponential, or cycle
    loss: str = "rows"
    """rows, ignored, classes, told, sum, weighed sum, terms, penalty, across (its rows, which no micro-batches can),
    tokens, names (several losses, each a mean over something else), pairs, groups (of rows, across which it looks)."""
    blocks: str = ""  # of TrainStep: layer by layer, with these updates: after_backward, or in_backward
    blocks_on: str = ""  # where the blocks live: where they compute, or on another device: cpu
    batch: str = "tuple"  # of TrainStep: tuple, dict, columns (rows in the last dimension), shared (has no rows)
    clip: float | None = None
    nonfinite: str = "propagate"
    scaler: int = 0  # growth interval of a GradScaler; 0 without one; -1: its scale is another for each micro-batch
    hook: str = ""
    """step: on the finished gradient; parameter, clamp: on a parameter's; module: on outputs and their gradients."""
    losses: int = 1
    unused: bool = False
    frozen: str = ""  # a layer that is not trained: trunk, or head
    chunk: int = 0  # the trunk is chunked, into so many rows
    checkpoint: str = ""  # the trunk is checkpointed: reentrant, or early (stops its recomputation by an exception)
    norm: str = ""  # a BatchNorm in the trunk, and what is done about it
    dropout: bool = False
    keep: int = 0
    dtype: str = "float64"  # float64, float32, or autocast (bfloat16)
    wide: bool = False  # gradients are summed in float64
    noise: bool = False  # the noise scale is measured
    loader: str = "list"  # list, generator, iterator, DataLoader, workers, stream, stateful, refilled, array refilled

    @property
    def ranks(self) -> list[tuple[tuple[MicroBatch, ...], ...]]:
        """The epochs of each."""
        return [self.epochs, *([self.others] if self.others else [])]


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """What a failing one is shrunk to, in one step."""

    def changed(name: str, i: int, epoch: tuple[MicroBatch, ...]) -> Scenario:
        return dataclasses.replace(scenario, **{name: with_other(getattr(scenario, name), i, epoch)})

    places = [(name, i, epoch) for name in ("epochs", "others") for i, epoch in enumerate(getattr(scenario, name))]
    for name, i, epoch in places:
        if len(scenario.epochs) > 1:
            yield dataclasses.replace(scenario, **{n: without(getattr(scenario, n), i) for n in ("epochs", "others")})
        for j, _ in enumerate(epoch if len(epoch) > 1 else ()):
            yield changed(name, i, without(epoch, j))
            if scenario.others:  # on both ranks
                both = {n: getattr(scenario, n) for n in ("epochs", "others")}
                both = {n: with_other(e, i, without(e[i], j) or e[i]) for n, e in both.items()}
                yield dataclasses.replace(scenario, **both)
    for field in unusual(scenario):
        if field not in ("seed", "kind", "epochs", "others", "engine"):
            yield usual(scenario, field)
    for name, i, epoch in places:
        for j, one in enumerate(epoch):
            yield from (changed(name, i, with_other(epoch, j, usual(one, field))) for field in unusual(one))
