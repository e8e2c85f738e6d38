"""`batch_norm="exact"`: the large batch's updates, with BatchNormalization over all of its rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from gradaccum import NotEquivalentError
from gradaccum.keras import chunked, micro_batched
from tests.keras.problems import ACTIVITY, compiled_on, slow, slow_where_compiled
from tests.reference import relative_error

BACKEND = keras.backend.backend()
ROWS, BATCH, MICRO = 22, 11, 4
random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 4, 4, 2)) + np.arange(ROWS)[:, None, None, None] / ROWS
Y = random.normal(size=(ROWS, 3))


@pytest.fixture
def exact(float64, monkeypatch):
    """Lets Keras compute in float64 on JAX and PyTorch, too. Yields the error that is then allowed."""
    from keras.src.backend.common import dtypes

    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
    return 1e-12


def normalised(x, **options):
    return layers.BatchNormalization(momentum=0.8, beta_initializer="ones", **options)(x)


def residual():
    """First of all a normalisation, a shortcut past another one, and one in a nested model.

    No biases before them: their gradient is zero, and all of it rounding.
    """
    keras.utils.set_random_seed(0)
    inside = keras.Sequential(
        [layers.Input((48,)), layers.Dense(3, use_bias=False), layers.BatchNormalization(), layers.Activation("tanh")]
    )
    inputs = layers.Input((4, 4, 2))
    h = layers.Conv2D(3, 3, padding="same", activation="tanh")(normalised(inputs, scale=False))
    g = normalised(layers.Conv2D(3, 1, use_bias=False)(h))
    g = layers.Flatten()(keras.ops.tanh(g + h))
    return keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(layers.Concatenate()([g, inside(g)])))


def small():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            layers.Input((4, 4, 2)),
            layers.Flatten(),
            layers.Dense(4, use_bias=False),
            layers.BatchNormalization(name="bn"),
            layers.Dense(3),
        ]
    )


def fitted(model, **compiled):
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse", **compiled)
    dtype = keras.config.floatx()
    history = model.fit(X.astype(dtype), Y.astype(dtype), batch_size=BATCH, shuffle=False, verbose=0)
    return [*model.get_weights(), np.array(history.history["loss"])]


WAYS = {
    "torch": [(residual, {})],
    "jax": [(residual, {})],
    "tensorflow": [
        (small, {"jit_compile": False}),
        slow(residual, {"jit_compile": False}),
        slow(residual, {"jit_compile": True}),
    ],
}


@compiled_on("tensorflow")
@pytest.mark.parametrize(("make", "way"), WAYS[BACKEND])
def test_updates_and_moving_statistics_are_the_large_batchs(exact, make, way):
    expected = fitted(make(), run_eagerly=BACKEND == "tensorflow")
    found = fitted(micro_batched(make(), MICRO, batch_norm="exact"), **way)
    assert relative_error(found, expected) <= exact


def both(make, x, y, **options):
    """One update each, from the same weights: what is left over."""
    results = []
    for wrap in (lambda model: micro_batched(model, MICRO, batch_norm="exact"), lambda model: model):
        keras.utils.set_random_seed(0)
        model = wrap(make())
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", run_eagerly=BACKEND == "tensorflow")
        model.train_on_batch(x, y, **options)
        results.append(model.get_weights())
    return relative_error(*results)


@slow_where_compiled
def test_a_mask_that_is_an_argument_counts(exact):
    def make():
        inputs, mask = layers.Input((4, 2)), layers.Input((4,), dtype="bool")
        h = layers.BatchNormalization(momentum=0.8)(inputs, mask=mask)
        return keras.Model([inputs, mask], layers.GRU(3)(layers.Dense(3, activation="tanh")(h)))

    mask = random.random((BATCH, 4)) < 0.7
    mask[:, 0] = True
    assert both(make, [random.normal(size=(BATCH, 4, 2)), mask], Y[:BATCH]) <= exact


@compiled_on("tensorflow")
def test_dropout_is_replayed_in_its_segment(exact):
    keras.utils.set_random_seed(0)
    drop = layers.Dropout(0.5, seed=1)
    model = keras.Sequential([layers.Input((5,)), layers.BatchNormalization(scale=False, center=False), drop])
    chunked(model, MICRO, batch_norm="exact", verify=False)
    x = keras.ops.convert_to_tensor(np.ones((8, 5)) * np.arange(8)[:, None])
    outputs = keras.ops.convert_to_numpy(model(x, training=True))
    kept = outputs != 0
    assert 0.2 < kept.mean() < 0.8
    assert not np.array_equal(kept[:4], kept[4:])
    expected = (x - 3.5) / np.sqrt(5.25 + 1e-3) * 2
    assert relative_error([outputs], [np.where(kept, expected, 0)]) <= exact


@slow_where_compiled
def test_evaluation_runs_in_micro_batches_by_the_moving_statistics():
    x = X.astype("float32")
    model, plain = chunked(small(), MICRO, batch_norm="exact"), small()
    assert relative_error([model(x, training=False)], [plain(x, training=False)]) < 1e-6


@slow_where_compiled
def test_words_can_be_changed_again():
    model = micro_batched(small(), MICRO, batch_norm="pooled")
    micro_batched(model, MICRO, batch_norm="exact")
    assert "train_step" not in vars(model)
    assert "call" in vars(model)
    micro_batched(model, MICRO, batch_norm="pooled")
    assert "call" not in vars(model)


class Own(layers.Layer):
    def __init__(self):
        super().__init__(name="own")
        self.norm = layers.BatchNormalization(name="hidden")

    def call(self, x):
        return self.norm(x)


class Subclassed(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: Subclassed(name="mine"), {}, "needs a functional or sequential model.*Subclassed 'mine'"),
        (lambda: keras.Sequential([layers.Input((3,)), Own()]), {}, "can't cut Own 'own' at 'hidden' inside of it"),
        (small, {"keep": 1}, "keep=1"),
        (small, {"micro_batch_size": "auto"}, 'micro_batch_size="auto"'),
    ],
    ids=["subclassed", "own layer", "keep", "auto"],
)
def test_what_cannot_be_cut_is_refused_by_name(make, options, message):
    with pytest.raises(ValueError, match=message):
        if "keep" in options:
            chunked(make(), MICRO, batch_norm="exact", **options)
        else:
            micro_batched(make(), **{"micro_batch_size": MICRO, "batch_norm": "exact", **options})


@pytest.mark.skipif(ACTIVITY is None, reason="sums over rows before Keras 3.14")
@slow_where_compiled
def test_losses_of_layers_are_refused():
    model = keras.Sequential(
        [layers.Input((4, 4, 2)), layers.Dense(2, activity_regularizer="l2"), layers.BatchNormalization()]
    )
    with pytest.raises(ValueError, match="adds losses in its forward pass"):
        chunked(model, MICRO, batch_norm="exact")(X.astype("float32"), training=True)


@slow_where_compiled
def test_what_looks_across_rows_beside_the_normalisations_is_named():
    model = keras.Sequential(
        [layers.Input((5,)), layers.BatchNormalization(), layers.Softmax(axis=0, name="attend"), layers.Dense(2)]
    )
    micro_batched(model, MICRO, batch_norm="exact").compile("sgd", "mse")
    with pytest.raises(NotEquivalentError, match="'attend' .Softmax. mixes rows"):
        model.fit(X[:BATCH].reshape(BATCH, -1)[:, :5], Y[:BATCH, :2], batch_size=BATCH, verbose=0)


class Centred(layers.Layer):
    """Takes the mean over its rows away: no micro-batch has the large batch's."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


@slow_where_compiled
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_in_bfloat16_a_bias_before_it_is_rounding_and_what_mixes_rows_is_still_refused(seed):
    keras.utils.set_random_seed(seed)
    inside = [layers.Dense(6), layers.BatchNormalization(), layers.Activation("tanh"), layers.Dense(3)]
    inside = [type(layer).from_config({**layer.get_config(), "dtype": "mixed_bfloat16"}) for layer in inside]
    x = X.reshape(ROWS, -1)[:8].astype("float32")
    exact = chunked(keras.Sequential([layers.Input((32,)), *inside]), 3, batch_norm="exact")
    assert exact(x, training=True).shape == (8, 3)
    mixing = keras.Sequential([layers.Input((32,)), *inside[:2], Centred(dtype="mixed_bfloat16"), inside[3]])
    with pytest.raises(NotEquivalentError, match="5% allowed|0.05 allowed"):
        chunked(mixing, 3, batch_norm="exact")(x, training=True)
