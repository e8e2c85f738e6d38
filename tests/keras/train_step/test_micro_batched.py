"""`micro_batched(model, k)` trains as plain `fit` does at the large batch: weights, losses and metrics."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from gradaccum.keras.micro_batched import micro_batched
from tests.keras.problems import ACTIVITY, compiled_on, slow, slow_where_compiled
from tests.reference import relative_error

BACKEND = keras.backend.backend()
ROWS, BATCH, MICRO = 22, 11, 4
"""Two batches of one shape, compiled once; micro-batches of 4, 4 and 3 rows."""

random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 5))
CLASSES = random.integers(0, 3, ROWS)
WEIGHTS = random.uniform(0.5, 2, ROWS)
TOKENS = random.integers(1, 7, (ROWS, 6))
for row, length in enumerate(random.integers(1, 7, ROWS)):
    TOKENS[row, length:] = 0
TAGS = random.integers(0, 3, (ROWS, 6))


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def run(make, compiled, x, y=None, micro_batch_size=None, batch_norm="warn", verify=False, eager=False, **fit):
    """Train a model made by `make`; in micro-batches where a size is given. Returns it and its history.

    The proof of the first update has tests of its own (test_proof.py): here it would be compiled each time.
    """
    keras.utils.set_random_seed(1)
    model = make()
    if micro_batch_size is not None:
        model = micro_batched(model, micro_batch_size, batch_norm=batch_norm, verify=verify)
    keras.utils.set_random_seed(2)
    model.compile(**{"optimizer": sgd(), **compiled(), **({"run_eagerly": True} if eager else {})})
    if BACKEND == "tensorflow" and not callable(x) and not eager:
        # Otherwise the first trace makes the variables of optimizer and metrics, and is thrown away for a second one.
        batch = x, y, fit.get("sample_weight")
        rows = keras.tree.map_structure(lambda array: None if array is None else np.asarray(array)[:MICRO], batch)
        model._symbolic_build(data_batch=rows)
    fit = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **fit}
    history = model.fit(x() if callable(x) else x, y, **fit)
    return model, history.history


EAGER = BACKEND == "tensorflow"
"""Whether the plain `fit` runs eagerly: tracing takes ten times as long as its few updates."""

IN_FLOAT32 = 1e-6 if BACKEND == "jax" else 0.0
"""The error of logs where Keras sums over rows in float32: `result_type` takes float64 for float32 on JAX.

