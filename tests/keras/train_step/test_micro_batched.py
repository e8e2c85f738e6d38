"""`micro_batched(model, k)` trains as plain `fit` does at the large batch: weights, states, losses and metrics."""

from __future__ import annotations

import functools
import re

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import gradaccum.keras
from gradaccum.keras.micro_batched import micro_batched
from tests.keras.marks import BACKEND, compiled_on, slow, slow_where_compiled
from tests.keras.problems import ACTIVITY, sgd
from tests.keras.train_step.cases import IN_FLOAT32, assert_same, classifier, crossentropy, mse, run, tagger
from tests.keras.train_step.data import BATCH, CLASSES, MICRO, ROWS, TAGS, TOKENS, WEIGHTS, X
from tests.reference import relative_error

random = np.random.default_rng(4)


@pytest.mark.parametrize("optimizer", [slow("sgd"), "adam"])
def test_ragged_batches_match_plain_fit(float64, optimizer):
    make = {"sgd": sgd, "adam": lambda: keras.optimizers.Adam(0.01)}[optimizer]
    # Batches of 9, 9 and 4 rows; micro-batches of 3, 3 and 3, and of 4.
    compiled = lambda: {"optimizer": make(), **crossentropy()}  # noqa: E731
    assert_same(classifier, compiled, X, CLASSES, float64, batch_size=9, eager=False)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_a_share_that_is_known_in_advance_is_not_rounded_to_float32(exact, reduction):
    """A third of the rows: a number, which TensorFlow casts to float32 before anything else."""
    compiled = functools.partial(crossentropy, reduction=reduction)
    rows = {"sample_weight": WEIGHTS[:18], "batch_size": 9, "eager": False}
    assert_same(classifier, compiled, X[:18], CLASSES[:18], exact, 3, IN_FLOAT32, **rows)


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


def over_weights():
    return crossentropy(reduction="mean_with_sample_weight")


class Scalar(losses.Loss):
    """The mean over rows, as a scalar, which Keras multiplies with weights and mask."""

    def call(self, y_true, y_pred):
        return ops.mean(-ops.log(y_pred[..., 0]))


def largest(y_true, y_pred):
    return ops.max(y_pred)  # a scalar that looks across rows


def segmenter():
    return keras.Sequential([layers.Input((4, 5)), layers.Dense(3, activation="sigmoid")])


def logits():
    return keras.Sequential([layers.Input((6, 2)), layers.Dense(4)])


def constrained():
    return classifier(kernel_constraint=keras.constraints.MaxNorm(0.5))


def scheduled():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    return {**crossentropy(), "optimizer": keras.optimizers.SGD(rate, 0.9, weight_decay=0.01, clipnorm=0.1, **averages)}


ZERO_OR_CANCELLING = WEIGHTS.copy()
ZERO_OR_CANCELLING[:MICRO] = 0
ZERO_OR_CANCELLING[BATCH : BATCH + MICRO] = [1, -1, 2, -2]
IGNORED = np.where(TOKENS == 0, -1, TAGS)
IGNORED[:4] = -1  # a whole micro-batch
MASKED = np.where(np.arange(len(TOKENS))[:, None] < MICRO, 0, TOKENS)  # all of a micro-batch
SPREAD = np.repeat(WEIGHTS[:, None], 6, 1)
LOGS, ONCE, WEIGHED = {"in_logs": IN_FLOAT32}, {"epochs": 1}, {"sample_weight": WEIGHTS}
CASES = {
    "weights that are zero or cancel": (
        classifier, over_weights, X, CLASSES, {"sample_weight": ZERO_OR_CANCELLING}),
    "masks beside other terms of the loss": (
        lambda: tagger(kernel_regularizer="l2", activity_regularizer=ACTIVITY), crossentropy, TOKENS, TAGS, {}),
    "ignored classes": (lambda: tagger(mask=False), lambda: crossentropy(ignore_class=-1), TOKENS, IGNORED, {}),
    "an unbuilt subclassed model with added losses": (Subclassed, crossentropy, X, CLASSES, LOGS),
    "overridden compute_loss and compute_metrics": (with_own_loss, over_weights, X, CLASSES, {**WEIGHED, **LOGS}),
    "a metric that is no sum over rows": (
        classifier, lambda: {**crossentropy(), "metrics": [largest]}, X, CLASSES, {}),
    "schedules, averages, decay, clipping and constraints": (constrained, scheduled, X, CLASSES, {}),
    "validation data": (classifier, crossentropy, X, CLASSES, {**ONCE, "validation_data": (X, CLASSES)}),
    "a validation split": (classifier, crossentropy, X, CLASSES, {**ONCE, "validation_split": 0.3}),
    "CTC": (logits, lambda: {"loss": losses.CTC()}, random.normal(size=(ROWS, 6, 2)), random.integers(1, 4, (ROWS, 2)),
            {**ONCE, "tolerance": 1e-6}),
}  # fmt: skip
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
TARGETS = {
    "regression": random.normal(size=(ROWS, 3)),
    "positive": random.uniform(1, 2, size=(ROWS, 3)),
    "binary": random.integers(0, 2, (ROWS, 3)),
    "one_hot": np.eye(3)[CLASSES],
    "sparse": CLASSES,
}
BY_AXIS = "Dice", "Tversky"
"""These sum over the axes they are told, by default over all, rows included."""


