"""`info_nce` in tiles against the whole matrix of pairs."""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum.keras import chunked
from gradaccum.keras.losses import info_nce
from tests.keras.marks import BACKEND, compiled_on, slow, slow_where_compiled
from tests.reference import relative_error

ROWS, COLUMNS = 23, 31
OF_A, OF_B = np.arange(ROWS) % 7, np.arange(COLUMNS) % 9  # some have several positives, ids 7 and 8 none
PAIRS = {
    "row i and row i": (None, np.eye(ROWS, COLUMNS, dtype=bool)),
    "ids of the pairs": (OF_A - 3, OF_A[:, None] == np.concatenate([OF_A, np.full(COLUMNS - ROWS, -1)])),
    "ids of both": ((OF_A, OF_B), OF_A[:, None] == OF_B),
}
random = np.random.default_rng(0)
A, B = (random.normal(size=(rows, 6)) / 2 for rows in (ROWS, COLUMNS))


def plain(a, b, temperature, pairs, symmetric=True):
    scores, found = ops.matmul(a, ops.transpose(b)) / temperature, []
    for s, p in ((scores, pairs), (ops.transpose(scores), pairs.T)):
        number, p = ops.convert_to_tensor(p.sum(1)), ops.convert_to_tensor(p)
        positive = ops.sum(ops.where(p, s, ops.zeros_like(s)), axis=1) / ops.cast(ops.maximum(number, 1), s.dtype)
        has = ops.cast(number > 0, s.dtype)
        found.append(ops.sum((ops.logsumexp(s, axis=1) - positive) * has) / ops.sum(has))
    return sum(found) / 2 if symmetric else found[0]


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


@slow_where_compiled
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


FLOAT_IDS = (
    "ids, which are integers. Received: float64 of shape (3,). Keras casts an integer `y` to float before a loss of "
    'compile() sees it: use ops.cast(y, "int32").'
)


@slow_where_compiled
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"a": [[1.0]]}, TypeError, "`a` must be a tensor of Keras'"),
        ({"a": np.zeros((3, 2, 1))}, ValueError, "floats, of shape (rows, size). Received: float64 of shape (3, 2, 1)"),
        ({"b": np.zeros((3, 2), "int64")}, ValueError, "Received: int64 of shape (3, 2)"),
        ({"b": np.zeros((3, 4))}, ValueError, "rows of the same size. Received: (3, 2) and (3, 4)"),
        ({"b": np.zeros((2, 2))}, ValueError, "3 rows of a, 2 of b"),
        ({"temperature": 0}, ValueError, "temperature=0"),
        ({"temperature": "warm"}, TypeError, "temperature='warm'"),
        ({"temperature": np.ones(2)}, ValueError, "shape (2,)"),
        ({"tile": 0}, ValueError, "tile=0"),
        ({"positives": lambda i, j: i == j}, TypeError, "a tuple of two"),
        ({"positives": np.zeros(3)}, TypeError, FLOAT_IDS),
        ({"positives": np.zeros(4, "int32")}, ValueError, "(3,). Received: (4,)"),
        ({"positives": (None, np.zeros(3, "int32"))}, TypeError, "a tuple of two"),
    ],
)
def test_what_is_wrong_is_named(arguments, kind, message):
    right = {"a": np.zeros((3, 2)), "b": np.zeros((3, 2))}
    with pytest.raises(kind, match=re.escape(message)):
        info_nce(**right | arguments)
