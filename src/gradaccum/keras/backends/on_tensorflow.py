"""Keras on TensorFlow: a `tf.while_loop` over the rows of a batch, be their number known or not, eager or traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from tensorflow.python.eager import record  # whether a tape watches a tensor is nowhere else to be asked

from gradaccum.core.sizes import free_host_memory
from gradaccum.keras import private
from gradaccum.keras.backends import base
from gradaccum.keras.backends.base import RestartWindow, Spec, has_rows, quotient, values_of, wide


class MicroBatches(base.MicroBatches):
    """A batch in micro-batches; while TensorFlow traces, the number of rows is mostly a tensor."""

    def __init__(self, data: Any, rows: int | None, size: Callable[[Any], int], static: bool = True) -> None:
        traced = Backend().checked_rows(base.leaves_with_rows(data), 1) if rows is None else rows
        super().__init__(data, traced, lambda own: size(rows), static)

    def take(self, start: Any, size: Any) -> Any:
        return tree.map_structure(lambda leaf: _slice(leaf, start, size) if has_rows(leaf) else leaf, self.data)

    def loop(self, first: Any, stop: Any, body: Any, carry: Any, specs: Any) -> tuple[Any, list[Any]]:
        arrays = [
            tf.TensorArray(spec.dtype, stop - first, element_shape=[None, *(spec.row or ())], infer_shape=False)
            for spec in specs
        ]

        def step(index: Any, state: Any, arrays: Any) -> Any:
            (values, carry), kept = body(index, state)
            pairs = zip(arrays, kept)
            arrays = [array.write(index - first, tf.cast(one, array.dtype)) for array, one in pairs]
            return index + 1, ([tf.convert_to_tensor(value) for value in values], carry), arrays

        _, carry, arrays = tf.while_loop(
            lambda index, state, arrays: index < stop,
            step,
            (tf.constant(0, tf.int32) + first, carry, arrays),
            parallel_iterations=1,  # more of them would be in memory at once
        )
        return carry, [array.concat() for array in arrays]


def _slice(leaf: Any, start: Any, size: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[start : start + size]
    is_sparse = isinstance(leaf, tf.SparseTensor)
    others = leaf.dense_shape[1:] if is_sparse else tf.shape(leaf)[1:]
    begin = tf.concat([[tf.cast(start, others.dtype)], tf.zeros_like(others)], 0)
    extent = tf.concat([[tf.cast(size, others.dtype)], others], 0)
    if is_sparse:
        return tf.sparse.slice(leaf, begin, extent)
    part = tf.slice(leaf, begin, extent)
    part.set_shape([size if isinstance(size, int) else None, *leaf.shape[1:]])
    return part


class GradientSum(base.GradientSum):
    """Sparse gradients aren't summed but put one behind the other, as they would be for the whole batch.

    Keras' optimizers don't treat them like the dense gradient they stand for, where a row occurs twice.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        embeddings = [layer for layer in private.layers_in(model) if isinstance(layer, keras.layers.Embedding)]
        tables = {id(private.embedding_table(layer)) for layer in embeddings}
        self.sparse = frozenset(i for i, weight in enumerate(self.weights) if id(weight) in tables)  # most likely
        self.missing: set[int] = set()

    @property
    def specs(self) -> tuple[Spec, ...]:  # type: ignore[override]  # it follows what is sparse
        weights = [self.weights[index] for index in sorted(self.sparse)]
        return tuple(s for w in weights for s in (Spec(w.dtype, tuple(w.shape[1:])), Spec("int64", ())))

    def zeros(self) -> Any:
        return [tf.zeros(() if i in self.sparse else w.shape, wide(w.dtype)) for i, w in enumerate(self.weights)]

    def gradients(self, forward: Callable[[], Any]) -> tuple[list[Any], Any, list[Any]]:
        weights = values_of(self.weights)  # tensors, where an update is proved
        with tf.GradientTape() as tape:
            tape.watch([weight for weight in weights if not isinstance(weight, tf.Variable)])
            loss, others = forward()
        found = tape.gradient(loss, weights)
        sparse = frozenset(i for i, gradient in enumerate(found) if isinstance(gradient, tf.IndexedSlices))
        if sparse != self.sparse:
            self.sparse = sparse  # which shows while a loop is traced
            raise RestartWindow
        self.missing.update(i for i, gradient in enumerate(found) if gradient is None)
        kept = [part for i in sorted(sparse) for part in (found[i].values, found[i].indices)]
        return [None if i in sparse else gradient for i, gradient in enumerate(found)], others, kept

    def finish(self, sums: Any, kept: list[Any], scale: Any = None) -> list[Any]:
        gradients = [None if i in self.missing else total for i, total in enumerate(sums)]
        for i, (values, indices) in zip(sorted(self.sparse), zip(kept[::2], kept[1::2])):
            gradients[i] = tf.IndexedSlices(values, indices, tf.constant(tuple(self.weights[i].shape), tf.int64))
        return gradients