def of_single_rows(name):
    def compiled():
        return {"loss": getattr(losses, name)(), "optimizer": keras.optimizers.SGD(1e-3, momentum=0.9)}

    fit = {**WEIGHED, **ONCE, "batch_size": ROWS, "micro_batch_size": 8}
    return classifier, compiled, X, TARGETS[ADDITIVE[name]], fit


def within_a_row(name, axis, reduction):
    compiled = lambda: {"loss": getattr(losses, name)(axis=axis, reduction=reduction)}  # noqa: E731
    x, y = random.normal(size=(ROWS, 4, 5)), random.integers(0, 2, (ROWS, 4, 3))
    weighed = WEIGHED if axis in [(1, 2), (-2, -1)] else {}
    return segmenter, compiled, x.astype("float32"), y.astype("float32"), {**weighed, **ONCE}


def of_scalars(reduction):
    compiled = lambda: {"loss": Scalar(reduction=reduction)}  # noqa: E731
    loose = {"tolerance": 1e-6} if BACKEND == "jax" else {}  # where its mean is taken in float32
    rows = {
        "weights that are zero or cancel": (classifier, X, CLASSES, ZERO_OR_CANCELLING),
        "even weights": (classifier, X, CLASSES, np.full(ROWS, 2.0)),
        "masks": (tagger, MASKED, TAGS, None),
        "masks and weights": (tagger, MASKED, TAGS, SPREAD),
    }
    return {
        f"a scalar, {name}, {reduction}": (make, compiled, x, y, {**loose, "sample_weight": weights})
        for name, (make, x, y, weights) in rows.items()
    }


MEANS = "sum_over_batch_size", "mean_with_sample_weight"
SWEEP = {
    **{name: of_single_rows(name) for name in ADDITIVE},
    **{f"{name} over {axis}, {reduction}": within_a_row(name, axis, reduction)
       for name in BY_AXIS for axis in [1, 2, -1, (1, 2), (-2, -1)] for reduction in MEANS},
}  # fmt: skip
EVERYWHERE = [
    "weights that are zero or cancel", "masks beside other terms of the loss", "ignored classes",
    "an unbuilt subclassed model with added losses", "overridden compute_loss and compute_metrics", "MeanSquaredError",
    "schedules, averages, decay, clipping and constraints", "a scalar, masks and weights, sum_over_batch_size",
]  # fmt: skip
OFTEN = [*CASES, "CosineSimilarity", "SparseCategoricalCrossentropy", *(f"Dice over (1, 2), {one}" for one in MEANS)]
CASES |= {name: case for reduction in (*MEANS, "sum") for name, case in of_scalars(reduction).items()} | SWEEP


def marked(case):
    if case in EVERYWHERE:
        return case
    return slow(case) if case in OFTEN else pytest.param(case, marks=pytest.mark.slow)


@compiled_on("tensorflow")
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_matches_plain_fit_with(case, float64):
    make, compiled, x, y, fit = CASES[case]
    assert_same(make, compiled, x, y, **{"tolerance": float64, **fit})


def test_every_built_in_loss_is_tested_here_or_refused():
    kinds = {name: kind for name, kind in vars(losses).items() if isinstance(kind, type) and kind is not losses.Loss}
    built_in = {name for name, kind in kinds.items() if issubclass(kind, losses.Loss)}
    assert built_in == {*ADDITIVE, *BY_AXIS, "Circle", "CTC"}


