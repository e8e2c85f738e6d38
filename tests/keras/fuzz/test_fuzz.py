"""Random training runs under Keras: right, or refused by an error or a warning of the library's own."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter

import keras
import pytest

from tests.keras.fuzz import runs
from tests.keras.fuzz.scenario import Scenario, random_scenario, sensible, shrunk
from tests.keras.problems import BACKEND, slow_where_compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # they are part of the outcome
SLICE = 5 if BACKEND == "torch" else 2


def failure(scenario: Scenario) -> str:
    """What is wrong with a run; empty where it is right, or refused."""
    what = runs.outcome(scenario)
    keras.backend.clear_session()
    return "" if what.startswith("refused:") else what


def check(seed: int, scenario: Scenario) -> None:
    what = failure(scenario)
    if what:
        small = shrunk(scenario, lambda candidate: bool(failure(candidate)))
        pytest.fail(f"seed {seed}: {small}\n{failure(small) or what}", pytrace=False)


def test_shrinking_ends() -> None:
    for seed in range(20):
        assert len(shrunk(random_scenario(seed), lambda candidate: True).batches) == 1


@slow_where_compiled
@pytest.mark.parametrize("kind", ["wrapper", "micro_batched", "chunked", "exact"])
def test_some_random_runs_are_right_or_refused(kind: str, float64: float) -> None:
    for seed in range(SLICE):
        scenario = random_scenario(seed, kind)
        if sensible(scenario):
            check(seed, scenario)


@pytest.mark.fuzz
def test_random_runs_are_right_or_refused(float64: float) -> None:
    """For FUZZ_SECONDS (600), from FUZZ_SEED (0) on, of one FUZZ_KIND or all."""
    first, seconds = int(os.environ.get("FUZZ_SEED", "0")), float(os.environ.get("FUZZ_SECONDS", "600"))
    end, found, counts = time.monotonic() + seconds, [], Counter[str]()
    for seed in itertools.count(first):
        if time.monotonic() > end:
            break
        scenario = random_scenario(seed, os.environ.get("FUZZ_KIND"))
        if not sensible(scenario):
            continue
        counts[scenario.kind] += 1
        try:
            check(seed, scenario)
        except pytest.fail.Exception as failed:
            found.append(str(failed))
            print(failed, flush=True)
    print(f"{BACKEND}: {dict(counts)} from seed {first}", flush=True)
    assert not found, f"{len(found)} runs are wrong:\n" + "\n".join(found)
