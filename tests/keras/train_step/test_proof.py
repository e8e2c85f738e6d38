"""The proof of the first update: what mixes rows is refused by name before anything is trained, and nothing else is."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from gradaccum.errors import NotEquivalentError
from gradaccum.keras.micro_batched import micro_batched
from gradaccum.keras.train_step.proof import Proof, few_rows, ragged_size
from tests.keras.problems import ACTIVITY, BACKEND, Batches, compiled_on, slow_where_compiled
from tests.reference import relative_error

ROWS = 24
random = np.random.default_rng(7)
X = random.normal(size=(ROWS, 5)).astype("float32")
Y = random.uniform(0.2, 2.5, size=(ROWS, 3)).astype("float32")
CLASSES, ONES = random.integers(0, 3, ROWS), np.ones(ROWS)


def missing(mark):
    return np.where(np.isin(np.arange(ROWS), [3, 11])[:, None], np.float32(mark), Y)


def squares(t, p):
    return ops.mean(ops.square(p - t), axis=-1)


def of_the_known(mark):
    def masked(t, p):
        known = ops.cast(ops.logical_not(ops.isnan(t)) if np.isnan(mark) else ops.not_equal(t, mark), p.dtype)
        t = ops.where(ops.isnan(t), ops.zeros_like(t), t)
        return ops.sum(known * ops.square(p - t)) / ops.sum(known)

    return masked


class OverWeights(losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        y_true = ops.cast(y_true, y_pred.dtype)
        return ops.sum(ops.square(y_pred - y_true)) / ops.sum(ops.abs(y_true))


class Halves(losses.Loss):
    """The rows' second half holds another view of the first."""

    def call(self, t, p):
        first, second = ops.split(p, 2, axis=0)
        close = ops.log_softmax(ops.matmul(first, ops.transpose(second)), axis=-1)
        return -ops.mean(ops.sum(close * ops.eye(ops.shape(first)[0], dtype=p.dtype), axis=-1))


def one_hot(t, p):
    return ops.one_hot(ops.cast(ops.reshape(t, (-1,)), "int32"), 3, dtype=p.dtype)


def balanced(t, p):
    t = one_hot(t, p)
    return -ops.sum(t * ops.log_softmax(p, axis=-1) / (ops.sum(t, axis=0) + 1.0))


def normalised_labels(t, p):
    t = one_hot(t, p)
    return squares(t / (ops.sum(t, axis=0, keepdims=True) + 1.0), p)


def of_large_labels(t, p):
    return squares(t, p) / (1 + ops.sum(ops.cast(t > 1.5, p.dtype)))


ACROSS_ROWS = {
    "a mean over labels that aren't -1": (of_the_known(-1.0), missing(-1.0)),
    "a mean over labels that aren't NaN": (of_the_known(np.nan), missing(np.nan)),
    "an overridden __call__": (OverWeights(), Y),
    "divided by a count": (of_large_labels, Y),
    "divided by the largest label": (lambda t, p: squares(t, p) / ops.max(t), Y),
    "halves": (Halves(), Y),
    "the hardest rows": (lambda t, p: ops.mean(ops.top_k(squares(t, p), 3)[0]), Y),
    "divided by its own mean": (lambda t, p: squares(t, p) / ops.stop_gradient(ops.mean(squares(t, p))), Y),
    "one-hot labels, normalised": (normalised_labels, CLASSES),
    "balanced classes": (balanced, CLASSES),
    "a small variance": (lambda t, p: squares(t, p) + 3e-4 * ops.var(p, axis=0)[0], Y),
    "dice": (losses.Dice(), np.eye(3, dtype="float32")[CLASSES]),
}
REPRESENTATIVES = {"divided by its own mean"}
if BACKEND == "torch":
    REPRESENTATIVES |= {"a mean over labels that aren't -1", "halves"}


def some_slow(table, representatives):
    return [pytest.param(name, marks=[] if name in representatives else pytest.mark.slow) for name in table]


def linear():
    return keras.Sequential([layers.Input((5,)), layers.Dense(3, name="dense")])


