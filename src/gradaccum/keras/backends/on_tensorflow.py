"""Keras on TensorFlow: a `tf.while_loop` over the rows of a batch, be their number known or not, eager or traced."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from tensorflow.python.eager import record  # whether a tape watches a tensor is nowhere else to be asked

from gradaccum.keras import private
from gradaccum.keras.backends import base
from gradaccum.keras.backends.base import Result, Scope, Spec, assign, has_rows, is_float, rows_of, values_of, wide
from gradaccum.keras.optimizer.window import Counts, Window, is_overwritten, rescaled

__all__: list[str] = []


class MicroBatches(base.MicroBatchesBase):
    """A batch in `count` micro-batches of `size` rows, the first `larger` of them of one row more.

    As `gradaccum.core.sizes.even_sizes` cuts it; but while TensorFlow traces, the number of rows is mostly a tensor.
    """

    def __init__(self, data: Any, rows: int | None, size: Callable[[Any], int], static: bool) -> None:
        self.data, self.static = data, static
        self.rows = _checked_rows(data) if rows is None else rows
        most = size(rows)
        self.count = (self.rows + most - 1) // most
        self.size, self.larger = self.rows // self.count, self.rows % self.count

    def take(self, start: Any, size: Any) -> Any:
        return tree.map_structure(lambda leaf: _slice(leaf, start, size) if has_rows(leaf) else leaf, self.data)

    def at(self, index: int) -> tuple[Any, Any]:
        start, size = self.ragged(index)
        return self.take(start, size), size

    def start_of(self, index: int) -> Any:
        return self.ragged(index)[0]

    def ragged(self, index: Any) -> tuple[Any, Any]:
        """The first row of a micro-batch, and its size."""
        if isinstance(index, int) and isinstance(self.larger, int):
            return index * self.size + min(index, self.larger), self.size + (index < self.larger)
        start = index * self.size + tf.minimum(index, self.larger)
        return start, self.size + tf.cast(index < self.larger, tf.int32)

    def _segments(self, begin: int) -> Iterator[tuple[Any, Any, Callable[[Any], tuple[Any, Any]]]]:
        """Loops over the micro-batches: `(first, behind the last, index -> (its first row, its size))`."""
        size, larger = self.size, self.larger

        def longer(index: Any) -> tuple[Any, Any]:
            # XLA compiles this loop even where no micro-batch is longer: its slices must exist.
            return index * (size + 1), tf.minimum(size + 1, self.rows)

        def shorter(index: Any) -> tuple[Any, Any]:
            return index * size + larger, size

        if isinstance(larger, int) and larger == 0:
            segments = [(0, self.count, shorter)]
        elif self.static:
            segments = [(0, larger, longer), (larger, self.count, shorter)]
        else:
            segments = [(0, self.count, self.ragged)]
        for first, stop, bounds in segments:
            first = max(first, begin) if begin else first  # some are kept only where all numbers are known
            if not isinstance(stop, int) or first < stop:
                yield first, stop, bounds

    def run(self, micro: Any, carry: Any, specs: Any = (), threads: Any = (), begin: int = 0) -> tuple[Any, list[Any]]:
        if not private.in_stateless_scope():  # variables are assigned where they are
            threads = ()
        state, parts = (values_of(threads), carry), []
        for first, stop, bounds in self._segments(begin):
            arrays = [
                tf.TensorArray(spec.dtype, stop - first, element_shape=[None, *(spec.row or ())], infer_shape=False)
                for spec in specs
            ]

            def body(index: Any, state: Any, arrays: Any, first: Any = first, bounds: Any = bounds) -> Any:
                start, size = bounds(index)
                values, carry = state
                with Scope(zip(threads, values)) if threads else contextlib.nullcontext():
                    carry, kept = micro(self.take(start, size), size, carry)
                    state = [tf.convert_to_tensor(value) for value in values_of(threads)], carry
                pairs = zip(arrays, kept)
                return index + 1, state, [array.write(index - first, tf.cast(one, array.dtype)) for array, one in pairs]

            _, state, arrays = tf.while_loop(
                lambda index, state, arrays, stop=stop: index < stop,
                body,
                (tf.constant(0, tf.int32) + first, state, arrays),
                parallel_iterations=1,  # more of them would be in memory at once
            )
            parts.append([array.concat() for array in arrays])
        assign(threads, state[0])
        return state[1], [tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts)]


def _checked_rows(data: Any) -> Any:
    """The rows, as a tensor that is an error where the arrays of the batch disagree. XLA finds that by itself."""
    rows = [tf.shape(leaf)[0] for leaf in tree.flatten(data) if has_rows(leaf)]
    message = (
        "A batch is cut into micro-batches along the first dimension: its arrays must have the same number of rows."
    )
    checks = [tf.debugging.assert_equal(rows[0], other, message) for other in rows[1:]]
    checks.append(tf.debugging.assert_positive(rows[0], "A batch must have at least one row."))
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(rows[0])


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


def take_rows(leaf: Any, rows: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return tf.gather(leaf, rows)
    return tf.sparse.concat(0, [_slice(leaf, int(row), 1) for row in rows])


class GradientSum:
    """Gradients of a model's trainable weights, added up in at least 32 bits.

    Sparse gradients aren't summed but put one behind the other, as they would be for the whole batch: Keras' optimizers
    don't treat them like the dense gradient they stand for, where a row occurs twice.
    """

    def __init__(self, model: Any, overwriting: frozenset[int]) -> None:
        self.weights, self.overwriting = model.trainable_weights, overwriting
        embeddings = [layer for layer in private.layers_in(model) if isinstance(layer, keras.layers.Embedding)]
        tables = {id(private.embedding_table(layer)) for layer in embeddings}
        self.sparse = frozenset(i for i, weight in enumerate(self.weights) if id(weight) in tables)  # most likely
        self.missing: set[int] = set()

    @property
    def specs(self) -> tuple[Spec, ...]:
        weights = [self.weights[index] for index in sorted(self.sparse)]
        return tuple(s for w in weights for s in (Spec(w.dtype, tuple(w.shape[1:])), Spec("int64", ())))

    def zeros(self) -> Any:
        return [tf.zeros(() if i in self.sparse else w.shape, wide(w.dtype)) for i, w in enumerate(self.weights)]

    def add(self, sums: Any, forward: Callable[[], Any], share: Any) -> Any:
        with tf.GradientTape() as tape:
            scaled, others = forward()
            scaled *= share if isinstance(share, float) else tf.cast(share, scaled.dtype)
        gradients = tape.gradient(scaled, self.weights)
        found = frozenset(i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices))
        if found != self.sparse:
            self.sparse = found
            raise _SparseGradientsError
        self.missing.update(i for i, gradient in enumerate(gradients) if gradient is None)
        joined = [tf.maximum if i in self.overwriting else tf.add for i in range(len(sums))]
        after = [
            total if gradient is None or i in found else joined[i](total, tf.cast(gradient, total.dtype))
            for i, (total, gradient) in enumerate(zip(sums, gradients))
        ]
        return after, others, [part for i in sorted(found) for part in (gradients[i].values, gradients[i].indices)]

    def finish(self, sums: Any, kept: list[Any], scale: Any = None) -> list[Any]:
        gradients = [None if i in self.missing else total for i, total in enumerate(sums)]
        for i, (values, indices) in zip(sorted(self.sparse), zip(kept[::2], kept[1::2])):
            gradients[i] = tf.IndexedSlices(values, indices, tf.constant(tuple(self.weights[i].shape), tf.int64))
        return gradients


class _SparseGradientsError(Exception):
    """Other gradients than was thought are `tf.IndexedSlices`, which shows while a loop is traced."""


class Training(base.TrainingBase):
    """What a training step leaves to TensorFlow."""

    def attempt(self, data: Any, rows: Any, size: Callable[[Any], int], run: Callable[[Any, Any], Any]) -> Any:
        model = self.step.model
        batches, sums = MicroBatches(data, rows, size, model.jit_compile), GradientSum(model, self.step.overwriting)
        while True:
            with contextlib.suppress(_SparseGradientsError):
                return run(batches, sums)

    def look(self, function: Callable[[Any], Any], batches: Any) -> Any:
        with tf.__internal__.FuncGraph("gradaccum_plan").as_default():
            return function(batches.take(0, batches.size))

    eagerly = staticmethod(tf.init_scope)

    def apply(self, gradients: list[Any]) -> None:
        self.step.model.optimizer.apply_gradients(zip(gradients, self.step.model.trainable_weights))

    def make_train_function(self, make: Callable[[], None]) -> None:
        """Keras' own; where an update is to be proved, behind a look at its batch, which is drawn here for that.

        In all other updates the graph draws its batches by itself.
        """
        make()
        model, proof = self.step.model, self.step.proof
        step: Callable[[Any], Any] = model.train_function

        def guarded(iterator: Any) -> Any:
            drawn_here = not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))
            is_due = proof is not None and proof.is_due(model.steps_per_execution)
            if not (drawn_here or is_due):
                return step(iterator)
            batches = [next(iterator), *itertools.islice(iterator, model.steps_per_execution - 1)]
            for batch in batches:
                batch = tree.map_structure(lambda leaf: _of_all_replicas(leaf, model.distribute_strategy), batch)
                rows_of(batch)  # in a graph, another number of rows would be an error of TensorFlow's
                if is_due:
                    self.build(batch)
                    proof.run(batch)
            result = step(_again(batches, iterator))
            if is_due:
                proof.warn()
            return result

        model.train_function = guarded


def _again(batches: list[Any], iterator: Any) -> Any:
    """An iterator over these batches of an iterator, of the same kind if possible: `fit` has a function for that."""
    spec = iterator.element_spec if isinstance(iterator, tf.data.Iterator) else None
    known = (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)
    if spec is None or not all(isinstance(one, known) for one in tf.nest.flatten(spec)):
        return iter(batches)
    return iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec))


def _of_all_replicas(leaf: Any, strategy: Any) -> Any:
    """A batch's tensor; of one that is spread over replicas, all rows."""
    if isinstance(leaf, tf.experimental.Optional):
        return None
    parts = strategy.experimental_local_results(leaf)
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def value_and_gradients(function: Callable[[list[Any]], Any], values: list[Any]) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        tape.watch(values)
        found = function(values)
    gradients = tape.gradient(found[0], values)
    return found, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


