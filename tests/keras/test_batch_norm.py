"""BatchNormalization in micro-batches: it is named, and does what `batch_norm` says; `"exact"` is the large batch's."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum import NotEquivalentError
from gradaccum.keras import chunked, micro_batched
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import BatchOptimizer, Optimizer
from tests.keras.marks import BACKEND, compiled_on, slow, slow_where_compiled
from tests.keras.problems import ACTIVITY, Does, sgd
from tests.keras.train_step.cases import crossentropy, mse, run
from tests.keras.train_step.data import BATCH, MICRO, ROWS, TAGS, TOKENS, X
from tests.reference import relative_error

random = np.random.default_rng(0)
SHIFTED = X * np.arange(1, 6) + np.arange(ROWS)[:, None]  # micro-batches differ in their means


@pytest.fixture
def bound(float64):
    """On JAX, Keras normalises in `result_type(inputs.dtype, "float32")`, which is float32 there for float64 too."""
    return max(float64, 1e-6) if BACKEND == "jax" else float64


def normalised(**kwargs):
    # The first layer: what it sees doesn't depend on the weights.
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [layers.Input((5,)), layers.BatchNormalization(name="bn", momentum=0.9, **kwargs), layers.Dense(3)]
    )


def moving(model):
    bn = model.get_layer("bn")
    return [keras.ops.convert_to_numpy(v) for v in (bn.moving_mean, bn.moving_variance)]


def wrapped(model, callbacks=()):
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse", jit_compile=False)
    model.fit(X, X[:, :3], batch_size=11, verbose=0, callbacks=list(callbacks))


NAMING = {
    "a wrapped optimizer": wrapped,
    "a wrapped optimizer with the callback": lambda model: wrapped(model, [GradientAccumulation()]),
    "BatchOptimizer": lambda model: BatchOptimizer(sgd(), 4, 8, 16, model),
    "micro_batched": lambda model: micro_batched(model, 4),
    "chunked": lambda model: chunked(model, 4),
}


@pytest.mark.parametrize("use", [slow(use) if use.startswith("a wrapped") else use for use in NAMING])
def test_batch_norm_is_named_in_one_warning_unless_it_is_frozen(use):
    model = normalised()
    with pytest.warns(UserWarning, match="BatchNormalization normalises each micro-batch by itself.*: 'bn'") as seen:
        NAMING[use](model)
    assert len([one for one in seen if "BatchNormalization" in str(one.message)]) == 1
    model = normalised()
    model.get_layer("bn").trainable = False
    NAMING[use](model)


WORDS = {
    # (rows of a micro-batch; pieces of each batch by whose statistics plain Keras' move in the same way)
    "pooled": (MICRO, [BATCH]),
    "pooled over micro-batches of 2": (2, [BATCH]),
    "pooled over one": (100, [BATCH]),
    "micro": (MICRO, [4, 4, 3]),
    "frozen": (MICRO, []),
}
SHELLS = [(shell, word) for shell in ("micro_batched", "chunked") for word in WORDS]
OFTEN = {
    "jax": [("micro_batched", word) for word in ("pooled", "micro", "frozen")],
    "tensorflow": [("micro_batched", "micro"), *(("chunked", word) for word in ("pooled", "micro", "frozen"))],
}.get(BACKEND, SHELLS)


@pytest.mark.parametrize(("shell", "word"), [pair if pair in OFTEN else slow(*pair) for pair in SHELLS])
def test_moving_statistics_go_by_the_word(shell, word, bound):
    (size, pieces), choice = WORDS[word], word.partition(" ")[0]
    ours, plain = normalised(), normalised()
    if shell == "chunked":
        chunked(ours, size, batch_norm=choice, verify=False)
    else:
        micro_batched(ours, size, batch_norm=choice, verify=False).compile(optimizer=sgd(), loss="mse")
    for batch in (SHIFTED[:BATCH], SHIFTED[BATCH:]):
        ours(batch, training=True) if shell == "chunked" else ours.train_on_batch(batch, batch[:, :3])
        for piece in np.split(batch, np.cumsum(pieces)[:-1]) if pieces else ():
            plain(piece, training=True)
    assert relative_error(moving(ours), moving(plain)) <= bound
    assert ours.get_layer("bn").momentum == 0.9, "the layer is left as it was"
    assert "call" not in vars(ours.get_layer("bn"))


@slow_where_compiled
def test_pooled_statistics_heed_masks(bound):
    def make():
        return keras.Sequential(
            [
                layers.Input((6,), dtype="int32"),
                layers.Embedding(7, 3, mask_zero=True, trainable=False),
                layers.BatchNormalization(name="bn", momentum=0.9),
                layers.Dense(3, activation="softmax"),
            ]
        )

    ours, _ = run(make, crossentropy, TOKENS, TAGS, 4, batch_norm="pooled", epochs=1)
    plain, _ = run(make, crossentropy, TOKENS, TAGS, epochs=1)
    # Keras divides by the number of values that the mask lets through plus 1e-7: once per micro-batch here.
    assert relative_error(moving(ours), moving(plain)) <= max(bound, 1e-8)


@compiled_on("jax")
def test_frozen_normalises_by_the_moving_statistics(bound):
    class Inference(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training=False, mask=mask)

    def inference():
        keras.utils.set_random_seed(0)
        return keras.Sequential([layers.Input((5,)), Inference(name="bn", momentum=0.9), layers.Dense(3)])

    ours, _ = run(normalised, mse, X, X[:, :3], 4, batch_norm="frozen", epochs=1)
    plain, _ = run(inference, mse, X, X[:, :3], epochs=1)
    assert relative_error(ours.get_weights(), plain.get_weights()) <= bound
    parts, whole = chunked(normalised(), 4, batch_norm="frozen", verify=False), normalised()
    assert relative_error([parts(X, training=True)], [whole(X, training=False)]) <= bound


@compiled_on("jax")
def test_pooling_what_cannot_be_pooled_is_refused():
    def twice():
        inputs = layers.Input((5,))
        bn = layers.BatchNormalization(name="bn")
        return keras.Model(inputs, layers.Dense(3)(bn(bn(inputs))))

    with pytest.raises(ValueError, match="'bn'.*several times"):
        run(twice, mse, X, X[:, :3], 4, batch_norm="pooled")
    if "renorm" not in inspect.signature(layers.BatchNormalization).parameters:
        return  # Keras before 3.14
    with pytest.raises(ValueError, match="renorm=True.*'bn'"):
        run(lambda: normalised(renorm=True), mse, X, X[:, :3], 4, batch_norm="pooled")


# `batch_norm="exact"`, whose updates are compared in tests/keras/fuzz.

PICTURES = random.normal(size=(ROWS, 4, 4, 2)) + np.arange(ROWS)[:, None, None, None] / ROWS
Y = random.normal(size=(ROWS, 3))


def small():
    first = [layers.Input((4, 4, 2)), layers.Flatten(), layers.Dense(4, use_bias=False)]
    return keras.Sequential([*first, layers.BatchNormalization(name="bn"), layers.Dense(3)])


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
def test_evaluation_runs_in_micro_batches_by_the_moving_statistics_and_words_can_be_changed_again():
    x, plain = PICTURES.astype("float32"), small()
    model = micro_batched(small(), MICRO, batch_norm="pooled")
    model.set_weights(plain.get_weights())
    micro_batched(model, MICRO, batch_norm="exact")
    assert "train_step" not in vars(model)
    assert relative_error([model(x, training=False)], [plain(x, training=False)]) < 1e-6
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
    ],
    ids=["subclassed", "own layer", "keep"],
)
def test_what_cannot_be_cut_is_refused_by_name(make, options, message):
    with pytest.raises(ValueError, match=message):
        (chunked if options else micro_batched)(make(), MICRO, batch_norm="exact", **options)


@pytest.mark.skipif(ACTIVITY is None, reason="sums over rows before Keras 3.14")
@slow_where_compiled
def test_losses_of_layers_are_refused():
    inside = [layers.Dense(2, activity_regularizer="l2"), layers.BatchNormalization()]
    with pytest.raises(ValueError, match="adds losses in its forward pass"):
        chunked(keras.Sequential([layers.Input((5,)), *inside]), MICRO, batch_norm="exact")(X, training=True)


@slow_where_compiled
def test_what_looks_across_rows_beside_the_normalisations_is_named():
    inside = [layers.BatchNormalization(), layers.Softmax(axis=0, name="attend"), layers.Dense(2)]
    model = micro_batched(keras.Sequential([layers.Input((5,)), *inside]), MICRO, batch_norm="exact")
    model.compile("sgd", "mse")
    with pytest.raises(NotEquivalentError, match="'attend' .Softmax. mixes rows"):
        model.fit(X[:BATCH], Y[:BATCH, :2], batch_size=BATCH, verbose=0)


@slow_where_compiled
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_in_bfloat16_a_bias_before_it_is_rounding_and_what_mixes_rows_is_still_refused(seed):
    keras.utils.set_random_seed(seed)
    inside = [layers.Dense(6), layers.BatchNormalization(), layers.Activation("tanh"), layers.Dense(3)]
    inside = [type(layer).from_config({**layer.get_config(), "dtype": "mixed_bfloat16"}) for layer in inside]
    x = PICTURES.reshape(ROWS, -1)[:8].astype("float32")
    exact = chunked(keras.Sequential([layers.Input((32,)), *inside]), 3, batch_norm="exact")
    assert exact(x, training=True).shape == (8, 3)
    mixing = [*inside[:2], Does(lambda h: h - ops.mean(h, axis=0, keepdims=True), dtype="mixed_bfloat16"), inside[3]]
    with pytest.raises(NotEquivalentError, match="(5%|0.05) allowed"):
        chunked(keras.Sequential([layers.Input((32,)), *mixing]), 3, batch_norm="exact")(x, training=True)
