"""The proof of updates, and `check_equivalence`: what mixes rows is refused by name, and nothing else is."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import gradaccum
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import check_equivalence, micro_batched
from gradaccum.keras.train_step.proof import Proof, few_rows, ragged_size
from tests.cli.results import assert_one_clear_line, invoke
from tests.keras.marks import BACKEND, compiled_on, slow_where_compiled
from tests.keras.problems import ACTIVITY, AddsLoss, Batches, Does
from tests.keras.train_step.cases import TWO, OverWeights, classifier, crossentropy, linear, squares
from tests.reference import relative_error

ROWS = 24
random = np.random.default_rng(7)
X = random.normal(size=(ROWS, 5)).astype("float32")
Y = random.uniform(0.2, 2.5, size=(ROWS, 3)).astype("float32")
CLASSES, ONES = random.integers(0, 3, ROWS), np.ones(ROWS)


def missing(mark):
    return np.where(np.isin(np.arange(ROWS), [3, 11])[:, None], np.float32(mark), Y)


def of_the_known(mark):
    def masked(t, p):
        known = ops.cast(ops.logical_not(ops.isnan(t)) if np.isnan(mark) else ops.not_equal(t, mark), p.dtype)
        t = ops.where(ops.isnan(t), ops.zeros_like(t), t)
        return ops.sum(known * ops.square(p - t)) / ops.sum(known)

    return masked


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


def of_large_labels(t, p):
    return squares(t, p) / (1 + ops.sum(ops.cast(t > 1.5, p.dtype)))


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


def own_loss():
    inputs = layers.Input((5,))
    return Summed(inputs, layers.Dense(3)(inputs))


class Counting(layers.Layer):
    """Has a variable that moves with every pass, and perhaps reads it."""

    def __init__(self, reads=False, **kwargs):
        super().__init__(**kwargs)
        self.reads = reads

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, inputs):
        self.count.assign_add(1.0)
        return inputs * (1 + 0.1 * self.count) if self.reads else inputs


def in_float8():
    model = with_layer(layers.Dense(4, name="float8"))
    model.get_layer("float8").quantize("float8")
    return model


class Sampling(layers.Layer):
    """A VAE's: draws whether it trains or not."""

    def __init__(self, seed, **kwargs):
        super().__init__(**kwargs)
        self.seeds = {"noise": seed}

    def call(self, inputs):
        return inputs + 0.1 * keras.random.normal(ops.shape(inputs), seed=self.seeds["noise"])


def unit():
    return keras.Sequential([layers.Input((5,)), layers.Dense(3), layers.UnitNormalization()])


def sigmoid():
    return keras.Sequential([layers.Input((4, 5)), layers.Dense(3, activation="sigmoid")])


ACROSS = {
    "divided by the largest label": (lambda t, p: squares(t, p) / ops.max(t), Y),
    "halves": (Halves(), Y),
    "the hardest rows": (lambda t, p: ops.mean(ops.top_k(squares(t, p), 3)[0]), Y),
    "divided by its own mean": (lambda t, p: squares(t, p) / ops.stop_gradient(ops.mean(squares(t, p))), Y),
    "balanced classes": (balanced, CLASSES),
    "a small variance": (lambda t, p: squares(t, p) + 1e-3 * ops.var(p, axis=0)[0], Y),
}
PICTURES, SEGMENTS = random.normal(size=(ROWS, 4, 5)), random.integers(0, 2, (ROWS, 4, 3)).astype("float32")


def across(loss, y):
    said = getattr(loss, "name", getattr(loss, "__name__", "")).strip("<>")
    return linear, X, y, loss, f"The loss '[^']*{said}[^']*' of '[^']*' looks across the rows", "loss"


def over_axes(kind, axis):
    loss = kind(axis=axis)
    said = rf"'{loss.name}'.*looks across the rows.*with an `axis` that leaves out.*gradaccum\.keras\.chunked\(model, "
    return sigmoid, PICTURES, SEGMENTS, loss, said, "loss"