# A chunked layer.


def chunks(tensors: list[Any], micro_batch_size: int) -> MicroBatches:
    """Its inputs in micro-batches: in loops over those of one size, as XLA may compile them."""
    return MicroBatches(tensors, tensors[0].shape[0], lambda rows: micro_batch_size, static=True)


class Program:
    """A chunked layer's call on a micro-batch, as a function of its `weights`, which may need gradients."""

    def __init__(self, body: Any, batches: MicroBatches) -> None:
        self.body = body
        for tensor in body.tensors:
            if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor)):
                raise TypeError(
                    f"{body.name} takes dense tensors. Received: a {type(tensor).__name__} of shape "
                    f"{tuple(tensor.shape)}."
                )
        self._discover(batches)
        body.state.read()
        self._variables = [v for v in body.read if v.trainable and is_float(v)]
        self._frozen = [v for v in body.read if all(v is not variable for variable in self._variables)]
        self._frozen_values = [tf.convert_to_tensor(value) for value in private.uncast_values(self._frozen)]
        weights = [*private.uncast_values(self._variables), *body.shared]
        self.weights = [tf.convert_to_tensor(value) for value in weights]

    def _discover(self, batches: MicroBatches) -> None:
        """What the layer reads and moves, and what its outputs are."""
        body, graph = self.body, tf.__internal__.FuncGraph("gradaccum_chunked")
        shapes: list[tuple[Any, ...]] = []
        with graph.as_default():
            body.run(batches.take(0, batches.size))
            size = batches.size if isinstance(batches.size, int) else 4
            with contextlib.suppress(Exception):  # a layer that is written for one size
                other = [tf.zeros((size + 1, *t.shape[1:]), t.dtype) for t in body.tensors]
                shapes = [tuple(output.shape) for output in body.run(other).outputs]
        body.check_rows(size + 1, shapes)
        # Refuse what a gradient should go to, of which `tf.custom_gradient` knows nothing.
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

    def start(self) -> Any:
        return [tf.convert_to_tensor(value) for value in self.body.state.start()]

    def evaluate(self, weights: Any, carry: list[Any], tensors: list[Any]) -> Result:
        state, weights = self.body.state, self.weights if weights is None else weights
        values = [
            *zip(self._variables, weights),
            *zip(self._frozen, self._frozen_values),
            *zip(state.variables, state.values(list(carry))),
        ]
        return self.body.run(tensors, values, weights[len(self._variables) :])


