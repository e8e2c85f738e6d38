"""What micro-batches weigh: rows that are known, that are not, and that become known inside a window."""

import logging

import keras
import numpy as np
import pytest

import gradaccum
import gradaccum.keras
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import Optimizer
from tests.keras.problems import (
    BACKEND,
    Batches,
    adam,
    compiled,
    compiled_on,
    error,
    join,
    network,
    plain,
    regression,
    sgd,
    slow,
    slow_where_compiled,
    split,
    train_by_hand,
    wrapped,
)
from tests.reference import keras_updates

LossScale = keras.optimizers.LossScaleOptimizer


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
        model.fit(Batches(batches[3:]), shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    assert error(model, plain(network(), make(), batches, 4, 1)) <= fit_bound
    assert [record.getMessage() for record in caplog.records if record.name == "gradaccum"] == [
        "The open window holds 3 micro-batches whose rows are not known. Each counts as many rows as the next one: if "
        "they had others, its update is not the large batch's. Call optimizer.flush() before fit() to close it first."
    ]


@compiled_on("jax")
def test_a_window_whose_rows_are_known_too_late_is_inexact_and_named_or_flushed_and_exact(caplog, fit_bound):
    batches = split(regression(14), [4, 4, 2, 4])
    for flush, expected in ((False, [batches]), (True, [batches[:2], batches[2:]])):
        model = wrapped(sgd(), 4) if flush else compiled_with(Optimizer(sgd(), 4))
        for batch in batches[:2]:
            model.train_on_batch(*batch)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gradaccum"):
            assert not flush or model.optimizer.flush()
            model.fit(Batches(batches[2:]), shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
        named = "if they had others, its update is not the large batch's" in caplog.text
        large = compiled(network(), sgd())
        keras_updates(large, [join(window) for window in expected])
        assert (error(model, large) <= fit_bound) == flush
        assert named != flush


class Interrupts(keras.callbacks.Callback):
    """Interrupts the first `fit`, after so many micro-batches."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


def test_a_window_in_which_fit_was_interrupted_is_discarded_by_the_next_one_and_kept_by_flush(caplog, fit_bound):
    batches = split(regression(26), [4] * 6 + [2])
    model = wrapped(sgd(), 3)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        for after in (5, 7):  # two micro-batches into the second window, and one into the third
            with pytest.raises(KeyboardInterrupt):
                callbacks = [GradientAccumulation(), Interrupts(after)]
                model.fit(Batches([*batches, batches[0]]), shuffle=False, verbose=0, callbacks=callbacks)
        assert model.optimizer.flush()
        model.fit(Batches(batches), shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    expected = compiled(network(), sgd())
    windows = [batches[:3], batches[:3], batches[3:6], batches[6:], batches[:3], batches[3:6], batches[6:]]
    keras_updates(expected, [join(window) for window in windows])
    assert error(model, expected) <= fit_bound
    assert [record.getMessage() for record in caplog.records if record.name == "gradaccum"] == [
        "The last fit() was interrupted inside a window, whose 2 micro-batches are discarded. Call optimizer.flush() "
        "before fit() to make the update of them."
    ]


@compiled_on("jax")
@pytest.mark.parametrize("make", [sgd, pytest.param(adam, marks=pytest.mark.slow)])
def test_a_window_that_fit_with_the_callback_opened_is_closed_without_it(make, tmp_path, caplog, fit_bound):
    batches = split(regression(24), [4] * 6)

    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.save(tmp_path / "model.keras")

    model = compiled_with(Optimizer(make(), 3))
    callbacks = [GradientAccumulation(), Saves()]
    model.fit(Batches(batches[:3]), shuffle=False, verbose=0, callbacks=callbacks)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "weighs micro-batches by their rows. It goes on exactly with callbacks=" in caplog.text
    assert "its update is not the large batch's if they differ" in caplog.text
    for batch in batches[2:]:
        loaded.train_on_batch(*batch)
    assert error(loaded, plain(network(), make(), batches, 3, 1)) <= fit_bound


@compiled_on("jax")
@pytest.mark.parametrize("make", [sgd, pytest.param(adam, marks=pytest.mark.slow)])
def test_large_batches_in_micro_batches_are_weighed_by_their_rows_too(make, fit_bound):
    batches = split(regression(32), [6, 6, 4, 6, 6, 4])
    model = gradaccum.keras.micro_batched(network(), 2)
    model.compile(optimizer=Optimizer(make(), 3), loss="mse")
    for _ in range(2):
        model.fit(Batches(batches[:3]), shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    assert int(model.optimizer.iterations) == 2
    assert error(model, plain(network(), make(), batches[:3], 3, 2)) <= fit_bound


@compiled_on("jax")
def test_a_train_step_that_is_replaced_after_the_callback_began_is_an_error():
    model = compiled_with(Optimizer(sgd(), 2))

    class Replaces(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            del self.model.train_step
            self.model.make_train_function(force=True)

    with pytest.raises(gradaccum.WindowError, match="were not weighed by their rows: the model's `train_step`"):
        model.fit(*regression(8), batch_size=4, verbose=0, callbacks=[GradientAccumulation(), Replaces()])


@compiled_on("jax")
@pytest.mark.parametrize("bad", [[0, 3], pytest.param([0, 1, 4], marks=pytest.mark.slow)])
def test_a_loss_scale_outside_drops_micro_batches_and_keeps_windows_where_they_were(bad, fit_bound):
    batches = split(regression(28), [4] * 7)
    poisoned = [(np.full_like(x, np.inf), y) if index in bad else (x, y) for index, (x, y) in enumerate(batches)]
    model = compiled_with(LossScale(Optimizer(sgd(), 2), initial_scale=8.0))
    model.fit(Batches(poisoned), shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    windows = [[0, 1], [2, 3], [4, 5], [6]]
    good = [[batches[index] for index in window if index not in bad] for window in windows]
    expected = compiled(network(), sgd())
    keras_updates(expected, [join(window) for window in good if window])
    assert int(model.optimizer.iterations) == sum(map(bool, good))
    assert error(model, expected) <= fit_bound


@slow_where_compiled
@pytest.mark.parametrize("name", [None, slow("conv1_bn"), "plain"])
def test_batch_normalization_is_named(name):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((5,)), keras.layers.BatchNormalization(name=name), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse", jit_compile=False)
    callbacks = [GradientAccumulation()] if name == "plain" else []
    with pytest.warns(UserWarning, match="BatchNormalization normalises each micro-batch by itself") as seen:
        model.fit(*regression(8), batch_size=4, verbose=0, callbacks=callbacks)
    named = [str(one.message) for one in seen if "BatchNormalization" in str(one.message)]
    assert [repr(layers[1].name) in message for message in named] == [True]
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
    loss_scale = lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)  # noqa: E731
    inner = keras.optimizers.SGD(1.0)
    optimizer = wrapped = Optimizer(loss_scale(inner) if scaled == "inside" else inner, 3)
    if scaled == "outside":
        optimizer = loss_scale(wrapped)
    optimizer.build(variables)
    for rows, largest in ((None, [1.0, 5.0]), (2, [3.0, 2.0]), (2, [2.0, 4.0])):
        gradients = [np.array(largest), np.array([48.0 if scaled else 6.0])][: len(variables)]
        with wrapped.window.with_rows(0, rows):
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