@slow_where_compiled
def test_weights_of_two_losses_that_are_almost_even_count_as_they_are(exact):
    def train(wrap):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,))
        model = wrap(keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(3)(inputs)]))
        model.compile(keras.optimizers.SGD(0.1), [losses.MeanSquaredError("mean_with_sample_weight") for _ in range(2)])
        model.train_on_batch(X, [np.eye(3)[CLASSES]] * 2, [1 + 8e-6 * np.linspace(0, 1, ROWS)] * 2)
        return model.get_weights()

    split = functools.partial(micro_batched, micro_batch_size=MICRO, verify=False)
    assert relative_error(train(split), train(lambda model: model)) <= exact


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], CLASSES[rows], WEIGHTS[rows]


def generator():
    while True:
        yield from (Sequence()[index] for index in range(2))


def tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, CLASSES, WEIGHTS)).batch(BATCH)


SOURCES = {Sequence: BACKEND != "tensorflow", generator: False, tf_data: BACKEND == "tensorflow"}


@pytest.mark.parametrize("source", [source if often else slow(source) for source, often in SOURCES.items()])
def test_every_source_of_batches_matches_plain_fit(float64, source):
    fit = {"batch_size": None, "steps_per_epoch": 2 if source is generator else None, "eager": False}
    assert_same(classifier, over_weights, source, tolerance=float64, **fit)


def unreduced():
    return {"optimizer": keras.optimizers.SGD(0.01), **crossentropy(reduction=None)}


def by_xla():
    return {**crossentropy(), "jit_compile": True}


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's: losses without reduction, and XLA as a choice")
@pytest.mark.parametrize(("compiled", "size"), [(unreduced, 4), (by_xla, 4), (by_xla, 3)])
def test_what_tensorflow_alone_compiles_matches_plain_fit(compiled, size, float64):
    fit = {"batch_size": 10, "epochs": 1, "eager": compiled is unreduced}
    assert_same(classifier, compiled, X[:20], CLASSES[:20], 1e-6 if compiled is by_xla else float64, size, **fit)


def test_random_layers_draw_per_micro_batch_and_are_reproducible():
    def regularised():
        hidden = [layers.Dense(8, activation="relu"), layers.Dropout(0.5)]
        return keras.Sequential([layers.Input((5,)), *hidden, layers.Dense(3)])

    same = np.ones((8, 5))  # every micro-batch holds the same rows
    first, second = (run(regularised, mse, same, np.zeros((8, 3)), 2, epochs=1)[0] for _ in range(2))
    assert relative_error(first.get_weights(), second.get_weights()) == 0
    if BACKEND != "torch":  # which draws from PyTorch's own generator
        (state,) = [ops.convert_to_numpy(v) for v in first.non_trainable_variables if "seed" in v.path]
        assert int(state[1]) == 4  # one draw per micro-batch


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
    ones, fit = np.ones((512, 1)), {"batch_size": 512, "epochs": 1}
    model, _ = run(lambda: under("bfloat16", make), compiled, ones, ones, 1, **fit)
    assert float(ops.convert_to_numpy(ops.cast(model.weights[0], "float32")).item()) == 1.0


@compiled_on("tensorflow")
@pytest.mark.filterwarnings("ignore:.*radients do not exist")  # Keras says so of the other output's layer, not on JAX
def test_a_loss_that_is_a_number_of_pythons_leaves_its_layer_as_it_is_and_is_proved(float64):
    def make():
        inputs = layers.Input((5,))
        hidden = layers.Dense(4, kernel_regularizer="l2")(inputs)
        return keras.Model(inputs, [layers.Dense(3, name="trained")(hidden), layers.Dense(2, name="other")(hidden)])

    compiled = lambda: {"loss": ["mse", lambda y, p: 0.0]}  # noqa: E731
    ours, _ = assert_same(make, compiled, X, [X[:, :3], X[:, :2]], float64, verify=True, epochs=1)
    assert gradaccum.keras.check_equivalence(ours, X, [X[:, :3], X[:, :2]]).ok


