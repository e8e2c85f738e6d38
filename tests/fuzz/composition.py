"""Scenarios made from a seed."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.fuzz.loaders import FRESH
from tests.fuzz.scenario import MicroBatch, Scenario
from tests.fuzzing import Chance

ON_ALL_RANKS = ("save", "forward error")
"""Events that happen on every rank at once: nobody loads a checkpoint alone."""


OF_WRAPPER = [
    *("save", "save", "skip", "flush", "step error", "loader error", "zero_grad", "freeze", "break", "discard"),
    *("by hand", "by hand", "reload", "reload", "no pass", "no pass", "save inside", "save inside"),
]


def random_scenario(seed: int, kind: str | None = None, engine: str = "") -> Scenario:
    """The scenario of a seed; most things are as usual in most of them."""
    chance = Chance(seed)
    kind = kind or chance.choices(["wrapper", "TrainStep", "chunked"], [5, 5, 2])[0]
    alone = engine == ""
    heads_vary = engine in ("", "ddp unused", "fsdp2")
    nonfinite = chance.rarely(["skip_window"], "propagate") if kind == "wrapper" else "propagate"
    scaler = chance.rarely([1, 3, 1000, *([-1, -1] if alone else [])], 0, 0.3)
    dtype = chance.rarely(["float32", "autocast"], "float64", 0.15)
    first: dict[str, Any] = {
        "kind": kind,
        "engine": engine,
        "nonfinite": nonfinite,
        "scaler": scaler if kind != "chunked" else 0,
        "dtype": dtype,
        "optimizer": "sgd" if dtype != "float64" else chance.choice(["sgd", "adam", "adamw", "asgd"]),
        "unused": heads_vary and chance.rarely([True], False),
        "frozen": chance.rarely(["trunk", "head"], "", 0.1) if alone else "",
        "schedule": chance.rarely(["exponential", "cycle"], ""),
        "clip": chance.rarely([0.05, float("inf")], None),
        "chunk": chance.rarely([1, 2, 5], 0, 0.15),
        "sync": chance.rarely(["micro_batch"], "window", 0.4) if not alone else "window",
        "checkpoint": chance.rarely(["early", "reentrant"] if alone else ["early"], "", 0.1),
        "dropout": chance.rarely([True], False, 0.15) and (alone or kind == "wrapper"),
        "wide": dtype == "float32" and chance.rarely([True], False, 0.5),
        "noise": chance.rarely([True], False, 0.1) and kind != "chunked",
        "hook": chance.rarely(["step", "parameter", "module"] if alone else ["step"], ""),
    }
    own = {"wrapper": _of_wrapper, "TrainStep": _of_train_step, "chunked": _of_chunked}[kind]
    first.update(own(chance, alone, dtype))
    if first.get("norm"):
        first["chunk"] = 0
    scenario = Scenario(seed=seed, **first)
    heads = chance.rarely([True], False, 0.3) and heads_vary
    return dataclasses.replace(scenario, **_epochs(chance, scenario, heads))


def _of_wrapper(chance: Chance, alone: bool, dtype: str) -> dict[str, Any]:
    ways = ["plain", "closure", "backward", "backward", "batches", "batches", "batches backward"]
    way = chance.choice(ways)
    two = alone and way == "plain" and chance.rarely([True], False)
    loader = chance.rarely([*FRESH] if alone else ["generator", "iterator", "stream", "stateful"], "list", 0.4)
    return {
        "way": way,
        "steps": chance.choice([1, 2, 3, 4]),
        "lengths": chance.rarely(["epoch", "update"], "") if alone else "",
        "optimizers": 2 if two else 1,
        "loss": chance.rarely(["sum", "penalty"] if alone and dtype != "autocast" else ["sum"], "rows", 0.3),
        "losses": chance.rarely([2], 1, 0.2) if way != "closure" else 1,
        "loader": loader,
        "norm": chance.rarely(["warn"], "", 0.1) if alone else "",
    }


def _of_train_step(chance: Chance, alone: bool, dtype: str) -> dict[str, Any]:
    losses = ["ignored", "classes", "told", "sum", "terms"]
    if alone:
        losses += ["across", "tokens", *(["penalty"] if dtype != "autocast" else []), *["names", "groups", "pairs"] * 2]
        losses.append("weighed sum")
    found: dict[str, Any] = {
        "micro": chance.choice([1, 2, 3, 4, 100, *([0] if alone else [])]),
        "memory": chance.rarely([1, 2, 3, 6], 0, 0.15) if alone else 0,
        "loss": chance.rarely(losses, "rows", 0.6),
        "optimizers": chance.rarely([2], 1, 0.15) if alone else 1,
        "norm": chance.rarely(["exact", "exact", "warn", "micro", "pooled", "frozen"], "", 0.25) if alone else "",
        "batch": chance.rarely(["dict", "columns", "shared"], "tuple", 0.3),
        "loader": chance.rarely([*FRESH, "refilled", "array refilled"], "list", 0.3) if alone else "list",
        "way": chance.rarely(["loop"], "", 0.2) if alone else "",
    }
    if found["loss"] in ("groups", "pairs"):
        found |= {"batch": "tuple", "micro": max(found["micro"], 3) if found["micro"] else 0, "memory": 0, "norm": ""}
    if found["loss"] in ("groups", "pairs", "names"):
        found |= {"dropout": False, "norm": found["norm"] if found["norm"] in ("exact", "frozen") else ""}
    if found["norm"] in ("warn", "micro", "pooled"):
        found |= {"micro": 4, "memory": 0}
    if found["loss"] == "tokens":
        found |= {"norm": "", "dropout": False, "chunk": 0, "checkpoint": "", "batch": "tuple", "loader": "list"}
    if alone and dtype == "float64" and found["optimizers"] == 1 and chance.rarely([True], False, 0.1):
        found |= {"optimizer": "lbfgs", "dropout": False, "hook": "", "noise": False, "schedule": "", "norm": ""}
        found |= {"clip": None, "way": ""}
    if alone and chance.rarely([True], False):
        blocks = chance.choice(["after_backward", "in_backward"])
        found["loss"] = "rows" if found["loss"] == "penalty" else found["loss"]  # which finds no graph in blocks
        found |= {"blocks": blocks, "blocks_on": chance.rarely(["cpu"], "", 0.3)}
        found |= {"noise": False, "norm": "" if found["norm"] == "exact" else found["norm"]}
        found |= {"micro": found["micro"] or 3, "scaler": 0, "way": ""}
        if found.get("optimizer") == "lbfgs":
            found |= {"optimizer": "sgd"}
        if blocks == "in_backward":
            found |= {"hook": "", "clip": None}
    if found.get("dropout", True):
        found |= {"memory": 0, "micro": found["micro"] or 2}
    return found


def _of_chunked(chance: Chance, alone: bool, dtype: str) -> dict[str, Any]:
    norm = chance.rarely(["exact", "exact", "warn", "micro", "pooled", "frozen"], "", 0.4)
    return {
        "micro": 4 if norm in ("warn", "micro", "pooled") else chance.choice([1, 2, 3, 4, 100]),
        "norm": norm,
        "keep": chance.rarely([1, 2], 0) if norm != "exact" else 0,
        "batch": chance.rarely(["columns", "shared"], "tuple", 0.3),
        "loss": chance.rarely(["penalty"], "rows", 0.2),
        "losses": chance.rarely([2], 1),
        "hook": chance.rarely(["parameter", "clamp", "module"], "", 0.3),
        "optimizer": "sgd",
        "schedule": "",
        "clip": None,
        "chunk": 0,
    }


def _epochs(chance: Chance, scenario: Scenario, heads: bool) -> dict[str, Any]:
    kind, engine, alone = scenario.kind, scenario.engine, not scenario.engine
    weighed = kind == "wrapper" and chance.rarely([True], False, 0.4)
    errors = ["forward error", "backward error", "oom", "backward oom", "eval"]
    events = {
        "wrapper": [*errors, *OF_WRAPPER],
        "TrainStep": [*errors, "save", "step error", "oom", "freeze"],
        "chunked": [*errors, "eval"],
    }[kind]
    if engine.startswith("ddp"):
        events = {"wrapper": ["save", "eval", "forward error"], "TrainStep": ["save", "eval", "oom", "backward oom"]}[
            kind
        ]
        events += chance.rarely([["gone"]], [])
    elif engine:
        events = ["save"]
    leaves_traces = scenario.loss == "tokens" or (kind == "TrainStep" and scenario.norm)
    if (scenario.scaler or scenario.nonfinite != "propagate") and not leaves_traces:
        events += ["inf"] * (8 if kind == "wrapper" else 3)
    if kind == "wrapper" and scenario.scaler < 0:
        events += ["no pass"] * 8
    often = chance.choice([0.1, 0.2, 0.4])
    if alone:  # a few kinds, each of which meets itself and the others
        events = [chance.choice(events) for _ in range(chance.choice([1, 2, 4, 20]))]
    fewest = 2 if scenario.norm else 1
    ordinary = kind == "wrapper" and alone  # many windows, most of whose micro-batches have as many rows
    alike = chance.rarely([2, 3], 0, 0.5) if ordinary else 0

    def micro_batch() -> MicroBatch:
        rows = alike or chance.choice([fewest, 2, 3, 4, 7])
        if kind != "wrapper":
            rows = chance.choice([5, 8, 11, 19] if scenario.norm else [2, 3, 5, 8, 11, 19])
            rows += rows % 2 if scenario.loss == "pairs" else 0
        weight = chance.choice([None, None, 0.0, 0.5, 3.0]) if weighed else None
        return MicroBatch(rows, weight, chance.randint(0, 1) if heads else 0, chance.rarely(events, "", often))

    count = chance.choice([1, 1, 2]) if scenario.optimizer != "lbfgs" else 1

    def epochs() -> tuple[tuple[MicroBatch, ...], ...]:
        longest = chance.choice([4, 8, 16] if ordinary else [3, 6, 9]) if scenario.optimizer != "lbfgs" else 2
        lengths = [chance.randint(1, longest) for _ in range(count)]
        return tuple(
            tuple(_fitting(scenario, micro_batch(), n + 1 == length) for n in range(length)) for length in lengths
        )

    own = epochs()
    others = epochs() if engine else ()
    if engine and (kind == "TrainStep" or "batches" not in scenario.way):
        others = tuple(tuple((other * len(one))[: len(one)]) for one, other in zip(own, others, strict=True))
    pairs = [_agreeing(scenario, one, other) for one, other in zip(own, others, strict=True)] if engine else []
    return {
        "epochs": tuple(one for one, _ in pairs) if engine else own,
        "others": tuple(other for _, other in pairs),
    }


def _fitting(scenario: Scenario, one: MicroBatch, is_last: bool) -> MicroBatch:
    """Without an event that can't be there."""
    in_batches = scenario.way.startswith("batches")
    if one.event == "save inside" and in_batches and not is_last and scenario.losses == 1 and not scenario.norm:
        return dataclasses.replace(one, weight=0.0)
    fits = one.event != "save inside" and (one.event != "no pass" or in_batches or scenario.way == "plain")
    return one if fits else dataclasses.replace(one, event="")


