"""`micro_batched` in everything that `fit` can be given, and everything that happens once per update."""

from __future__ import annotations

import functools
import re

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import gradaccum.keras
from gradaccum.errors import NotEquivalentError
from gradaccum.keras.micro_batched import micro_batched
from tests.keras.problems import compiled_on, slow, slow_where_compiled
from tests.keras.train_step.test_micro_batched import (
    BACKEND,
    BATCH,
    CLASSES,
    MICRO,
    ROWS,
    WEIGHTS,
    X,
    assert_same,
    classifier,
    crossentropy,
    run,
    sgd,
)
from tests.reference import relative_error


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], CLASSES[rows], WEIGHTS[rows]


def generator():
    while True:
        for index in range(2):
            yield Sequence()[index]


def tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, CLASSES, WEIGHTS)).batch(BATCH)


@pytest.mark.parametrize(
    "source",
    [slow(Sequence), slow(generator), tf_data]
    if BACKEND == "tensorflow"
    else [Sequence, slow(generator), slow(tf_data)],
)
def test_every_source_of_batches_matches_plain_fit(float64, source):
    fit = {"batch_size": None, "steps_per_epoch": 2 if source is generator else None, "eager": False}
    assert_same(classifier, lambda: crossentropy(reduction="mean_with_sample_weight"), source, tolerance=float64, **fit)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA is not optional on JAX, and absent on PyTorch.")
@pytest.mark.parametrize("micro_batch_size", [slow(3), 4])
def test_xla_on_tensorflow_matches_plain_fit(micro_batch_size):
    compiled = lambda: {**crossentropy(), "jit_compile": True}  # noqa: E731
    fit = {"batch_size": 10, "epochs": 1, "eager": False}
    assert_same(classifier, compiled, X[:20], CLASSES[:20], 1e-6, micro_batch_size, **fit)


