"""`info_nce` in tiles against the whole matrix of pairs."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum.keras import chunked
from gradaccum.keras.losses import info_nce
from tests import contrastive
from tests.contrastive import COLUMNS, OF_A, PAIRS, ROWS, assert_refused, each_refused, unit_rows
from tests.keras.marks import BACKEND, compiled_on, slow, slow_where_compiled
from tests.reference import relative_error

A, B = unit_rows()


def plain(a, b, temperature, pairs, symmetric=True):
    return contrastive.info_nce(ops, a, b, temperature, pairs, symmetric=symmetric)


class Loss(layers.Layer):
    """The rows and the temperature are its weights, so that its gradient has everything."""

    def __init__(self, loss):
        super().__init__()
        self.loss, values = loss, (A, B, np.array(0.7))
        self.parts = [self.add_weight(shape=value.shape, name=name) for value, name in zip(values, "abt")]
        for part, value in zip(self.parts, values):
            part.assign(value)

    def call(self, inputs):
        a, b, scale = map(ops.convert_to_tensor, self.parts)
        return inputs + self.loss(a, b, ops.exp(-scale))


def gradients(loss, **how):
    """By an update of SGD at rate 1: what the weights have moved by."""
    inputs, layer = layers.Input((1,)), Loss(loss)
    model = keras.Model(inputs, layer(inputs))
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, outputs: ops.mean(outputs, axis=-1), **how)
    before = model.get_weights()
    model.fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0)
    return [a - b for a, b in zip(before, model.get_weights())]


CASES = [
    ("ids of both", 5, True),
    *(slow(*one) for one in [("row i and row i", 8, False), ("ids of the pairs", 1, True)]),
]


@compiled_on("tensorflow")
@pytest.mark.parametrize(("said", "tile", "symmetric"), CASES)
def test_all_gradients_are_those_of_the_whole_matrix(exact, said, tile, symmetric):
    positives, pairs = PAIRS[said]
    options = {"tile": tile, "symmetric": symmetric, "positives": positives}
    expected = gradients(lambda a, b, t: plain(a, b, t, pairs, symmetric), run_eagerly=BACKEND != "jax")
    found = gradients(lambda a, b, t: info_nce(a, b, temperature=t, **options))
    assert relative_error(found, expected) <= exact
    values = [info_nce(A, B, temperature=0.5, **options), plain(A, B, 0.5, pairs, symmetric)]
    assert relative_error([ops.convert_to_numpy(values[0])], [ops.convert_to_numpy(values[1])]) <= exact


@compiled_on("tensorflow")
def test_a_tower_in_fit_has_the_updates_of_the_matrix(exact):
    """With chunked towers, and a last batch of its own size, of which TensorFlow doesn't know the rows."""

    def trained(wrap, loss):
        keras.utils.set_random_seed(0)
        towers = [wrap(keras.Sequential([layers.Input((6,)), layers.Dense(4, activation="tanh")])) for _ in "ab"]
        inputs = [layers.Input((6,)), layers.Input((6,))]
        model = keras.Model(inputs, layers.Concatenate()([tower(x) for tower, x in zip(towers, inputs)]))
        model.compile(keras.optimizers.SGD(0.1), loss=loss)
        rows = np.arange(ROWS) + 8
        model.fit([A, B[rows]], np.zeros((ROWS, 1)), batch_size=14, shuffle=False, verbose=0)
        return model.get_weights()

    def both(loss):
        return lambda y, outputs: loss(*ops.split(outputs, 2, axis=1))

    def matrix(a, b):
        scores = ops.matmul(a, ops.transpose(b)) / 0.5
        sums = ops.logsumexp(scores, axis=0) + ops.logsumexp(scores, axis=1)
        return ops.mean(sums / 2 - ops.diagonal(scores))

    found = trained(lambda tower: chunked(tower, 5), both(lambda a, b: info_nce(a, b, temperature=0.5, tile=5)))
    assert relative_error(found, trained(lambda tower: tower, both(matrix))) <= exact


@compiled_on("tensorflow")
def test_rows_without_a_positive_have_loss_zero():
    assert float(info_nce(A, B, tile=8, positives=(OF_A, np.full(COLUMNS, 99)))) == 0


@slow_where_compiled
def test_half_precision_is_summed_in_single(exact):
    half = [ops.cast(x, "bfloat16") for x in (A, B)]
    value = info_nce(*half, temperature=0.5, tile=5)
    assert keras.backend.standardize_dtype(value.dtype) == "float32"
    expected = plain(*(ops.cast(x, "float64") for x in half), 0.5, PAIRS["row i and row i"][1])
    assert abs(float(value) - float(expected)) < 1e-6


@slow_where_compiled
@each_refused
def test_what_is_wrong_is_named(case, exact):
    assert_refused(case, info_nce, ops.convert_to_tensor, "a tensor")


@slow_where_compiled
def test_ids_that_keras_has_cast_and_functions_are_refused():
    with pytest.raises(TypeError, match=r'Keras casts an integer `y` to float.* use ops.cast\(y, "int32"\)'):
        info_nce(A, B, positives=np.zeros(ROWS))
    with pytest.raises(TypeError, match="a tuple of two"):
        info_nce(A, B, positives=lambda i, j: i == j)
