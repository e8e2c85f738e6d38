"""Every loss of Keras under `micro_batched`: plain `fit`'s update, or a clear refusal before anything is trained."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, losses

from tests.keras.problems import BACKEND, compiled_on, slow, slow_where_compiled
from tests.keras.train_step.test_micro_batched import CLASSES, ROWS, WEIGHTS, X, assert_same, classifier
from tests.keras.train_step.test_proof import refused

random = np.random.default_rng(4)
TARGETS = {
    "regression": random.normal(size=(ROWS, 3)),
    "positive": random.uniform(1, 2, size=(ROWS, 3)),
    "binary": random.integers(0, 2, (ROWS, 3)),
    "one_hot": np.eye(3)[CLASSES],
    "sparse": CLASSES,
}
ADDITIVE = {
    **dict.fromkeys(["MeanSquaredError", "MeanAbsoluteError", "CosineSimilarity", "Huber", "LogCosh"], "regression"),
    **dict.fromkeys(["MeanAbsolutePercentageError", "MeanSquaredLogarithmicError", "Poisson"], "positive"),
    **dict.fromkeys(["Hinge", "SquaredHinge", "BinaryCrossentropy", "BinaryFocalCrossentropy"], "binary"),
    **dict.fromkeys(["CategoricalHinge", "CategoricalCrossentropy", "CategoricalFocalCrossentropy"], "one_hot"),
    "KLDivergence": "one_hot",
    "SparseCategoricalCrossentropy": "sparse",
    "CategoricalGeneralizedCrossEntropy": "sparse",
}
"""What a row's loss depends on is that row alone; with the targets that they take."""
BY_AXIS = ("Dice", "Tversky")
"""These sum over the axes they are told, by default over all, rows included."""


def test_every_built_in_loss_is_tested_here():
    kinds = {name: kind for name, kind in vars(losses).items() if isinstance(kind, type) and kind is not losses.Loss}
    built_in = {name for name, kind in kinds.items() if issubclass(kind, losses.Loss)}
    assert built_in == {*ADDITIVE, *BY_AXIS, "Circle", "CTC"}


FEW = ["MeanSquaredError", "CosineSimilarity", "SparseCategoricalCrossentropy"][: 3 if BACKEND == "torch" else 1]
"""One of each kind of arguments, the first alone where each is compiled; the others are slow."""


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ADDITIVE])
def test_losses_of_single_rows_match_plain_fit(float64, name):
    def compiled():
        return {"loss": getattr(losses, name)(), "optimizer": keras.optimizers.SGD(1e-3, momentum=0.9)}

    fit = {"sample_weight": WEIGHTS, "epochs": 1, "batch_size": ROWS, "micro_batch_size": 8}
    assert_same(classifier, compiled, X, TARGETS[ADDITIVE[name]], float64, **fit)


@slow_where_compiled
def test_ctc_matches_plain_fit(float64):
    def make():
        return keras.Sequential([layers.Input((6, 2)), layers.Dense(4)])

    x, y = random.normal(size=(ROWS, 6, 2)), random.integers(1, 4, (ROWS, 2))
    assert_same(make, lambda: {"loss": losses.CTC()}, x, y, max(float64, 1e-6), epochs=1)


def segmenter():
    return keras.Sequential([layers.Input((4, 5)), layers.Dense(3, activation="sigmoid")])


PICTURES = random.normal(size=(ROWS, 4, 5)).astype("float32")
SEGMENTS = random.integers(0, 2, (ROWS, 4, 3)).astype("float32")
WITHIN = [(name, axis) for name in BY_AXIS for axis in [1, 2, -1, (1, 2), (-2, -1)]]
OVER = [(name, axis) for name in BY_AXIS for axis in [None, 0, -3, (0, 1), (0, 2), (0, 1, 2)]]


def slow_but(cases, kept):
    return [pytest.param(*case, marks=[] if case == kept else pytest.mark.slow) for case in cases]


@slow_where_compiled
@pytest.mark.parametrize("reduction", [slow("sum_over_batch_size"), "mean_with_sample_weight"])
@pytest.mark.parametrize(("name", "axis"), slow_but(WITHIN, ("Dice", (1, 2))))
def test_sums_within_a_row_match_plain_fit(float64, name, axis, reduction):
    compiled = lambda: {"loss": getattr(losses, name)(axis=axis, reduction=reduction)}  # noqa: E731
    weights = WEIGHTS if axis in [(1, 2), (-2, -1)] else None
    assert_same(segmenter, compiled, PICTURES, SEGMENTS, float64, sample_weight=weights, epochs=1)


@slow_where_compiled
@pytest.mark.parametrize(("name", "axis"), slow_but(OVER, ("Tversky", (0, 2))))
def test_sums_over_rows_are_refused(name, axis):
    loss = getattr(losses, name)(axis=axis)
    said = f"'{loss.name}'.*looks across the rows.*with an `axis` that leaves out"
    refused(segmenter(), PICTURES, SEGMENTS, said, loss=loss)


@pytest.mark.parametrize("settings", [slow({}), slow({"remove_diagonal": False}), slow({"gamma": 1.0})])
def test_losses_that_compare_rows_are_refused(settings):
    model = keras.Sequential([layers.Input((5,)), layers.Dense(3), layers.UnitNormalization()])
    said = "'circle'.*looks across the rows.*Let it return one value per row"
    refused(model, X.astype("float32"), CLASSES, said, loss=losses.Circle(**settings))
