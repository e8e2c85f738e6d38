"""Keras on JAX: `lax.scan` over micro-batches, and values of variables that go in and out of functions.

An unrolled loop would hold more memory than the whole batch: XLA runs its micro-batches side by side. Where
`keras.distribution` spreads the batch over several devices, each micro-batch has rows of all of them: rows that follow
one another lie on one device, and the others would wait, or do the same again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental.sparse import BCOO
from keras import tree

from gradaccum.keras import private
from gradaccum.keras.backends import base
from gradaccum.keras.backends.base import Result, Scope, assign, has_rows, values_of
from gradaccum.on_jax import free_memory, recomputed, scan

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For XLA: what runs but twice takes longest to compile."""


def devices_of(rows: int) -> int:
    """How many devices a batch of so many rows is spread over, in equal parts."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return 1
    mesh = distribution.device_mesh
    count = int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])
    return count if rows % count == 0 else 1


class MicroBatches(base.MicroBatches):
    """A batch in micro-batches of so many rows on each device. What was kept of it is `(device, its rows, ...)`."""

    axis = 1

    def __init__(self, data: Any, rows: int, size: Callable[[int], int], static: bool = True) -> None:
        self.devices = devices_of(rows)
        super().__init__(data, rows, size)

    def take(self, start: Any, size: int) -> Any:
        return tree.map_structure(lambda leaf: self._slice(leaf, start, size) if has_rows(leaf) else leaf, self.data)

    def _slice(self, leaf: Any, start: Any, size: int) -> Any:
        if isinstance(leaf, BCOO):
            own, rows = leaf.shape[0] // self.devices, size * self.devices
            row = leaf.indices[:, 0] % own - start
            place = leaf.indices[:, 0] // own * size + row
            return _with_rows(leaf, jnp.where((row >= 0) & (row < size), place, rows), rows)
        parts = self.part(jnp.asarray(leaf))
        return jax.lax.dynamic_slice_in_dim(parts, start, size, 1).reshape(-1, *leaf.shape[1:])

    def loop(self, first: int, stop: int, body: Any, carry: Any, specs: Any) -> tuple[Any, list[Any]]:
        def step(carry: Any, index: Any) -> tuple[Any, list[Any]]:
            after, kept = body(index, carry)
            # In the dtypes of a loop's carry.
            return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), after, carry), kept

        def by_device(stacked: Any) -> Any:
            shape = (self.devices, -1, *stacked.shape[2:])
            return stacked.reshape(stop - first, *shape).swapaxes(0, 1).reshape(shape)

        if stop - first > 1:
            carry, kept = scan(step, carry, jnp.arange(first, stop))
        else:
            carry, kept = step(carry, first)
            kept = [one[None] for one in kept]
        return carry, list(map(by_device, kept))

    def part(self, output: Any) -> Any:
        return output.reshape(self.devices, -1, *output.shape[1:])

    def joined(self, parts: Sequence[Any], begin: int = 0) -> Any:
        found = super().joined(parts, begin)
        return found.reshape(-1, *found.shape[2:])


def _with_rows(leaf: Any, places: Any, rows: int) -> Any:
    """A sparse array whose entries are moved to other rows; those behind the last one are none."""
    indices = leaf.indices.at[:, 0].set(places.astype(leaf.indices.dtype))
    return BCOO((leaf.data, indices), shape=(rows, *leaf.shape[1:]))


def _look(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda: found.append(function()))
    return found[0]


class GradientSum(base.GradientSum):
    """What a forward pass assigns is returned by the function that is differentiated."""

    def gradients(self, forward: Callable[[], Any]) -> tuple[list[Any], Any, list[Any]]:
        moving = [*self.model.non_trainable_variables, *self.model.metrics_variables]

        def loss(values: Any) -> Any:
            with Scope(zip(self.weights, values)):
                value, others = forward()
                return value, (others, values_of(moving))

        (_, (others, moved)), gradients = jax.value_and_grad(loss, has_aux=True)(values_of(self.weights))
        assign(moving, moved)
        return gradients, others, []


class Training(base.Training):
    """What a training step leaves to JAX."""

    def call(self, *args: Any) -> Any:
        state, data = args
        with self.in_scope(state):
            logs = self.step.update(data)
            return logs, self.step.state()

    def build(self, data: Any) -> None:
        """Keras builds before it traces."""

    def make_train_function(self, make: Callable[[], None]) -> None:
        step = self.step
        if isinstance(step.model.train_step, type(step)):  # not what the GradientAccumulation callback put around it
            # A new one: `jax.jit` would find what was compiled for the old loss.
            step.model.train_step = copy.copy(step)
        super().make_train_function(make)

    def recover(self, state: Any = None) -> None:
        """`fit` takes the values out of the variables before the first step and puts them back after it: do so here."""
        for variables, values in zip(self.step.variables(), state):
            for variable, value in zip(variables, values):
                if not private.has_value(variable) and not value.is_deleted():
                    private.put_value(variable, value)
        optimizer = self.step.model.optimizer
        if optimizer is None:
            return

        def finalize(variables: Any) -> None:
            """Else `fit` puts the averages of `use_ema` into the variables, which are zeros before an update."""
            del vars(optimizer)["finalize_variable_values"]
            if int(optimizer.iterations) > 0:
                optimizer.finalize_variable_values(variables)

        vars(optimizer)["finalize_variable_values"] = finalize


class Program(base.Program):
    """A chunked layer's call, traced once for each size, as a function of what it closes over, such as its weights."""

    def __init__(self, body: Any, batches: MicroBatches) -> None:
        super().__init__(body, batches)
        body.discover(batches, _look)
        self._traced: dict[int, Any] = {}
        for index in {0, batches.count - 1}:
            self._trace(jax.eval_shape(lambda index=index: batches.at(index)[0]), batches.at(index)[1])

    def _trace(self, tensors: list[Any], size: int) -> None:
        state = self.body.state

        def micro_batch(values: list[Any], tensors: list[Any]) -> Any:
            return tuple(self.body.run(tensors, zip(state.variables, values)))

        closed, results = jax.make_jaxpr(micro_batch, return_shape=True)(state.values(state.start()), tensors)
        places = [self._place(const) for const in closed.consts]
        self._traced[size] = closed.jaxpr, places, jax.tree.structure(results)

    def _place(self, const: Any) -> int:
        for place, known in enumerate(self.weights):
            if known is const:
                return place
        self.weights.append(const)
        return len(self.weights) - 1

    def evaluate(self, weights: Any, carry: Any, tensors: list[Any]) -> Result:
        jaxpr, places, results = self._traced[tensors[0].shape[0]]
        given = [(self.weights if weights is None else weights)[place] for place in places]
        flat = jax.core.eval_jaxpr(jaxpr, given, *self.body.state.values(carry), *tensors)
        return Result(*jax.tree.unflatten(results, flat))