def _agreeing(scenario: Scenario, own: Any, others: Any) -> Any:
    """Two ranks' epochs, in which what must happen on both does."""
    ranks, shared = [list(own), list(others)], min(len(own), len(others))
    for i, one in enumerate(own[:shared]):
        if scenario.kind == "TrainStep":
            ranks[1][i] = dataclasses.replace(ranks[1][i], head=one.head)
        if one.event in ON_ALL_RANKS and i + 1 < shared:
            ranks[1][i] = dataclasses.replace(ranks[1][i], event=one.event)
    for rank, other in (ranks, ranks[::-1]):
        for i, one in enumerate(rank):
            if one.event in ON_ALL_RANKS and (i + 1 >= shared or other[i].event != one.event):
                rank[i] = dataclasses.replace(one, event="")
    return tuple(ranks[0]), tuple(ranks[1])


def sensible(scenario: Scenario) -> bool:
    """Whether the oracle can say what is right, and what is to happen can happen."""
    every = [one for epochs in (scenario.epochs, scenario.others) for epoch in epochs for one in epoch]
    events = {one.event for one in every}
    at_once = scenario.kind == "TrainStep" or "batches" not in scenario.way
    lengths = [[len(epoch) for epoch in epochs] for epochs in (scenario.epochs, scenario.others)]
    impossible = [
        # Infinity is left out, or a GradScaler's matter.
        "inf" in events and not scenario.scaler and scenario.nonfinite == "propagate",
        # What fails when blocks have been updated can't be taken back.
        scenario.blocks == "in_backward" and events & {"backward error", "backward oom", "step error"},
        # Where nothing goes backward, nothing fails there.
        events & {"backward error", "backward oom"} and (scenario.frozen == "trunk" or "freeze" in events),
        any(one.event.startswith("backward") and one.weight == 0 for one in every),
        # What a new run would not know.
        events & {"save", "save inside"} and events & {"freeze", "loader error"},
        "step error" in events and (scenario.scaler or scenario.optimizers > 1 or scenario.way == "loop"),
        scenario.way == "closure" and scenario.kind == "wrapper" and (scenario.scaler or scenario.losses > 1),
        # Gradients by hand come of no other pass, and not through recomputation.
        "by hand" in events and (scenario.way == "closure" or scenario.checkpoint or scenario.chunk),
        scenario.optimizers > 1 and scenario.kind == "wrapper" and scenario.way != "plain",
        # Micro-batches of unknown sizes, which draw or normalise by themselves.
        _by_micro_batch(scenario) and (events & {"oom", "backward oom"} or scenario.memory or not scenario.micro),
        scenario.dropout and scenario.norm == "exact",
        scenario.norm in ("warn", "micro", "pooled") and scenario.kind != "wrapper" and scenario.micro < 4,
        scenario.checkpoint == "reentrant" and scenario.loss == "penalty",
        scenario.checkpoint and scenario.norm,  # which moves twice then, in a plain loop
        # Parameters' hooks in a reentrant pass see less than the whole sum, in a plain loop too.
        scenario.kind == "chunked" and scenario.checkpoint == "reentrant" and scenario.hook == "clamp",
        # A recomputation finds the mode that the module has by then, in a plain loop too.
        scenario.kind == "chunked" and scenario.checkpoint and scenario.dropout and "eval" in events,
        scenario.frozen == "head" and "freeze" in events,
        # A GradScaler that has seen no gradient can't tell its next scale.
        scenario.kind == "wrapper" and scenario.scaler and scenario.seed % 4 == 0 and any(o.weight == 0 for o in every),
        "no pass" in events and scenario.scaler > 0,
        # It refuses an optimizer without gradients, and infinity doesn't reach it.
        scenario.optimizers > 1 and (scenario.frozen or "freeze" in events) and (scenario.scaler or "inf" in events),
        # Differences, of which float32 rounds more than 1e-6 away.
        scenario.norm and scenario.dtype == "float32",
        scenario.loss == "tokens" and (scenario.chunk or scenario.checkpoint or scenario.dropout or scenario.norm),
        scenario.dtype != "float64" and scenario.optimizer != "sgd",
        # Differences of nearly equal gradients, which magnify rounding.
        scenario.optimizer == "lbfgs" and (scenario.clip is not None or scenario.norm or len(every) > 2),
        # So does a BatchNorm over two rows, whose outputs are -1 and 1 whatever its inputs are.
        scenario.norm and scenario.kind != "wrapper" and any(one.rows < 5 for one in every),
        scenario.norm and scenario.kind == "TrainStep" and "inf" in events,
        scenario.others and at_once and lengths[0] != lengths[1],
        scenario.others and not _agree(scenario),
        # A rank that leaves when the other has no more batches is one that breaks off its loop.
        scenario.others and scenario.way.startswith("batches") and _leaves_alone(scenario),
    ]
    return not any(impossible)


def _by_micro_batch(scenario: Scenario) -> bool:
    return scenario.kind != "wrapper" and (scenario.dropout or scenario.norm in ("warn", "micro", "pooled"))


def _leaves_alone(scenario: Scenario) -> bool:
    pairs = [
        pair for one, two in zip(scenario.epochs, scenario.others, strict=True) for pair in ((one, two), (two, one))
    ]
    return any(one.event == "gone" and i >= len(other) for own, other in pairs for i, one in enumerate(own))


def _agree(scenario: Scenario) -> bool:
    """Whether what must happen on both ranks does."""
    pairs = zip(scenario.epochs, scenario.others, strict=True)
    return all(_agreeing(scenario, own, others) == (own, others) for own, others in pairs)