def refused(model, x, y, match, **compiled):
    """Training this is refused by name, with everything as it was."""
    model = micro_batched(model, 8)
    model.compile(**{"optimizer": keras.optimizers.Adam(0.1), **compiled})
    model(x[:2])
    before = model.get_weights()
    with pytest.raises(NotEquivalentError, match=rf"(?s){match}.*verify=False"):
        model.fit(x, y, batch_size=ROWS, verbose=0)
    assert relative_error(model.get_weights(), before) == 0
    assert int(model.optimizer.iterations) == 0


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", some_slow(ACROSS_ROWS, REPRESENTATIVES))
def test_a_loss_that_looks_across_rows_is_refused_by_name(name):
    loss, y = ACROSS_ROWS[name]
    said = getattr(loss, "name", getattr(loss, "__name__", "")).strip("<>")
    refused(linear(), X, y, f"The loss '[^']*{said}[^']*' of '[^']*' looks across the rows", loss=loss)


class Mixed(layers.Layer):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def with_layer(layer):
    return keras.Sequential([layers.Input((5,)), layers.Dense(4), layer, layers.Dense(3)])


def with_operation():
    inputs = layers.Input((5,))
    hidden = layers.Dense(4)(inputs)
    return keras.Model(inputs, layers.Dense(3)(hidden - ops.mean(hidden, axis=0, keepdims=True)))


class Inside(keras.Model):
    """Mixes rows in its own call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4), layers.Dense(3)

    def call(self, inputs):
        hidden = self.first(inputs)
        return self.second(hidden - ops.mean(hidden, axis=0, keepdims=True))


class Summed(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum(ops.square(y_pred - y))


class AddsSum(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.sum(ops.square(inputs)))
        return inputs


class Counting(layers.Layer):
    """Has a variable that moves with every pass."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, inputs):
        self.count.assign_add(1.0)
        return inputs


def own_loss():
    inputs = layers.Input((5,))
    return Summed(inputs, layers.Dense(3)(inputs))


MIXING = {
    "softmax over rows": (lambda: with_layer(layers.Softmax(axis=0, name="mix")), "'mix' .Softmax.* mixes rows"),
    "the batch's mean": (lambda: with_layer(Mixed(lambda h: h - ops.mean(h, axis=0), name="mix")), "'mix' .Mixed"),
    "sorted": (lambda: with_layer(Mixed(lambda h: ops.sort(h, axis=0), name="mix")), "'mix' .Mixed.* mixes rows"),
    "an operation of a functional model": (with_operation, "'[a-z_0-9.]*mean[a-z_0-9]*' .Mean. mixes rows"),
    "the model's own call": (Inside, "`call` of Inside itself mixes rows"),
    "compute_loss": (own_loss, "`compute_loss` of Summed is no mean over rows"),
    "add_loss": (lambda: with_layer(AddsSum()), r"model.losses\[0\] is no mean over rows"),
    "a variable that moves": (lambda: with_layer(Counting(name="counting")), "'counting.count' moves with every"),
}


@compiled_on("tensorflow")
@pytest.mark.parametrize(
    "name", some_slow(MIXING, {"softmax over rows", *(["add_loss"] if BACKEND == "torch" else [])})
)
def test_what_mixes_rows_is_refused_by_name(name):
    make, said = MIXING[name]
    refused(make(), X, Y, said, loss="mse")


class Sampling(layers.Layer):
    """A VAE's: draws whether it trains or not."""

    def __init__(self, seed, **kwargs):
        super().__init__(**kwargs)
        self.seeds = {"noise": seed}

    def call(self, inputs):
        return inputs + 0.1 * keras.random.normal(ops.shape(inputs), seed=self.seeds["noise"])


def harmless(heavy):
    """Masks and normalisation, with all kinds of randomness; attention and recurrence, which take long to compile."""
    inputs = layers.Input((6,), dtype="int32")
    hidden = layers.Embedding(7, 4, mask_zero=True)(inputs)
    hidden = layers.LayerNormalization()(layers.SpatialDropout1D(0.2)(hidden))
    if heavy:
        hidden = layers.MultiHeadAttention(2, 2, dropout=0.3)(hidden, hidden)
        hidden = layers.Bidirectional(layers.GRU(3, dropout=0.4))(hidden)
    else:
        hidden = layers.GlobalAveragePooling1D()(hidden)
    hidden = Sampling(keras.random.SeedGenerator(3))(layers.GaussianNoise(0.1)(layers.Dropout(0.5)(hidden)))
    return keras.Model(inputs, layers.Dense(3, activity_regularizer=ACTIVITY)(hidden))