class Backend(base.Backend):
    cut, gradient_sum, training, program = MicroBatches, GradientSum, Training, Program
    keeps_masks = False  # on JAX plain `fit` loses them, too

    def take_rows(self, leaf: Any, rows: Any) -> Any:
        if not isinstance(leaf, BCOO):
            return leaf[rows]
        places = jnp.full(leaf.shape[0], len(rows)).at[rows].set(jnp.arange(len(rows)))
        return _with_rows(leaf, places[leaf.indices[:, 0]], len(rows))

    def prepared(
        self, function: Callable[..., Any], arguments: Any, model: Any
    ) -> tuple[Callable[[], Any], float | None]:
        program = jax.jit(function).lower(*arguments).compile()
        analysis = program.memory_analysis()
        needed = None if analysis is None else float(analysis.temp_size_in_bytes)
        return lambda: jax.block_until_ready(program(*arguments)), needed

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        # Not apply(): that of a LossScaleOptimizer assigns inside of a branch.
        own = optimizer.variables
        trained, state = optimizer.stateless_apply(values_of(own), gradients, values_of(variables))
        assign([*variables, *own], [*trained, *state])

    def recomputed(self, passes: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        return recomputed(passes.first, passes.second)(passes.inputs, carry)

    def pullback(
        self, function: Callable[[list[Any]], Any], inputs: list[Any], given: Any = None, program: Any = None
    ) -> tuple[list[Any], Any]:
        outputs, pull, others = jax.vjp(function, inputs, has_aux=True)
        return pull(list(map(jnp.ones_like, outputs)) if given is None else given)[0], others

    def separate(self, variables: Sequence[Any], others: Sequence[Any]) -> None:
        held = {id(value) for value in values_of(others)}  # averages, after `fit`, whose next one donates each buffer
        for variable in variables:
            if id(variable.value) in held:
                variable.assign(jnp.copy(variable.value))

    def known(self, tensors: list[Any]) -> bool:
        return not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)

    at_once = staticmethod(jax.ensure_compile_time_eval)
    look, device, free_memory = staticmethod(_look), staticmethod(jax.default_backend), staticmethod(free_memory)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function, compiler_options=QUICKLY)

    def when(
        self, condition: Any, then: Callable[[], None], otherwise: Callable[[], None], variables: list[Any]
    ) -> None:
        """No assignment happens in a branch: branches return values."""
        if not isinstance(condition, jax.core.Tracer):
            super().when(condition, then, otherwise, variables)
            return

        def branch(function: Callable[[], None]) -> Callable[[list[Any]], list[Any]]:
            def values_after(values: list[Any]) -> list[Any]:
                with Scope(zip(variables, values)):
                    function()
                    return values_of(variables)

            return values_after

        assign(variables, jax.lax.cond(condition, branch(then), branch(otherwise), values_of(variables)))