def mixing(make, said, kind="mixes_rows"):
    return make, X, Y, "mse", said, kind


REFUSED = {
    # (model, x, y, loss, what the error says, the kind of the cause)
    **{name: across(*case) for name, case in ACROSS.items()},
    **{f"{kind.__name__} over {axis}": over_axes(kind, axis)
       for kind in (losses.Dice, losses.Tversky) for axis in [None, 0, -3, (0, 1), (0, 2), (0, 1, 2)]},
    **{f"circle, {settings}": (unit, X, CLASSES, losses.Circle(**settings),
                               "'circle'.*looks across the rows.*Let it return one value per row", "loss")
       for settings in ({}, {"remove_diagonal": False}, {"gamma": 1.0})},
    "softmax over rows": mixing(lambda: with_layer(layers.Softmax(axis=0, name="mix")), "'mix' .Softmax.* mixes rows"),
    "softmax over rows behind random numbers": mixing(
        lambda: with_layer(keras.Sequential([
            Sampling(keras.random.SeedGenerator(3)), layers.Softmax(axis=0, name="mix")
        ])), "mix' .Softmax.* mixes rows"),
    "the batch's mean": mixing(
        lambda: with_layer(Does(lambda h: h - ops.mean(h, axis=0), name="mix")), "'mix' .Does"),
    "an operation of a functional model": mixing(with_operation, "'[a-z_0-9.]*mean[a-z_0-9]*' .Mean. mixes rows"),
    "the model's own call": mixing(Inside, "`call` of Inside itself mixes rows"),
    "compute_loss": mixing(own_loss, "`compute_loss` of Summed is no mean over rows", "loss"),
    "add_loss": mixing(lambda: with_layer(AddsLoss("sum")), r"model.losses\[0\] is no mean over rows", "regulariser"),
    "a variable that moves and is read": mixing(
        lambda: with_layer(Counting(reads=True, name="counting")), "'counting.count' moves with every", "buffer"),
    "float8": mixing(in_float8, "'float8' rounds the gradients of its outputs to float8", "rounding"),
}  # fmt: skip
OFTEN = {"divided by its own mean", "softmax over rows"}
if BACKEND == "torch":
    OFTEN |= {"halves", "add_loss", "Tversky over (0, 2)", "the model's own call"}
    OFTEN |= {"softmax over rows behind random numbers"}
    OFTEN |= {name for name in REFUSED if name.startswith("circle")}


def some_slow(table, often):
    return [pytest.param(name, marks=[] if name in often else pytest.mark.slow) for name in table]


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", some_slow(REFUSED, OFTEN))
def test_what_mixes_rows_is_refused_by_name_before_anything_is_trained_and_by_the_check(name):
    make, x, y, loss, said, kind = REFUSED[name]
    model = micro_batched(make(), 8)
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss=loss)
    model(x[:2])
    before = model.get_weights()
    with pytest.raises(NotEquivalentError, match=rf"(?s){said}.*verify=False"):
        model.fit(x, y, batch_size=ROWS, verbose=0)
    assert relative_error(model.get_weights(), before) == 0
    assert int(model.optimizer.iterations) == 0
    if name == "halves":  # the check tries odd numbers of rows, too
        kind, said = "error", r"In micro-batches of 5 \+ .* rows the loss raises ValueError: "
    (cause,) = check_equivalence(model, x, y).causes
    assert cause.kind == kind
    assert re.search(said, cause.message, re.DOTALL)


# What is no difference.


@slow_where_compiled
def test_a_variable_that_only_counts_passes_is_named_once_and_the_update_is_the_large_batchs():
    models = [with_layer(Counting(name="counting")) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    micro_batched(models[0], 8)
    for model in models:
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    with pytest.warns(UserWarning, match=r"once per micro-batch and not once per update: 'counting.count'\."):
        models[0].fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)
    models[0].fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)  # a second warning would be an error
    models[1].fit(X, Y, batch_size=ROWS, shuffle=False, epochs=2, verbose=0)
    pairs = zip(models[0].trainable_variables, models[1].trainable_variables)
    assert max(relative_error(*map(ops.convert_to_numpy, pair)) for pair in pairs) <= 1e-6
    (cause,) = check_equivalence(models[0], X, Y).causes
    assert (cause.kind, cause.where) == ("buffer", "counting.count")


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