class Training(base.Training):
    """What a training step leaves to TensorFlow."""

    def all_rows(self, batch: Any) -> Any:
        def joined(leaf: Any) -> Any:
            if isinstance(leaf, tf.experimental.Optional):
                return None
            parts = self.step.model.distribute_strategy.experimental_local_results(leaf)
            return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

        return tree.map_structure(joined, batch)

    def again(self, batches: list[Any], iterator: Any) -> Any:
        """An iterator of the same kind if possible: `fit` has a function for that."""
        spec = iterator.element_spec if isinstance(iterator, tf.data.Iterator) else None
        known = (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)
        if spec is None or not all(isinstance(one, known) for one in tf.nest.flatten(spec)):
            return iter(batches)
        return iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec))


class Program(base.Program):
    """A chunked layer's call. What it reads is passed to it: `tf.custom_gradient` knows no other tensors."""

    def __init__(self, body: Any, batches: MicroBatches) -> None:
        super().__init__(body, batches)
        for tensor in body.tensors:
            if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor)):
                raise TypeError(
                    f"{body.name} takes dense tensors. Received: a {type(tensor).__name__} of shape "
                    f"{tuple(tensor.shape)}."
                )
        body.discover(batches, self._look)
        self.settle()
        self.weights = [tf.convert_to_tensor(value) for value in self.weights]
        frozen = [v for v in body.read if all(v is not variable for variable in self.variables)]
        self.frozen = [(v, tf.convert_to_tensor(*private.uncast_values([v]))) for v in frozen]

    def _look(self, function: Callable[[], Any]) -> Any:
        """Refuse what a gradient should go to, or is random, of which `tf.custom_gradient` knows nothing."""
        body, graph = self.body, tf.__internal__.FuncGraph("gradaccum_chunked")
        with graph.as_default():
            found = function()
        own = [*body.tensors, *body.shared, *private.uncast_values([*body.read, *body.state.variables])]
        of_own = {id(tensor) for tensor in own}
        outer = [tensor for tensor, _ in graph.captures if tensor.dtype.is_floating and id(tensor) not in of_own]
        body.refuse_outer([tuple(tensor.shape) for tensor in outer if record.should_record_backprop([tensor])])
        drawn = {operation.type for operation in graph.get_operations() if operation.type in _STATEFUL}
        if drawn:
            raise ValueError(
                f"{body.name} draws random numbers with TensorFlow's own generator ({', '.join(sorted(drawn))}), which "
                "the second pass can't draw again. Use keras.random with a keras.random.SeedGenerator."
            )
        return found


_STATEFUL = {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
}  # fmt: skip


# An optimizer's window.


def _of_replicas(value: Any) -> list[Any]:
    """What replicas have of a value or variable; in a replica, its own alone."""
    value = value.value if isinstance(value, keras.Variable) else value
    parts = getattr(value, "values", None) if tf.distribute.in_cross_replica_context() else None
    return list(parts) if isinstance(parts, tuple) else [value]


