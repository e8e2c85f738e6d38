"""Models that the tests of `micro_batched` share, and training them both ways."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, losses, ops

from gradaccum.keras.micro_batched import micro_batched
from tests.keras.marks import BACKEND
from tests.keras.problems import sgd
from tests.keras.train_step.data import BATCH, MICRO, TAGS, TOKENS, X
from tests.reference import relative_error


def classifier(**kwargs):
    inputs = layers.Input((5,))
    hidden = layers.Dense(7, activation="tanh", **kwargs)(inputs)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


def linear():
    return keras.Sequential([layers.Input((5,)), layers.Dense(3, name="dense")])


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


def crossentropy(**kwargs):
    return {"loss": losses.SparseCategoricalCrossentropy(**kwargs), "metrics": ["accuracy"]}


def mse():
    return {"loss": "mse"}


def two_losses():
    return {
        "loss": {
            "tags": losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
            "value": losses.Huber(),
        },
        "loss_weights": {"tags": 0.3, "value": 2.0},
        "metrics": {"tags": ["accuracy"], "value": ["mae"]},
        "optimizer": keras.optimizers.SGD(0.01, momentum=0.9),
    }


TWO = two_outputs, two_losses, {"tokens": TOKENS, "numbers": X}, {"tags": TAGS, "value": X[:, :2]}


def squares(t, p):
    return ops.mean(ops.square(p - ops.cast(t, p.dtype)), axis=-1)


@keras.saving.register_keras_serializable("gradaccum_tests")
class OverWeights(losses.Loss):
    """Divides by the sum of the sample weights; without them, of the targets."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        y_true = ops.cast(y_true, y_pred.dtype)
        weights = ops.abs(y_true) if sample_weight is None else ops.cast(sample_weight, y_pred.dtype)
        values = ops.square(y_pred - y_true)
        return ops.sum((1 if sample_weight is None else ops.reshape(weights, (-1, 1))) * values) / ops.sum(weights)


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