So `ops.mean` computes in it, and `ops.tanh`, and with it an activity regulariser of a tanh. Gradients don't see it.
"""


def assert_same(
    make, compiled, x, y=None, tolerance=1e-6, micro_batch_size=MICRO, in_logs=0.0, eager=EAGER, verify=False, **fit
):
    """Both ways of training end with the same weights, the same optimizer state and the same logs."""
    plain, expected = run(make, compiled, x, y, eager=eager, **fit)
    ours, logs = run(make, compiled, x, y, micro_batch_size, verify=verify, **fit)
    assert relative_error(ours.get_weights(), plain.get_weights()) <= tolerance
    states = [[keras.ops.convert_to_numpy(v) for v in model.optimizer.variables] for model in (ours, plain)]
    assert relative_error(*states) <= 10 * tolerance
    assert logs.keys() == expected.keys()
    allowed = max(10 * tolerance, in_logs)
    for name, values in expected.items():
        assert relative_error([logs[name]], [values]) <= allowed, name
    return ours, plain


def classifier(**kwargs):
    inputs = layers.Input((5,))
    hidden = layers.Dense(7, activation="tanh", **kwargs)(inputs)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


def crossentropy(**kwargs):
    return {"loss": losses.SparseCategoricalCrossentropy(**kwargs), "metrics": ["accuracy"]}


@pytest.mark.parametrize("optimizer", [slow("sgd"), "adam"])
def test_ragged_batches_match_plain_fit(float64, optimizer):
    make = {"sgd": sgd, "adam": lambda: keras.optimizers.Adam(0.01)}[optimizer]
    # Batches of 9, 9 and 4 rows; micro-batches of 3, 3 and 3, and of 4.
    compiled = lambda: {"optimizer": make(), **crossentropy()}  # noqa: E731
    assert_same(classifier, compiled, X, CLASSES, float64, batch_size=9, eager=False)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Plain Keras trains on an unreduced loss on TensorFlow only.")
def test_no_reduction_matches_plain_fit(float64):
    def compiled():
        return {"optimizer": keras.optimizers.SGD(0.01), **crossentropy(reduction=None)}

    assert_same(classifier, compiled, X, CLASSES, float64)


def tagger(mask=True, **kwargs):
    inputs = layers.Input((6,), dtype="int32")
    embedded = layers.Embedding(7, 3, mask_zero=mask)(inputs)
    hidden = layers.Dense(4, activation="tanh")(embedded)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", **kwargs)(hidden))


def two_outputs():
    inputs = {"tokens": layers.Input((6,), dtype="int32", name="tokens"), "numbers": layers.Input((5,), name="numbers")}
    sequence = layers.Dense(4)(layers.Embedding(7, 3, mask_zero=True)(inputs["tokens"]))
    tags = layers.Dense(3, activation="softmax", name="tags")(sequence)
    joined = layers.Concatenate()([layers.Dense(4)(inputs["numbers"]), layers.GlobalAveragePooling1D()(sequence)])
    return keras.Model(inputs, {"tags": tags, "value": layers.Dense(2, name="value")(joined)})


TWO_INPUTS = {"tokens": TOKENS, "numbers": X}
TWO_TARGETS = {"tags": TAGS, "value": X[:, :2]}


def two_losses(first="mean_with_sample_weight", second="sum_over_batch_size"):
    return {
        "loss": {
            "tags": losses.SparseCategoricalCrossentropy(reduction=first),
            "value": losses.Huber(reduction=second),
        },
        "loss_weights": {"tags": 0.3, "value": 2.0},
        "metrics": {"tags": ["accuracy"], "value": ["mae"]},
        "optimizer": keras.optimizers.SGD(0.01, momentum=0.9),
    }


@slow_where_compiled
@pytest.mark.parametrize("batch_size", [slow(8), 9])
def test_each_outputs_loss_in_the_logs_is_the_mean_over_all_rows(float64, batch_size):
    compiled = lambda: {**two_losses(), "optimizer": keras.optimizers.SGD(0.0)}  # noqa: E731
    fit = {"batch_size": batch_size, "epochs": 1}  # and a last batch of fewer rows
    model, logs = run(two_outputs, compiled, TWO_INPUTS, TWO_TARGETS, MICRO, **fit)
    distance = np.abs(model.predict(TWO_INPUTS, verbose=0)["value"] - TWO_TARGETS["value"])
    expected = np.where(distance <= 1, distance**2 / 2, distance - 1 / 2).mean()
    assert relative_error([logs["value_loss"]], [[expected]]) <= max(float64, IN_FLOAT32)


@keras.saving.register_keras_serializable("gradaccum_tests")
class Subclassed(keras.Model):
    """Unbuilt until it sees data; adds a loss in its call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(6, activation="tanh", kernel_regularizer="l1")
        self.out = layers.Dense(3, activation="softmax", activity_regularizer=ACTIVITY)

    def call(self, inputs, training=False):
        hidden = self.hidden(inputs)
        self.add_loss(0.1 * ops.mean(ops.square(hidden)))
        return self.out(hidden)


