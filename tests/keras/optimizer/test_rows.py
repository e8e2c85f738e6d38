"""What micro-batches weigh: rows that are known, that are not, and that become known inside a window."""

import contextlib
import logging

import keras
import numpy as np
import pytest

import gradaccum
import gradaccum.keras
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import BatchOptimizer, Optimizer
from tests.keras.problems import (
    BACKEND,
    Batches,
    adam,
    compiled_on,
    error,
    fit,
    logged,
    network,
    plain,
    regression,
    sgd,
    slow,
    slow_where_compiled,
    split,
    train_by_hand,
    updated,
    wrapped,
)

LossScale = keras.optimizers.LossScaleOptimizer
with_adam = pytest.param(adam, marks=pytest.mark.slow)


def compiled_with(optimizer):
    model = network()
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model


@compiled_on("jax")
@pytest.mark.parametrize("make", [sgd, slow(adam)])
def test_a_window_that_train_on_batch_opened_is_closed_by_fit_with_the_callback(make, caplog, fit_bound):
    batches = split(regression(28), [4] * 7)
    # One that has not been in a `fit` with the callback: after that, train_on_batch tells of rows as well.
    model = compiled_with(Optimizer(make(), 4))
    for batch in batches[:3]:
        model.train_on_batch(*batch)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        fit(model, batches[3:])
    assert error(model, plain(network(), make(), batches, 4, 1)) <= fit_bound
    (message,) = logged(caplog)
    assert message.startswith("The open window holds 3 micro-batches whose rows are not known.")


@compiled_on("jax")
def test_a_window_whose_rows_are_known_too_late_is_inexact_and_named_or_flushed_and_exact(caplog, fit_bound):
    batches = split(regression(14), [4, 4, 2, 4])
    for flush, windows in ((False, [batches]), (True, [batches[:2], batches[2:]])):
        model = wrapped(sgd(), 4) if flush else compiled_with(Optimizer(sgd(), 4))
        for batch in batches[:2]:
            model.train_on_batch(*batch)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gradaccum"):
            assert not flush or model.optimizer.flush()
            fit(model, batches[2:])
        assert (error(model, updated(windows)) <= fit_bound) == flush
        assert ("if not, the update is not the large batch's" in caplog.text) != flush


class Ends(keras.callbacks.Callback):
    """Ends a `fit` by an error, after so many micro-batches."""

    def __init__(self, after, by=KeyboardInterrupt):
        super().__init__()
        self.after, self.by = after, by

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if self.after == 0:
            raise self.by


def test_a_window_in_which_fit_was_interrupted_is_discarded_by_the_next_one_and_kept_by_flush(caplog, fit_bound):
    batches = split(regression(26), [4] * 6 + [2])
    model = wrapped(sgd(), 3)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        for after in (5, 7):  # two micro-batches into the second window, and one into the third
            with pytest.raises(KeyboardInterrupt):
                fit(model, [*batches, batches[0]], GradientAccumulation(), Ends(after))
        assert model.optimizer.flush()
        fit(model, batches)
    first, second, third = batches[:3], batches[3:6], batches[6:]
    assert error(model, updated([first, first, second, third, first, second, third])) <= fit_bound
    assert logged(caplog) == [
        "The last fit() was interrupted inside a window, whose 2 micro-batches are discarded. To update with them, "
        "call optimizer.flush() before fit()."
    ]


@compiled_on("jax")
@pytest.mark.parametrize("make", [sgd, with_adam])
def test_a_window_that_fit_with_the_callback_opened_is_closed_without_it(make, tmp_path, caplog, fit_bound):
    batches, model = split(regression(24), [4] * 6), compiled_with(Optimizer(make(), 3))

    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.save(tmp_path / "model.keras")

    fit(model, batches[:3], Saves())
    with caplog.at_level(logging.WARNING, "gradaccum"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "weighs micro-batches by their rows. It stays exact with callbacks=" in caplog.text
    assert "its update is not the large batch's if their rows differ" in caplog.text
    for batch in batches[2:]:
        loaded.train_on_batch(*batch)
    assert error(loaded, plain(network(), make(), batches, 3, 1)) <= fit_bound


@compiled_on("jax")
@pytest.mark.parametrize("make", [sgd, with_adam])
def test_large_batches_in_micro_batches_are_weighed_by_their_rows_too(make, fit_bound):
    batches = split(regression(32), [6, 6, 4, 6, 6, 4])[:3]
    model = gradaccum.keras.micro_batched(network(), 2)
    model.compile(optimizer=Optimizer(make(), 3), loss="mse")
    for _ in range(2):
        fit(model, batches)
    assert int(model.optimizer.iterations) == 2
    assert error(model, plain(network(), make(), batches, 3, 2)) <= fit_bound


@compiled_on("jax")
def test_a_train_step_that_is_replaced_after_the_callback_began_is_an_error():
    model = compiled_with(Optimizer(sgd(), 2))

    class Replaces(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            del self.model.train_step
            self.model.make_train_function(force=True)

    with pytest.raises(gradaccum.WindowError, match="were not weighed by their rows: the model's `train_step`"):
        fit(model, split(regression(8), [4, 4]), Replaces())


@compiled_on("jax")
@pytest.mark.parametrize("bad", [[0, 3], pytest.param([0, 1, 4], marks=pytest.mark.slow)])
def test_a_loss_scale_outside_drops_micro_batches_and_keeps_windows_where_they_were(bad, fit_bound):
    batches = split(regression(28), [4] * 7)
    poisoned = [(np.full_like(x, np.inf), y) if index in bad else (x, y) for index, (x, y) in enumerate(batches)]
    model = fit(compiled_with(LossScale(Optimizer(sgd(), 2), initial_scale=8.0)), poisoned)
    good = [[batches[i] for i in window if i not in bad] for window in ([0, 1], [2, 3], [4, 5], [6])]
    assert int(model.optimizer.iterations) == sum(map(bool, good))
    assert error(model, updated([window for window in good if window])) <= fit_bound


@slow_where_compiled
@pytest.mark.parametrize("name", [None, slow("conv1_bn"), "plain"])
def test_batch_normalization_is_named(name):
    norm = keras.layers.BatchNormalization(name=name)
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(3)])
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse", jit_compile=False)
    callbacks = [GradientAccumulation()] if name == "plain" else []
    with pytest.warns(UserWarning, match="BatchNormalization normalises each micro-batch by itself") as seen:
        model.fit(*regression(8), batch_size=4, verbose=0, callbacks=callbacks)
    named = [str(one.message) for one in seen if "BatchNormalization" in str(one.message)]
    assert [repr(norm.name) in message for message in named] == [True]
    model.fit(*regression(8), batch_size=4, verbose=0, callbacks=[GradientAccumulation()])


