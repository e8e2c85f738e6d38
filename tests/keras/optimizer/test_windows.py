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
    split,
    updated,
    wrapped,
)
from tests.reference import WINDOWS, keras_updates, windows_of

RAGGED = "ragged everywhere"
OFTEN = RAGGED, "4+4+2 rows", "a window longer than the epoch"
EPOCHS = [
    *((name, sgd) if name in OFTEN else slow(name, sgd) for name in WINDOWS),
    *((name, adam) if name == RAGGED else slow(name, adam) for name in WINDOWS),
]
FIVE = split(regression(20), [4] * 5)


def callback(event, function):
    """One that calls `function(model, number)` at this event."""
    made = keras.callbacks.LambdaCallback(**{event: lambda number, logs=None: function(made.model, number)})
    return made


@pytest.mark.parametrize(("window", "make"), EPOCHS)
def test_an_epoch_of_windows_matches_the_large_batches(window, make, fit_bound):
    sizes, steps = WINDOWS[window]
    micro_batches = split(regression(sum(sizes)), sizes)
    model = fit(wrapped(make(), steps), micro_batches, epochs=2)
    assert int(model.optimizer.iterations) == 2 * len(windows_of(sizes, steps))
    assert error(model, plain(network(), make(), micro_batches, steps, 2)) <= fit_bound


@compiled_on("jax")
@pytest.mark.parametrize("where", ["callback", "optimizer"])
def test_a_schedule_of_epochs(where, fit_bound):
    micro_batches, schedule = split(regression(40), [4] * 10), {0: 8, 2: 3}
    on_optimizer = where == "optimizer"
    model = wrapped(sgd(), schedule if on_optimizer else 5)
    fit(model, micro_batches, GradientAccumulation(None if on_optimizer else schedule), epochs=4)
    assert error(model, updated([w for steps in (8, 8, 3, 3) for w in windows_of(micro_batches, steps)])) <= fit_bound
    assert model.optimizer.steps == (3 if on_optimizer else 5), "the callback gives back the optimizer's own steps"
    assert "train_step" not in vars(model)
    assert not model.optimizer.window.driven


def test_a_schedule_compiles_nothing_anew():
    traces = []

    class Counts(keras.layers.Dense):
        def call(self, x):
            traces.append(1)
            return super().call(x)

    model = keras.Sequential([keras.Input((5,)), Counts(3)])
    model.compile(optimizer=Optimizer(sgd(), 1), loss="mse")
    for schedule in ({0: 4}, {0: 3, 1: 2, 2: 1}):
        before = len(traces)
        fit(model, split(regression(16), [4] * 4), GradientAccumulation(schedule), epochs=3)
    # PyTorch compiles nothing, and calls the model on every micro-batch.
    assert before > 0
    assert len(traces) == before or BACKEND == "torch"


def test_a_callable_schedule_is_asked_when_a_window_opens(fit_bound):
    micro_batches, asked = split(regression(28), [4] * 7), []

    def steps(epoch, update):
        asked.append((epoch, update))
        return 1 + update % 3

    model = fit(wrapped(sgd(), 1), micro_batches, GradientAccumulation(steps), epochs=2)
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    ends = [0, 1, 3, 6, 7], [0, 2, 5, 6, 7]  # 1, 2, 3 and the one left; then 2, 3, 1, and the one left
    windows = [micro_batches[a:b] for bounds in ends for a, b in itertools.pairwise(bounds)]
    assert error(model, updated(windows)) <= fit_bound


def test_a_generator_of_unknown_length(fit_bound):
    model, seen = wrapped(sgd(), 3), []
    looks = callback("on_epoch_end", lambda model, epoch: seen.append(model.optimizer.micro_batches))
    with pytest.warns(UserWarning, match="ran out of data"):  # Keras: the length is not known before
        model.fit((one for one in FIVE), shuffle=False, verbose=0, callbacks=[GradientAccumulation(), looks])
    assert seen == [0]
    assert error(model, updated(windows_of(FIVE, 3))) <= fit_bound


