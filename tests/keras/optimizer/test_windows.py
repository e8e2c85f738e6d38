"""Windows and epochs in `fit`: what the GradientAccumulation callback adds."""

import contextlib
import itertools
import logging

import keras
import numpy as np
import pytest

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
    split,
    wrapped,
)
from tests.reference import WINDOWS, keras_updates, windows_of


def accumulated(model, micro_batches, epochs=2, callback=None, **fit):
    callbacks = [GradientAccumulation() if callback is None else callback, *fit.pop("callbacks", [])]
    model.fit(Batches(micro_batches), epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks, **fit)
    return model


RAGGED = "ragged everywhere"
OFTEN = RAGGED, "4+4+2 rows", "a window longer than the epoch"
EPOCHS = [
    *((name, sgd) if name in OFTEN else slow(name, sgd) for name in WINDOWS),
    *((name, adam) if name == RAGGED else slow(name, adam) for name in WINDOWS),
]


@pytest.mark.parametrize(("window", "make"), EPOCHS)
def test_an_epoch_of_windows_matches_the_large_batches(window, make, fit_bound):
    sizes, steps = WINDOWS[window]
    micro_batches = split(regression(sum(sizes)), sizes)
    model = accumulated(wrapped(make(), steps), micro_batches)
    assert int(model.optimizer.iterations) == 2 * len(windows_of(sizes, steps))
    assert error(model, plain(network(), make(), micro_batches, steps, 2)) <= fit_bound


def scheduled(micro_batches, steps_of_epochs):
    model = compiled(network(), sgd())
    for steps in steps_of_epochs:
        keras_updates(model, [join(window) for window in windows_of(micro_batches, steps)])
    return model


@compiled_on("jax")
@pytest.mark.parametrize("where", ["callback", "optimizer"])
def test_a_schedule_of_epochs(where, fit_bound):
    micro_batches = split(regression(40), [4] * 10)
    schedule = {0: 8, 2: 3}
    on_optimizer = where == "optimizer"
    model = wrapped(sgd(), schedule if on_optimizer else 5)
    callback = GradientAccumulation(None if on_optimizer else schedule)
    accumulated(model, micro_batches, epochs=4, callback=callback)
    assert error(model, scheduled(micro_batches, [8, 8, 3, 3])) <= fit_bound
    assert model.optimizer.steps == (3 if on_optimizer else 5), "the callback gives back the optimizer's own steps"


def test_a_schedule_compiles_nothing_anew():
    traces = []

    class Counts(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            traces.append(1)
            return self.dense(x)

    model = Counts()
    model.compile(optimizer=Optimizer(sgd(), 1), loss="mse")
    x, y = regression(16)

    def fit(schedule):
        model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[GradientAccumulation(schedule)])

    fit({0: 4})
    before = len(traces)
    fit({0: 3, 1: 2, 2: 1})
    if BACKEND == "torch":  # which compiles nothing, and calls the model on every micro-batch
        assert before > 0
    else:
        assert len(traces) == before


def test_a_callable_schedule_is_asked_when_a_window_opens(fit_bound):
    micro_batches = split(regression(28), [4] * 7)
    asked = []

    def steps(epoch, update):
        asked.append((epoch, update))
        return 1 + update % 3

    model = accumulated(wrapped(sgd(), 1), micro_batches, callback=GradientAccumulation(steps))
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    expected = compiled(network(), sgd())
    ends = [0, 1, 3, 6, 7], [0, 2, 5, 6, 7]  # 1, 2, 3 and the one left; then 2, 3, 1, and the one left
    for bounds in ends:
        keras_updates(expected, [join(micro_batches[a:b]) for a, b in itertools.pairwise(bounds)])
    assert error(model, expected) <= fit_bound


def test_a_generator_of_unknown_length(fit_bound):
    micro_batches = split(regression(20), [4, 4, 4, 4, 4])
    model, seen = wrapped(sgd(), 3), []

    def rows():
        yield from micro_batches

    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.optimizer.micro_batches)

    callbacks = [GradientAccumulation(), Looks()]
    with pytest.warns(UserWarning, match="ran out of data"):  # Keras: the length is not known before
        model.fit(rows(), shuffle=False, verbose=0, callbacks=callbacks)
    assert seen == [0]
    assert error(model, plain(network(), sgd(), micro_batches, 3, 1)) <= fit_bound


def test_steps_per_epoch(fit_bound):
    micro_batches = split(regression(20), [4] * 5)
    model = wrapped(sgd(), 2)

    def forever():
        while True:
            yield from micro_batches

    model.fit(forever(), steps_per_epoch=3, epochs=2, shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    expected = compiled(network(), sgd())
    order = [[0, 1], [2], [3, 4], [0]]
    keras_updates(expected, [join([micro_batches[i] for i in window]) for window in order])
    assert error(model, expected) <= fit_bound


def test_validation_and_callbacks_see_the_finished_epoch():
    x, y = regression(20)
    open_windows = []

    class Looks(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            open_windows.append(self.model.optimizer.micro_batches)

        on_epoch_end = lambda self, epoch, logs=None: self.on_test_begin()  # noqa: E731

    model = wrapped(sgd(), 3)
    callbacks = [Looks(), GradientAccumulation()]
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks)
    assert open_windows == [0] * 4


@compiled_on("jax")
def test_validation_in_the_middle_leaves_the_window_open(fit_bound):
    micro_batches = split(regression(20), [4] * 5)

    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(*micro_batches[0], verbose=0)

    model = accumulated(wrapped(sgd(), 3), micro_batches, callbacks=[Evaluates()])
    assert error(model, plain(network(), sgd(), micro_batches, 3, 2)) <= fit_bound


def test_training_that_stops_inside_an_epoch_closes_the_window(fit_bound):
    micro_batches = split(regression(20), [4] * 5)

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    model = accumulated(wrapped(sgd(), 2), micro_batches, callbacks=[Stops()])
    assert error(model, plain(network(), sgd(), micro_batches[:3], 2, 1)) <= fit_bound


def test_more_steps_than_batches_makes_one_update_per_epoch_and_says_so(caplog, fit_bound):
    micro_batches = split(regression(11), [4, 4, 3])
    with caplog.at_level(logging.WARNING, "gradaccum"):
        model = accumulated(wrapped(sgd(), 8), micro_batches, epochs=3)
    assert int(model.optimizer.iterations) == 3
    assert error(model, plain(network(), sgd(), micro_batches, 8, 3)) <= fit_bound
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "A window of 8 micro-batches is longer than an epoch of 3: one update per epoch, of 3 micro-batches"
    ]


