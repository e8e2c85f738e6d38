"""Random training runs: right, or refused by an error of the library's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests import fuzzing
from tests.fuzz import runs
from tests.fuzz.composition import random_scenario, sensible
from tests.fuzz.scenario import MicroBatch, Scenario, simpler
from tests.torch.distributed.processes import Processes, Raised

ENGINES = ("ddp", "ddp unused", "fsdp2", "nested fsdp2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    started = Processes(2, timeout=15.0)
    yield started
    started.kill()


def failure(scenario: Scenario, ranks: Processes | None = None) -> str:
    """What is wrong with a run; empty where it is right, or refused."""
    outcomes = on_ranks(scenario, ranks) if scenario.engine else [runs.outcome(scenario)]
    wrong = [what for what in outcomes if what and not what.startswith("refused")]
    if not wrong and len({*map(bool, outcomes)}) > 1:
        return f"refused on one rank only: {outcomes}"
    return next(iter(wrong), "")


def on_ranks(scenario: Scenario, ranks: Any) -> list[str]:
    try:
        results = ranks.try_run(runs.on_rank, scenario, limit=runs.LIMIT + 15)
    except AssertionError as error:  # it hung
        results = [str(error)]
    gone = "refused: its process is gone" if runs.waits_in_vain(scenario) else "its process is gone"  # gloo ended it
    results = [result.trace or gone if isinstance(result, Raised) else result for result in results]
    if any(results):
        ranks.kill()
        ranks.regroup(15.0)
    return results


def check(seed: int, scenario: Scenario, ranks: Processes | None = None) -> None:
    fuzzing.check(seed, scenario, lambda one: failure(one, ranks), simpler, sensible)


@pytest.mark.parametrize(("kind", "seeds"), [("wrapper", 450), ("TrainStep", 120), ("chunked", 40)])
def test_some_random_runs_are_right_or_refused(kind: str, seeds: int) -> None:
    """Loaders, schedules, checkpoints, overflows, losses by name, groups, memory: hardly any has another test."""
    for seed in range(seeds):
        scenario = random_scenario(seed, kind)
        if sensible(scenario):
            check(seed, scenario)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_random_run_of_two_ranks_is_right_or_refused(engine: str, ranks: Processes) -> None:
    for seed in range(2):
        scenario = random_scenario(seed, "wrapper" if seed else "TrainStep", engine)
        if sensible(scenario):
            check(seed, scenario, ranks)


ONE, NOTHING, SAVED = MicroBatch(), MicroBatch(weight=0.0), MicroBatch(event="save")
NOTICED = {  # of a sum that is cleared, and one more micro-batch
    "its unit changes": {"last": MicroBatch(rows=1), "way": "batches"},
    "it weighs nothing": {"last": NOTHING},
    "it weighs nothing under batches()": {"last": NOTHING, "way": "batches"},
    "the GradScaler's scale changes": {"last": ONE, "scaler": 3},
}


@pytest.mark.parametrize("found", NOTICED.values(), ids=NOTICED)
def test_a_cleared_sum_that_was_found_unnoticed_is_noticed(found: dict[str, Any]) -> None:
    settings = {**found}
    epoch = MicroBatch(event="zero_grad"), settings.pop("last")
    assert "cleared or replaced" in runs.outcome(Scenario(epochs=(epoch,), **settings))


def split(*batches: MicroBatch, **settings: Any) -> Scenario:
    return Scenario(kind="TrainStep", epochs=(batches,), **settings)


NO_PASS = (ONE, MicroBatch(event="no pass"))
EXACT = {
    "a sum that is saved inside a window": Scenario(epochs=((SAVED, MicroBatch(rows=3)),), loss="sum"),
    "a sum that is weighed in one epoch": Scenario(
        epochs=((ONE,), (MicroBatch(weight=0.5),)), way="batches", loss="sum"
    ),
    "unscale_ after a scale that moved without a pass": Scenario(epochs=(NO_PASS,), way="plain", scaler=-1),
    "gradients by torch.func in a scale that has changed": Scenario(
        epochs=((ONE, MicroBatch(event="by hand"), ONE),), way="plain", scaler=-1, steps=3
    ),
    "the loss where unscale_ has divided": Scenario(epochs=((ONE,) * 2,), scaler=3),
    "an overflow in a window that is saved": Scenario(
        epochs=((MicroBatch(event="inf"), SAVED, ONE, ONE),), scaler=1000, steps=3
    ),
    "a loader that goes on from its own state": Scenario(
        seed=1, epochs=((SAVED, MicroBatch(rows=3), ONE),), way="batches", loader="stateful"
    ),
    "an overflow of a batch that is split": split(ONE, MicroBatch(event="inf"), ONE, scaler=1000, clip=0.05),
    "losses by name beside exact statistics": split(*(MicroBatch(rows=8),) * 2, seed=2, loss="names", norm="exact"),
    **{
        f"losses by name of which some rows and batches have none, blocks={blocks!r}": split(
            MicroBatch(rows=5), *(MicroBatch(rows=1),) * 3, seed=17, loss="names", micro=1, blocks=blocks
        )
        for blocks in ("", "after_backward")
    },
}


@pytest.mark.parametrize("scenario", EXACT.values(), ids=EXACT)
def test_what_was_found_is_exact(scenario: Scenario) -> None:
    assert runs.outcome(scenario) == ""


def test_what_rounding_makes_of_the_oracle_itself_is_no_error_and_more_is() -> None:
    epochs, trained = ((ONE, MicroBatch(rows=3), ONE),), {"optimizer": "adamw", "norm": "exact"}
    two_rows = Scenario(seed=298, kind="TrainStep", micro=1, epochs=epochs, **trained)
    assert max(runs.run_train_step(two_rows, 0).values()) > 1e-12
    assert runs.outcome(two_rows) == ""
    wrong = lambda scenario, rank: {name: 1e-9 for name in ("parameters", "undone")}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(runs._RUNS, "TrainStep", wrong)
        assert "parameters" in runs.outcome(two_rows)
        assert "undone" in runs.outcome(two_rows)


def pair(own: list[MicroBatch], others: list[MicroBatch], engine: str = "ddp", **settings: Any) -> Scenario:
    """An epoch on two ranks. Weight decay moves what has a gradient of 0, and leaves what no rank uses, without one."""
    settings |= {"optimizer": "adamw"} if "unused" in engine else {"way": "batches backward"} if "ddp" in engine else {}
    return Scenario(epochs=(tuple(own),), others=(tuple(others),), engine=engine, **settings)


UNUSED = "ddp unused"
FOUND_ON_RANKS = {
    "a late backward pass fills what no rank uses": pair([ONE] * 6, [ONE] * 6, UNUSED, losses=2),
    "a late backward pass beside a rank that weighs nothing": pair([ONE], [NOTHING], UNUSED, way="batches", losses=2),
    "a first micro-batch that weighs nothing on one rank": pair([ONE] * 2, [NOTHING, ONE], UNUSED, sync="micro_batch"),
    "a last micro-batch that weighs nothing on one rank": pair(
        [ONE] * 3, [ONE, ONE, NOTHING], UNUSED, sync="micro_batch"
    ),
    "a window that is saved between its reductions": pair(
        [SAVED, ONE], [SAVED, ONE], UNUSED, sync="micro_batch", steps=4
    ),
    "several backward passes, the first that one rank has any in": pair(
        [ONE] * 3, [NOTHING, ONE, ONE], losses=2, steps=1
    ),
    "several backward passes in windows that go on from a checkpoint": pair(
        [SAVED, SAVED, ONE, ONE, ONE], [SAVED, SAVED, ONE], losses=2
    ),
    "a second forward pass after the reduction beside a rank that weighs nothing": pair([ONE], [NOTHING], losses=2),
    "a sharded head that was used before the window was saved, and not after": pair(
        [SAVED, ONE], [MicroBatch(event="save", head=1), ONE], "fsdp2"
    ),
    "a noise scale of windows that one rank only takes part in": pair([ONE], [ONE] * 4, noise=True),
}


@pytest.mark.parametrize("scenario", FOUND_ON_RANKS.values(), ids=FOUND_ON_RANKS)
def test_what_was_found_on_ranks_is_exact(scenario: Scenario, ranks: Processes) -> None:
    assert on_ranks(scenario, ranks) == ["", ""]


@pytest.mark.fuzz
def test_random_runs_are_right_or_refused(ranks: Processes) -> None:
    """Every eighth run on two ranks."""
    counts = Counter[str]()

    def run(seed: int) -> str:
        engine = ENGINES[seed // 8 % len(ENGINES)] if seed % 8 == 0 else ""
        kind = ("wrapper", "TrainStep")[seed // 32 % 2] if engine else None
        scenario = random_scenario(seed, kind, engine)
        if not sensible(scenario):
            return ""
        counts[scenario.engine or scenario.kind] += 1
        return fuzzing.failed(check, seed, scenario, ranks)

    fuzzing.for_a_while(run, counts)
