"""What BatchNormalization does in micro-batches."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from keras import layers

from gradaccum.keras.micro_batched import micro_batched
from tests.keras.problems import compiled_on, slow, slow_where_compiled
from tests.keras.train_step.test_micro_batched import BACKEND, ROWS, TAGS, TOKENS, X, crossentropy, run
from tests.reference import relative_error


@pytest.fixture
def bound(float64):
    """On JAX, Keras normalises in `result_type(inputs.dtype, "float32")`, which is float32 there for float64 too."""
    return max(float64, 1e-6) if BACKEND == "jax" else float64


def normalised(**kwargs):
    # The first layer: what it sees doesn't depend on the weights, so plain `fit` tells its statistics.
    return keras.Sequential(
        [layers.Input((5,)), layers.BatchNormalization(name="bn", momentum=0.9, **kwargs), layers.Dense(3)]
    )


def moving(model):
    bn = model.get_layer("bn")
    return [keras.ops.convert_to_numpy(v) for v in (bn.moving_mean, bn.moving_variance)]


def mse():
    return {"loss": "mse"}


def test_batch_norm_is_named_in_a_warning_unless_it_is_chosen_or_frozen():
    with pytest.warns(UserWarning, match="'bn'.*batch_norm="):
        micro_batched(normalised(), 4)
    for choice in ("micro", "pooled", "frozen"):
        micro_batched(normalised(), 4, batch_norm=choice)
    model = normalised()
    model.get_layer("bn").trainable = False
    micro_batched(model, 4)


def test_micro_moves_the_statistics_with_every_micro_batch():
    model, _ = run(normalised, mse, X, X[:, :3], 4, batch_norm="micro", epochs=1, batch_size=8, steps_per_epoch=1)
    mean = np.zeros(5)
    for rows in (X[:4], X[4:8]):
        mean = 0.9 * mean + 0.1 * rows.mean(0)
    assert relative_error(moving(model)[:1], [mean]) < 1e-6


@compiled_on("jax")
@pytest.mark.parametrize("size", [slow(2), 4, slow(100)])
def test_pooled_statistics_are_the_full_batchs(bound, size):
    shifted = X * np.arange(1, 6) + np.arange(ROWS)[:, None]  # micro-batches differ in their means
    ours, _ = run(normalised, mse, shifted, X[:, :3], size, batch_norm="pooled")
    plain, _ = run(normalised, mse, shifted, X[:, :3])
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
def test_frozen_normalises_by_the_moving_statistics_and_leaves_them(bound):
    ours, _ = run(normalised, mse, X, X[:, :3], 4, batch_norm="frozen", epochs=1)
    assert relative_error(moving(ours), [np.zeros(5), np.ones(5)]) == 0

    class Inference(layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training=False, mask=mask)

    def inference():
        return keras.Sequential([layers.Input((5,)), Inference(name="bn", momentum=0.9), layers.Dense(3)])

    plain, _ = run(inference, mse, X, X[:, :3], epochs=1)
    assert relative_error(ours.get_weights(), plain.get_weights()) <= bound


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