_STATEFUL = {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
}  # fmt: skip


def recomputed(passes: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
    weights, rows = passes.program.weights, passes.body.tensors
    ends, count = (len(weights), len(weights) + len(rows)), len(passes.body.specs)

    @tf.custom_gradient
    def run(*tensors: Any) -> Any:
        weights, rows, start = tensors[: ends[0]], tensors[ends[0] : ends[1]], list(tensors[ends[1] :])
        outputs, carry = passes.first(weights, rows, start)

        def gradient(*upstream: Any) -> Any:
            given = [one if one.dtype.is_floating else None for one in upstream[:count]]
            return [*passes.second(weights, rows, start, given), *[None] * len(start)]

        return (*outputs, *carry), gradient

    results = run(*weights, *rows, *carry)
    return list(results[:count]), list(results[count:])


def pullback(
    function: Callable[[list[Any]], Any], inputs: list[Any], given: list[Any], program: Any
) -> tuple[list[Any], Any]:
    inputs = [tf.identity(tensor) for tensor in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs, others = function(inputs)
    return tape.gradient(outputs, inputs, given), others


def added(total: Any, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, None], tf.cast(gradient.values, total.dtype))
    return base.added(total, gradient)


def known(tensors: list[Any]) -> bool:
    return all(not tf.is_tensor(tensor) or isinstance(tensor, tf.__internal__.EagerTensor) for tensor in tensors)


def unprovable() -> str:
    return "under a strategy of several replicas" if tf.distribute.get_strategy().num_replicas_in_sync > 1 else ""


at_once = tf.init_scope


# An optimizer's window.


def accumulate(window: Window, gradients: list[Any], rows: Any) -> None:
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients must be applied by a replica. Call strategy.run(train_step), and apply them in train_step."
        )
    rows = None if rows is None else tf.cast(rows, "int64")
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _accumulate(window, gradients, rows, None)
    else:
        tf.distribute.get_replica_context().merge_call(
            lambda strategy, gradients, rows: _accumulate(window, gradients, rows, strategy), args=(gradients, rows)
        )


