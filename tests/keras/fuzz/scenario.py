"""Scenarios made from a seed, and the smaller ones that a failing scenario is shrunk to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tests.fuzzing import Chance, Program, unusual, usual, without


@dataclasses.dataclass(frozen=True)
class Scenario(Program):
    """A training run."""

    seed: int = 0
    kind: str = "wrapper"  # micro_batched, chunked, or exact (with exact BatchNormalization)
    batches: tuple[int, ...] = (4, 4)  # rows of each: micro-batches of the wrapper, else batches
    epochs: int = 1
    optimizer: str = "sgd"  # adam, ema, schedule, clipped, decayed
    eager: bool = False
    otherwise: bool = False  # whether XLA compiles where the other tests don't have it, and the other way round
    per_execution: int = 1
    event: str = ""  # in the middle: save, interrupt, flush, train_on_batch; and with micro_batched recompile
    at: int = 1  # after how many batches

    # The wrapper.
    steps: tuple[int, ...] = (2,)  # of each epoch; the last one of those that follow
    callback: bool = True
    scaled: str = ""  # where a LossScaleOptimizer is: inside, or outside
    sized: bool = False  # whether it is a BatchOptimizer

    # The others; of layers and losses the words in runs.py.
    micro: int = 3
    tokens: bool = False
    masked: bool = False
    layers: tuple[str, ...] = ()
    losses: tuple[str, ...] = ("mse",)  # one for each output
    reduction: str = "sum_over_batch_size"
    weights: str = ""  # of samples: ones, random, zeros, signed, late (uneven in the last batch only)
    missing: str = ""  # marks for missing targets: early, or late (in the last batch only)
    metrics: bool = False
    keep: int = 0
    whole: bool = True  # whether all of the model is chunked, or a tower inside of it

    @property
    def layered(self) -> bool:
        """Whether layers are chunked."""
        return self.kind in ("chunked", "exact")

    @property
    def per_step(self) -> bool:
        """Whether each token has a target, and its mask comes to the loss."""
        return self.kind == "micro_batched" and self.tokens


ROWS = ["dense", "layer norm", "conv", "gru", "attention", "group norm", "residual", "distributed", "frozen norm"]
WORDS = {
    "micro_batched": [*ROWS, "nested", *["dense", "active", "adds mean"] * 2],
    "chunked": [*ROWS, "own", "nested"],
    "exact": [*ROWS, *["norm", "norm of steps", "shared norm", "norm and branch", "nested", "twice"] * 2],
}
MIXING = {"micro_batched": ["softmax", "adds sum", "norm"]}
ACROSS = ["dice", "masked mean", "over weights", "variance"]


def random_scenario(seed: int, kind: str | None = None) -> Scenario:
    """The scenario of a seed; most things are as usual in most of them."""
    chance = Chance(seed)
    chance.rare, rarely = 0.25, chance.rarely
    kind = kind or chance.choice(["wrapper", "micro_batched", "chunked", "exact"])
    sizes = [1, 2, 3, 4, 7] if kind == "wrapper" else [2, 3, 5, 8, 12, 20]
    count, even = chance.randint(2, 6), chance.random() < 0.4
    size = chance.choice(sizes)
    common = {
        "seed": seed,
        "kind": kind,
        "batches": tuple(size if even else chance.choice(sizes) for _ in range(count)),
        "epochs": chance.choice([1, 1, 2, 3] if kind == "wrapper" else [1, 2]),
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
    mixes = rarely(MIXING.get(kind, ["softmax", "own mean", "own norm"]), "", 0.12)
    words = [chance.choice(WORDS[kind]) for _ in range(chance.randint(kind != "micro_batched", 4))]
    common |= {
        "micro": chance.choice([1, 2, 3, 4, 7, *[100] * (kind == "micro_batched")]),
        "tokens": chance.random() < 0.3,
        "masked": chance.random() < 0.5,
        "layers": tuple(chance.sample(found := [*words, *[mixes] * bool(mixes)], len(found))),
    }
    if kind != "micro_batched":
        chosen = {"optimizer": chance.choice(["sgd", "ema", "clipped"]), "epochs": 1, "per_execution": 1}
        return Scenario(
            **common | chosen,
            losses=(chance.choice(["across", "mse"]),),
            weights=rarely(["random"], ""),
            keep=0 if kind == "exact" else rarely([1, 2, 9], 0),
            whole=chance.random() < 0.6,
        )
    of_rows = ["mse", "mae", "huber", "own", "scalar", "sparse", "binary"]
    return Scenario(
        **common,
        event=rarely(["save", "recompile", "train_on_batch"], ""),
        losses=tuple(rarely(ACROSS, chance.choice(of_rows), 0.15) for _ in range(chance.choice([1, 1, 2]))),
        reduction=rarely(["sum", "mean_with_sample_weight"], "sum_over_batch_size", 0.4),
        weights=rarely(["ones", "random", "zeros", "signed", "late"], "", 0.5),
        missing=rarely(["early", "late"], "", 0.3),
        metrics=chance.random() < 0.3,
    )


def sensible(s: Scenario) -> bool:
    """Whether the oracle can say what is right."""
    if not s.batches or not 1 <= s.at < max(2 - (s.event == "save"), len(s.batches)):
        return False
    if s.layered:
        return not (s.weights and "across" in s.losses) and len(s.losses) == 1
    if s.kind == "micro_batched":
        return True
    even, scheduled = len(set(s.batches)) == 1, len(s.steps) > 1
    cut = len(set(s.batches[:-1])) == 1 and s.batches[-1] <= s.batches[0]
    if s.sized and (not cut or s.event or scheduled or s.scaled == "outside"):
        return False
    if s.event in ("flush", "train_on_batch") and (scheduled or not even):
        return False  # a schedule of epochs outside of epochs; not weighed by rows
    if not s.callback and not s.sized and (not even or scheduled or s.event in ("interrupt", "flush")):
        return False
    return not (s.event and s.per_execution > 1)


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """What a failing one is shrunk to, in one step."""
    for name in unusual(scenario):
        value, default = getattr(scenario, name), getattr(Scenario, name)
        longer = isinstance(value, tuple) and len(value) < len(default)  # and would be shortened again, for ever
        if name not in ("seed", "kind") and not longer:
            yield usual(scenario, name)
    for field in dataclasses.fields(scenario):
        value = getattr(scenario, field.name)
        for index in range(len(value)) if isinstance(value, tuple) and len(value) > 1 else ():
            yield dataclasses.replace(scenario, **{field.name: without(value, index)})
