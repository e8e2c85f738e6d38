"""`micro_batched`'s training step: what happens to a batch, in which order, on every backend.

A batch is cut. A look at a few rows tells what must be counted and kept; where losses divide by something other than
rows, a first pass counts it; then every micro-batch runs forward and backward, and gradients, losses and statistics add
up. One update follows, and the metrics of the whole batch.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.proof import Outcome
from gradaccum.core.sizes import MARGIN, WORSE, fastest_size, process_memory, seconds_of
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import (
    RestartWindow,
    Spec,
    assign,
    copies_of,
    discarded,
    has_rows,
    kind_of,
    rows_of,
    times,
    unpack,
    values_of,
)  # fmt: skip
from gradaccum.keras.batch_norm import BatchNorm, Pool, batch_norms_of, during_micro_batch, warn
from gradaccum.keras.equivalence import Draws, held, outcome_of
from gradaccum.keras.loss import Measured, divisors_of, update_trackers, weighed_losses
from gradaccum.keras.train_step.proof import Proof

logger = logging.getLogger("gradaccum")

_UNKNOWN_ROWS, _UNKNOWN_DIMENSION = 4096, 128
"""Rows to try at most where TensorFlow doesn't know the batch's while it traces, and what stands in for another
dimension that is not known, such as the length of sequences."""
_OUT_OF_MEMORY = "resource_exhausted", "resourceexhausted", "memory", "oom"


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


class Window(NamedTuple):
    """What the micro-batches of a batch have added up to."""

    gradients: list[Any]
    loss: Any
    tracked: list[Any]  # each loss that is logged by itself
    y_pred: Any  # the outputs, where metrics see the whole batch's; else None
    rows: Any


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
                self.proof.see((x, y, sample_weight))
            return train_on_batch(x, y, sample_weight, *args, **kwargs)

        model.train_on_batch = seen

    def _make_train_function(self, force: bool = False) -> Any:
        """Keras' own, which `fit` and `train_on_batch` begin with, around this step."""
        model, is_new = self.model, self.model.train_function is None or force
        if self.proof is not None:
            self.proof.begin(is_new)
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
        size = functools.partial(self._size_for, data)
        return self.training.attempt(data, rows, size, lambda *cut: _Pass(self, *cut).run())

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
                self._sizes[key] = _size_for_memory(self.model, data, rows)
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


