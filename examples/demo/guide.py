"""Pictures: a batch of 64 rows against 4 micro-batches of 16. Imports no framework.

The network has two hidden layers of 512 ReLU units; plain SGD; the rows in the data set's order:

    (a)  the large batch                      64 rows per update
    (b)  accumulated, through gradaccum       64 rows per update, as 4 micro-batches of 16
    (c)  accumulated, by hand (PyTorch)       the same, with `loss / 4` and an update every 4th time

A framework's side of it is one function, `train(setup, data, plan, initial, notify) -> Run`, in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from examples.demo.data import Data
from examples.demo.processes import call
from examples.demo.progress import Progress

__all__ = [
    "Epoch",
    "Notify",
    "Outcome",
    "Plan",
    "Run",
    "Setup",
    "in_a_process",
    "initial_parameters",
    "perform",
    "plans",
]

HIDDEN = 512
CLASSES = 10

Framework = Literal["torch", "keras", "jax"]
DType = Literal["float32", "float64"]


@dataclass(frozen=True)
class Setup:
    """What the runs share.

    Args:
        framework: Whose optimizer is wrapped.
        batch_size: Rows of the large batch, a multiple of `steps`.
        steps: Micro-batches of a window.
        epochs: Passes over the rows.
        dtype: Of everything.
        learning_rate: Of plain SGD. The guide's own, 1e-3, reaches 65 % of accuracy in six epochs; this one 86 %.
        seed: Of the initial weights.
    """

    framework: Framework = "torch"
    batch_size: int = 64
    steps: int = 4
    epochs: int = 4
    dtype: DType = "float64"
    learning_rate: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size % self.steps:
            raise ValueError(
                f"The batch size must be a multiple of the steps. Received: {self.batch_size} and {self.steps}."
            )


@dataclass(frozen=True)
class Plan:
    """One run: `steps` micro-batches of `micro_batch_size` rows for each update; `by_hand`, or through gradaccum."""

    key: str
    name: str
    micro_batch_size: int
    steps: int
    by_hand: bool = False


@dataclass(frozen=True)
class Epoch:
    """After an epoch: the mean loss over the training rows as they were seen, and the test rows' loss and accuracy."""

    train_loss: float
    test_loss: float
    accuracy: float


Notify = Callable[["Epoch | float"], None]
"""What a run calls at the end of each epoch, and in between with the part of an epoch that has passed since."""


@dataclass(frozen=True)
class Run:
    """What one run gave.

    Args:
        plan: What it was.
        epochs: One entry per epoch.
        seconds: Spent training: forward, backward and update. Tests, start-up and set-up are left out.
        updates: The number of updates.
        parameters: At the end, in the order of `initial_parameters`.
        first_gradients: Of the first update, as the inner optimizer saw them, in the same order; None where the
            framework does not show them.
        peak_bytes: At the peak of a window: parameters, gradients, activations and what is made on the way.
        single_precision: Whether the framework computes some of it in float32, whatever the dtype.
    """

    plan: Plan
    epochs: Sequence[Epoch]
    seconds: float
    updates: int
    parameters: Sequence[np.ndarray]
    first_gradients: Sequence[np.ndarray] | None = None
    peak_bytes: int | None = None
    single_precision: bool = False


@dataclass(frozen=True)
class Outcome:
    """The runs: the large batch, accumulated, and in PyTorch accumulated by hand."""

    setup: Setup
    data_name: str
    data_source: str
    rows: int
    runs: Sequence[Run]

    @property
    def difference(self) -> float:
        """The largest `max|a - b| / max|a|` over the parameters of (a) and (b) at the end."""
        return self.difference_of(1)

    def difference_of(self, run: int) -> float:
        """The same for any of the runs, by its place."""
        return _difference(self.runs[0].parameters, self.runs[run].parameters)

    @property
    def gradient_difference(self) -> float | None:
        """The same for the gradients of the first update; None where the framework does not show them."""
        large, accumulated = self.runs[0].first_gradients, self.runs[1].first_gradients
        return None if large is None or accumulated is None else _difference(large, accumulated)

    @property
    def precision(self) -> DType:
        """The dtype that says how exact the runs can be."""
        return "float32" if any(run.single_precision for run in self.runs) else self.setup.dtype

    @property
    def allowed(self) -> float:
        """The bound of `difference`: 1e-12 in float64; in float32 as much for each update as for one."""
        return 1e-12 if self.precision == "float64" else self.gradient_allowed * self.runs[0].updates

    @property
    def gradient_allowed(self) -> float:
        """The bound of `gradient_difference`."""
        return 1e-12 if self.precision == "float64" else 1e-6

    @property
    def ok(self) -> bool:
        """Whether (a) and (b) are equal as far as the dtype can tell: the first update's gradient, where it is known.

        The parameters at the end decide in float64, and where there is no gradient. In float32 rounding decides now
        and then whether a ReLU fires, and over thousands of updates such differences grow in any training.
        """
        gradients = self.gradient_difference
        if gradients is None or self.precision == "float64":
            return self.difference <= self.allowed and (gradients is None or gradients <= self.gradient_allowed)
        return gradients <= self.gradient_allowed


def _difference(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """The largest over all tensors; NaN if there is one."""
    each = [np.max(np.abs(a - b)) / np.max(np.abs(a)) for a, b in zip(expected, actual, strict=True)]
    return float(np.max(each))


def plans(setup: Setup) -> list[Plan]:
    """The runs; the loop by hand is PyTorch's, as Keras and JAX users have none."""
    small = setup.batch_size // setup.steps
    runs = [
        Plan("a", f"(a) batch {setup.batch_size}", setup.batch_size, 1),
        Plan("b", f"(b) {setup.steps} x {small}, gradaccum", small, setup.steps),
    ]
    if setup.framework == "torch" and setup.steps > 1:
        runs.append(Plan("c", f"(c) {setup.steps} x {small}, by hand", small, setup.steps, by_hand=True))
    return runs


def initial_parameters(features: int, seed: int) -> list[np.ndarray]:
    """Weights of shape (in, out) and biases of the three layers, uniform in +-1/sqrt(in), in float64."""
    random = np.random.default_rng(seed)
    parameters = []
    for inputs, outputs in ((features, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)):
        bound = inputs**-0.5
        parameters += [random.uniform(-bound, bound, (inputs, outputs)), random.uniform(-bound, bound, outputs)]
    return parameters


def perform(setup: Setup, data: Data, progress: Progress) -> Outcome:
    """Make the runs, one after the other, each in a fresh process.

    Raises:
        RunError: A run failed.
    """
    runs = []
    for plan in plans(setup):
        progress.start(plan.name, total=setup.epochs)
        run = in_a_process(setup, data, plan, progress)
        progress.done(f"accuracy {run.epochs[-1].accuracy:.1%}, {run.seconds:.1f} s")
        runs.append(run)
    return Outcome(setup, data.name, data.source, len(data.train_x), runs)


def in_a_process(setup: Setup, data: Data, plan: Plan, progress: Progress) -> Run:
    """Make one run in a fresh process.

    Raises:
        RunError: It failed, or its process ended early.
    """
    passed = 0.0

    def notify(event: Any) -> None:
        nonlocal passed
        if isinstance(event, Epoch):
            progress.advance(1 - passed, f"accuracy {event.accuracy:.1%}")
            passed = 0.0
        else:
            progress.advance(event)
            passed += event

    arguments = (setup, data, plan, initial_parameters(data.features, setup.seed))
    run: Run = call(f"Run {plan.name}", f"examples.demo.guide_{setup.framework}", "train", arguments, notify)
    return run
