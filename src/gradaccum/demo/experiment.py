"""The guide's experiment: three runs, each in a process of its own, and what they show. Imports no framework.

The network has two hidden layers of 512 ReLU units; plain SGD, learning rate 1e-3; the rows in the data set's order:

    (a)  the large batch                      64 rows per update
    (b)  accumulated, through gradaccum       64 rows per update, as 4 micro-batches of 16
    (c)  the small batch by itself            16 rows per update

A framework's side of it is one function, `train(setup, data, plan, initial, notify) -> Run`, in a module of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Literal

import numpy as np

from gradaccum.demo.data import Data
from gradaccum.demo.progress import Progress

__all__ = [
    "Epoch",
    "Notify",
    "Outcome",
    "Plan",
    "Run",
    "RunError",
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


class RunError(RuntimeError):
    """A run failed in its process; the message has that process's traceback."""


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
    """All runs, in the order of `plans`: the large batch, accumulated, the small batch."""

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


def perform(setup: Setup, data: Data, progress: Progress) -> Outcome:
    """Make the three runs, one after the other, each in a fresh process, so that none inherits another's memory.

    Raises:
        RunError: A run failed.
    """
    runs = []
    for plan in plans(setup):
        progress.start(plan.name, total=setup.epochs)
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
    context = _context(setup.framework)
    here, there = context.Pipe(duplex=False)
    port = _free_port() if plan.ranks > 1 else 0
    processes = [
        context.Process(target=_child, args=(there if rank == 0 else None, setup, data, plan, rank, port), daemon=True)
        for rank in range(plan.ranks)
    ]
    try:
        _start(processes, context)
        there.close()
        while True:
            message = here.recv()
            if isinstance(message, Run):
                return message
            if isinstance(message, str):
                raise RunError(f"Run {plan.name} failed:\n{message}")
            progress.advance(1, f"accuracy {message.accuracy:.1%}")
    except EOFError:
        processes[0].join()
        raise RunError(f"Run {plan.name} ended early, with exit code {processes[0].exitcode}.") from None
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()
        here.close()


_Context = multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext
"""How processes are started."""


def _start(processes: Sequence[multiprocessing.process.BaseProcess], context: _Context) -> None:
    """Start them deaf to Ctrl-C: a terminal sends it to all processes, and this one ends the others."""
    if context.get_start_method() == "forkserver":
        with _interrupts_blocked():
            forkserver.ensure_running()
        first = context.Process(target=_nothing, daemon=True)  # the server imports PyTorch first, for seconds
        first.start()
        first.join()
    with _interrupts_blocked():
        for process in processes:
            process.start()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C waits meanwhile. What is started meanwhile never gets it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """The work of a process that is started to see others started."""


def _context(framework: Framework) -> _Context:
    """Where fresh processes come from: a fork of this one would inherit its memory.

    PyTorch's, on Linux, are forks of one that has imported it and done nothing else: the import takes longest.
    """
    if framework != "torch" or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gradaccum.demo.torch_experiment"])
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(
    pipe: multiprocessing.connection.Connection | None, setup: Setup, data: Data, plan: Plan, rank: int, port: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    # What torchrun tells its processes; rank 0 reports for all.
    where = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": plan.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    if plan.ranks > 1:
        os.environ.update({name: str(value) for name, value in where.items()})

    def send(message: object) -> None:
        try:
            if pipe is not None:
                pipe.send(message)
        except BrokenPipeError:  # whom it is for was killed
            sys.exit(1)

    try:
        train = importlib.import_module(f"gradaccum.demo.{setup.framework}_experiment").train
        send(train(setup, data, plan, initial_parameters(data.features, setup.seed), send))
    except Exception:
        send(traceback.format_exc())