class _Pass:
    """All micro-batches of a batch, forward and backward, and what they add up to.

    What losses divide by is counted before; or, on a backend that runs each micro-batch by itself, taken to be in the
    rest as in the first one, and the sums are corrected in the end. If that can't be, the batch runs again.
    """

    def __init__(self, step: MicroBatchedStep, batches: Any, gradients: Any) -> None:
        self.step, self.batches, self.gradients = step, batches, gradients
        self.model, self.plan, self.layers = step.model, step.plan(batches), step.batch_norms
        self.pool = Pool(self.layers if step.batch_norm == "pooled" else [])
        self.totals = self._counted() if self.plan.counted and step.counts_first else dict[int, Any]()
        self.found: dict[int, Any] = {}  # what the losses of the micro-batches did divide by
        self.is_one_loss = not overrides(self.model, "compute_loss")

    def _counted(self) -> dict[int, Any]:
        """What the losses divide by: a forward pass over all rows, without side effects."""
        counted = self.plan.counted

        def micro(micro_batch: Any, size: Any, totals: Any) -> tuple[Any, list[Any]]:
            with weighed_losses(self.model) as measured:
                self.step.training.compute(*unpack(micro_batch))
            return [total + measured.divisors[index] for total, index in zip(totals, counted)], []

        zeros = [ops.zeros(shape, keras.backend.floatx()) for shape in counted.values()]
        threads = self.model.non_trainable_variables
        totals, _ = self.step.training.counted(self.batches, lambda cut: cut.run(micro, zeros, threads=threads))
        return dict(zip(counted, totals))

    def run(self) -> Window:
        plan, model, batches = self.plan, self.model, self.batches
        before = copies_of(self.pool.variables)
        single = [ops.zeros((), keras.backend.floatx())] * plan.tracked
        carry = self.gradients.zeros(), ops.zeros((), plan.dtype), single, self.pool.zeros()
        specs, whole = list(self.gradients.specs), plan.metrics == "whole"
        for spec in tree.flatten(plan.outputs) if whole else ():
            specs += [spec, Spec("bool", spec.row[:1])] if spec.masked and spec.row is not None else [spec]
        threads = [*model.non_trainable_variables, *model.metrics_variables]
        (sums, loss, tracked, pooled), parts = batches.run(self._micro, carry, specs, threads)
        scale = self._scale()
        assign(self.pool.variables, self.pool.moved(pooled, before))
        rows, own = [batches.joined([part]) for part in parts], len(self.gradients.specs)
        queue = iter(rows[own:])

        def taken(spec: Spec) -> Any:
            tensor = next(queue)
            if spec.masked:  # the mask comes behind it
                private.set_keras_mask(tensor, next(queue))
            return tensor

        outputs = tree.map_structure(taken, plan.outputs) if whole else None
        gradients = self.gradients.finish(sums, rows[:own], scale)
        return Window(gradients, loss if scale is None else loss * scale, tracked, outputs, batches.rows)

    def _micro(self, micro_batch: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
        (sums, loss_sum, tracked, pooled), plan = carry, self.plan
        _, y, sample_weight = unpack(micro_batch)
        share = _share(size, self.batches.rows)
        forward = functools.partial(self._forward, micro_batch, share)
        sums, (loss, y_pred, singles, valid), rows = self.gradients.add(sums, forward, share)
        loss = times(loss, share)
        if len(loss.shape):  # reduction=None on TensorFlow: `fit` logs the mean
            loss = times(ops.mean(loss), share)
        tracked = [total + times(one, share) for total, one in zip(tracked, singles)]
        pooled = self.pool.add(pooled, values_of(self.pool.variables), valid, size)
        if plan.metrics == "streamed":
            private.compiled_metrics(self.model).update_state(y, y_pred, sample_weight)
        elif plan.metrics == "whole":
            for one, spec in zip(tree.flatten(y_pred), tree.flatten(plan.outputs)):
                rows += [one, private.keras_mask(one)] if spec.masked else [one]
        return (sums, loss_sum + ops.cast(loss, loss_sum.dtype), tracked, pooled), rows

    def _forward(self, micro_batch: Any, share: Any) -> tuple[Any, Any]:
        """The loss to differentiate; the loss, the outputs, each loss by itself, and what BatchNorm's masks let by."""
        model, step = self.model, self.step
        with (
            during_micro_batch(self.layers, step.batch_norm) as valid,
            weighed_losses(model, share, self.totals) as measured,
        ):
            scaled, loss, y_pred = step.training.compute(*unpack(micro_batch))
        for index, count in measured.divisors.items() if step.backend.lazy_divisors else ():
            count = ops.cast(ops.stop_gradient(count), keras.backend.floatx())
            self.totals.setdefault(index, ops.where(count != 0, count, ops.ones_like(count)) / share)
            self.found[index] = self.found.get(index, 0) + count
            self.is_one_loss &= not (model.losses or count.shape) and len(measured.calls) == 1
        return scaled, (loss, y_pred, [measured.values[index] for index in range(self.plan.tracked)], valid)

    def _scale(self) -> Any:
        """What gradients and loss are still to be multiplied by; None: nothing."""
        if self.is_one_loss and self.found:
            ((index, total),) = self.found.items()
            ratio = self.totals[index] / ops.where(total != 0, total, ops.ones_like(total))
            return ops.where(total != 0, ratio, ops.zeros_like(ratio))
        close = 1e-12 if keras.backend.floatx() == "float64" else 1e-6
        if any(bool(ops.any(ops.abs(self.totals[i] - n) > close * ops.abs(n))) for i, n in self.found.items()):
            self.step.counts_first = True
            raise RestartWindow
        return None


def _share(size: Any, rows: Any) -> Any:
    """Of the rows: a number, or a tensor where a number of rows is one."""
    if isinstance(size, int) and isinstance(rows, int):
        return size / rows
    return ops.cast(size, keras.backend.floatx()) / ops.cast(rows, keras.backend.floatx())


def remove_step(model: Any) -> None:
    """Let a model train as it did before a step was installed; nothing where there is none."""
    if isinstance(vars(model).get("train_step"), MicroBatchedStep):
        for name in ("train_step", "make_train_function", "train_on_batch"):
            vars(model).pop(name, None)


def overrides(model: Any, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)


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


# micro_batch_size="auto" where the update is compiled as a whole: measured beforehand.


def _size_for_memory(model: Any, data: Any, rows: int | None) -> int:
    """The rows with which micro-batches are about the fastest, of those that fit into memory.

    A few sizes are tried, each with a forward and backward pass over zeros in the shapes of `data`, compiled as the
    model is. What they need is what XLA states on JAX, and what the process took on TensorFlow.
    """
    most, free = _UNKNOWN_ROWS if rows is None else rows, backends.running().free_memory()
    limit = float("inf") if free is None else (1 - MARGIN) * free
    base = process_memory()["VmHWM"]  # the most bytes ever in use

    def trial(size: int) -> tuple[float, float | None]:
        seconds = needed = None
        try:
            run, needed = _gradient(model, data, size)
            if needed is None or needed <= limit or size == 1:
                seconds = seconds_of(run) * most / size
        except Exception as error:
            said = f"{type(error).__name__} {error}".lower()
            if size == 1 or all(sign not in said for sign in _OUT_OF_MEMORY):
                raise
        return process_memory()["VmHWM"] - base if needed is None else needed, seconds

    _, _, seconds = fastest_size(most, trial, limit)
    # What an update does once per micro-batch isn't measured.
    best = max(size for size, taken in seconds.items() if taken <= WORSE * min(seconds.values()))
    logger.info("micro_batch_size='auto': %d of %s rows.", best, "any number of" if rows is None else rows)
    return best


def _gradient(model: Any, data: Any, size: int) -> tuple[Callable[[], Any], float | None]:
    """One gradient of a micro-batch, ready to run, and the bytes that it needs, where the compiler says."""
    backend = backends.running()

    def zeros(leaf: Any) -> Any:
        if leaf is None:
            return None
        shape = [size, *leaf.shape[1:]] if has_rows(leaf) else []
        known = [_UNKNOWN_DIMENSION if number is None else number for number in shape]
        return ops.convert_to_tensor(np.zeros(known, keras.backend.standardize_dtype(leaf.dtype)))

    def gradients(state: Any, batch: Any) -> Any:
        def loss_of(values: Any) -> Any:
            return ops.sum(divisors_of(model, (values, *state[1:]), *unpack(batch))[1]), None

        return backend.value_and_gradients(loss_of, state[0])

    variables = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
    state = [[ops.zeros(v.shape, v.dtype) for v in part] for part in variables]
    return backend.prepared(gradients, (state, tree.map_structure(zeros, data)), model)
