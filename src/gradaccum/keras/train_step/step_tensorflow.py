"""The training step on TensorFlow: a `tf.while_loop` over the micro-batches, inside the function that `fit` traces."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from gradaccum.keras.batch_norm import Pool, during_micro_batch
from gradaccum.keras.equivalence import Outcome, as_array, held
from gradaccum.keras.loops import Spec
from gradaccum.keras.loops.loop_tensorflow import Cut
from gradaccum.keras.loss import divisors_of, update_trackers, weighed_losses
from gradaccum.keras.private import (
    compiled_metrics,
    compute_loss,
    embedding_table,
    keras_mask,
    layers_in,
    loss_tracker,
    set_keras_mask,
    takes_training,
    unscale_loss_for_distribution,
)
from gradaccum.keras.train_step.data import rows_of, unpack
from gradaccum.keras.train_step.step import MicroBatchedStep, Plan

__all__ = ["TensorFlowStep"]


class _Window(NamedTuple):
    """What the micro-batches of a batch have added up to."""

    gradients: list[Any]
    loss: Any
    tracked: list[Any]
    y_pred: Any
    rows: Any
    whole_metrics: bool
    """Whether metrics see the whole batch's outputs."""


class TensorFlowStep(MicroBatchedStep):
    """`model.train_step` on TensorFlow."""

    def __call__(self, data: Any) -> Any:
        model = self.model
        window = self._window(data)
        loss_tracker(model).update_state(unscale_loss_for_distribution(window.loss), sample_weight=window.rows)
        update_trackers(model, window.tracked, window.rows)
        if model.trainable_weights:
            model.optimizer.apply_gradients(zip(window.gradients, model.trainable_weights))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        if not window.whole_metrics:
            return model.get_metrics_result()
        x, y, sample_weight = unpack(data)
        return model.compute_metrics(x, y, window.y_pred, sample_weight=sample_weight)

    def outcome(self, data: Any, state: Any = None) -> Outcome:
        """What the update of this batch is made of, computed as an update computes it. Leaves everything as found."""
        self.build(data)
        variables = [variable for part in self.variables() for variable in part]
        found = [tf.identity(variable.value) for variable in variables]
        try:
            if state is not None:
                _assign(variables, [value for part in state for value in part])
            before = list(map(as_array, self.model.non_trainable_variables))
            with held() as draws:
                window = self._window(data)
            after = list(map(as_array, self.model.non_trainable_variables))
        finally:
            _assign(variables, found)
        gradients = [
            None if gradient is None else as_array(tf.convert_to_tensor(gradient)) for gradient in window.gradients
        ]
        return Outcome(self.model, as_array(tf.reduce_sum(window.loss)), gradients, before, after, draws)

    def _window(self, data: Any) -> _Window:
        """Run all micro-batches."""
        rows = rows_of(data)
        self.build(data)
        cut = Cut(data, rows, self.size_for(data, rows), static=self.model.jit_compile)
        plan = self._plan(cut)
        totals = self._counted(cut, plan) if plan.counted else None
        pool = Pool(self.batch_norms) if self.batch_norm == "pooled" else None
        before = [] if pool is None else [tf.identity(variable.value) for variable in pool.variables]
        sparse = _embeddings(self.model.trainable_weights, self.model)
        while True:
            try:
                gradients, loss, tracked, pooled, y_pred = self._accumulated(cut, plan, totals, pool, sparse)
                break
            except _SparseGradientsError as found:  # shows while the loop is traced: trace it once more
                sparse = found.indices
        if pool is not None:
            for variable, value in zip(pool.variables, pool.moved(pooled, before)):
                variable.assign(value)
        return _Window(gradients, loss, tracked, y_pred, cut.rows, plan.metrics == "whole")

    def _make_train_function(self, force: bool = False) -> None:
        """Keras' own, behind a look at each batch before it is trained on.

        So batches are drawn here, not in the graph, which takes as long.
        """
        model, proof = self.model, self.proof
        made = model.train_function
        super()._make_train_function(force)
        if model.train_function is made:
            return
        step: Callable[[Any], Any] = model.train_function

        def guarded(iterator: Any) -> Any:
            batches = [next(iterator), *itertools.islice(iterator, model.steps_per_execution - 1)]
            for batch in batches:
                batch = tree.map_structure(_of_all_replicas, batch)
                rows_of(batch)  # in a graph, another number of rows would be an error of TensorFlow's
                if proof is not None:
                    proof.run(batch)
            result = step(iter(batches))
            if proof is not None:
                proof.say()
            return result

        model.train_function = guarded

    def eagerly(self) -> contextlib.AbstractContextManager[Any]:
        """While this is open, operations run at once, even in a function that is being traced."""
        return tf.init_scope()

    def _plan(self, cut: Cut) -> Plan:
        with tf.__internal__.FuncGraph("gradaccum_plan").as_default():
            micro_batch = cut.take(0, cut.size)
            _, measured, y_pred, loss = divisors_of(self.model, self._state(), *unpack(micro_batch))
        return self.plan(measured, y_pred, loss, micro_batch)

    def _counted(self, cut: Cut, plan: Plan) -> dict[int, Any]:
        # What the counts don't depend on is stateless, and pruned from the graph.
        trainable, non_trainable, metrics = self._state()

        def micro(start: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
            non_trainable, totals = carry
            state = (trainable, non_trainable, metrics)
            non_trainable, measured, _, _ = divisors_of(self.model, state, *unpack(cut.take(start, size)))
            return (non_trainable, [total + measured.divisors[j] for total, j in zip(totals, plan.counted)]), []

        zeros = [tf.zeros((), keras.backend.floatx()) for _ in plan.counted]
        (_, totals), _ = cut.loop(micro, (non_trainable, zeros), [])
        return dict(zip(plan.counted, totals))

    def _state(self) -> list[list[Any]]:
        model = self.model
        parts = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        return [[tf.convert_to_tensor(variable.value) for variable in variables] for variables in parts]

    def _accumulated(
        self, cut: Cut, plan: Plan, totals: dict[int, Any] | None, pool: Pool | None, sparse: frozenset[int]
    ) -> tuple[list[Any], Any, list[Any], Any, Any]:
        """Run all micro-batches: sums of gradients, the loss, the single losses, the pooled statistics, the outputs.

        Sparse gradients aren't summed but put one behind the other, as they would be for the whole batch: Keras'
        optimizers don't treat them like the dense gradient they stand for, where a row occurs twice.
        """
        model, layers = self.model, self.batch_norms
        weights = model.trainable_weights
        missing: set[int] = set()
        overwriting = self.overwriting
        kept = [
            spec
            for i in sorted(sparse)
            for spec in (Spec(weights[i].dtype, tuple(weights[i].shape[1:]), False), _INDEX)
        ]
        keeps_outputs = plan.metrics == "whole"
        for spec in tree.flatten(plan.outputs) if keeps_outputs else []:
            kept += [spec, Spec("bool", spec.row[:1], False)] if spec.masked else [spec]
        if plan.loss.row is not None:
            kept.append(plan.loss)

        def micro(start: Any, size: Any, carry: Any) -> tuple[Any, list[Any]]:
            dense, loss_sum, tracked, pooled = carry
            x, y, sample_weight = unpack(cut.take(start, size))
            share = tf.cast(size, keras.backend.floatx()) / tf.cast(cut.rows, keras.backend.floatx())
            with tf.GradientTape() as tape:
                with during_micro_batch(layers, self.batch_norm) as seen:
                    y_pred = model(x, training=True) if takes_training(model) else model(x)
                with weighed_losses(model, share, totals) as measured:
                    loss = compute_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
                part = loss * tf.cast(share, loss.dtype)
                scaled = part if model.optimizer is None else model.optimizer.scale_loss(part)
            gradients = tape.gradient(scaled, weights)
            found = frozenset(i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices))
            if found != sparse:
                raise _SparseGradientsError(found)
            missing.update(i for i, gradient in enumerate(gradients) if gradient is None)
            joined = [tf.maximum if i in overwriting else tf.add for i in range(len(weights))]
            dense = [
                total if gradient is None or i in sparse else joined[i](total, tf.cast(gradient, total.dtype))
                for i, (total, gradient) in enumerate(zip(dense, gradients))
            ]
            tracked = [total + measured.values[j] * tf.cast(share, total.dtype) for j, total in enumerate(tracked)]
            if pool is not None:
                statistics = [tf.convert_to_tensor(variable.value) for variable in pool.variables]
                pooled = pool.add(pooled, statistics, seen.valid, size)
            if plan.metrics == "streamed":
                compiled_metrics(model).update_state(y, y_pred, sample_weight)
            rows = [tensor for i in sorted(sparse) for tensor in (gradients[i].values, gradients[i].indices)]
            for output in tree.flatten(y_pred) if keeps_outputs else []:
                mask = keras_mask(output)
                rows += [output] if mask is None else [output, mask]
            if plan.loss.row is None:
                loss_sum += tf.cast(part, loss_sum.dtype)
            else:
                rows.append(part)
            return (dense, loss_sum, tracked, pooled), rows

        zeros = [tf.zeros(() if i in sparse else weight.shape, _wide(weight.dtype)) for i, weight in enumerate(weights)]
        tracked = [tf.zeros((), keras.backend.floatx())] * plan.tracked
        carry = (zeros, tf.zeros((), plan.loss.dtype), tracked, [] if pool is None else pool.zeros())
        (gradients, loss, tracked, pooled), rows = cut.loop(micro, carry, kept)
        gradients = [None if i in missing else gradient for i, gradient in enumerate(gradients)]
        queue = iter(rows)
        for i in sorted(sparse):
            gradients[i] = tf.IndexedSlices(next(queue), next(queue), tf.constant(tuple(weights[i].shape), tf.int64))
        y_pred = None
        if keeps_outputs:
            y_pred = tree.map_structure(
                lambda spec: _with_mask(next(queue), next(queue) if spec.masked else None), plan.outputs
            )
        return gradients, loss if plan.loss.row is None else next(queue), tracked, pooled, y_pred


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values):
        variable.assign(value)


def _of_all_replicas(leaf: Any) -> Any:
    """A batch's tensor; of one that is spread over replicas, all rows."""
    if isinstance(leaf, tf.experimental.Optional):
        return None
    parts = tf.distribute.get_strategy().experimental_local_results(leaf)
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


class _SparseGradientsError(Exception):
    """The gradients of these trainable weights, and no others, are `tf.IndexedSlices`."""

    def __init__(self, indices: frozenset[int]) -> None:
        super().__init__(indices)
        self.indices = indices


_INDEX = Spec("int64", (), False)


def _embeddings(weights: list[Any], model: Any) -> frozenset[int]:
    """The weights whose gradients are most likely sparse."""
    tables = {id(embedding_table(layer)) for layer in layers_in(model) if isinstance(layer, keras.layers.Embedding)}
    return frozenset(i for i, weight in enumerate(weights) if id(weight) in tables)


def _wide(dtype: str) -> str:
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _with_mask(tensor: Any, mask: Any) -> Any:
    if mask is not None:
        set_keras_mask(tensor, mask)
    return tensor