def close(window: Window) -> None:
    strategy, untouched = window.place, _untouched(window)
    if strategy.num_replicas_in_sync == 1:
        return _close(window, _read(window), untouched, None)
    with strategy.scope():
        # In a graph: run eagerly, replicas wait for each other's reductions in an order that can lock.
        tf.function(lambda: _close(window, _read(window), untouched, strategy))()


def _accumulate(window: Any, gradients: Any, rows: Any, strategy: Any) -> None:
    """`gradients` and `rows` are one replica's for `strategy=None`, else those of every replica."""
    replicas = strategy.num_replicas_in_sync if strategy else 1
    all_rows = strategy.reduce("SUM", rows, axis=None) if strategy and rows is not None else rows
    counts, weight, rescale, closes = window.rule.add(_read(window), all_rows)

    def update(total: Any, function: Callable[..., None], *args: Any) -> None:
        if strategy:
            strategy.extended.update(total.value, function, args=args, group=False)
        else:
            function(total.value, *args)

    def scale(total: Any, variable: Any) -> None:
        total.assign(rescaled(total, variable, rescale))

    def add(total: Any, gradient: Any, rows: Any, variable: Any) -> None:
        gradient = tf.cast(gradient, total.dtype)
        if is_overwritten(variable):
            total.assign(tf.maximum(total, gradient))
            return
        # Keras divides each replica's loss by their number; where rows are known it shall count by its rows.
        gradient = _times(gradient, tf.cast(weight if rows is None else rows * replicas, total.dtype))
        if isinstance(gradient, tf.IndexedSlices):
            total.scatter_add(gradient)
        else:
            total.assign_add(gradient)

    def scale_sums() -> None:
        for total, variable in zip(window.sums, window.variables):
            update(total, scale, variable)

    if rescale is not None:
        tf.cond(tf.cast(rescale, "int64") == 1, lambda: None, scale_sums)
    for total, gradient, variable in zip(window.sums, gradients, window.variables):
        if gradient is not None:
            update(total, add, gradient, rows, variable)
    absent = [gradient is None for gradient in gradients]
    present = tf.constant([not none for none in absent], window.touched.value.dtype)
    window.touched.value.assign(tf.maximum(window.touched.value, present))
    tf.cond(
        closes,
        lambda: _close(window, counts, absent if tf.inside_function() else _untouched(window), strategy),
        lambda: _write(window, counts),
    )


