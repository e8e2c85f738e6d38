"""A model's training step in micro-batches: what those of the three backends share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import keras
from keras import tree

from gradaccum.keras import batch_norm as batch_norms
from gradaccum.keras.equivalence import Outcome
from gradaccum.keras.loops import Spec
from gradaccum.keras.loss import Measured
from gradaccum.keras.private import build_symbolically, compiled_metrics, is_of_keras, metric_function
from gradaccum.keras.train_step.auto_size import fastest_size
from gradaccum.keras.train_step.data import has_rows, rows_of
from gradaccum.keras.train_step.proof import Proof

__all__ = ["MicroBatchedStep", "Plan", "remove_step"]


@dataclass(frozen=True)
class Plan:
    """What one forward pass tells about the rest.

    Attributes:
        counted: The losses whose denominators have to be counted, by index.
        loss: What the loss is: a scalar, except with `reduction=None` on TensorFlow, where it keeps its rows.
        outputs: The model's outputs, in their structure.
        metrics: `"whole"`: metrics see the whole batch's outputs, once per update, as in plain `fit`; `"streamed"`:
            they see those of each micro-batch, where the metrics are sums over rows and keeping all outputs would cost
            more than the batch itself; `"none"`: there are none.
        tracked: How many losses are logged by themselves.
        terms: Whether the loss can have other terms than one compiled loss.
    """

    counted: tuple[int, ...]
    loss: Spec
    outputs: Any
    metrics: Literal["whole", "streamed", "none"]
    tracked: int
    terms: bool


class MicroBatchedStep:
    """Replaces `model.train_step`; each backend has its own.

    It is found among the model's methods and nowhere else, so nothing of it is saved, cloned or serialised.
    """

    def __init__(
        self,
        model: Any,
        micro_batch_size: int | Literal["auto"],
        batch_norm: batch_norms.BatchNorm,
        verify: bool = True,
    ) -> None:
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.batch_norm = batch_norm
        self.proof = Proof(self) if verify else None
        self.plans: dict[Any, Plan] = {}
        self._named: set[str] = set()
        self._sizes: dict[str, int] = {}

    def install(self) -> None:
        """Make this the model's training step."""
        self._warn(stacklevel=4)
        self.model.train_step = self
        self.model.train_function = None
        self.model.make_train_function = self._make_train_function
        if self.proof is not None:
            self.model.fit = _after(self.proof.begin_fit, self.model.fit)
            self.model.reset_metrics = _after(self.proof.begin, self.model.reset_metrics)  # each epoch begins so
        self.model.train_on_batch = _checked(self.model.train_on_batch)

    def _make_train_function(self, force: bool = False) -> Any:
        """Keras' own; `fit` and `train_on_batch` begin with it."""
        if self.proof is not None:
            self.proof.begin()
        return type(self.model).make_train_function(self.model, force=force)

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def outcome(self, data: Any, state: Any = None) -> Outcome:
        """What the update of this batch is made of, computed as an update computes it. Leaves everything as found.

        Args:
            data: A batch of known rows.
            state: Values of the trainable, non-trainable, optimizer's and metrics' variables; None: their own.
        """
        raise NotImplementedError

    def trial(self, micro_batch_size: int, batch_norm: batch_norms.BatchNorm) -> MicroBatchedStep:
        """The same step with other choices, not installed."""
        return type(self)(self.model, micro_batch_size, batch_norm, verify=False)

    def state(self) -> tuple[list[Any], ...]:
        """The values of the trainable, non-trainable, optimizer's and metrics' variables."""
        return tuple([variable.value for variable in variables] for variables in self.variables())

    def variables(self) -> tuple[list[Any], ...]:
        """The trainable, non-trainable, optimizer's and metrics' variables."""
        model = self.model
        optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
        return (
            list(model.trainable_variables),
            list(model.non_trainable_variables),
            optimizer,
            list(model.metrics_variables),
        )

    @property
    def overwriting(self) -> frozenset[int]:
        """Trainable variables, by index, whose gradient is their next value, as the scales of float8 are.

        Of several micro-batches' the largest is taken: they hold maxima.
        """
        weights = self.model.trainable_variables
        return frozenset(i for i, v in enumerate(weights) if getattr(v, "overwrite_with_gradient", False))

    def eagerly(self) -> contextlib.AbstractContextManager[Any]:
        """While this is open, operations run at once, even in a function that is being traced."""
        return contextlib.nullcontext()

    def size_for(self, data: Any, rows: int | None) -> int:
        """Rows of a micro-batch at most, for a batch of so many."""
        if self.micro_batch_size != "auto":
            return self.micro_batch_size
        key = str(tree.map_structure(lambda leaf: None if leaf is None else tuple(leaf.shape), data))
        if key not in self._sizes:
            with self.eagerly():
                self._sizes[key] = fastest_size(self.model, data, rows)
        return self._sizes[key]

    @property
    def batch_norms(self) -> list[Any]:
        """The layers that `batch_norm` is about."""
        return batch_norms.batch_norms_of(self.model)

    def build(self, data: Any) -> None:
        """Build the model, its losses, metrics and optimizer, where that is still to do."""
        model = self.model
        build_symbolically(model, data)
        self._warn(stacklevel=3)

    def _warn(self, stacklevel: int) -> None:
        if self.batch_norm == "warn":
            batch_norms.warn(self.model, self._named, stacklevel)

    def plan(self, measured: Measured, y_pred: Any, loss: Any, data: Any) -> Plan:
        """What has to be counted and kept."""
        model, outputs = self.model, tree.flatten(y_pred)
        metrics: Literal["whole", "streamed", "none"]
        if _overrides(model, "compute_metrics"):
            metrics = "whole"
        elif compiled_metrics(model) is None:
            metrics = "none"
        else:
            # Keras' functions reduce an output of one dimension to a scalar.
            additive = all(map(_adds_over_rows, compiled_metrics(model).metrics)) and all(
                len(output.shape) > 1 for output in outputs
            )
            kept, held = _numbers_per_row(outputs), _numbers_per_row(data)
            metrics = "streamed" if additive and (kept is None or held is None or kept > held) else "whole"
        return Plan(
            counted=tuple(sorted(measured.divisors)),
            loss=Spec.of(loss),
            outputs=tree.map_structure(Spec.of, y_pred),
            metrics=metrics,
            tracked=len(measured.values),
            terms=len(measured.calls) != 1 or measured.added or _overrides(model, "compute_loss"),
        )


