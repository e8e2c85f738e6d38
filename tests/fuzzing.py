"""What all fuzzers share: a program is drawn from a seed, run, judged, and shrunk to a smaller one that fails, too."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from logging.handlers import BufferingHandler
from typing import Any

import pytest


class Chance(random.Random):
    """A seed's decisions."""

    rare = 0.2

    def rarely(self, values: Any, usual: Any, probability: float | None = None) -> Any:
        """One of `values`; mostly what is usual."""
        return self.choice(values) if self.random() < (probability or self.rare) else usual


class Program:
    """A frozen dataclass that shows what is unlike its defaults."""

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in unusual(self))})"


def unusual(record: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(record) if getattr(record, f.name) != f.default]


def usual(record: Any, name: str) -> Any:
    """This record, with the default of one of its fields."""
    return dataclasses.replace(record, **{name: getattr(type(record), name)})


def without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]


def with_other(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


class Errors(dict[str, float]):
    """The largest of each kind; NaN is larger than any."""

    def note(self, kind: str, error: float) -> None:
        before = self.setdefault(kind, 0.0)
        if not (error <= before or before != before):
            self[kind] = error


@contextlib.contextmanager
def listening() -> Iterator[list[logging.LogRecord]]:
    """What the library logs meanwhile, which nobody else sees."""
    logger, lines = logging.getLogger("gradaccum"), BufferingHandler(10**6)
    logger.addHandler(lines)
    logger.propagate = False
    try:
        yield lines.buffer
    finally:
        logger.removeHandler(lines)
        logger.propagate = True


def for_a_while(run: Callable[[int], str], counts: Any = "") -> None:
    """Runs from FUZZ_SEED (0) on for FUZZ_SECONDS (600), each of which says what is wrong with it."""
    first, seconds = int(os.environ.get("FUZZ_SEED", "0")), float(os.environ.get("FUZZ_SECONDS", "600"))
    end, seed, found = time.monotonic() + seconds, first, []
    while time.monotonic() < end:
        if wrong := run(seed):
            found.append(wrong)
            print(found[-1], flush=True)
        seed += 1
    print(f"{counts}: seeds {first} to {seed}", flush=True)
    assert not found, f"{len(found)} runs are wrong:\n" + "\n".join(found)


def failed(check: Callable[..., Any], *args: Any) -> str:
    """What a failing check says."""
    try:
        check(*args)
    except (AssertionError, pytest.fail.Exception) as error:
        return str(error)
    return ""


def check(seed: int, scenario: Any, failure: Callable[[Any], str], simpler: Any, sensible: Any) -> None:
    """Fails with the smallest sensible scenario on the way down that still fails."""
    if what := failure(scenario):
        small = shrunk(scenario, lambda one: sensible(one) and failure(one), simpler)
        pytest.fail(f"seed {seed}: {small}\n{failure(small) or what}", pytrace=False)


def shrunk(scenario: Any, fails: Callable[[Any], Any], simpler: Callable[[Any], Iterable[Any]]) -> Any:
    while smaller := next(filter(fails, simpler(scenario)), None):
        scenario = smaller
    return scenario
