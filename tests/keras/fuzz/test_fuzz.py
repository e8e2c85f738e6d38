"""Random training runs under Keras: right, or refused by an error or a warning of the library's own."""

from __future__ import annotations

import itertools
import os
from collections import Counter

import keras
import pytest

from tests import fuzzing
from tests.keras.fuzz import runs
from tests.keras.fuzz.scenario import Scenario, random_scenario, sensible, simpler
from tests.keras.marks import BACKEND, slow, slow_where_compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # they are part of the outcome
SLICES = {"wrapper": 25, "micro_batched": 12, "chunked": 6, "exact": 6}


def failure(scenario: Scenario) -> str:
    """What is wrong with a run; empty where it is right, or refused."""
    what = runs.outcome(scenario)
    keras.backend.clear_session()
    return "" if what.startswith(("refused:", "no oracle:")) else what


def check(seed: int, scenario: Scenario) -> None:
    fuzzing.check(seed, scenario, failure, simpler, sensible)


def test_shrinking_ends() -> None:
    for seed in range(20):
        assert len(fuzzing.shrunk(random_scenario(seed), sensible, simpler).batches) == 1


BATCHES = {"kind": "micro_batched", "batches": (11, 11), "micro": 4}
CHUNKED = {"kind": "chunked", "batches": (11, 11), "micro": 4, "losses": ("across",)}
EXACT = {"kind": "exact", "batches": (11, 11), "micro": 4}
TOKENS = {**BATCHES, "tokens": True, "masked": True, "losses": ("sparse",)}
TWO = {**BATCHES, "losses": ("sparse", "huber"), "metrics": True}
MEAN = "mean_with_sample_weight"
TABLE = {
    "a chunked tower under a loss across rows": Scenario(**CHUNKED, layers=("dense",), whole=False),
    "windows, compiled otherwise": Scenario(
        batches=(4, 4, 4, 4, 4, 2), steps=(3,), epochs=2, optimizer="adam", otherwise=True
    ),
    "a BatchOptimizer with a ragged last micro-batch": Scenario(
        batches=(4, 4, 4, 4, 2), steps=(3,), epochs=2, sized=True, seed=2
    ),
    # Not for JAX, but for the slow tests:
    "weights in two losses": Scenario(**TWO, reduction=MEAN, weights="random", optimizer="schedule"),
    "masks and weights": Scenario(**TOKENS, reduction=MEAN, weights="random"),
    "exact BatchNormalization": Scenario(**EXACT, layers=("norm", "dense", "norm")),
    # For PyTorch alone, but for the slow tests:
    "a chunked model of tokens": Scenario(**CHUNKED, layers=("dense",), tokens=True),
    "a chunked tower, eagerly": Scenario(**CHUNKED, layers=("dense",), whole=False, eager=True),
    "a chunked tower, compiled otherwise": Scenario(**CHUNKED, layers=("dense",), whole=False, otherwise=True),
    "exact BatchNormalization by a mask that is an argument": Scenario(**EXACT, layers=("norm by a mask", "gru")),
    "exact BatchNormalization, compiled otherwise": Scenario(**EXACT, layers=("norm", "dense"), otherwise=True),
    "train_on_batch": Scenario(**BATCHES, event="train_on_batch"),
    "several steps per execution": Scenario(**BATCHES, per_execution=2, epochs=2, metrics=True),
    "... with a loss scale around windows that end within an execution": Scenario(
        batches=(2, 4, 3, 1, 7), steps=(3,), per_execution=2, scaled="outside"
    ),
    "compiled anew": Scenario(**BATCHES, event="recompile"),
    "exact BatchNormalization in a model that is called twice, masked": Scenario(
        kind="exact", batches=(11,), masked=True, layers=("dense", "twice", "gru"), losses=("across",)
    ),
    "exact BatchNormalization called twice, frozen, and beside a branch": Scenario(
        kind="exact", batches=(11,), layers=("dense", "shared norm", "shared norm", "frozen norm", "norm and branch")
    ),
    "exact BatchNormalization with weights": Scenario(
        kind="exact", batches=(11,), masked=True, layers=("dense", "norm"), weights="random"
    ),
    "chunked layers that count their calls": Scenario(
        kind="chunked", batches=(11, 11), layers=("own", "dense", "own"), losses=("across",)
    ),
}


EVERYWHERE, NOT_FOR_JAX = [*TABLE][:3], [*TABLE][3:6]
OFTEN = EVERYWHERE + NOT_FOR_JAX * (BACKEND != "jax")
if BACKEND == "torch":  # where nothing is compiled
    TABLE = {name: scenario for name, scenario in TABLE.items() if not scenario.otherwise}


@pytest.mark.parametrize("case", [name if name in OFTEN else slow(name) for name in TABLE])
def test_training_is_plain_kerass_with(case: str, float64: float) -> None:
    assert runs.outcome(TABLE[case]) == ""


@slow_where_compiled
@pytest.mark.parametrize("kind", SLICES)
def test_some_random_runs_are_right_or_refused(kind: str, float64: float) -> None:
    scenarios = filter(sensible, (random_scenario(seed, kind) for seed in itertools.count()))
    for scenario in itertools.islice(scenarios, SLICES[kind]):
        check(scenario.seed, scenario)


@pytest.mark.fuzz
def test_random_runs_are_right_or_refused(float64: float) -> None:
    """Of one FUZZ_KIND or all."""
    counts = Counter[str]()

    def run(seed: int) -> str:
        scenario = random_scenario(seed, os.environ.get("FUZZ_KIND"))
        if not sensible(scenario):
            return ""
        counts[f"{BACKEND}, {scenario.kind}"] += 1
        return fuzzing.failed(check, seed, scenario)

    fuzzing.for_a_while(run, counts)