@pytest.mark.skipif(BACKEND != "torch", reason="compiled backends count once, when they trace")
def test_a_layer_that_changes_with_each_call_is_named_by_the_check():
    calls = itertools.count(1)
    model = with_layer(Does(lambda h: h * next(calls)))
    model.compile(loss="mse")
    (cause,) = check_equivalence(model, X, Y).causes
    assert cause.kind == "nondeterminism"
    assert "another gradient each time" in cause.message


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
        few = isinstance(h.shape[0], int) and h.shape[0] <= 6
        return ops.relu(h - 1.0 + (-gap if few else gap))

    model = with_layer(Does(edge))
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


# When an update is proved, and with which rows.


def of_one_class(t, p):
    t = ops.reshape(t, (-1,))
    values = squares(ops.one_hot(ops.cast(t, "int32"), 3, dtype=p.dtype), p)
    return values * ops.where(t == 1, 2.0 / (1.0 + ops.sum(ops.cast(t == 1, p.dtype))), 1.0)


def of_many_rows(t, p):
    return squares(t, p) + (0.0 if p.shape[0] is None or p.shape[0] <= 4 else ops.var(p))


LATER_DATA = {
    "a mark": (of_the_known(-1.0), (X, Y), (X, missing(-1.0))),
    "NaN": (of_the_known(np.nan), (X, Y), (X, missing(np.nan))),
    "uneven weights": (OverWeights(), (X, Y, ONES), (X, Y, np.where(np.arange(ROWS) == 3, 5.0, 1.0))),
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
    judged, own = [], Proof._compare
    monkeypatch.setattr(
        Proof, "_compare", lambda self, *args: [judged.append(self.due.schedule.batches), own(self, *args)][1]
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


HOME = str(Path(gradaccum.__file__).parent)


@slow_where_compiled
def test_an_ordinary_update_makes_no_call_of_the_proofs():
    """After the proofs an update is what it is with `verify=False`: the same function, and the same calls of ours."""

    def calls(verify):
        model = micro_batched(linear(), 8, verify=verify)
        model.compile(optimizer="sgd", loss="mse", run_eagerly=BACKEND == "tensorflow")
        seen = Counter()

        def profile(frame, event, argument):
            if event == "call" and frame.f_code.co_filename.startswith(HOME):
                seen[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

        counts = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: sys.setprofile(profile if batch in (8, 9, 10) else None),
            on_train_batch_end=lambda batch, logs: sys.setprofile(None),
        )
        model.fit(Batches([(X, Y)] * 12), shuffle=False, verbose=0, callbacks=[counts])
        return seen

    with_proofs, without = calls(True), calls(False)
    more = with_proofs - without
    assert not without - with_proofs
    assert set(more) <= {"due.includes", "proof_schedule.is_due"}, more
    assert not with_proofs["window_state._find"]  # on PyTorch: only windows 1, 2, 4, ... look which modules there are


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
    y, x = Y.copy(), np.zeros((ROWS, 2), "float32")
    y[17], x[5, 1] = -1, np.nan
    chosen = few_rows((x, y, None), [2, 2, 2])
    assert {5, 17} <= set(chosen)
    assert len(set(chosen)) == 6
    assert [ragged_size(rows) for rows in (2, 3, 5, 8, 16)] == [None, 2, 2, 3, 7]


# `check_equivalence` on compiled models: what it says, and that it names the culprit.


def compiled(model, **kwargs):
    model.compile(**{"optimizer": "sgd", **crossentropy(), **kwargs})
    return model


@compiled_on("tensorflow")
def test_equal_models_pass_and_stay_as_they_are(tmp_path):
    model = compiled(classifier(kernel_regularizer="l2", activity_regularizer=ACTIVITY))
    before = model.get_weights()
    result = check_equivalence(model, X, CLASSES, Y[:, 0], micro_batch_size=4)
    assert result.raise_if_different() is result
    assert result.save(tmp_path / "result.json").exists()
    assert result.max_error < 1e-5
    assert relative_error(model.get_weights(), before) == 0
    assert not [name for layer in model.layers for name in vars(layer) if name == "call"]
    assert model.optimizer.iterations == 0


@slow_where_compiled
def test_masks_and_several_outputs_pass_and_the_micro_batch_size_is_that_of_micro_batched():
    make, options, x, y = TWO
    assert check_equivalence(compiled(make(), **options()), x, y, micro_batch_size=3).ok
    result = check_equivalence(micro_batched(compiled(classifier()), 7), X, CLASSES)
    assert (6, 6, 6, 6) in result.partitions


@compiled_on("tensorflow")
def test_dropout_is_no_difference_and_batch_normalization_is_named_and_exact_where_it_is_frozen():
    dropping, normalised = (
        compiled(keras.Sequential([layers.Dense(8), layer, layers.Dense(3, activation="softmax")]))
        for layer in (layers.Dropout(0.5), layers.BatchNormalization(name="bn"))
    )
    result = check_equivalence(dropping, X, CLASSES)
    assert result.ok
    assert any("dropout" in note for note in result.notes)
    result = check_equivalence(normalised, X, CLASSES)
    assert [(cause.kind, cause.where[-2:]) for cause in result.causes] == [("batch_norm", "bn")]
    with pytest.raises(NotEquivalentError, match="'.*bn'"):
        result.raise_if_different()
    assert check_equivalence(normalised, X, CLASSES, batch_norm="frozen").ok


@pytest.mark.parametrize(
    ("error", "said", "model", "rows", "size"),
    [
        (TypeError, r"keras\.Model", lambda: print, (ROWS, ROWS), None),
        (ValueError, "compiled", classifier, (ROWS, ROWS), None),
        (ValueError, "at least 2 rows", lambda: compiled(classifier()), (1, 1), None),
        (ValueError, "same number of rows", lambda: compiled(classifier()), (ROWS, ROWS - 1), None),
        (ValueError, "micro_batch_size", lambda: compiled(classifier()), (ROWS, ROWS), 0),
    ],
)
def test_bad_input_is_refused(error, said, model, rows, size):
    with pytest.raises(error, match=said):
        check_equivalence(model(), X[: rows[0]], CLASSES[: rows[1]], micro_batch_size=size)


# `gradaccum check file.py:make`.

FILE = """
import keras
import numpy as np

def make(norm=keras.layers.LayerNormalization):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((6,)), dense(8), norm(name="norm"), dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    return model, (random.normal(size=(12, 6)).astype("float32"), random.integers(3, size=12)), None

def different():
    return make(keras.layers.BatchNormalization)

def uncompiled():
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8)]), make()[1], None
"""


@pytest.fixture
def check(tmp_path):
    file = tmp_path / "keras_experiment.py"
    file.write_text(FILE, encoding="utf-8")
    return lambda name, *options: invoke("check", f"{file}:{name}", *options)


@slow_where_compiled
def test_the_command_names_batch_normalization_with_exit_code_1_and_passes_other_models_with_0(check):
    result = check("make", "--micro-batch-size", 4)
    assert result.exit_code == 0, result.output
    assert "The accumulated gradient is the large batch's" in result.stdout
    result = check("different", "--json")
    assert result.exit_code == 1, result.output
    (cause,) = json.loads(result.stdout)["causes"]
    assert (cause["kind"], cause["where"].rpartition("/")[2]) == ("batch_norm", "norm")


def test_bad_input_to_the_command_is_one_clear_line(check):
    assert_one_clear_line(check("uncompiled"), "compile")
    assert_one_clear_line(check("make", "--device", "cuda"), "--device is for PyTorch")