@compiled_on("jax")
def test_schedules_ema_weight_decay_constraints_and_callbacks_are_per_update(float64):
    def optimizer():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
        averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        return keras.optimizers.SGD(schedule, momentum=0.9, weight_decay=0.01, clipnorm=0.1, **averages)

    class Batches(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append((batch, float(logs["loss"])))

    make = lambda: classifier(kernel_constraint=keras.constraints.MaxNorm(0.5))  # noqa: E731
    seen = []
    for size in (None, MICRO):
        callback = Batches()
        model, _ = run(
            make, lambda: {**crossentropy(), "optimizer": optimizer()}, X, CLASSES, size, callbacks=[callback]
        )
        assert int(ops.convert_to_numpy(model.optimizer.iterations)) == 4
        seen.append((model.get_weights(), callback.seen))
    assert relative_error(seen[1][0], seen[0][0]) <= float64
    assert relative_error(seen[1][1], seen[0][1]) <= 10 * float64


def linear():
    return keras.Sequential([layers.Input((5,)), layers.Dense(3)])


def regularised():
    hidden = [layers.Dense(8, activation="relu"), layers.Dropout(0.5)]
    return keras.Sequential([layers.Input((5,)), *hidden, layers.Dense(3)])


def test_random_layers_draw_per_micro_batch_and_are_reproducible():
    compiled = lambda: {"loss": "mse"}  # noqa: E731
    same = np.ones((8, 5))  # every micro-batch holds the same rows
    first, _ = run(regularised, compiled, same, np.zeros((8, 3)), 2, epochs=1)
    second, _ = run(regularised, compiled, same, np.zeros((8, 3)), 2, epochs=1)
    assert relative_error(first.get_weights(), second.get_weights()) == 0
    if BACKEND != "torch":  # which draws from PyTorch's own generator
        (state,) = [ops.convert_to_numpy(v) for v in first.non_trainable_variables if "seed" in v.path]
        assert int(state[1]) == 4  # one draw per micro-batch


@slow_where_compiled
def test_metrics_of_outputs_larger_than_the_batch_are_streamed(float64):
    def make():
        return keras.Sequential([layers.Input((5,)), layers.Dense(40, activation="softmax")])

    def compiled():
        metrics = {
            "metrics": ["accuracy", keras.metrics.SparseCategoricalCrossentropy()],
            "weighted_metrics": ["accuracy"],
        }
        return {"loss": losses.SparseCategoricalCrossentropy(), **metrics}

    ours, _ = assert_same(make, compiled, X, CLASSES, float64, sample_weight=WEIGHTS)
    assert {plan.metrics for plan in ours.train_step.plans.values()} <= {"streamed"}


def under(policy, make):
    """A model that is made under another dtype policy."""
    keras.config.set_dtype_policy(policy)
    try:
        return make()
    finally:
        keras.config.set_dtype_policy("float32")


@compiled_on("tensorflow")
def test_mixed_float16_with_loss_scaling_matches_plain_fit():
    ours, _ = assert_same(lambda: under("mixed_float16", classifier), crossentropy, X, CLASSES, 2e-3, epochs=1)
    assert type(ours.optimizer).__name__ == "LossScaleOptimizer"


def test_half_precision_gradients_are_summed_in_float32():
    def make():
        return keras.Sequential([layers.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def summed(y_true, y_pred):
        return -ops.sum(y_pred, axis=-1)

    # 512 gradients of 1/512: a sum in bfloat16 stays at one half.
    compiled = lambda: {"loss": summed, "optimizer": keras.optimizers.SGD(1.0)}  # noqa: E731
    fit = {"batch_size": 512, "epochs": 1}
    model, _ = run(lambda: under("bfloat16", make), compiled, np.ones((512, 1)), np.ones((512, 1)), 1, **fit)
    assert float(ops.convert_to_numpy(ops.cast(model.weights[0], "float32")).item()) == 1.0


@compiled_on("tensorflow")
def test_variables_without_a_gradient_stay_as_they_are():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(3), layers.Dense(2)

        def build(self, shape):
            self.used.build(shape)
            self.unused.build(shape)

        def call(self, inputs):
            return self.used(inputs)

    compiled = lambda: {"loss": "mse"}  # noqa: E731
    if BACKEND == "jax":
        assert_same(Unused, compiled, X, X[:, :3])
    else:
        with pytest.warns(UserWarning, match="[Gg]radients do not exist"):
            assert_same(Unused, compiled, X, X[:, :3])


@slow_where_compiled
def test_the_model_saves_loads_and_clones_as_what_it_came_from(tmp_path):
    plain, ours = classifier(), micro_batched(classifier(), MICRO)
    ours.compile(optimizer=sgd(), **crossentropy())
    ours.fit(X, CLASSES, batch_size=BATCH, verbose=0)
    config = [model.to_json().replace(model.name, "") for model in (plain, ours)]
    assert "gradaccum" not in config[1]
    ours.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "train_step" not in vars(loaded)
    assert relative_error(loaded.get_weights(), ours.get_weights()) == 0
    loaded.fit(X, CLASSES, batch_size=BATCH, verbose=0)
    assert "train_step" not in vars(keras.models.clone_model(ours))
    plain.set_weights(ours.get_weights())
    assert relative_error([plain.predict(X, verbose=0)], [ours.predict(X, verbose=0)]) == 0


@compiled_on("tensorflow")
def test_auto_picks_a_size_and_matches_plain_fit(float64, caplog):
    with caplog.at_level("INFO", logger="gradaccum"):
        assert_same(classifier, crossentropy, X, CLASSES, float64, "auto", batch_size=11, epochs=1)
    (said,) = {record.message for record in caplog.records if record.name == "gradaccum" and "auto" in record.message}
    assert re.match(r"micro_batch_size='auto': [1-9]\d* of (11|any number of) rows\.", said)


def sparse(x):
    if BACKEND == "jax":
        from jax.experimental.sparse import BCOO

        return BCOO.fromdense(x.astype("float32"))
    import tensorflow as tf

    return tf.sparse.from_dense(x.astype("float32"))


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no sparse tensors on PyTorch")
def test_sparse_inputs_match_plain_fit_and_are_proved():
    x = X * (np.random.default_rng(8).random(X.shape) < 0.4)
    weights = []
    for size in (None, MICRO):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Input((5,), sparse=True), layers.Dense(4), layers.Dense(3)])
        model = model if size is None else micro_batched(model, size)
        model.compile(optimizer=sgd(), loss="mse", jit_compile=BACKEND == "jax")
        for _ in range(2):
            model.train_on_batch(sparse(x), X[:, :3])
        weights.append(model.get_weights())
    assert relative_error(*weights) <= 1e-6
    assert gradaccum.keras.check_equivalence(model, sparse(x), X[:, :3]).ok


@compiled_on("tensorflow")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras says so of the other output's layer
def test_a_loss_that_is_a_number_of_pythons_matches_plain_fit_and_is_proved(float64):
    def make():
        inputs = layers.Input((5,))
        hidden = layers.Dense(4, kernel_regularizer="l2")(inputs)
        return keras.Model(inputs, [layers.Dense(3, name="trained")(hidden), layers.Dense(2, name="other")(hidden)])

    compiled = lambda: {"loss": ["mse", lambda y, p: 0.0]}  # noqa: E731
    ours, _ = assert_same(make, compiled, X, [X[:, :3], X[:, :2]], float64, verify=True, epochs=1)
    assert gradaccum.keras.check_equivalence(ours, X, [X[:, :3], X[:, :2]]).ok


# Errors.


@compiled_on("jax")
def test_a_layer_that_keeps_a_state_of_each_row_is_refused_by_name():
    model = keras.Sequential([layers.Input(batch_shape=(8, 2, 5)), layers.SimpleRNN(3, stateful=True, name="rnn")])
    micro_batched(model, 4, verify=False).compile(optimizer=sgd(), loss="mse")
    batch = np.zeros((8, 2, 5)), np.zeros((8, 3))
    for use in (model.train_on_batch, functools.partial(gradaccum.keras.check_equivalence, model)):
        with pytest.raises(ValueError, match="a state of each of its rows: 'rnn' with stateful=True"):
            use(*batch)
    micro_batched(model, 8, verify=False).train_on_batch(*batch)


class OwnStep(keras.Model):
    def train_step(self, *args):
        return {}


@pytest.mark.parametrize(
    ("model", "size", "options", "said"),
    [
        *((classifier, size, {}, "micro_batch_size.*Received") for size in [0, -1, 2.5, True, "4", None]),
        (lambda: print, 4, {}, r"keras\.Model.*Received"),
        (classifier, 4, {"batch_norm": "no"}, "batch_norm.*Received"),
        (classifier, "auto", {"batch_norm": "exact"}, "needs a number of rows. Received"),
        (OwnStep, 4, {}, "OwnStep overrides `train_step`"),
    ],
)
def test_bad_arguments_are_refused(model, size, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        micro_batched(model(), size, **options)


@slow_where_compiled
def test_after_a_refused_loss_the_model_trains_with_another():
    model = micro_batched(keras.Sequential([layers.Input((5,)), layers.Dense(3, activation="sigmoid")]), MICRO)
    model.compile(optimizer=keras.optimizers.SGD(0.1, use_ema=True), loss=losses.Dice())
    before = model.get_weights()
    with pytest.raises(NotEquivalentError, match="'dice.*across the rows"):
        model.fit(X, np.eye(3)[CLASSES], batch_size=BATCH, verbose=0)
    assert relative_error(model.get_weights(), before) == 0
    model.compile(optimizer=sgd(), loss="mse")
    model.fit(X, np.eye(3)[CLASSES], batch_size=BATCH, verbose=0)


@slow_where_compiled
def test_a_batch_that_cannot_be_split_is_named_and_nothing_is_touched():
    model = micro_batched(classifier(), MICRO)
    model.compile(optimizer=sgd(), loss="mse")
    model.fit(X, np.zeros((ROWS, 3)), verbose=0)
    before = model.get_weights()

    def batches():
        while True:
            yield X, np.zeros((ROWS - 1, 3))

    said = r"(?s)same number of rows.*x  shape \(22, 5\).*y  shape \(21, 3\)"
    with pytest.raises(ValueError, match=said):
        model.fit(batches(), steps_per_epoch=1, shuffle=False, verbose=0)
    assert relative_error(model.get_weights(), before) == 0
    model = micro_batched(keras.Sequential([layers.Dense(3)]), MICRO, verify=False)  # Keras would build it first
    model.compile(optimizer=sgd(), loss="mse")
    with pytest.raises(ValueError, match=said):
        model.train_on_batch(*next(batches()))


@slow_where_compiled
def test_scales_of_float8_are_the_largest_of_the_micro_batches():
    def make():
        model = keras.Sequential([layers.Input((16,)), layers.Dense(16, name="dense")])
        model.get_layer("dense").quantize("float8")
        return model

    random = np.random.default_rng(5)
    x = random.normal(size=(ROWS, 16)).astype("float32") * np.arange(1, ROWS + 1)[:, None]  # each row larger
    compiled = lambda: {"loss": "mse", "optimizer": keras.optimizers.SGD(1e-4)}  # noqa: E731
    ours, plain = (run(make, compiled, x, x, size, epochs=1, batch_size=ROWS)[0] for size in (MICRO, None))
    pairs = list(zip(ours.trainable_variables, plain.trainable_variables))
    scales = [pair for pair in pairs if pair[0].overwrite_with_gradient]
    assert len(scales) == 6
    for one, other in scales:
        expected = ops.convert_to_numpy(ops.cast(other, "float32"))
        assert relative_error([ops.convert_to_numpy(ops.cast(one, "float32"))], [expected]) <= 1e-6, one.path