WAYS = [("", "eager"), ("inside", "eager"), ("outside", "eager")]
if BACKEND == "jax":
    WAYS.pop()  # Keras can't: it assigns inside of a branch
if BACKEND != "tensorflow":
    WAYS += [("", "stateless"), ("inside", "stateless"), ("outside", "stateless")]


@pytest.mark.parametrize(("scaled", "by"), WAYS)
@pytest.mark.parametrize("alone", [False, True])
def test_what_overwrites_its_variable_is_the_largest_of_the_window(scaled, alone, by):
    amax = keras.Variable([0.0, 0.0], name="amax")
    amax.overwrite_with_gradient = True
    variables = [amax] if alone else [amax, keras.Variable([0.0], name="weight")]
    inner = keras.optimizers.SGD(1.0)
    optimizer = ours = Optimizer(LossScale(inner, initial_scale=8.0) if scaled == "inside" else inner, 3)
    if scaled == "outside":
        optimizer = LossScale(ours, initial_scale=8.0)
    optimizer.build(variables)
    for rows, largest in ((None, [1.0, 5.0]), (2, [3.0, 2.0]), (2, [2.0, 4.0])):
        gradients = [np.array(largest), np.array([48.0 if scaled else 6.0])][: len(variables)]
        with ours.window.with_rows(0, rows):
            train_by_hand(optimizer, variables, [gradients], by=by)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(amax.value), [3.0, 5.0])
    if not alone:
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1].value), [-6.0], rtol=1e-6)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow refuses stateless_apply")
def test_an_optimizer_may_keep_the_gradient_that_it_is_given(bound):
    class Keeps(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.last = [self.add_variable_from_reference(v, name="last") for v in variables]

        def update_step(self, gradient, variable, learning_rate):
            self.assign(self.last[self._get_variable_index(variable)], gradient)

    inner, variables = Keeps(1.0), [keras.Variable([0.0], name="weight")]
    gradients = [[np.array([value])] for value in (1.0, 2.0, 6.0, 4.0)]
    train_by_hand(Optimizer(inner, 2), variables, gradients, by="stateless")
    assert float(keras.ops.convert_to_numpy(inner.last[0].value)[0]) == 5.0


# Whose rows.

SIZES = [3, 7, 1, 4]
SHARED = np.random.default_rng(3).normal(size=(6, 5)).astype("float32")


class Graph(keras.Model):
    """Reads a matrix that all rows share, which comes before the rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, 5))
        self.built = True

    def call(self, inputs):
        return self.dense(keras.ops.matmul(inputs["x"], keras.ops.matmul(SHARED.T, inputs["adjacency"])))


class WithoutTargets(Graph):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((x["x"][:, :3] - y_pred) ** 2)


def with_shared(batch):
    return {"adjacency": SHARED, "x": batch[0]}, *batch[1:]


@compiled_on("jax")
@pytest.mark.parametrize("sizes", [SIZES, [4, 4, 4, 3]])
def test_rows_are_those_of_the_targets_where_the_first_input_is_shared_by_all_rows(sizes, fit_bound):
    data, models = regression(15), []
    for ours in (True, False):
        keras.utils.set_random_seed(0)
        models.append(model := Graph())
        optimizer = Optimizer(sgd(), 4) if sizes is SIZES else BatchOptimizer(sgd(), 4, 16, 15, model)
        model.compile(optimizer=optimizer if ours else sgd(), loss="mse")
    fit(models[0], [with_shared(batch) for batch in split(data, sizes)])
    models[1].fit(Batches([with_shared(data)]), shuffle=False, verbose=0)
    assert error(*models) <= fit_bound


@slow_where_compiled
@pytest.mark.parametrize("jit", [False, slow(True)])
def test_inputs_without_targets_must_have_the_same_number_of_rows(jit):
    model = WithoutTargets()
    model.compile(optimizer=Optimizer(sgd(), 4), jit_compile=jit and BACKEND != "torch")
    # On TensorFlow only the run tells, and its error has no shapes. Compiled by XLA it is one about this operation.
    by_tensorflow = "rows_of_a_micro_batch" if jit else "must have the same number of rows"
    expected = by_tensorflow if BACKEND == "tensorflow" else r"x\['adjacency'\]  shape \(6, 5\)\n +x\['x'\]"
    for rows in (6, 4):
        with contextlib.nullcontext() if rows == 6 else pytest.raises(Exception, match=expected):
            fit(model, [with_shared((np.ones((rows, 5), "float32"),))] * 2)