@keras.saving.register_keras_serializable("gradaccum_tests")
class OwnLoss(keras.Model):
    """Overrides compute_loss and compute_metrics."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.5 * ops.mean(ops.square(y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "largest": ops.max(y_pred)}


def with_own_loss():
    inputs = layers.Input((5,))
    return OwnLoss(inputs, layers.Dense(3, activation="softmax")(inputs))


def classes_of(*inside):
    return keras.Sequential([*inside, layers.Dense(3, activation="softmax")])


def over_weights():
    return crossentropy(reduction="mean_with_sample_weight")


def largest(y_true, y_pred):
    return ops.max(y_pred)  # a scalar that looks across rows


ZERO_OR_CANCELLING = WEIGHTS.copy()
ZERO_OR_CANCELLING[:MICRO] = 0
ZERO_OR_CANCELLING[BATCH : BATCH + MICRO] = [1, -1, 2, -2]
IGNORED = np.where(TOKENS == 0, -1, TAGS)
IGNORED[:4] = -1  # a whole micro-batch
# On JAX Keras divides a tanh's activity regulariser by its rows in float32, where only powers of two are exact.
EXACT, EXACT_BATCH = (16, 8) if BACKEND == "jax" else (ROWS, BATCH)
LOGS = {"in_logs": IN_FLOAT32}
CASES = {
    "weights that are zero or cancel": (
        classifier, over_weights, X, CLASSES, {"sample_weight": ZERO_OR_CANCELLING}),
    "masks beside other terms of the loss": (
        lambda: tagger(kernel_regularizer="l2", activity_regularizer=ACTIVITY), crossentropy, TOKENS, TAGS, {}),
    "ignored classes": (lambda: tagger(mask=False), lambda: crossentropy(ignore_class=-1), TOKENS, IGNORED, {}),
    "an unbuilt subclassed model with added losses": (Subclassed, crossentropy, X, CLASSES, LOGS),
    "regularisers, which count once": (
        lambda: classifier(kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer=ACTIVITY),
        crossentropy, X[:EXACT], CLASSES[:EXACT], {"batch_size": EXACT_BATCH, **LOGS}),
    "overridden compute_loss and compute_metrics": (
        with_own_loss, over_weights, X, CLASSES, {"sample_weight": WEIGHTS, **LOGS}),
    "a metric that is no sum over rows": (
        classifier, lambda: {**crossentropy(), "metrics": [largest]}, X, CLASSES, {}),
    "validation data": (classifier, crossentropy, X, CLASSES, {"epochs": 1, "validation_data": (X, CLASSES)}),
    "weights beside a term that only the forward pass adds": (
        lambda: classifier(activity_regularizer=ACTIVITY), over_weights, X, CLASSES,
        {"sample_weight": WEIGHTS, **LOGS}),
    "a mask that ends in pooling": (
        lambda: classes_of(layers.Embedding(7, 3, mask_zero=True), layers.GlobalAveragePooling1D()),
        lambda: {"optimizer": keras.optimizers.Adam(0.01), **crossentropy()}, TOKENS, CLASSES, {"epochs": 1}),
    "a mask that ends in an LSTM": (
        lambda: classes_of(layers.Embedding(7, 3, mask_zero=True), layers.LSTM(4)),
        lambda: {"optimizer": keras.optimizers.Adam(0.01), **crossentropy()}, TOKENS, CLASSES, {"epochs": 1}),
    "a masking layer": (
        lambda: classes_of(layers.Masking(0.0), layers.SimpleRNN(4, return_sequences=True)),
        crossentropy, random.normal(size=(ROWS, 6, 2)) * (TOKENS > 0)[..., None], TAGS, {"epochs": 1}),
    "no metrics": (classifier, lambda: {"loss": "sparse_categorical_crossentropy"}, X, CLASSES, {}),
    "a validation split": (classifier, crossentropy, X, CLASSES, {"epochs": 1, "validation_split": 0.3}),
}  # fmt: skip
EVERYWHERE = [
    "weights that are zero or cancel", "masks beside other terms of the loss", "ignored classes",
    "an unbuilt subclassed model with added losses", "overridden compute_loss and compute_metrics",
]  # fmt: skip


@compiled_on("tensorflow")
@pytest.mark.parametrize("case", [case if case in EVERYWHERE else slow(case) for case in CASES])
def test_matches_plain_fit_with(case, float64):
    make, compiled, x, y, fit = CASES[case]
    assert_same(make, compiled, x, y, float64, **fit)
