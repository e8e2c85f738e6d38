"""The training step on JAX: `lax.scan` over the micro-batches, inside the one function that `fit` compiles.

An unrolled loop would hold more memory than the whole batch: XLA runs its micro-batches side by side.

Where `keras.distribution` spreads the batch over several devices, each micro-batch has rows of all of them: rows that
follow one another lie on one device, and the others would wait, or do the same again.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from keras import tree

from gradaccum.core.sizes import even_sizes
from gradaccum.keras.batch_norm import BatchNorm, Pool, during_micro_batch
from gradaccum.keras.equivalence import Draws, Outcome, as_array, held
from gradaccum.keras.loops.loop_jax import by_device, devices_of, first, joined, like, loop, stacks
from gradaccum.keras.loss import divisors_of, update_trackers, weighed_losses
from gradaccum.keras.private import compiled_metrics, has_value, loss_tracker, put_value
from gradaccum.keras.train_step.data import rows_of, unpack
from gradaccum.keras.train_step.step import MicroBatchedStep, Plan

__all__ = ["JaxStep"]

_State = tuple[Any, Any, Any, Any]
"""Values of the trainable, non-trainable, optimizer's and metrics' variables."""


_QUICKLY_COMPILED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""What runs but twice takes longest to compile."""


class _Window(NamedTuple):
    """What the micro-batches of a batch have added up to."""

    sums: list[Any]
    values: list[Any]
    """The loss, and each loss that is logged by itself."""
    non_trainable: list[Any]
    metrics: list[Any]
    outputs: list[Any]
    """Of each segment, where metrics see the whole batch's."""