@slow_where_compiled
@pytest.mark.parametrize("heavy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_randomness_masks_and_regularisers_are_no_difference_and_nothing_is_touched(heavy):
    tokens = random.integers(1, 7, (ROWS, 6))
    tokens[np.arange(ROWS) % 5 < 2, 3:] = 0
    weights = []
    for verify in (True, False):
        keras.utils.set_random_seed(0)
        model = micro_batched(harmless(heavy), 8, verify=verify)
        loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(optimizer=keras.optimizers.Adam(0.1), loss=loss, weighted_metrics=["accuracy"])
        logs = model.train_on_batch(tokens, CLASSES, sample_weight=Y[:, 0], return_dict=True)
        weights.append([*model.get_weights(), *[ops.convert_to_numpy(v) for v in model.optimizer.variables]])
        weights[-1] += [np.asarray(logs[name]) for name in sorted(logs)]
    assert all(np.array_equal(a, b) for a, b in zip(*weights))


def test_rows_are_mixed_at_the_next_fit_once_a_variable_that_the_loss_reads_has_changed():
    class Coupled(losses.Loss):
        def __init__(self):
            super().__init__(name="coupled")
            self.strength = keras.Variable(0.0, trainable=False)

        def call(self, t, p):
            return squares(t, p) + self.strength * ops.var(p)

    if BACKEND == "jax":
        pytest.skip("On JAX, such a variable is a constant of the compiled step")
    loss = Coupled()
    model = micro_batched(linear(), 8)
    model.compile(optimizer="sgd", loss=loss)
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    loss.strength.assign(1.0)
    with pytest.raises(NotEquivalentError, match="'coupled'"):
        model.fit(X, Y, batch_size=ROWS, verbose=0)


class OverSampleWeights(losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        weights = ops.reshape(ops.cast(sample_weight, y_pred.dtype), (-1,))
        return ops.sum(weights * squares(ops.cast(y_true, y_pred.dtype), y_pred)) / ops.sum(weights)


def of_one_class(t, p):
    t = ops.reshape(t, (-1,))
    values = squares(ops.one_hot(ops.cast(t, "int32"), 3, dtype=p.dtype), p)
    return values * ops.where(t == 1, 2.0 / (1.0 + ops.sum(ops.cast(t == 1, p.dtype))), 1.0)


def of_many_rows(t, p):
    return squares(t, p) + (0.0 if p.shape[0] is None or p.shape[0] <= 4 else ops.var(p))


LATER_DATA = {
    "a mark": (of_the_known(-1.0), (X, Y), (X, missing(-1.0))),
    "NaN": (of_the_known(np.nan), (X, Y), (X, missing(np.nan))),
    "uneven weights": (OverSampleWeights(), (X, Y, ONES), (X, Y, np.where(np.arange(ROWS) == 3, 5.0, 1.0))),
    "more rows": (of_many_rows, (X[:4], Y[:4]), (X, Y)),
    "a new class": (of_one_class, (X, np.where(CLASSES == 1, 2, CLASSES)), (X, CLASSES)),
    "larger labels": (of_large_labels, (X, Y * 0.5), (X, Y)),
}


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", LATER_DATA if BACKEND == "torch" else some_slow(LATER_DATA, {"a mark"}))
def test_rows_of_a_new_sort_are_proved_at_updates_1_2_4_8_before_they_are_trained_on(name):
    loss, first, then = LATER_DATA[name]
    model = micro_batched(linear(), 8)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss)
    with pytest.raises(NotEquivalentError, match="looks across the rows"):  # in the middle of a fit
        model.fit(Batches([first, first, first, then]), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 3
    before = model.get_weights()
    with pytest.raises(NotEquivalentError, match="looks across the rows"):
        model.fit(Batches([then]), shuffle=False, verbose=0)
    assert relative_error(model.get_weights(), before) == 0
    model.train_on_batch(*first)


@compiled_on("jax")
def test_updates_1_2_4_8_and_each_fits_first_one_are_proved_and_no_other(monkeypatch):
    judged = []
    own = Proof._compare
    monkeypatch.setattr(
        Proof, "_compare", lambda self, *args: [judged.append(self.schedule.batches), own(self, *args)][1]
    )
    model = micro_batched(linear(), 8)
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, batch_size=ROWS, epochs=6, verbose=0)
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert judged == [1, 2, 4, 8]
    model.fit(X, Y, batch_size=ROWS, epochs=2, verbose=0)
    assert judged == [1, 2, 4, 8, 10]
    model.train_on_batch(X, Y, ONES)  # a batch of another kind
    assert judged == [1, 2, 4, 8, 10, 12]
    model.compile(optimizer="sgd", loss="mae")
    model.train_on_batch(X, Y)
    assert judged == [1, 2, 4, 8, 10, 12, 1]


@slow_where_compiled
def test_an_ordinary_update_makes_no_call_of_the_proofs(monkeypatch):
    """After the proofs an update is what it is with `verify=False`: the same function, and the same calls of ours."""

    def calls(verify):
        model = micro_batched(linear(), 8, verify=verify)
        model.compile(optimizer="sgd", loss="mse", run_eagerly=BACKEND == "tensorflow")
        seen = Counter()

        def profile(frame, event, argument):
            if event == "call" and "gradaccum" in frame.f_code.co_filename:
                seen[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

        class Counts(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                sys.setprofile(profile if batch in (8, 9, 10) else None)

            def on_train_batch_end(self, batch, logs=None):
                sys.setprofile(None)

        model.fit(Batches([(X, Y)] * 12), shuffle=False, verbose=0, callbacks=[Counts()])
        return seen

    with_proofs, without = calls(True), calls(False)
    more = with_proofs - without
    assert not without - with_proofs
    assert set(more) <= {"proof.is_due"}, more


@compiled_on("jax")
def test_a_model_that_has_converged_is_not_refused():
    """Its gradients are rounding, whole and in micro-batches another one."""
    model = micro_batched(linear(), 8)
    model.compile(optimizer=keras.optimizers.SGD(0.3), loss="mse")
    for _ in range(6):
        model.fit(X, X @ np.ones((5, 3), "float32"), batch_size=ROWS, epochs=30, verbose=0)


@slow_where_compiled
@pytest.mark.parametrize("gap", [1e-6, 0.05])
def test_a_sign_that_rounding_decides_is_no_difference_where_it_decides_at_these_weights_alone(gap):
    def edge(h):  # in which kernels of other sizes may differ by rounding
        return ops.relu(h - 1.0 + (gap if h.shape[0] is None or h.shape[0] > 6 else -gap))

    model = with_layer(Mixed(edge))
    kernel, bias = model.layers[0].get_weights()
    kernel[:, 2], bias[2] = 0.0, 1.0
    model.layers[0].set_weights([kernel, bias])
    model = micro_batched(model, 8)
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    with contextlib.nullcontext() if gap < 1e-3 else pytest.raises(NotEquivalentError):
        model.train_on_batch(X, Y)


ALLOWED = {
    "BatchNormalization, which has a warning": (layers.BatchNormalization, "mse", {}),
    "pooled BatchNormalization": (layers.BatchNormalization, "mse", {"batch_norm": "pooled"}),
    "a loss in half precision": (layers.Identity, losses.MeanSquaredError(dtype="float16"), {}),
    "what mixes rows, with verify=False": (lambda: layers.Softmax(axis=0), "mse", {"verify": False}),
}


@slow_where_compiled
@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
@pytest.mark.parametrize("name", ALLOWED)
def test_trains_with(name):
    layer, loss, options = ALLOWED[name]
    model = micro_batched(with_layer(layer()), 8, **options)
    model.compile(optimizer="sgd", loss=loss)
    model.train_on_batch(X, Y)


@slow_where_compiled
def test_what_cannot_be_compared_is_said_once():
    def of_all(t, p):
        if p.shape[0] is not None and p.shape[0] < 4:
            raise ValueError("At least four rows.")
        return squares(t, p)

    model = micro_batched(linear(), 1)
    model.compile(optimizer="sgd", loss=of_all, run_eagerly=BACKEND == "tensorflow")
    with pytest.raises(ValueError, match="four rows"):  # which the step itself runs into: no warning before it
        model.train_on_batch(X, Y)

    model = micro_batched(linear(), 12)
    model.compile(optimizer="sgd", loss=lambda t, p: squares(t, p) * np.nan)
    with pytest.warns(UserWarning, match="could not .*loss of 11 rows at once is nan") as told:
        model.fit(X, Y, batch_size=12, verbose=0)
    assert len([one for one in told if "at once with the same rows" in str(one.message)]) == 1
    model.fit(X, Y, batch_size=12, verbose=0)


def test_the_rows_that_are_looked_at_are_the_extremes():
    y = Y.copy()
    y[17] = -1
    x = np.zeros((ROWS, 2), "float32")
    x[5, 1] = np.nan
    chosen = few_rows((x, y, None), 6).tolist()
    assert {5, 17} <= set(chosen)
    assert len(set(chosen)) == 6
    assert [ragged_size(rows) for rows in (2, 3, 5, 8, 16)] == [None, 2, 2, 3, 7]