def _add(total: Any, gradient: Any, minus: Any, overwritten: bool, alone: bool) -> None:
    """Add a gradient times `-minus` to a sum."""
    if overwritten:
        total.assign(tf.maximum(total, gradient))
    elif isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, -minus)
        total.scatter_add(tf.IndexedSlices(values, gradient.indices, gradient.dense_shape))
    elif alone:  # in one pass over memory, and not two
        tf.raw_ops.ResourceApplyGradientDescent(var=total.handle, alpha=minus, delta=gradient)
    else:  # A replica without rows has a NaN for its mean, and counts for nothing.
        total.assign_add(tf.math.multiply_no_nan(gradient, -minus))


class Backend(base.Backend):
    cut, gradient_sum, training, program = MicroBatches, GradientSum, Training, Program

    def take_rows(self, leaf: Any, rows: Any) -> Any:
        if not isinstance(leaf, tf.SparseTensor):
            return tf.gather(leaf, rows)
        return tf.sparse.concat(0, [_slice(leaf, int(row), 1) for row in rows])

    def look(self, function: Callable[[], Any]) -> Any:
        with tf.__internal__.FuncGraph("gradaccum_look").as_default():
            return function()

    def device(self) -> str:
        return "gpu" if tf.config.list_logical_devices("GPU") else "cpu"

    def free_memory(self) -> float | None:
        # Not told of a GPU: there the first size that runs out of memory ends the search.
        return None if self.device() == "gpu" else free_host_memory()

    def prepared(
        self, function: Callable[..., Any], arguments: Any, model: Any
    ) -> tuple[Callable[[], Any], float | None]:
        run = function if model.run_eagerly else tf.function(function, jit_compile=model.jit_compile)
        return lambda: keras.ops.convert_to_numpy(run(*arguments)[0][0]), None

    def chunks(self, tensors: list[Any], micro_batch_size: int) -> Any:
        rows = tensors[0].shape[0]
        if rows is None:  # of any number of inputs, which `cut` takes for a batch's x, y and weights
            named = [(f"input {number}", one) for number, one in enumerate(tensors) if has_rows(one)]
            rows = self.checked_rows(named, 1)
        return self.cut(tensors, rows, lambda rows: micro_batch_size)

    def recomputed(self, passes: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        given, count = len(passes.inputs), len(passes.body.specs)

        @tf.custom_gradient
        def run(*tensors: Any) -> Any:
            inputs, start = tensors[:given], list(tensors[given:])
            outputs, carry = passes.first(inputs, start)

            def gradient(*upstream: Any) -> Any:
                known = [one if one.dtype.is_floating else None for one in upstream[:count]]
                return [*passes.second(inputs, start, known), *[None] * len(start)]

            return (*outputs, *carry), gradient

        results = run(*passes.inputs, *carry)
        return list(results[:count]), list(results[count:])

    def pullback(
        self, function: Callable[[list[Any]], Any], inputs: list[Any], given: Any = None, program: Any = None
    ) -> tuple[list[Any], Any]:
        inputs = [tf.identity(tensor) for tensor in inputs]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs, others = function(inputs)
        return tape.gradient(outputs, inputs, given), others

    def added(self, total: Any, gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.tensor_scatter_nd_add(total, gradient.indices[:, None], tf.cast(gradient.values, total.dtype))
        return super().added(total, gradient)

    def known(self, tensors: list[Any]) -> bool:
        return not tf.inside_function() and all(not tf.is_tensor(t) or hasattr(t, "numpy") for t in tensors)

    def unprovable(self) -> str:
        return "under a strategy of several replicas" if tf.distribute.get_strategy().num_replicas_in_sync > 1 else ""

    at_once = staticmethod(tf.__internal__.eager_context.eager_mode)  # in an init_scope no tape records

    def when(
        self, condition: Any, then: Callable[[], None], otherwise: Callable[[], None], variables: list[Any]
    ) -> None:
        tf.cond(condition, then, otherwise)

    def merged(self, function: Callable[..., None], gradients: list[Any], rows: Any) -> None:
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "Gradients must be applied by a replica. Call strategy.run(train_step), and apply them in train_step."
            )
        rows = None if rows is None else tf.cast(rows, "int64")
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            function(gradients, rows)
        else:
            tf.distribute.get_replica_context().merge_call(
                lambda strategy, *args: function(*args), args=(gradients, rows)
            )

    def in_replicas(self, function: Callable[[], None]) -> None:
        if tf.distribute.in_cross_replica_context():
            tf.distribute.get_strategy().extended.call_for_each_replica(function)
        else:
            function()

    def close(self, window: Any) -> None:
        if window.place.num_replicas_in_sync == 1:
            super().close(window)
            return
        absent = window.untouched()
        with window.place.scope():
            # In a graph: run eagerly, replicas wait for each other's reductions in an order that can lock.
            tf.function(lambda: window.update(window.read_traced(), absent))()

    def rows_of_all(self, rows: Any) -> Any:
        return None if rows is None else tf.add_n(_of_replicas(rows))

    def checked_rows(self, leaves: list[tuple[str, Any]], least: int | None = None) -> Any:
        # The mean of no rows is NaN: that of a replica counts for nothing, and alone it is an error.
        least = int(tf.distribute.get_strategy().num_replicas_in_sync == 1) if least is None else least
        rows, *others = [tf.shape(leaf)[0] for _, leaf in leaves]
        paths = ", ".join(path for path, _ in leaves)
        said = f"The arrays of a micro-batch must have the same number of rows, {least} or more: {paths}. Received:"
        same = tf.reduce_all([rows >= least, *(rows == other for other in others)])
        with tf.control_dependencies([tf.debugging.Assert(same, [said, rows, *others])]):
            for other in others:
                # XLA leaves assertions out. It knows the shapes when it compiles, and takes no reshape to another size.
                name = "rows_of_a_micro_batch_must_be_the_same_number"
                rows = tf.reshape(tf.fill([other], rows), [rows], name=name)[0]
            return tf.identity(rows)

    def integers(self, value: Any) -> list[Any]:
        return tf.unstack(tf.convert_to_tensor(value))

    def add_up(self, window: Any, gradients: list[Any], rows: Any, weight: Any, unit: Any) -> None:
        replicas = len(_of_replicas(window.sums[0]))
        # Keras divides each replica's loss by their number; where rows are known it shall count by its rows.
        weights = [weight] * replicas if rows is None else [own * replicas for own in _of_replicas(rows)]
        minus = functools.cache(lambda replica, dtype: -quotient(weights[replica], unit, dtype))
        for total, gradient, variable in zip(window.sums, gradients, window.variables):
            pairs = zip(_of_replicas(total), () if gradient is None else _of_replicas(gradient))
            for replica, (part, one) in enumerate(pairs):
                with tf.device(part.device):
                    args = tf.cast(one, part.dtype), minus(replica, part.dtype), private.is_overwritten(variable)
                    _add(part, *args, alone=replicas == 1)

    def replica(self) -> Any:
        replica = getattr(tf.distribute.get_replica_context(), "replica_id_in_sync_group", 0)
        return replica if isinstance(replica, int) else 0

    def place_of(self, optimizer: Any) -> Any:
        return private.strategy_of(optimizer)

    def beside(self, place: Any, variable: Any) -> Any:
        own = variable.value if isinstance(variable, keras.Variable) else variable
        return place.extended.colocate_vars_with(own)

    def total(self, variable: Any) -> Any:
        return tf.add_n([tf.convert_to_tensor(part) for part in getattr(variable.value, "values", [variable.value])])

    def put(self, variable: Any, value: Any) -> None:
        first, *others = getattr(variable.value, "values", [variable.value])
        first.assign(value)
        for part in others:
            part.assign(tf.zeros(part.shape, part.dtype))
