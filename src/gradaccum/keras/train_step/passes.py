"""All micro-batches of a batch, forward and backward, and what they add up to."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import keras
from keras import ops, tree

from gradaccum.keras import private
from gradaccum.keras.backends.base import RestartWindow, Spec, times, unpack
from gradaccum.keras.loss import weighed_losses


class Window(NamedTuple):
    """What the micro-batches of a batch have added up to."""

    gradients: list[Any]
    loss: Any
    tracked: list[Any]  # each loss that is logged by itself
    y_pred: Any  # the outputs, where metrics see the whole batch's; else None
    rows: Any


class Pass:
    """All micro-batches of a batch, forward and backward, and what they add up to.

    What losses divide by is counted before; or, on a backend that runs each micro-batch by itself, taken to be in the
    rest as in the first one, and the sums are corrected in the end. If that can't be, the batch runs again.
    """

    def __init__(self, step: Any, batches: Any, gradients: Any) -> None:
        self.step, self.batches, self.gradients = step, batches, gradients
        self.model, self.plan = step.model, step.plan(batches)
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
        single = [ops.zeros((), keras.backend.floatx())] * plan.tracked
        carry = self.gradients.zeros(), ops.zeros((), plan.dtype), single, self.carried()
        specs, whole = list(self.gradients.specs), plan.metrics == "whole"
        for spec in tree.flatten(plan.outputs) if whole else ():
            specs += [spec, Spec("bool", spec.row[:1])] if spec.masked and spec.row is not None else [spec]
        threads = [*model.non_trainable_variables, *model.metrics_variables]
        (sums, loss, tracked, carried), parts = batches.run(self._micro, carry, specs, threads)
        scale = self._scale()
        self.finish(carried)
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

    # For what else is to be added up.

    def carried(self) -> list[Any]:
        """What goes from micro-batch to micro-batch beside sums and losses."""
        return []

    def with_micro_batch(self, carried: list[Any], seen: Any, size: Any) -> list[Any]:
        """The same after a micro-batch of so many rows, of whose forward pass this was `seen`."""
        return carried

    def finish(self, carried: list[Any]) -> None:
        """All micro-batches have run."""

    def _micro(self, micro_batch: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
        (sums, loss_sum, tracked, carried), plan = carry, self.plan
        _, y, sample_weight = unpack(micro_batch)
        share = _share(size, self.batches.rows)
        forward = functools.partial(self.forward, micro_batch, share)
        sums, (loss, y_pred, singles, seen), rows = self.gradients.add(sums, forward, share)
        loss = times(loss, share)
        if len(loss.shape):  # reduction=None on TensorFlow: `fit` logs the mean
            loss = times(ops.mean(loss), share)
        tracked = [total + times(one, share) for total, one in zip(tracked, singles)]
        carried = self.with_micro_batch(carried, seen, size)
        if plan.metrics == "streamed":
            private.compiled_metrics(self.model).update_state(y, y_pred, sample_weight)
        elif plan.metrics == "whole":
            for one, spec in zip(tree.flatten(y_pred), tree.flatten(plan.outputs)):
                rows += [one, private.keras_mask(one)] if spec.masked else [one]
        return (sums, loss_sum + ops.cast(loss, loss_sum.dtype), tracked, carried), rows

    def forward(self, micro_batch: Any, share: Any) -> tuple[Any, Any]:
        """The loss to differentiate; the loss, the outputs, each loss by itself, and what else is to be seen."""
        model, step = self.model, self.step
        with weighed_losses(model, share, self.totals) as measured:
            scaled, loss, y_pred = step.training.compute(*unpack(micro_batch))
        for index, count in measured.divisors.items() if step.backend.lazy_divisors else ():
            count = ops.cast(ops.stop_gradient(count), keras.backend.floatx())
            self.totals.setdefault(index, ops.where(count != 0, count, ops.ones_like(count)) / share)
            self.found[index] = self.found.get(index, 0) + count
            self.is_one_loss &= not (model.losses or count.shape) and len(measured.calls) == 1
        return scaled, (loss, y_pred, [measured.values[index] for index in range(self.plan.tracked)], None)

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


def overrides(model: Any, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)
