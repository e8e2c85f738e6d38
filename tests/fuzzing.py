"""What all fuzzers share: runs for a while, and the smaller run that a failing one is shrunk to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest


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
