"""What `chunked` refuses, by name, and what `verify` finds."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum import NotEquivalentError
from gradaccum.keras import chunked
from tests.keras.chunking.test_chunked import BACKEND, MICRO, Dropping, X
from tests.keras.problems import compiled_on, slow, slow_where_compiled

x = X.astype("float32")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((lambda x: x, 4), {}, "`layer_or_model` must be a keras.layers.Layer.*gradaccum.torch.chunked"),
        ((layers.Dense(3), 0), {}, "`micro_batch_size`"),
        ((layers.Dense(3), 2.5), {}, "`micro_batch_size`"),
        ((layers.Dense(3), 4), {"keep": -1}, "`keep`"),
        ((layers.Dense(3), 4), {"batch_norm": "exactly"}, "`batch_norm` must be one of"),
        ((layers.BatchNormalization(), 4), {}, "BatchNormalization can't be chunked by itself"),
    ],
)
def test_options_that_are_none_are_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        chunked(*arguments, **options)


class Mean(layers.Layer):
    def call(self, x):
        return ops.mean(x, axis=0)


class Products(layers.Layer):
    def call(self, x):
        return ops.matmul(x, ops.transpose(x))


class Same(layers.Layer):
    """Gives so many rows, which may happen to be those of a micro-batch."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def call(self, x):
        return ops.zeros((self.rows, 5), x.dtype) + ops.sum(x)


class Adds(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x))
        return x


class Assigns(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, x):
        self.scale.assign(self.scale + 1)
        return x * self.scale


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Mean, "must return a row for each row of its inputs.*(5,)"),
        (Products, "look across the rows"),
        (lambda: Same(3), r"row for each row of its inputs.*\(3, 5\) for a micro-batch of [24] rows"),
        (lambda: Same(4), r"row for each row of its inputs.*\(4, 5\) for a micro-batch of [35] rows"),
        (Adds, "adds losses in its forward pass"),
        (lambda: keras.Sequential([layers.Dense(3, activity_regularizer="l2", name="loud")]), "'loud'"),
        (Assigns, "assigns trainable variables.*scale"),
        (lambda: layers.SpectralNormalization(layers.Dense(3)), "assigns trainable variables.*kernel"),
    ],
    ids=["mean", "products", "three", "four", "add_loss", "regularizer", "assigns", "spectral"],
)
def test_layers_that_no_micro_batches_can_stand_for_are_refused(layer, message):
    layer = layer()
    layer.build((None, 5))
    with pytest.raises(ValueError, match=message):
        chunked(layer, MICRO)(x[:11], training=True)


def test_inputs_of_different_rows_are_listed():
    layer = chunked(layers.Add(), MICRO)
    with pytest.raises(ValueError, match=r"\(11, 5\), \(1, 5\)"):
        layer([ops.convert_to_tensor(x[:11]), ops.convert_to_tensor(x[:1])])


class Foreign:
    shape, dtype = (11, 5), "float32"


def test_arrays_of_another_kind_are_named():
    layer = chunked(layers.Lambda(lambda x: x), MICRO)
    with pytest.raises(TypeError, match=rf"Keras' {BACKEND} backend.*Foreign of shape \(11, 5\)"):
        layer.call(Foreign())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own generators")
