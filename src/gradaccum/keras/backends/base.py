"""What a backend is asked for: the interface of `on_tensorflow`, `on_jax` and `on_torch`, and what they share of it.

Functions that a backend doesn't define are those of this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from gradaccum.keras.backends.rows import Result, Spec, discarded
from gradaccum.keras.private import compute_loss, takes_training

__all__ = ["Micro", "Training"]

Micro = Callable[[Any, Any, Any], tuple[Any, list[Any]]]
"""`micro(micro-batch, its rows, carry) -> (carry, tensors to keep)`."""

keeps_masks = True
"""Whether masks come with outputs."""
lazy_divisors = False
"""Whether what a loss divides by may be found while gradients are summed. Else a first pass counts it, of which
compilers drop all that the counts don't depend on."""


class MicroBatches(Protocol):
    """A batch that is cut along its rows."""

    data: Any
    rows: Any
    """Of the batch: a number, or a tensor where only the run will tell."""

    @property
    def count(self) -> Any:
        """How many there are."""

    def of(self, data: Any) -> MicroBatches:
        """The same cut of other tensors with as many rows."""

    def at(self, index: int) -> tuple[Any, Any]:
        """The micro-batch of this number, and its rows."""

    def run(
        self, micro: Micro, carry: Any, specs: Any = (), threads: Any = (), begin: int = 0
    ) -> tuple[Any, list[Any]]:
        """Run `micro` on each from number `begin` on: a `tf.while_loop`, a `lax.scan`, a loop of Python's.

        `specs` are the kinds of what is kept. `threads` are variables that move: where a loop is a function, it takes
        their values along.
        """

    def joined(self, parts: Any, begin: int = 0) -> Any:
        """What was kept of consecutive micro-batches, in the order of the batch; zeros for those before `begin`."""

    def part(self, output: Any) -> Any:
        """What one of `at` gave, for `joined`."""


class GradientSum(Protocol):
    """Gradients of a model's trainable variables, added up in at least 32 bits; of those that are overwritten with
    their gradient, the largest."""

    specs: tuple[Spec, ...]
    """Of the rows that each micro-batch keeps for it."""

    def zeros(self) -> Any:
        """The carry before the first micro-batch."""

    def add(self, sums: Any, forward: Callable[[], Any], share: Any) -> tuple[Any, Any, list[Any]]:
        """`forward() -> (loss to differentiate, others)`: the sums with `share` of its gradient, others, kept rows."""

    def finish(self, sums: Any, kept: list[Any], scale: Any = None) -> list[Any]:
        """The gradients, times `scale` where there is one; None for those that no loss depends on."""


class Training:
    """What a training step leaves to its backend.

    - `attempt(data, rows, size, run)`: `run(micro-batches, gradient sum)`, and once more where it must start over.
    - `look(function, batches)`: what `function(micro-batch)` returns for shapes, or a few rows, without side effects.
    - `apply(gradients)`: an update.
    - `evaluate(data, state)`: loss, gradients, and the non-trainable variables before and after. Moves nothing.
    - `make_train_function(make)`: Keras' own, with the proofs before those updates that are due.
    """

    drew = False
    """Whether the batch that was evaluated last drew random numbers that nobody holds."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def call(self, *args: Any) -> Any:
        """Keras' signature of a training step."""
        return self.step.update(*args)

    def build(self, data: Any) -> None:
        """The model has been compiled."""
        self.step.build(data)

    @contextlib.contextmanager
    def counting(self, batches: Any) -> Iterator[Any]:
        """While this is open, forward passes move nothing. Yields the micro-batches."""
        with discarded(self.step.model):
            yield batches

    def compute(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Loss times the optimizer's scale, loss and outputs of a micro-batch, as `fit` computes them."""
        model = self.step.model
        y_pred = model(x, training=True) if takes_training(model) else model(x)
        loss = compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        return loss if model.optimizer is None else model.optimizer.scale_loss(loss), loss, y_pred

    def trial(self, *choices: Any) -> Any:
        """The same step with other choices, not installed."""
        return self.step.other(*choices)


class Program(Protocol):
    """A chunked layer's call on a micro-batch, as a function of what it reads."""

    weights: list[Any]
    """What it reads that may need gradients."""

    def start(self) -> Any:
        """The carry before the first micro-batch; None where what the call moves shows only in it."""

    def evaluate(self, weights: Any, carry: Any, tensors: list[Any]) -> Result:
        """The call, with other weights, if any."""


def recomputed(passes: Any, carry: Any) -> tuple[list[Any], list[Any]]:
    """What `passes.first` returns, whose gradient is that of `passes.second`."""
    raise NotImplementedError


def pullback(
    function: Callable[[list[Any]], Any], inputs: list[Any], given: list[Any], program: Program
) -> tuple[list[Any], Any]:
    """`function(inputs) -> (outputs, others)`: the gradients that `given` ones of the outputs give, and the others."""
    raise NotImplementedError


def dense(gradient: Any, tensor: Any) -> Any:
    """The gradient of a tensor of rows."""
    return gradient


unrecorded = contextlib.nullcontext
"""While this is open, nothing is recorded for gradients."""


def plainly(run: Callable[[], Any]) -> Any:
    """`run()`, not as part of a graph that can't hold it."""
    return run()


def known(tensors: list[Any]) -> bool:
    """Whether these hold numbers: not while a function is traced."""
    return True


def unprovable() -> str:
    """Where nothing can be evaluated beside what is running; empty where it can."""
    return ""


def outer_tensors(outputs: list[Any], values: list[Any], layer: Any) -> list[tuple[int, ...]]:
    """Shapes of what `outputs` pass gradients to beside `values` and a module's own parameters, unseen elsewhere."""
    return []


def compiled(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`function(values)`, compiled as quickly as possible where running it at once would compile each operation."""
    return function


def accumulate(window: Any, gradients: list[Any], rows: Any) -> None:
    """Add a micro-batch's gradients to an optimizer's window, and close it if it is full."""
    raise NotImplementedError


def close(window: Any) -> None:
    """Close the window with what it holds, outside of a compiled function."""
    raise NotImplementedError


def replica() -> Any:
    """Which replica's training step this is."""
    return 0


def place_of(optimizer: Any) -> Any:
    """Where an optimizer's variables live, if the backend has to be told."""
    return None


host = contextlib.nullcontext
"""Where the counts are kept: reading them must not wait for an accelerator."""


def beside(place: Any, variable: Any) -> Any:
    """Where the variables that go with this one are made."""
    return contextlib.nullcontext()


def total(variable: Any) -> Any:
    """A sum over all replicas."""
    return variable.value


def put(variable: Any, value: Any) -> None:
    """Let the replicas' sums add up to this."""
    variable.assign(value)
