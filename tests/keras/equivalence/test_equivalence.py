"""`check_equivalence` on compiled Keras models: what it says, and that it names the culprit."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import gradaccum.keras
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import check_equivalence, micro_batched
from tests.keras.problems import ACTIVITY, compiled_on, slow_where_compiled
from tests.keras.train_step.test_micro_batched import (
    CLASSES,
    ROWS,
    TWO_INPUTS,
    TWO_TARGETS,
    WEIGHTS,
    X,
    classifier,
    crossentropy,
    two_losses,
    two_outputs,
)
from tests.reference import relative_error


def compiled(model, **kwargs):
    model.compile(**{"optimizer": "sgd", **crossentropy(), **kwargs})
    return model


@compiled_on("tensorflow")
def test_equal_models_pass_and_stay_as_they_are():
    model = compiled(classifier(kernel_regularizer="l2", activity_regularizer=ACTIVITY))
    before = model.get_weights()
    result = check_equivalence(model, X, CLASSES, WEIGHTS, micro_batch_size=4)
    assert result.raise_if_different() is result
    assert result.max_error < 1e-5
    assert relative_error(model.get_weights(), before) == 0
    assert not [name for layer in model.layers for name in vars(layer) if name == "call"]
    assert model.optimizer.iterations == 0


@slow_where_compiled
def test_masks_and_several_outputs_pass():
    assert check_equivalence(compiled(two_outputs(), **two_losses()), TWO_INPUTS, TWO_TARGETS, micro_batch_size=3).ok


@compiled_on("tensorflow")
def test_dropout_is_no_difference():
    model = keras.Sequential([layers.Dense(8), layers.Dropout(0.5), layers.Dense(3, activation="softmax")])
    result = check_equivalence(compiled(model), X, CLASSES)
    assert result.ok
    assert any("dropout" in note for note in result.notes)


class Sampling(layers.Layer):
    """Draws whether it trains or not, with a seed that is not an attribute of its own."""

    def __init__(self):
        super().__init__()
        self.seeds = {"noise": keras.random.SeedGenerator(3)}

    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds["noise"])


@slow_where_compiled
def test_a_layer_without_a_path_is_named_and_sampling_beside_it_is_not():
    mixing = layers.Softmax(axis=0, name="mixing")
    model = compiled(keras.Sequential([layers.Dense(8), Sampling(), mixing, layers.Dense(3, "softmax")]))
    assert [(cause.kind, cause.where) for cause in check_equivalence(model, X, CLASSES).causes] == [
        ("mixes_rows", "mixing")
    ]


@slow_where_compiled
def test_the_micro_batch_size_is_that_of_micro_batched():
    result = check_equivalence(micro_batched(compiled(classifier()), 5), X, CLASSES)
    assert (5, 5, 4, 4, 4) in result.partitions


class Centred(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class Summed(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.sum(ops.square(inputs)))
        return inputs


CAUSES = {
    "BatchNormalization": (lambda: layers.BatchNormalization(name="bn"), {}, CLASSES, ("batch_norm", "bn")),
    "a layer": (lambda: Centred(name="centred"), {}, CLASSES, ("mixes_rows", "centred")),
    "a loss": (lambda: layers.Dense(3, "sigmoid"), {"loss": losses.Dice()}, np.eye(3)[CLASSES], ("loss", None)),
    "an added loss": (Summed, {}, CLASSES, ("regulariser", "losses[0]")),
}


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", CAUSES)
def test_what_is_not_exact_is_named(name):
    make, options, y, (kind, where) = CAUSES[name]
    last = layers.Dense(3, "sigmoid" if options else "softmax")  # with softmax, Dice is a mean over rows
    model = compiled(keras.Sequential([layers.Dense(8), make(), last]), **options)
    result = check_equivalence(model, X, y)
    ((found, place),) = [(cause.kind, cause.where) for cause in result.causes]
    assert (found, place if where else None) == (kind, where)
    with pytest.raises(NotEquivalentError, match=(where and re.escape(where)) or "'dice'"):
        result.raise_if_different()
    if kind == "batch_norm":
        assert check_equivalence(model, X, y, batch_norm="frozen").ok


@slow_where_compiled
def test_it_saves(tmp_path):
    result = check_equivalence(compiled(classifier()), X, CLASSES)
    assert result.save(tmp_path / "result.json").exists()


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match=r"keras\.Model"):
        check_equivalence(print, X, CLASSES)
    with pytest.raises(ValueError, match="compiled"):
        check_equivalence(classifier(), X, CLASSES)
    with pytest.raises(ValueError, match="at least 2 rows"):
        check_equivalence(compiled(classifier()), X[:1], CLASSES[:1])
    with pytest.raises(ValueError, match="same number of rows"):
        check_equivalence(compiled(classifier()), X, CLASSES[: ROWS - 1])
    with pytest.raises(ValueError, match="micro_batch_size"):
        check_equivalence(compiled(classifier()), X, CLASSES, micro_batch_size=0)
    assert gradaccum.keras.check_equivalence is check_equivalence