def test_steps_per_epoch(fit_bound):
    model, arguments = wrapped(sgd(), 2), {"steps_per_epoch": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit((one for one in itertools.cycle(FIVE)), callbacks=[GradientAccumulation()], **arguments)
    assert error(model, updated([[FIVE[i] for i in window] for window in ([0, 1], [2], [3, 4], [0])])) <= fit_bound


def test_validation_and_callbacks_see_the_finished_epoch():
    (x, y), open_windows = regression(20), []
    model = wrapped(sgd(), 3)

    class Looks(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            open_windows.append(self.model.optimizer.micro_batches)

        on_epoch_end = lambda self, epoch, logs=None: self.on_test_begin()  # noqa: E731

    callbacks = [Looks(), GradientAccumulation()]
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks)
    assert open_windows == [0] * 4


@compiled_on("jax")
def test_validation_in_the_middle_leaves_the_window_open(fit_bound):
    evaluates = callback("on_train_batch_end", lambda model, batch: model.evaluate(*FIVE[0], verbose=0))
    model = fit(wrapped(sgd(), 3), FIVE, evaluates, epochs=2)
    assert error(model, updated(windows_of(FIVE, 3) * 2)) <= fit_bound


def test_training_that_stops_inside_an_epoch_closes_the_window(fit_bound):
    stops = callback("on_train_batch_end", lambda model, batch: setattr(model, "stop_training", batch == 2))
    model = fit(wrapped(sgd(), 2), FIVE, stops, epochs=2)
    assert error(model, updated([FIVE[:2], FIVE[2:3]])) <= fit_bound


def test_more_steps_than_batches_makes_one_update_per_epoch_and_says_so(caplog, fit_bound):
    micro_batches = split(regression(11), [4, 4, 3])
    with caplog.at_level(logging.WARNING, "gradaccum"):
        model = fit(wrapped(sgd(), 8), micro_batches, epochs=3)
    assert int(model.optimizer.iterations) == 3
    assert error(model, updated([micro_batches] * 3)) <= fit_bound
    assert logged(caplog) == [
        "A window of 8 micro-batches is longer than an epoch of 3: one update per epoch, of 3 micro-batches"
    ]


@compiled_on("jax")
def test_without_the_callback_windows_run_on_and_the_end_is_flushed_with_one_line(caplog, fit_bound):
    x, y = regression(20)
    model = network()
    model.compile(optimizer=Optimizer(sgd(), 3), loss="mse")
    with caplog.at_level(logging.WARNING, "gradaccum"):
        for _ in range(2):
            model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert error(model, updated(windows_of(FIVE * 2, 3) * 2)) <= fit_bound
    (line,) = logged(caplog)
    assert "closed a window of 1 of 3 micro-batches" in line
    assert "GradientAccumulation()" in line


@compiled_on("jax")
def test_a_fit_after_one_that_failed_counts_rows_once(fit_bound):
    micro_batches, model = split(regression(10), [4, 4, 2]), network()
    model.compile(optimizer=Optimizer(sgd(), 3), loss="mse")
    with contextlib.suppress(ZeroDivisionError):
        fit(model, micro_batches, callback("on_epoch_begin", lambda model, epoch: 1 / 0))
    fit(model, micro_batches)
    assert "train_step" not in vars(model)
    assert error(model, updated([micro_batches])) <= fit_bound


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

    micro_batches, model = split(regression(10), [4, 4, 2]), make()
    model.compile(optimizer=Optimizer(sgd(), 3), loss="mse")
    fit(model, micro_batches, epochs=2)
    assert error(model, plain(make(), sgd(), micro_batches, 3, 2)) <= fit_bound


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


# Bad input.


def test_what_the_callback_cannot_drive_is_an_error():
    model, (x, y) = network(), regression(8)
    model.compile(optimizer=sgd(), loss="mse")
    with pytest.raises(ValueError, match=r"whose optimizer is wrapped\. Received: SGD"):
        model.fit(x, y, verbose=0, callbacks=[GradientAccumulation(2)])
    for steps in (0, {2: 4}):
        with pytest.raises(ValueError, match="Received: steps="):
            GradientAccumulation(steps)
    if BACKEND == "torch":  # where Keras has no steps_per_execution
        return
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse", steps_per_execution=2)
    with pytest.raises(ValueError, match=r"steps_per_execution=1\. Received: steps_per_execution=2"):
        model.fit(x, y, verbose=0, callbacks=[GradientAccumulation(lambda epoch, update: 2)])


@compiled_on("jax")
def test_an_error_in_training_is_not_hidden():
    model = network()
    model.compile(optimizer=Optimizer(keras.optimizers.SGD(0.1, use_ema=True), 2), loss="mse")
    with pytest.raises(ZeroDivisionError):
        fit(model, FIVE, callback("on_train_batch_end", lambda model, batch: 1 / 0), GradientAccumulation())