def remove_step(model: Any) -> None:
    """Let a model train as it did before a step was installed; nothing where there is none."""
    if isinstance(vars(model).get("train_step"), MicroBatchedStep):
        for name in ("train_step", "make_train_function", "fit", "reset_metrics", "train_on_batch"):
            vars(model).pop(name, None)


def _after(first: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    return both


def _checked(train_on_batch: Callable[..., Any]) -> Callable[..., Any]:
    """With an error of its own where Keras would build the model from arrays of different numbers of rows, and fail."""

    @functools.wraps(train_on_batch)
    def checked(x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        rows_of((x, y, sample_weight))
        return train_on_batch(x, y, sample_weight, *args, **kwargs)

    return checked


def _overrides(model: Any, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _adds_over_rows(metric: Any) -> bool:
    """Whether this metric's state is a sum over rows, however they are split. True of Keras' own."""
    function = metric_function(metric)
    return is_of_keras(type(metric)) and (function is None or is_of_keras(function))


def _numbers_per_row(leaves: Any) -> int | None:
    """How many numbers a row of these holds; None where a dimension is not known."""
    total = 0
    for leaf in filter(has_rows, tree.flatten(leaves)):
        number = 1
        for size in leaf.shape[1:]:
            if size is None:
                return None
            number *= size
        total += number
    return total