def test_random_numbers_of_tensorflows_own_are_refused():
    import tensorflow as tf

    class Noise(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    with pytest.raises(ValueError, match=r"RandomStandardNormal.*keras\.random"):
        tf.function(chunked(Noise(), MICRO))(x[:11])
    with pytest.raises(ValueError, match=r"RandomStandardNormal.*keras\.random"):
        chunked(Noise(), MICRO)(x[:11])


class Shared(layers.Layer):
    """Divides by the rows of what it sees, or takes their mean off: only numbers tell."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, x, training=None):
        if self.kind == "evaluation" and training:
            return x
        return x / ops.cast(ops.shape(x)[0], x.dtype) if self.kind == "count" else x - ops.mean(x, 0, keepdims=True)


def in_fit(layer, **options):
    """One update by `fit` around a chunked layer."""
    inputs = layers.Input((5,))
    model = keras.Model(inputs, layers.Dense(2)(chunked(layer, MICRO, **options)(inputs)))
    model.compile("sgd", "mse")
    model.fit(x[:11], np.zeros((11, 2)), batch_size=11, verbose=0)
    return model


@compiled_on("tensorflow")
@pytest.mark.parametrize("kind", [slow("count"), "mean"])
def test_the_first_call_proves_itself_in_fit(kind):
    message = "(?s)The chunked Shared .* other outputs or gradients .*`call` of Shared itself mixes rows"
    with pytest.raises(NotEquivalentError, match=message):
        in_fit(Shared(kind))


@compiled_on("tensorflow")
def test_the_first_call_proves_itself_on_its_own_rows():
    with pytest.raises(NotEquivalentError, match="(?s)6 rows other.*'attend' .Softmax. mixes rows"):
        chunked(keras.Sequential([layers.Softmax(axis=0, name="attend")]), MICRO)(x)
    layer = chunked(Shared("evaluation"), MICRO)
    layer(x, training=True)
    with pytest.raises(NotEquivalentError, match="Shared"):
        layer(x, training=False)
    chunked(Shared("mean"), MICRO, verify=False)(x)


@slow_where_compiled
def test_a_proof_moves_nothing_and_is_made_once():
    layer = chunked(
        keras.Sequential([layers.Input((5,)), Dropping(), layers.BatchNormalization()]), MICRO, batch_norm="pooled"
    )
    seeds = [v for v in layer.variables if "seed" in v.path]
    layer(x, training=True)
    once = [ops.convert_to_numpy(v) for v in seeds]
    layer(x, training=True)
    steps = [ops.convert_to_numpy(v) - before for v, before in zip(seeds, once)]
    start = keras.random.SeedGenerator(1)
    assert [list(before - ops.convert_to_numpy(start.state)) for before in once] == [list(step) for step in steps]


class Largest(layers.Layer):
    def build(self, shape):
        self.most = self.add_weight(shape=(), initializer="zeros", trainable=False, name="most")

    def call(self, x):
        self.most.assign(ops.maximum(self.most, ops.max(x)))
        return x


class Balanced(layers.Layer):
    def call(self, x):
        vars(self)["balance"] = ops.mean(x)
        return x


class Eleven(layers.Layer):
    def call(self, x):
        if x.shape[0] not in (None, 3, 4, 11):
            raise ValueError("so many rows?")
        return x


@slow_where_compiled
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Largest, "These variables of the chunked Largest.*'largest.*/most'"),
        (Balanced, "The chunked Balanced .*attributes .*balance.*last one's are left"),
        (Eleven, r"could not be proven.*so many rows\?.*verify"),
    ],
)
def test_what_moves_elsewhere_is_left_behind_or_cannot_be_proven_is_named_once(make, message):
    layer, rising = chunked(make(), MICRO), np.arange(55, dtype="float32").reshape(11, 5)
    with pytest.warns(UserWarning, match=message):
        layer(rising)
    layer(rising)


class Scaled(layers.Layer):
    def call(self, x):
        return x * self.found[0]


@pytest.mark.skipif(BACKEND == "jax", reason="there it gets its gradient")
def test_tensors_from_outside_that_need_gradients_are_refused():
    class Around(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(5,), initializer="ones", name="scale")
            self.inside = chunked(Scaled(), MICRO)

        def call(self, x):
            vars(self.inside)["found"] = (ops.tanh(self.scale),)
            return self.inside(x)

    model = Around()
    model.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match=r"The chunked Scaled .* neither its inputs nor its variables, of shape \(5,\)"
    ):
        model.fit(x[:11], x[:11], batch_size=11, verbose=0)


def attending():
    return keras.Sequential([layers.Input((5,)), layers.Dense(4), layers.Softmax(axis=0, name="attend")])


def normalising():
    return keras.Sequential([layers.Input((5,)), layers.BatchNormalization(name="bn")])


VERIFIED = [
    slow(lambda: Shared("count"), {}, "`call` of Shared itself mixes rows"),
    (attending, {}, "'attend' .Softmax. mixes rows: its output for a row depends on the other"),
    slow(normalising, {"batch_norm": "pooled"}, "'bn' is a BatchNormalization"),
    slow(normalising, {"batch_norm": "frozen"}, ""),
    slow(lambda: layers.Dense(3), {}, ""),
    (lambda: keras.Sequential([layers.Input((5,)), Dropping(), layers.Dense(3)]), {}, ""),
]


@compiled_on("tensorflow")
@pytest.mark.parametrize(("make", "options", "message"), VERIFIED)
def test_verify_names_the_layer_in_which_rows_depend_on_each_other_and_moves_nothing(make, options, message):
    layer = chunked(make(), MICRO, **options)
    before = [ops.convert_to_numpy(variable) for variable in layer.variables]
    with pytest.raises(NotEquivalentError, match=message) if message else contextlib.nullcontext():
        layer.verify(x)
    assert all(map(np.array_equal, [ops.convert_to_numpy(variable) for variable in layer.variables], before))
    with pytest.raises(ValueError, match="at least 2 rows"):
        layer.verify(x[:1])