@slow_where_compiled
@pytest.mark.parametrize("wrap", [micro_batched, gradaccum.keras.chunked])
def test_the_model_saves_loads_and_clones_as_what_it_came_from(wrap, tmp_path):
    plain = classifier()
    ours = wrap(classifier(), MICRO)
    ours.compile(optimizer=sgd(), **crossentropy())
    ours.fit(X, CLASSES, batch_size=BATCH, verbose=0)
    assert "gradaccum" not in ours.to_json()
    ours.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not {"train_step", "call"} & {*vars(loaded), *vars(keras.models.clone_model(ours))}
    assert relative_error(loaded.get_weights(), ours.get_weights()) == 0
    loaded.fit(X, CLASSES, batch_size=BATCH, verbose=0)
    plain.set_weights(ours.get_weights())
    rounded = 1e-6 if wrap is gradaccum.keras.chunked else 0  # XLA rounds otherwise for other numbers of rows
    assert relative_error([plain.predict(X, verbose=0)], [ours.predict(X, verbose=0)]) <= rounded


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
    both = [[v for v in model.trainable_variables if v.overwrite_with_gradient] for model in (ours, plain)]
    assert len(both[0]) == 6
    scales = [[ops.convert_to_numpy(ops.cast(scale, "float32")) for scale in some] for some in both]
    assert relative_error(*scales) <= 1e-6


# Errors.


class OwnStep(keras.Model):
    def train_step(self, *args):
        return {}


@pytest.mark.parametrize(
    ("model", "size", "options", "said"),
    [
        *((classifier, size, {}, "micro_batch_size.*Received") for size in [0, -1, 2.5, True, "4", None]),
        (lambda: print, 4, {}, r"keras\.Model.*Received"),
        (classifier, 4, {"batch_norm": "no"}, "batch_norm.*Received"),
        (classifier, "auto", {"batch_norm": "exact"}, 'needs a number of rows. Received: micro_batch_size="auto"'),
        (OwnStep, 4, {}, "OwnStep overrides `train_step`"),
    ],
)
def test_bad_arguments_are_refused(model, size, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        micro_batched(model(), size, **options)


@compiled_on("jax")
def test_a_layer_that_keeps_a_state_of_each_row_is_refused_by_name():
    model = keras.Sequential([layers.Input(batch_shape=(8, 2, 5)), layers.SimpleRNN(3, stateful=True, name="rnn")])
    micro_batched(model, 4, verify=False).compile(optimizer=sgd(), loss="mse")
    batch = np.zeros((8, 2, 5)), np.zeros((8, 3))
    for use in (model.train_on_batch, functools.partial(gradaccum.keras.check_equivalence, model)):
        with pytest.raises(ValueError, match="a state of each of its rows: 'rnn' with stateful=True"):
            use(*batch)
    micro_batched(model, 8, verify=False).train_on_batch(*batch)


@slow_where_compiled
def test_a_batch_that_cannot_be_split_is_named_and_nothing_is_touched():
    model = micro_batched(classifier(), MICRO)
    model.compile(optimizer=sgd(), loss="mse")
    model.fit(X, np.zeros((ROWS, 3)), verbose=0)
    before, batch = model.get_weights(), (X, np.zeros((ROWS - 1, 3)))
    said = r"(?s)same number of rows.*x  shape \(22, 5\).*y  shape \(21, 3\)"
    with pytest.raises(ValueError, match=said):
        model.fit((one for one in [batch]), steps_per_epoch=1, shuffle=False, verbose=0)
    assert relative_error(model.get_weights(), before) == 0
    model = micro_batched(keras.Sequential([layers.Dense(3)]), MICRO, verify=False)  # Keras would build it first
    model.compile(optimizer=sgd(), loss="mse")
    with pytest.raises(ValueError, match=said):
        model.train_on_batch(*batch)


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's")
def test_torch_compile_is_refused_before_anything_is_trained():
    model = micro_batched(classifier(), 3)
    model.compile(optimizer="sgd", **{**crossentropy(), "jit_compile": True})
    before = model.get_weights()
    for train in (lambda: model.fit(X, CLASSES, verbose=0), lambda: model.train_on_batch(X, CLASSES)):
        with pytest.raises(ValueError, match="torch.compile.*Received: jit_compile=True"):
            train()
    assert relative_error(model.get_weights(), before) == 0
    model.compile(optimizer="sgd", **crossentropy())
    model.fit(X, CLASSES, verbose=0)
