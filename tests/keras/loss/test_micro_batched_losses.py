"""Every loss of Keras under `micro_batched`: plain `fit`'s update, or a clear refusal before anything is trained."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, losses

from gradaccum.errors import NotEquivalentError
from gradaccum.keras.micro_batched import micro_batched
from tests.keras.problems import BACKEND, compiled_on, slow, slow_where_compiled
from tests.keras.train_step.test_micro_batched import CLASSES, ROWS, WEIGHTS, X, assert_same, classifier
from tests.reference import relative_error

random = np.random.default_rng(4)

TARGETS = {
    "regression": random.normal(size=(ROWS, 3)),
    "positive": random.uniform(1, 2, size=(ROWS, 3)),
    "binary": random.integers(0, 2, (ROWS, 3)),
    "one_hot": np.eye(3)[CLASSES],
    "sparse": CLASSES,
}
ADDITIVE = {
    "MeanSquaredError": "regression",
    "MeanAbsoluteError": "regression",
    "MeanAbsolutePercentageError": "positive",
    "MeanSquaredLogarithmicError": "positive",
    "CosineSimilarity": "regression",
    "Huber": "regression",
    "LogCosh": "regression",
    "Hinge": "binary",
    "SquaredHinge": "binary",
    "CategoricalHinge": "one_hot",
    "KLDivergence": "one_hot",
    "Poisson": "positive",
    "BinaryCrossentropy": "binary",
    "BinaryFocalCrossentropy": "binary",
    "CategoricalCrossentropy": "one_hot",
    "CategoricalFocalCrossentropy": "one_hot",
    "SparseCategoricalCrossentropy": "sparse",
    "CategoricalGeneralizedCrossEntropy": "sparse",
}
"""What a row's loss depends on is that row alone; with the targets that they take."""

BY_AXIS = ("Dice", "Tversky")
"""These sum over the axes they are told, by default over all, rows included."""

ACROSS_ROWS = {"Circle": "sparse"}
"""These compare rows with each other, always."""


def of_rows(name, reduction, float64):
    def compiled():
        return {
            "loss": getattr(losses, name)(reduction=reduction),
            "optimizer": keras.optimizers.SGD(1e-3, momentum=0.9),
        }

    y = TARGETS[ADDITIVE[name]]
    assert_same(
        classifier, compiled, X, y, float64, sample_weight=WEIGHTS, epochs=1, batch_size=ROWS, micro_batch_size=8
    )


def test_every_built_in_loss_is_tested_here():
    built_in = {
        name
        for name, member in vars(losses).items()
        if isinstance(member, type) and issubclass(member, losses.Loss) and member is not losses.Loss
    }
    assert built_in == {*ADDITIVE, *BY_AXIS, *ACROSS_ROWS, "CTC"}


FEW = ["MeanSquaredError", "CosineSimilarity", "SparseCategoricalCrossentropy"][: 3 if BACKEND == "torch" else 1]
"""One of each kind of arguments, the first alone where each is compiled; the others are slow."""


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ADDITIVE])
def test_losses_of_single_rows_match_plain_fit(float64, name):
    of_rows(name, "sum_over_batch_size", float64)


@slow_where_compiled
def test_ctc_matches_plain_fit(float64):
    def make():
        return keras.Sequential([layers.Input((6, 2)), layers.Dense(4)])

    x, y = random.normal(size=(ROWS, 6, 2)), random.integers(1, 4, (ROWS, 2))
    assert_same(make, lambda: {"loss": losses.CTC()}, x, y, max(float64, 1e-6), epochs=1)


def segmenter():
    return keras.Sequential([layers.Input((4, 5)), layers.Dense(3, activation="sigmoid")])


PICTURES, SEGMENTS = random.normal(size=(ROWS, 4, 5)), random.integers(0, 2, (ROWS, 4, 3))


def slow_but(cases, *kept):
    return [pytest.param(*case, marks=[] if case in kept else pytest.mark.slow) for case in cases]


WITHIN = [
    (name, axis, reduction)
    for name in BY_AXIS
    for axis in [1, 2, -1, (1, 2), (-2, -1)]
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight")
]
OVER = [(name, axis) for name in BY_AXIS for axis in [None, 0, -3, (0, 1), (0, 2), (0, 1, 2)]]


@slow_where_compiled
@pytest.mark.parametrize(
    ("name", "axis", "reduction"),
    slow_but(WITHIN, ("Dice", (1, 2), "mean_with_sample_weight")),
)
def test_sums_within_a_row_match_plain_fit(float64, name, axis, reduction):
    compiled = lambda: {"loss": getattr(losses, name)(axis=axis, reduction=reduction)}  # noqa: E731
    weights = WEIGHTS if axis in [(1, 2), (-2, -1)] else None
    assert_same(segmenter, compiled, PICTURES, SEGMENTS, float64, sample_weight=weights, epochs=1)


@slow_where_compiled
@pytest.mark.parametrize(("name", "axis"), slow_but(OVER, ("Tversky", (0, 2))))
def test_sums_over_rows_are_refused(name, axis):
    refused(segmenter(), getattr(losses, name)(axis=axis), PICTURES, SEGMENTS, "with an `axis` that leaves out")


@pytest.mark.parametrize("name", ACROSS_ROWS)
@pytest.mark.parametrize(
    "settings",
    [slow({}), *(pytest.param(s, marks=pytest.mark.slow) for s in ({"remove_diagonal": False}, {"gamma": 1.0}))],
)
def test_losses_that_compare_rows_are_refused(name, settings):
    y = TARGETS[ACROSS_ROWS[name]]
    model = keras.Sequential([layers.Input((5,)), layers.Dense(3), layers.UnitNormalization()])
    refused(model, getattr(losses, name)(**settings), X, y, "Let it return one value per row")


def refused(model, loss, x, y, advice):
    """Training this is refused by name, and the weights stay as they were."""
    micro_batched(model, 8).compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
    before = model.get_weights()
    with pytest.raises(NotEquivalentError, match=f"'{loss.name}'.*looks across the rows.*{advice}"):
        model.fit(x, y, batch_size=ROWS, verbose=0)
    assert relative_error(model.get_weights(), before) == 0
