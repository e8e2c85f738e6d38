"""Scenarios made from a seed, and the smaller ones that a failing scenario is shrunk to."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

NORMS = ["norm", "norm of steps", "shared norm", "norm and branch", "nested", "twice"]
"""Of graphs.py, those with BatchNormalization over the batch."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training run."""

    seed: int = 0
    kind: str = "wrapper"  # micro_batched, chunked, or exact (chunked with exact BatchNormalization)
    batches: tuple[int, ...] = (4, 4)  # rows of each: micro-batches of the wrapper, batches of micro_batched
    epochs: int = 1
    optimizer: str = "sgd"  # adam, ema, schedule, clipped, decayed
    eager: bool = False
    per_execution: int = 1
    event: str = ""  # in the middle: save, interrupt, flush, train_on_batch; and with micro_batched recompile
    at: int = 1  # after how many batches

    # The wrapper.
    steps: tuple[int, ...] = (2,)  # of each epoch; the last one of those that follow
    callback: bool = True
    scaled: str = ""  # where a LossScaleOptimizer is: inside, or outside
    sized: bool = False  # whether it is a BatchOptimizer

    # micro_batched.
    micro: int = 3
    tokens: bool = False
    layers: tuple[str, ...] = ()
    losses: tuple[str, ...] = ("mse",)  # one for each output
    reduction: str = "sum_over_batch_size"
    weights: str = ""  # of samples: ones, random, zeros, signed, late (uneven in the last batch only)
    missing: str = ""  # marks for missing targets: early, or late (in the last batch only)
    metrics: bool = False
    norm: str = ""  # a BatchNormalization: frozen, or micro

    # chunked; `micro`, `tokens`, `layers` and `losses` as well, of these the words in graphs.py.
    keep: int = 0
    whole: bool = True  # whether all of the model is chunked, or a tower inside of it
    masked: bool = False

    def __str__(self) -> str:
        changed = {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}
        return f"Scenario({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def random_scenario(seed: int, kind: str | None = None) -> Scenario:
    """The scenario of a seed; most things are as usual in most of them."""
    chance = random.Random(seed)

    def rarely(values: Any, usual: Any, probability: float = 0.25) -> Any:
        return chance.choice(values) if chance.random() < probability else usual

    kind = kind or chance.choice(["wrapper", "micro_batched", "chunked", "exact"])
    sizes = [1, 2, 3, 4, 7] if kind == "wrapper" else [2, 3, 5, 8, 12, 20]
    even = chance.random() < 0.4
    count, size = chance.randint(2, 6), chance.choice(sizes)
    batches = tuple(size if even else chance.choice(sizes) for _ in range(count))
    common = {
        "seed": seed,
        "kind": kind,
        "batches": batches,
        "epochs": chance.choice([1, 1, 2, 3]) if kind == "wrapper" else chance.choice([1, 2]),
        "optimizer": chance.choice(["sgd", "sgd", "adam", "ema", "schedule", "clipped", "decayed"]),
        "eager": chance.random() < 0.3,
        "per_execution": rarely([2, 3], 1),
        "at": chance.randint(1, count - 1),
    }
    if kind == "wrapper":
        return Scenario(
            **common,
            event=rarely(["save", "interrupt", "flush", "train_on_batch"], "", 0.5),
            steps=tuple(chance.choice([1, 2, 3, 5]) for _ in range(chance.choice([1, 1, 2]))),
            callback=chance.random() < 0.7,
            scaled=rarely(["inside", "outside"], ""),
            sized=chance.random() < 0.2,
        )
    if kind in ("chunked", "exact"):
        rows = ["dense", "layer norm", "conv", "gru", "attention", "group norm", "residual"]
        rows += ["distributed", "frozen norm"]
        words = [*rows, "own", "nested"] if kind == "chunked" else [*rows, *NORMS * 2]
        mixes = chance.choice(["softmax", "own mean", "own norm"]) if chance.random() < 0.12 else ""
        names = [chance.choice(words) for _ in range(chance.randint(1, 5))] + [mixes] * bool(mixes)
        return Scenario(
            **common | {"optimizer": chance.choice(["sgd", "ema", "clipped"]), "epochs": 1},
            micro=chance.choice([1, 2, 3, 4, 7]),
            tokens=chance.random() < 0.3,
            masked=chance.random() < 0.4,
            layers=tuple(chance.sample(names, len(names))),
            losses=(chance.choice(["across", "mse"]),),
            weights=rarely(["random"], ""),
            keep=0 if kind == "exact" else rarely([1, 2, 9], 0),
            whole=chance.random() < 0.6,
        )
    tokens = chance.random() < 0.3
    rows = ["mse", "mae", "huber", "own", "scalar", "sparse", "binary"]
    across = ["dice", "masked mean", "over weights", "variance"]
    layers = ["dense", "layer norm", "regularised", "active", "adds mean"]
    return Scenario(
        **common,
        event=rarely(["save", "recompile", "train_on_batch"], ""),
        micro=chance.choice([1, 2, 3, 4, 7, 100]),
        tokens=tokens,
        layers=tuple(chance.choice(layers) for _ in range(chance.choice([0, 1, 2])))
        + ((chance.choice(["softmax", "adds sum"]),) if chance.random() < 0.1 else ()),
        losses=tuple(rarely(across, chance.choice(rows), 0.15) for _ in range(chance.choice([1, 1, 2]))),
        reduction=rarely(["sum", "mean_with_sample_weight"], "sum_over_batch_size", 0.4),
        weights=rarely(["ones", "random", "zeros", "signed", "late"], "", 0.5),
        missing=rarely(["early", "late"], "", 0.3),
        metrics=chance.random() < 0.3,
        norm=rarely(["frozen", "micro"], "", 0.15),
    )


def sensible(scenario: Scenario) -> bool:
    """Whether the oracle can say what is right."""
    s = scenario
    if not s.batches or not 1 <= s.at < max(2, len(s.batches)):
        return False
    if s.kind in ("chunked", "exact"):
        return not (s.weights and "across" in s.losses) and len(s.losses) == 1
    if s.kind == "micro_batched":
        return True
    even, scheduled = len(set(s.batches)) == 1, len(s.steps) > 1
    if s.sized and (not even or s.event or scheduled or s.scaled == "outside"):
        return False
    if s.event in ("flush", "train_on_batch") and (scheduled or not even):
        return False  # a schedule of epochs outside of epochs; not weighed by rows
    if not s.callback and not s.sized and (not even or scheduled or s.event in ("interrupt", "flush")):
        return False
    return not (s.event and s.per_execution > 1)


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest scenario on the way down that still fails."""
    while smaller := next((one for one in filter(sensible, _simpler(scenario)) if fails(one)), None):
        scenario = smaller
    return scenario


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    for field in dataclasses.fields(scenario):
        value = getattr(scenario, field.name)
        longer = isinstance(value, tuple) and len(value) < len(field.default)  # and would be shortened again, for ever
        if field.name not in ("seed", "kind") and value != field.default and not longer:
            yield dataclasses.replace(scenario, **{field.name: field.default})
        if isinstance(value, tuple) and len(value) > 1:
            for index in range(len(value)):
                yield dataclasses.replace(scenario, **{field.name: value[:index] + value[index + 1 :]})