@compiled_on("jax")
def test_without_the_callback_windows_run_on_and_the_end_is_flushed_with_one_line(caplog, fit_bound):
    x, y = regression(20)
    micro_batches = split((x, y), [4] * 5)
    model = network()
    model.compile(optimizer=Optimizer(sgd(), 3), loss="mse")
    with caplog.at_level(logging.WARNING, "gradaccum"):
        for _ in range(2):
            model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    expected = compiled(network(), sgd())
    for _ in range(2):
        keras_updates(expected, [join(window) for window in windows_of(micro_batches * 2, 3)])
    assert error(model, expected) <= fit_bound
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "closed a window of 1 of 3 micro-batches" in lines[0]
    assert "GradientAccumulation()" in lines[0]


def test_the_model_is_left_as_it_was_found():
    model = accumulated(wrapped(sgd(), 2), split(regression(8), [4, 4]))
    assert "train_step" not in vars(model)
    assert not model.optimizer.window.driven


@compiled_on("jax")
def test_a_fit_after_one_that_failed_counts_rows_once(fit_bound):
    micro_batches = split(regression(10), [4, 4, 2])

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise RuntimeError

    model = network()
    model.compile(optimizer=Optimizer(sgd(), 3), loss="mse")
    for callbacks in ([GradientAccumulation(), Fails()], [GradientAccumulation()]):
        with contextlib.suppress(RuntimeError):
            model.fit(Batches(micro_batches), shuffle=False, verbose=0, callbacks=callbacks)
    assert "train_step" not in vars(model)
    assert error(model, plain(network(), sgd(), micro_batches, 3, 1)) <= fit_bound


def test_a_custom_train_step_is_weighed_by_its_rows_too(fit_bound):
    if BACKEND != "tensorflow":
        pytest.skip("written for TensorFlow")
    import tensorflow as tf

    class Custom(keras.Model):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    def make():
        inputs = keras.Input((5,))
        keras.utils.set_random_seed(0)
        return Custom(inputs, keras.layers.Dense(3)(inputs))

    x, y = regression(10)
    model = make()
    model.compile(optimizer=Optimizer(sgd(), 3), loss="mse")
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    assert error(model, plain(make(), sgd(), split((x, y), [4, 4, 2]), 3, 2)) <= fit_bound


# Bad input.


def test_the_callback_needs_a_wrapped_optimizer():
    model, (x, y) = network(), regression(8)
    model.compile(optimizer=sgd(), loss="mse")
    with pytest.raises(ValueError, match=r"whose optimizer is wrapped\. Received: SGD"):
        model.fit(x, y, verbose=0, callbacks=[GradientAccumulation(2)])


def test_a_callable_schedule_needs_single_executions():
    if BACKEND == "torch":
        pytest.skip("Keras on PyTorch has no steps_per_execution")
    model, (x, y) = network(), regression(8)
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse", steps_per_execution=2)
    with pytest.raises(ValueError, match=r"steps_per_execution=1\. Received: steps_per_execution=2"):
        model.fit(x, y, verbose=0, callbacks=[GradientAccumulation(lambda epoch, update: 2)])


@pytest.mark.parametrize("steps", [0, {2: 4}])
def test_the_callbacks_steps_are_checked(steps):
    with pytest.raises(ValueError, match="Received: steps="):
        GradientAccumulation(steps)


@compiled_on("jax")
def test_an_error_in_training_is_not_hidden():
    model, (x, y) = network(), regression(8)
    model.compile(optimizer=Optimizer(keras.optimizers.SGD(0.1, use_ema=True), 2), loss="mse")

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("from the user's callback")

    with pytest.raises(RuntimeError, match="from the user's callback"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[Fails(), GradientAccumulation()])


@compiled_on("jax")
def test_rows_are_found_in_any_structure_of_inputs(fit_bound):
    x, y = regression(10)

    def make(optimizer):
        keras.utils.set_random_seed(0)
        inputs = {"a": keras.Input((5,), name="a"), "b": keras.Input((5,), name="b")}
        model = keras.Model(inputs, keras.layers.Dense(3)(inputs["a"] + inputs["b"]))
        model.compile(optimizer=optimizer, loss="mse")
        return model

    data = {"a": x, "b": np.flip(x, 0).copy()}
    model, expected = make(Optimizer(adam(), 3)), make(adam())
    model.fit(data, y, batch_size=4, shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    keras_updates(expected, [(data, y)])
    assert error(model, expected) <= fit_bound