class JaxStep(MicroBatchedStep):
    """`model.train_step` on JAX: a pure function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gradients_of: Callable[..., Any] | None = None
        self._trials: dict[Any, Any] = {}

    def __call__(self, state: _State, data: Any) -> tuple[Any, _State]:
        model = self.model
        window = self._window(state, data)
        trainable, optimizer_variables = model.optimizer.stateless_apply(state[2], window.sums, state[0])
        rows = rows_of(data)
        x, y, sample_weight = unpack(data)
        with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, window.metrics))) as scope:
            loss_tracker(model).update_state(window.values[0], sample_weight=rows)
            update_trackers(model, window.values[1:], rows)
            if window.outputs:
                y_pred = jax.tree.map(joined, *window.outputs)
                logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            else:
                logs = model.get_metrics_result()
        metrics = [scope.get_current_value(variable) for variable in model.metrics_variables]
        return logs, (trainable, window.non_trainable, optimizer_variables, metrics)

    def outcome(self, data: Any, state: Any = None) -> Outcome:
        """What the update of this batch is made of, computed as an update computes it. Leaves everything as found."""
        state = self.state() if state is None else state
        if self._gradients_of is None:

            def gradients_of(state: _State, data: Any) -> tuple[Any, Any, Any]:
                window = self._window(state, data)
                return window.values[0], window.sums, window.non_trainable

            eager = self.model.run_eagerly or not self.model.jit_compile
            self._gradients_of = gradients_of if eager else jax.jit(gradients_of, compiler_options=_QUICKLY_COMPILED)
            self._draws = Draws()
        with held() as draws:
            loss, gradients, after = self._gradients_of(state, data)
        self._draws.held |= draws.held  # seen while it is traced, and not again
        self._draws.raw |= draws.raw
        return Outcome(
            self.model,
            as_array(loss),
            list(map(as_array, gradients)),
            list(map(as_array, state[1])),
            list(map(as_array, after)),
            self._draws,
        )

    def trial(self, micro_batch_size: int, batch_norm: BatchNorm) -> Any:
        """The same step with other choices, not installed. It is kept with what it has compiled."""
        key = micro_batch_size, batch_norm
        if key not in self._trials:
            self._trials[key] = super().trial(*key)
        return self._trials[key]

    def _window(self, state: _State, data: Any) -> _Window:
        """Run all micro-batches."""
        model = self.model
        trainable, non_trainable, optimizer_variables, metrics = state
        rows = rows_of(data)
        assert rows is not None
        self._warn(stacklevel=2)
        devices = devices_of(rows)
        segments = stacks(data, even_sizes(rows // devices, self.size_for(data, rows // devices)), devices)
        plan = self._plan((trainable, non_trainable, metrics), tree.map_structure(first, segments[0][1]))
        totals = None
        if plan.counted:
            # The compiler drops all of this forward pass that the counts don't depend on.
            totals = self._counted((trainable, non_trainable, metrics), segments, plan)
        layers = self.batch_norms
        pool = Pool(layers) if self.batch_norm == "pooled" else None
        moving = [] if pool is None else _positions(model.non_trainable_variables, pool.variables)
        before = [non_trainable[index] for index in moving]
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        overwriting = self.overwriting

        def micro(size: int, carry: Any, micro_batch: Any) -> tuple[Any, Any]:
            sums, values, non_trainable, metrics, pooled = carry
            x, y, sample_weight = unpack(micro_batch)
            (_, aux), gradients = gradient(
                trainable, non_trainable, metrics, x, y, sample_weight, optimizer_variables, size / rows, totals
            )
            parts, y_pred, new_non_trainable, new_metrics, valid = aux
            if pool is not None:
                pooled = pool.add(pooled, [new_non_trainable[index] for index in moving], valid, size)
            if plan.metrics == "streamed":
                new_metrics = self._stream(new_metrics, y, y_pred, sample_weight)
            sums = [
                jnp.maximum(total, gradient) if index in overwriting else total + gradient
                for index, (total, gradient) in enumerate(zip(sums, gradients))
            ]
            values = [value + part for value, part in zip(values, parts)]
            after = like((sums, values, new_non_trainable, new_metrics, pooled), carry)
            return after, y_pred if plan.metrics == "whole" else None

        carry = (
            [jnp.zeros(value.shape, jnp.promote_types(value.dtype, jnp.float32)) for value in trainable],
            [jnp.zeros((), keras.backend.floatx())] * (1 + plan.tracked),
            non_trainable,
            metrics,
            [] if pool is None else pool.zeros(),
        )
        outputs = []
        for size, micro_batches in segments:
            carry, stacked = loop(functools.partial(micro, size), carry, micro_batches)
            outputs.append(jax.tree.map(functools.partial(by_device, devices=devices), stacked))
        sums, values, non_trainable, metrics, pooled = carry
        if pool is not None:
            for index, value in zip(moving, pool.moved(pooled, before)):
                non_trainable[index] = value
        return _Window(sums, values, non_trainable, metrics, outputs if plan.metrics == "whole" else [])

    def _loss(
        self,
        trainable: Any,
        non_trainable: Any,
        metrics: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        optimizer_variables: Any,
        share: float,
        totals: dict[int, Any] | None,
    ) -> tuple[Any, Any]:
        """A micro-batch's part of the large batch's loss, scaled for `jax.grad`. The rest is auxiliary."""
        with (
            during_micro_batch(self.batch_norms, self.batch_norm) as seen,
            weighed_losses(self.model, share, totals) as measured,
        ):
            scaled, (loss, y_pred, non_trainable, metrics) = self.model.compute_loss_and_updates(
                trainable, non_trainable, metrics, x, y, sample_weight, True, optimizer_variables
            )
        values = [loss, *(measured.values[index] for index in range(len(measured.values)))]
        return scaled * share, ([value * share for value in values], y_pred, non_trainable, metrics, seen.valid)

    def _plan(self, state: Any, micro_batch: Any) -> Plan:
        seen: list[tuple[Any, Any, Any]] = []

        def probe(state: Any, micro_batch: Any) -> None:
            seen.append(divisors_of(self.model, state, *unpack(micro_batch))[1:])

        jax.eval_shape(probe, state, micro_batch)
        measured, y_pred, loss = seen[0]
        return self.plan(measured, y_pred, loss, micro_batch)

    def eagerly(self) -> Any:
        """While this is open, operations run at once, even in a function that is being traced."""
        return jax.ensure_compile_time_eval()

    def _counted(self, state: Any, segments: Any, plan: Plan) -> dict[int, Any]:
        trainable, non_trainable, metrics = state

        def count(non_trainable: Any, micro_batch: Any) -> tuple[Any, Any]:
            after, measured, _, _ = divisors_of(self.model, (trainable, non_trainable, metrics), *unpack(micro_batch))
            return like(after, non_trainable), [measured.divisors[index] for index in plan.counted]

        totals = [0.0] * len(plan.counted)
        for _, micro_batches in segments:
            non_trainable, counts = loop(count, non_trainable, micro_batches)
            totals = [total + jnp.sum(part) for total, part in zip(totals, counts)]
        return dict(zip(plan.counted, totals))

    def _stream(self, metrics: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        variables = self.model.metrics_variables
        with keras.StatelessScope(state_mapping=list(zip(variables, metrics))) as scope:
            compiled_metrics(self.model).update_state(y, y_pred, sample_weight)
        return [scope.get_current_value(variable) for variable in variables]

    def _make_train_function(self, force: bool = False) -> None:
        """Keras' own, with one thing more: an error while a step is traced leaves the model's variables as they were.

        `fit` takes the values out of the variables before the first step and puts them back after it.
        """
        model = self.model
        if self.proof is not None:
            self.proof.begin()
        if model.train_function is not None and not force:
            return
        self._trials.clear()
        if isinstance(model.train_step, JaxStep):  # not what the GradientAccumulation callback put around it
            model.train_step = copy.copy(self)  # a new one: `jax.jit` would find what was compiled for the old loss
        type(model).make_train_function(model, force=force)
        step: Callable[[_State, Any], Any] = model.train_function
        proof = self.proof

        def guarded(state: _State, iterator: Any) -> Any:
            try:
                if proof is None:
                    return step(state, iterator)
                batches = [*itertools.islice(iterator, model.steps_per_execution)]
                for data in batches:
                    proof.run(data, state)
                result = step(state, iter(batches))
                proof.say()
                return result
            except Exception:
                parts = (
                    model.trainable_variables,
                    model.non_trainable_variables,
                    model.optimizer.variables,
                    model.metrics_variables,
                )
                for variables, values in zip(parts, state):
                    for variable, value in zip(variables, values):
                        if not has_value(variable) and not value.is_deleted():
                            put_value(variable, value)
                _finalize_only_after_updates(model.optimizer)
                raise

        model.train_function = guarded


def _finalize_only_after_updates(optimizer: Any) -> None:
    """After an error, Keras' `fit` still puts the averages of `use_ema` into the variables: zeros before an update."""

    def finalize(variables: Any) -> None:
        del vars(optimizer)["finalize_variable_values"]
        if int(optimizer.iterations) > 0:
            optimizer.finalize_variable_values(variables)

    if int(optimizer.iterations) == 0:
        vars(optimizer)["finalize_variable_values"] = finalize


def _positions(variables: list[Any], wanted: list[Any]) -> list[int]:
    by_id = {id(variable): index for index, variable in enumerate(variables)}
    return [by_id[id(variable)] for variable in wanted]
