"""Runs a scenario, and the oracle beside it. A run is right, or refused by an error of the library's own."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # before a run's time is limited: torch imports it with the first optimizer

import gradaccum
from gradaccum.errors import NotEquivalentError, WindowError
from tests.fuzz.chunked_runs import run_chunked
from tests.fuzz.problem import Gone
from tests.fuzz.scenario import Scenario
from tests.fuzz.train_step_runs import run_train_step
from tests.fuzz.wrapper_runs import run_wrapper
from tests.fuzzing import listening
from tests.reference import FLOAT32, FLOAT64

HOME = str(Path(gradaccum.__file__).parent)
LIMIT = 60
"""Seconds after which a run counts as hung."""

ALLOWED = {"float64": FLOAT64, "float32": FLOAT32, "autocast": 2e-2}
"""Relative errors. Products in bfloat16 are rounded otherwise in micro-batches."""

TIMES = 8
"""Times what the last bits of the parameters make of the oracle: up to there a difference is one of rounding."""

_RUNS: dict[str, Callable[[Scenario, int], dict[str, float]]] = {
    "chunked": run_chunked,
    "TrainStep": run_train_step,
    "wrapper": run_wrapper,
}


def outcome(scenario: Scenario, rank: int = 0) -> str:
    """`""` if the run is right, `"refused: ..."` if the library refuses it, else what is wrong."""
    with warnings.catch_warnings(), listening() as said:
        warnings.simplefilter("ignore")
        try:
            with _limited(LIMIT):
                wrong = _RUNS[scenario.kind](scenario, rank)
        except Gone:
            return "refused: it has left"
        except (WindowError, NotEquivalentError, ValueError, TypeError, NotImplementedError) as error:
            own = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(HOME)
            if own and _is_due(scenario, error):
                return f"refused: {type(error).__name__}: {str(error)[:200]}"
            return "".join(traceback.format_exception(error))
        except Exception as error:  # whatever it is, it is not an answer
            if any(word in str(error) for word in ("gloo", "pair closure")) and waits_in_vain(scenario):
                return "refused: another rank does not come, and the process group says so"
            return "".join(traceback.format_exception(error))
    unproven = scenario.loss == "across" and any("could not be proven" in line.getMessage() for line in said)
    allowed = dict.fromkeys(wrong, ALLOWED[scenario.dtype])
    if any(not error <= allowed[what] for what, error in wrong.items()):
        allowed = {what: max(most, TIMES * _rounding(scenario).get(what, 0.0)) for what, most in allowed.items()}
    what_is_wrong = "; ".join(f"{what}: {error}" for what, error in wrong.items() if not error <= allowed[what])
    if what_is_wrong and unproven:
        return "refused: it could not be proven, and that was said"
    return what_is_wrong


def waits_in_vain(scenario: Scenario) -> bool:
    """Whether a rank leaves the other one alone, or has fewer micro-batches of a sharded model."""
    epochs = [epoch for epochs in scenario.ranks for epoch in epochs]
    uneven = any(len({*map(len, pair)}) > 1 for pair in zip(*scenario.ranks))
    return any(one.event == "gone" for epoch in epochs for one in epoch) or ("fsdp2" in scenario.engine and uneven)


def _is_due(scenario: Scenario, error: Exception) -> bool:
    """Whether a run of one rank may be refused so: where rows look at each other, and where the sum was cleared."""
    if isinstance(error, NotEquivalentError) and not scenario.engine:
        return scenario.loss == "across" or scenario.kind == "chunked"
    if isinstance(error, WindowError) and not scenario.engine:
        return any(one.event == "zero_grad" for epoch in scenario.epochs for one in epoch)
    return True


@functools.lru_cache(1)
def _rounding(scenario: Scenario) -> dict[str, float]:
    """How far the oracle moves by itself where the last bits of its parameters are others, as far as that is known.

    BatchNorm over two or three rows leaves gradients that are nearly zero, of which Adam makes updates of full size.
    """
    if scenario.kind != "TrainStep" or scenario.engine or scenario.dtype != "float64":
        return {}
    with warnings.catch_warnings(), listening():
        warnings.simplefilter("ignore")
        moved = run_train_step(scenario, 0, flipped=(1, 2, 3, 5, 7))
    return {what: moved.get(what, 0.0) for what in ("parameters", "buffers", "state", "loss")}


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise where a run hangs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"The run hung for {seconds} s.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def on_rank(rank: int, scenario: Scenario) -> str:
    """`outcome` on one of several ranks."""
    return outcome(scenario, rank)
