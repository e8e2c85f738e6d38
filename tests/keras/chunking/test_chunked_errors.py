"""What `chunked` refuses, by name, and what `verify` finds."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum import NotEquivalentError
from gradaccum.keras import chunked
from tests.keras.chunking.test_chunked import BACKEND, MICRO, Dropping, X

x = X.astype("float32")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((lambda x: x, 4), {}, "`layer_or_model` must be a keras.layers.Layer.*gradaccum.torch.chunked"),
        ((layers.Dense(3), 0), {}, "`micro_batch_size`"),
        ((layers.Dense(3), 2.5), {}, "`micro_batch_size`"),
        ((layers.Dense(3), 4), {"keep": -1}, "`keep`"),
        ((layers.Dense(3), 4), {"batch_norm": "exactly"}, "`batch_norm` must be one of"),
        ((layers.BatchNormalization(), 4), {}, "BatchNormalization by itself"),
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
        (Mean, "must give a row for each row of its inputs.*(5,)"),
        (Products, "look across the rows"),
        (Adds, "adds losses in its forward pass"),
        (lambda: keras.Sequential([layers.Dense(3, activity_regularizer="l2", name="loud")]), "'loud'"),
        (Assigns, "assigns trainable variables.*scale"),
        (lambda: layers.SpectralNormalization(layers.Dense(3)), "assigns trainable variables.*kernel"),
    ],
    ids=["mean", "products", "add_loss", "regularizer", "assigns", "spectral"],
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


def test_verify_names_the_layer_in_which_rows_depend_on_each_other():
    model = keras.Sequential(
        [layers.Input((5,)), layers.Dense(4), layers.Softmax(axis=0, name="attend"), layers.Dense(3)]
    )
    before = model.get_weights()
    with pytest.raises(NotEquivalentError, match="'attend' is a Softmax in which a row's output depends on the other"):
        chunked(model, MICRO).verify(x)
    assert all(map(np.array_equal, model.get_weights(), before))


def test_verify_names_batch_normalization_unless_it_is_frozen():
    def make():
        return keras.Sequential([layers.Input((5,)), layers.BatchNormalization(name="bn")])

    with pytest.raises(NotEquivalentError, match="'bn' is a BatchNormalization"):
        chunked(make(), MICRO, batch_norm="pooled").verify(x)
    chunked(make(), MICRO, batch_norm="frozen").verify(x)


def test_verify_passes_what_works_row_by_row_and_moves_nothing():
    layer = chunked(keras.Sequential([layers.Input((5,)), Dropping(), layers.Dense(3)]), MICRO)
    before = [ops.convert_to_numpy(variable) for variable in layer.variables]
    layer.verify(x)
    assert all(map(np.array_equal, [ops.convert_to_numpy(variable) for variable in layer.variables], before))
    with pytest.raises(ValueError, match="at least 2 rows"):
        layer.verify(x[:1])