def _close(window: Any, counts: Counts, absent: list[bool], strategy: Any) -> None:
    inner, touched = window.inner, window.touched.value

    def apply(leave_out: list[bool]) -> None:
        def in_replica() -> None:
            means = window.means([total.value for total in window.sums], counts.weight)
            inner.apply([None if none else mean for mean, none in zip(means, leave_out)], window.variables)

        if not all(leave_out):
            if strategy:
                strategy.extended.call_for_each_replica(in_replica)
            else:
                in_replica()

    before = tf.identity(inner.iterations)
    if any(absent) and tf.inside_function():
        # Whether an earlier micro-batch of the window had a gradient for one of them is known only at run time.
        tf.cond(
            tf.reduce_any(tf.boolean_mask(touched, absent) > 0),
            lambda: apply([False] * len(absent)),
            lambda: apply(absent),
        )
    else:
        apply(absent)
    for total in [*(total.value for total in window.sums), touched]:
        total.assign(tf.zeros(total.shape, total.dtype))
    updated = tf.cast(inner.iterations != before, "int64") if window.may_skip else 1
    _write(window, window.rule.closed(counts, updated))


def _untouched(window: Window) -> list[bool]:
    """Which variables have had no gradient in this window."""
    return [not touched for touched in window.touched.value.numpy().tolist()]


def _times(gradient: Any, factor: Any) -> Any:
    # A replica without rows has a NaN for its mean, and counts for nothing.
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, factor)


def _read(window: Window) -> Counts:
    return Counts(*tf.unstack(tf.convert_to_tensor(window.counts.value)))


def _write(window: Window, counts: Counts) -> None:
    variable = window.counts.value
    variable.assign(tf.stack([tf.cast(count, variable.dtype) for count in counts]))


def replica() -> Any:
    replica = getattr(tf.distribute.get_replica_context(), "replica_id_in_sync_group", 0)
    return replica if isinstance(replica, int) else 0


place_of = private.strategy_of


def beside(place: Any, variable: Any) -> Any:
    own = variable.value if isinstance(variable, keras.Variable) else variable
    return place.extended.colocate_vars_with(own)


def total(variable: Any) -> Any:
    return tf.add_n([tf.convert_to_tensor(part) for part in _parts(variable)])


def put(variable: Any, value: Any) -> None:
    first, *others = _parts(variable)
    first.assign(value)
    for part in others:
        part.assign(tf.zeros(part.shape, part.dtype))


def _parts(variable: Any) -> list[Any]:
    return list(getattr(variable.value, "values", [variable.value]))
