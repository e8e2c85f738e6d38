"""Scenarios made from a seed, and the smaller ones that a failing scenario is shrunk to."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["MicroBatch", "Scenario", "random_scenario", "sensible", "shrunk"]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows that arrive together: a micro-batch of a wrapped optimizer, a batch of TrainStep."""

    rows: int = 2
    weight: float | None = None
    """None: its rows."""
    head: int = 0
    event: str = ""
    """What happens: save, skip, flush, inf, forward error, backward error, oom, zero_grad, eval."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training run."""

    seed: int = 0
    kind: str = "wrapper"
    """wrapper, TrainStep, or chunked."""
    epochs: tuple[tuple[MicroBatch, ...], ...] = ((MicroBatch(),),)
    others: tuple[tuple[MicroBatch, ...], ...] = ()
    """The epochs of a second rank."""
    engine: str = ""
    """ddp, ddp unused, fsdp2, or nested fsdp2."""
    sync: str = "window"
    way: str = "backward"
    """plain, backward, batches, or batches backward."""
    steps: int = 2
    micro: int = 3
    optimizer: str = "sgd"
    loss: str = "rows"
    """rows, ignored, classes, told, sum."""
    clip: float | None = None
    nonfinite: str = "propagate"
    scaler: int = 0
    """Growth interval of a GradScaler; 0 without one."""
    hook: bool = False
    losses: int = 1
    unused: bool = False
    frozen: str = ""
    """A layer that is not trained: trunk, or head."""
    chunk: int = 0
    norm: bool = False
    keep: int = 0
    loader: str = "list"

    def __str__(self) -> str:
        changed = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return f"Scenario({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def random_scenario(seed: int, kind: str | None = None, engine: str = "") -> Scenario:
    """The scenario of a seed; most things are as usual in most of them."""
    chance = random.Random(seed)

    def rarely(value: Any, usual: Any, probability: float = 0.25) -> Any:
        return value() if chance.random() < probability and callable(value) else usual

    kind = kind or chance.choices(["wrapper", "TrainStep", "chunked"], [6, 4, 1])[0]
    way = chance.choice(["plain", "backward", "batches", "batches backward"])
    nonfinite = rarely(lambda: chance.choice(["skip_window", "skip_micro_batch"]), "propagate")
    scaler = rarely(lambda: chance.choice([1, 3, 1000]), 0) if not engine.endswith("unused") else 0
    if engine.endswith("fsdp2") and nonfinite == "skip_micro_batch":
        nonfinite = "skip_window"
    heads = chance.random() < 0.3 and engine in ("", "ddp unused", "fsdp2")
    weighed = chance.random() < 0.4
    events = ["save", "skip", "flush", "forward error", "backward error", "zero_grad", "eval"]
    if kind == "TrainStep":
        events = ["save", "forward error", "backward error", "oom", "oom", "eval"]
    if engine:
        events = ["eval"] if engine.startswith("ddp") else [""]
    if scaler or nonfinite != "propagate":
        events += ["inf"] * 3

    def micro_batch() -> MicroBatch:
        rows = chance.choice([1, 2, 3, 4, 7]) if kind == "wrapper" else chance.choice([2, 3, 5, 8, 11])
        weight = chance.choice([None, None, 0.0, 0.5, 3.0]) if weighed else None
        event = chance.choice(events) if chance.random() < 0.15 else ""
        return MicroBatch(rows, weight, chance.randrange(2) if heads else 0, event)

    def epochs() -> tuple[tuple[MicroBatch, ...], ...]:
        longest = chance.choice([3, 6, 9])
        return tuple(tuple(micro_batch() for _ in range(chance.randint(1, longest))) for _ in range(count))

    count = chance.choice([1, 1, 2])
    own = epochs()
    others = epochs() if engine else ()
    if kind == "TrainStep" or (engine and "batches" not in way):
        others = tuple(
            tuple((other * len(one))[i] for i, _ in enumerate(one)) for one, other in zip(own, others, strict=False)
        )
    return Scenario(
        seed=seed,
        kind=kind,
        epochs=own,
        others=others,
        engine=engine,
        sync=rarely(lambda: "micro_batch", "window", 0.4) if engine else "window",
        way=way,
        steps=chance.choice([1, 2, 3, 4]),
        micro=chance.choice([1, 2, 3, 4, 100]),
        optimizer=chance.choice(["sgd", "adam", "adamw"]),
        loss=rarely(lambda: chance.choice(["ignored", "classes", "told", "sum"]), "rows", 0.5)
        if kind == "TrainStep"
        else rarely(lambda: "sum", "rows", 0.15),
        clip=rarely(lambda: 0.05, None),
        nonfinite=nonfinite if kind == "wrapper" else "propagate",
        scaler=scaler,
        hook=rarely(lambda: True, False),
        losses=rarely(lambda: 2, 1) if kind == "wrapper" else 1,
        unused=rarely(lambda: True, False) if engine in ("", "ddp unused", "fsdp2") else False,
        frozen=rarely(lambda: chance.choice(["trunk", "head"]), "", 0.2) if not engine else "",
        chunk=rarely(lambda: chance.choice([1, 2, 5]), 0),
        norm=rarely(lambda: True, False) if kind != "wrapper" and not engine else False,
        keep=rarely(lambda: chance.choice([1, 2]), 0),
        loader=rarely(lambda: chance.choice(["generator", "refilled", "dict refilled", "DataLoader"]), "list"),
    )


def sensible(scenario: Scenario) -> bool:
    """Whether the oracle can say what is right: infinity is left out, or a GradScaler's matter; errors can happen."""
    every = [one for epochs in (scenario.epochs, scenario.others) for epoch in epochs for one in epoch]
    events = {one.event for one in every}
    finite = "inf" not in events or scenario.scaler > 0 or scenario.nonfinite != "propagate"
    no_pass = scenario.frozen == "trunk" or any(one.event == "backward error" and one.weight == 0 for one in every)
    if no_pass and "backward error" in events:
        return False
    if scenario.scaler and any(one.event == "inf" and one.weight == 0 for one in every):
        return False
    lengths = [[len(epoch) for epoch in epochs] for epochs in (scenario.epochs, scenario.others)]
    in_step = scenario.kind == "TrainStep" or "batches" not in scenario.way
    return finite and (not scenario.others or not in_step or lengths[0] == lengths[1])


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest scenario on the way down that still fails."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in filter(sensible, _simpler(scenario)):
            if fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    for name in ("epochs", "others"):
        epochs = getattr(scenario, name)
        for i, epoch in enumerate(epochs):
            if len(epochs) > 1:
                both = {n: _without(getattr(scenario, n), i) for n in ("epochs", "others")}
                yield dataclasses.replace(scenario, **both)
            for j, _ in enumerate(epoch):
                if len(epoch) > 1:
                    yield dataclasses.replace(scenario, **{name: _with(epochs, i, _without(epoch, j))})
    for field in dataclasses.fields(scenario):
        keeps = field.name in ("seed", "kind", "epochs", "others", "engine")
        if not keeps and getattr(scenario, field.name) != field.default:
            yield dataclasses.replace(scenario, **{field.name: field.default})
    for name in ("epochs", "others"):
        epochs = getattr(scenario, name)
        for i, epoch in enumerate(epochs):
            for j, micro_batch in enumerate(epoch):
                for field in dataclasses.fields(micro_batch):
                    if getattr(micro_batch, field.name) != field.default:
                        simple = dataclasses.replace(micro_batch, **{field.name: field.default})
                        yield dataclasses.replace(scenario, **{name: _with(epochs, i, _with(epoch, j, simple))})


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
