"""`micro_batched`'s training step: what happens to a batch, in which order, on every backend.

A batch is cut. A look at a few rows tells what must be counted and kept; where losses divide by something other than
rows, a first pass counts it; then every micro-batch runs forward and backward, and gradients, losses and statistics add
up. One update follows, and the metrics of the whole batch.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import keras
from keras import tree

from gradaccum.core.proof import Outcome
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import (
    Spec,
    discarded,
    has_rows,
    kind_of,
    rows_of,
    unpack,
    values_of,
)  # fmt: skip
from gradaccum.keras.batch_norm import BatchNorm, batch_norms_of, warn
from gradaccum.keras.loss import Measured, update_trackers, weighed_losses
from gradaccum.keras.proof import Draws, held, outcome_of
from gradaccum.keras.train_step.auto_size import size_for_memory
from gradaccum.keras.train_step.batch_norm_pass import BatchNormPass
from gradaccum.keras.train_step.passes import Pass, Window, overrides
from gradaccum.keras.train_step.proof import Proof


@dataclass(frozen=True)
class Plan:
    """What one forward pass tells about the rest."""

    counted: dict[int, tuple[int, ...]]  # the losses, by index, that divide by something to be counted, and its shape
    dtype: str  # in which the loss is added up
    outputs: Any  # the model's, in their structure
    # Metrics see the whole batch's outputs, once per update, as in plain `fit`; or those of each micro-batch, where
    # they are sums over rows and keeping all outputs would cost more than the batch itself.
    metrics: Literal["whole", "streamed", "none"]
    tracked: int  # losses that are logged by themselves


class MicroBatchedStep:
    """Replaces `model.train_step`.

    It is found among the model's methods and nowhere else, so nothing of it is saved, cloned or serialised.
    """

    def __init__(
        self, model: Any, micro_batch_size: int | Literal["auto"], batch_norm: BatchNorm, verify: bool = True
    ) -> None:
        self.model, self.micro_batch_size, self.batch_norm = model, micro_batch_size, batch_norm
        self.backend = backends.running()
        self.training = self.backend.training(self)
        self.proof = Proof(self) if verify else None
        self.draws, self.plans = Draws(), dict[Any, Plan]()
        self.counts_first = False  # whether a first pass counts what losses divide by
        self._built: list[Any] = [self] * 3  # what the model was compiled with when it was built
        self._pass_type = Pass
        self._named, self._sizes, self._trials = set[str](), dict[str, int](), dict[Any, MicroBatchedStep]()

    # In the place of the model's own.

    def install(self) -> None:
        """Make this the model's training step."""
        warn(self.model, self.batch_norm, self._named, stacklevel=3)
        model, train_on_batch = self.model, self.model.train_on_batch
        model.train_step, model.train_function, model.make_train_function = self, None, self._make_train_function

        @functools.wraps(train_on_batch)
        def seen(x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
            rows_of((x, y, sample_weight))  # an error of its own where Keras would build the model from it, and fail
            if self.proof is not None:
                self.proof.due.see((x, y, sample_weight))
            return train_on_batch(x, y, sample_weight, *args, **kwargs)

        model.train_on_batch = seen

    def _make_train_function(self, force: bool = False) -> Any:
        """Keras' own, which `fit` and `train_on_batch` begin with, around this step."""
        model, is_new = self.model, self.model.train_function is None or force
        if self.proof is not None:
            self.proof.due.begin(is_new)
        if getattr(model.optimizer, "use_ema", False):  # a `fit` before has ended with the averages in the weights
            self.backend.separate(model.trainable_variables, model.optimizer.variables)
        if is_new:
            self._trials.clear()
            self.training.make_train_function(lambda: type(model).make_train_function(model, force=force))
        return model.train_function

    def __call__(self, *args: Any) -> Any:
        return self.training.call(*args)

    def variables(self) -> tuple[list[Any], ...]:
        """The trainable, non-trainable, optimizer's and metrics' variables."""
        model = self.model
        optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
        trained, moving = list(model.trainable_variables), list(model.non_trainable_variables)
        return trained, moving, optimizer, list(model.metrics_variables)

    def state(self) -> tuple[list[Any], ...]:
        return tuple(map(values_of, self.variables()))

    # An update.

    def update(self, data: Any) -> Any:
        """Train on a batch. Returns the logs."""
        model, window = self.model, self.window(data)
        loss = private.unscale_loss_for_distribution(window.loss)
        private.loss_tracker(model).update_state(loss, sample_weight=window.rows)
        update_trackers(model, window.tracked, window.rows)
        if model.trainable_weights:
            self.backend.apply(model.optimizer, window.gradients, model.trainable_weights)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        if window.y_pred is None:
            return model.get_metrics_result()
        x, y, sample_weight = unpack(data)
        return model.compute_metrics(x, y, window.y_pred, sample_weight=sample_weight)

    def window(self, data: Any) -> Window:
        """Run all micro-batches of a batch."""
        model, rows = self.model, rows_of(data)
        compiled = [private.compiled_losses(model), private.compiled_metrics(model), model.optimizer]
        if not all(one is other for one, other in zip(compiled, self._built)):
            self.check_states(rows)  # before TensorFlow makes variables in a trace that an error would end
            self.training.build(data)
            self.training.forget()
            warn(self.model, self.batch_norm, self._named)
            self.check_states(rows)
            self._built, self.counts_first = compiled, not self.backend.lazy_divisors
            self._pass_type = self._type_of_pass()
        size = functools.partial(self._size_for, data)
        return self.training.attempt(data, rows, size, lambda *cut: self._pass_type(self, *cut).run())

    def _type_of_pass(self) -> type[Pass]:
        """What runs the micro-batches: plain, unless BatchNormalization layers are to do something else."""
        if self.batch_norm not in ("pooled", "frozen") or not self.batch_norms:
            return Pass
        return BatchNormPass

    def check_states(self, rows: int | None) -> None:
        layers = private.stateful_layers(self.model)
        if layers and (rows is None or self.micro_batch_size == "auto" or rows > self.micro_batch_size):
            raise ValueError(
                "A batch can't be cut into micro-batches where layers keep a state of each of its rows: "
                f"{', '.join(repr(layer.name) for layer in layers)} with stateful=True. Received: micro_batch_size="
                f"{self.micro_batch_size!r} and a batch of {rows} rows. Use stateful=False, or a micro_batch_size of "
                "at least the batch's rows."
            )

    def plan(self, batches: Any) -> Plan:
        """What has to be counted and kept."""
        key = private.compiled_losses(self.model), kind_of(batches.data)
        if key not in self.plans or not self.backend.lazy_divisors:  # what is traced is traced for these shapes

            def planned(micro_batch: Any) -> Plan:
                with discarded(self.model), weighed_losses(self.model) as measured:
                    _, loss, y_pred = self.training.compute(*unpack(micro_batch))
                return self._plan_of(measured, loss, y_pred, micro_batch)

            self.plans[key] = self.training.look(planned, batches)
        return self.plans[key]

    def _plan_of(self, measured: Measured, loss: Any, y_pred: Any, micro_batch: Any) -> Plan:
        outputs, compiled = tree.flatten(y_pred), private.compiled_metrics(self.model)
        own_metrics = overrides(self.model, "compute_metrics")
        metrics: Literal["whole", "streamed", "none"] = "whole" if compiled is not None or own_metrics else "none"
        # Keras' functions reduce an output of one dimension to a scalar.
        add_up = not own_metrics and all(len(output.shape) > 1 for output in outputs)
        if compiled is not None and add_up and all(map(_adds_over_rows, compiled.metrics)):
            kept, given = _numbers_per_row(outputs), _numbers_per_row(micro_batch)
            metrics = "streamed" if kept is None or given is None or kept > given else "whole"
        dtype = keras.backend.standardize_dtype(loss.dtype)
        return Plan(
            {index: tuple(measured.divisors[index].shape) for index in sorted(measured.divisors)},
            dtype if "64" in dtype else keras.backend.floatx(),
            tree.map_structure(lambda output: Spec.of(output, self.backend.keeps_masks), y_pred),
            metrics,
            len(measured.values),
        )

    @property
    def batch_norms(self) -> list[Any]:
        return batch_norms_of(self.model)

    def _size_for(self, data: Any, rows: int | None) -> int:
        """Rows of a micro-batch at most, for a batch of so many."""
        if self.micro_batch_size != "auto":
            return self.micro_batch_size
        key = str(tree.map_structure(lambda leaf: None if leaf is None else tuple(leaf.shape), data))
        if key not in self._sizes:
            with self.backend.at_once():
                self._sizes[key] = size_for_memory(self.model, data, rows)
        return self._sizes[key]

    # For a proof.

    def outcome(self, data: Any, state: Any = None) -> Outcome:
        """What the update of this batch is made of, computed as an update computes it. Leaves everything as found."""
        with held() as draws:
            found = self.training.evaluate(data, state)
        self.draws.held |= draws.held  # on JAX seen while it is traced, and not again
        self.draws.raw |= draws.raw or self.training.drew
        return outcome_of(self.model, *found)

    def trial(self, micro_batch_size: int, batch_norm: BatchNorm) -> MicroBatchedStep:
        """The same step with other choices, not installed."""
        choices = micro_batch_size, batch_norm
        if choices not in self._trials:
            self._trials[choices] = type(self)(self.model, *choices, verify=False)
        return self._trials[choices]


def remove_step(model: Any) -> None:
    """Let a model train as it did before a step was installed; nothing where there is none."""
    if isinstance(vars(model).get("train_step"), MicroBatchedStep):
        for name in ("train_step", "make_train_function", "train_on_batch"):
            vars(model).pop(name, None)


def _adds_over_rows(metric: Any) -> bool:
    """Whether this metric's state is a sum over rows, however they are split. True of Keras' own."""
    function = private.metric_function(metric)
    return private.is_of_keras(type(metric)) and (function is None or private.is_of_keras(function))


def _numbers_per_row(leaves: Any) -> int | None:
    """How many numbers a row of these holds; None where a dimension is not known."""
    sizes = [leaf.shape[1:] for leaf in tree.flatten(leaves) if has_rows(leaf)]
    if any(number is None for size in sizes for number in size):
        return None
    return sum(math.prod(size) for size in sizes)
