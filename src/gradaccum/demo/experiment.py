"""The guide's experiment: three runs, each in a process of its own, and what they show. Imports no framework.

The network has two hidden layers of 512 ReLU units; plain SGD, learning rate 1e-3; the rows in the data set's order:

    (a)  the large batch                      64 rows per update
    (b)  accumulated, through gradaccum       64 rows per update, as 4 micro-batches of 16
    (c)  the small batch by itself            16 rows per update

A framework's side of it is one function, `train(setup, data, plan, initial, notify) -> Run`, in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradaccum.demo.data import Data
from gradaccum.demo.processes import Work, call
from gradaccum.demo.progress import Progress

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
Notify = Callable[["Epoch"], None]
"""What a run calls at the end of each epoch."""


@dataclass(frozen=True)
class Setup:
    """What all three runs share.

    Args:
        framework: Whose optimizer is wrapped.
        batch_size: Rows of the large batch, a multiple of `steps`.
        steps: Micro-batches of a window.
        epochs: Passes over the rows.
        dtype: Of everything.
        learning_rate: Of plain SGD.
        seed: Of the initial weights.
        ranks: Processes that run (b) together, each of them a part of every window.
    """

    framework: Framework = "torch"
    batch_size: int = 64
    steps: int = 4
    epochs: int = 6
    dtype: DType = "float32"
    learning_rate: float = 1e-3
    seed: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.steps:
            raise ValueError(
                f"The batch size must be a multiple of the steps. Received: {self.batch_size} and {self.steps}."
            )
        if self.steps % self.ranks:
            raise ValueError(f"The steps must be a multiple of the ranks. Received: {self.steps} and {self.ranks}.")


@dataclass(frozen=True)
class Plan:
    """One run: on each of the ranks, `steps` micro-batches of `micro_batch_size` rows for each update."""

    key: str
    name: str
    micro_batch_size: int
    steps: int
    ranks: int = 1


@dataclass(frozen=True)
class Epoch:
    """After an epoch: the mean loss over the training rows as they were seen, and what the test rows say."""

    train_loss: float
    test_loss: float
    accuracy: float


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
        activation_bytes: Of a micro-batch's rows and all that its forward pass keeps for the backward pass; None where
            the framework cannot tell.
        peak_bytes: At the peak of a window: parameters, gradients, activations and what is made on the way.
        single_precision: Whether the framework computes some of it in float32, whatever the dtype.
    """

    plan: Plan
    epochs: Sequence[Epoch]
    seconds: float
    updates: int
    parameters: Sequence[np.ndarray]
    first_gradients: Sequence[np.ndarray] | None = None
    activation_bytes: int | None = None
    peak_bytes: int | None = None
    single_precision: bool = False


@dataclass(frozen=True)
class Outcome:
    """The runs, in the order of `plans`: the large batch, accumulated and, if it was made, the small batch."""

    setup: Setup
    data_name: str
    data_source: str
    rows: int
    runs: Sequence[Run]

    @property
    def difference(self) -> float:
        """The largest `max|a - b| / max|a|` over the parameters of (a) and (b) at the end."""
        return _difference(self.runs[0].parameters, self.runs[1].parameters)

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
        """What `difference` may be: 1e-12 in float64; in float32 as much for each update as for one."""
        return 1e-12 if self.precision == "float64" else self.gradient_allowed * self.runs[0].updates

    @property
    def gradient_allowed(self) -> float:
        """What `gradient_difference` may be."""
        return 1e-12 if self.precision == "float64" else 1e-6

    @property
    def ok(self) -> bool:
        """Whether (a) and (b) are equal as far as the dtype can tell. NaN is not."""
        gradients = self.gradient_difference
        return self.difference <= self.allowed and (gradients is None or gradients <= self.gradient_allowed)


def _difference(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """The largest over all tensors; NaN if there is one."""
    each = [np.max(np.abs(a - b)) / np.max(np.abs(a)) for a, b in zip(expected, actual, strict=True)]
    return float(np.max(each))


def plans(setup: Setup) -> list[Plan]:
    """The three runs."""
    small, steps = setup.batch_size // setup.steps, setup.steps // setup.ranks
    name = f"{steps} x batch {small}" if setup.ranks == 1 else f"{setup.ranks} ranks x {steps} x batch {small}"
    return [
        Plan("a", f"(a) batch {setup.batch_size}", setup.batch_size, 1),
        Plan("b", f"(b) {name}", small, steps, setup.ranks),
        Plan("c", f"(c) batch {small}", small, 1),
    ]


def initial_parameters(features: int, seed: int) -> list[np.ndarray]:
    """Weights of shape (in, out) and biases of the three layers, uniform in +-1/sqrt(in), in float64."""
    random = np.random.default_rng(seed)
    parameters = []
    for inputs, outputs in ((features, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)):
        bound = inputs**-0.5
        parameters += [random.uniform(-bound, bound, (inputs, outputs)), random.uniform(-bound, bound, outputs)]
    return parameters


def perform(setup: Setup, data: Data, progress: Progress, *, keys: str = "abc") -> Outcome:
    """Make the runs with these `keys`, one after the other, each in a fresh process: none inherits another's memory.

    Raises:
        RunError: A run failed.
    """
    runs = []
    for plan in (plan for plan in plans(setup) if plan.key in keys):
        progress.start(plan.name if keys == "abc" else f"{plan.name}, {setup.dtype}", total=setup.epochs)
        run = in_a_process(setup, data, plan, progress)
        last = run.epochs[-1]
        progress.done(f"accuracy {last.accuracy:.1%}, {run.seconds:.1f} s")
        runs.append(run)
    return Outcome(setup, data.name, data.source, len(data.train_x), runs)


def in_a_process(setup: Setup, data: Data, plan: Plan, progress: Progress) -> Run:
    """Make one run in a fresh process; where its plan has several ranks, in one for each.

    Raises:
        RunError: It failed, or its process ended early.
    """
    work = Work(
        f"gradaccum.demo.{setup.framework}_experiment",
        "train",
        (setup, data, plan, initial_parameters(data.features, setup.seed)),
    )
    run: Run = call(
        f"Run {plan.name}",
        work,
        lambda epoch: progress.advance(1, f"accuracy {epoch.accuracy:.1%}"),
        ranks=plan.ranks,
        of_torch=setup.framework == "torch",
    )
    return run
