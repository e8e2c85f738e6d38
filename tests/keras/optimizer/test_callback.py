"""What the GradientAccumulation callback makes of rows, files and fits that are none of the plain ones."""

import logging

import keras
import numpy as np
import pytest

import gradaccum
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import BatchOptimizer, Optimizer
from tests.keras.problems import (
    BACKEND,
    Batches,
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
    wrapped,
)
from tests.reference import keras_updates

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


def graph(kind, optimizer):
    keras.utils.set_random_seed(0)
    model = kind()
    model.compile(optimizer=optimizer, loss=None if kind is WithoutTargets else "mse")
    return model


def with_shared(batch, shared=SHARED):
    return {"adjacency": shared, "x": batch[0]}, *batch[1:]


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "gradaccum"]


@compiled_on("jax")
def test_rows_are_those_of_the_targets_where_the_first_input_is_shared_by_all_rows(fit_bound):
    data = regression(15)
    model, expected = graph(Graph, Optimizer(sgd(), 4)), graph(Graph, sgd())
    callbacks = [GradientAccumulation()]
    micro_batches = [with_shared(batch) for batch in split(data, SIZES)]
    model.fit(Batches(micro_batches), shuffle=False, verbose=0, callbacks=callbacks)
    expected.fit(Batches([with_shared(data)]), shuffle=False, verbose=0)
    assert error(model, expected) <= fit_bound


@compiled_on("jax")
def test_a_batch_optimizers_rows_are_those_of_the_targets_too(fit_bound):
    data = regression(15)
    model, expected = graph(Graph, None), graph(Graph, sgd())
    model.compile(optimizer=BatchOptimizer(sgd(), 4, 16, 15, model), loss="mse")
    micro_batches = [with_shared(batch) for batch in split(data, [4, 4, 4, 3])]
    model.fit(Batches(micro_batches), batch_size=4, shuffle=False, verbose=0)
    expected.fit(Batches([with_shared(data)]), shuffle=False, verbose=0)
    assert error(model, expected) <= fit_bound


@slow_where_compiled
@pytest.mark.parametrize("jit", [False, slow(True)])
def test_inputs_without_targets_must_have_the_same_number_of_rows(jit):
    model = graph(WithoutTargets, Optimizer(sgd(), 4))
    if BACKEND != "torch":
        model.compile(optimizer=model.optimizer, jit_compile=jit)
    callbacks = [GradientAccumulation()]
    alike = [with_shared((np.ones((6, 5), "float32"),))] * 2
    model.fit(Batches(alike), verbose=0, callbacks=callbacks)
    apart = [with_shared((np.ones((4, 5), "float32"),))] * 2
    # On TensorFlow only the run tells, and its error has no shapes. Compiled by XLA it is one about this operation.
    by_tensorflow = "rows_of_a_micro_batch" if jit else "must have the same number of rows"
    expected = by_tensorflow if BACKEND == "tensorflow" else r"x\['adjacency'\]  shape \(6, 5\)\n +x\['x'\]"
    with pytest.raises(Exception, match=expected):
        model.fit(Batches(apart), verbose=0, callbacks=callbacks)


class Second(keras.Model):
    """Has a second optimizer, as a GAN has."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.critic_optimizer = Optimizer(sgd(), 4)

    def call(self, inputs):
        return self.dense(inputs)


@compiled_on("jax")
def test_a_second_wrapped_optimizer_is_named_once(caplog):
    model = Second()
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse")
    with caplog.at_level(logging.WARNING, "gradaccum"):
        callback = GradientAccumulation()
        for _ in range(2):
            model.fit(*regression(8), batch_size=4, verbose=0, callbacks=[callback])
    assert messages(caplog) == [
        "The GradientAccumulation callback drives the optimizer that the model was compiled with, and no other. Not "
        "driven: model.critic_optimizer. The micro-batches of each weigh the same, and its windows run on across "
        "epochs: give it micro-batches of one size, and call its flush() at each epoch's end, in the on_epoch_end of a "
        "callback of yours."
    ]


class Crashes(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if self.after == 0:
            raise RuntimeError("boom")


@compiled_on("jax")
@pytest.mark.parametrize("first", [False, slow(True)])
def test_a_window_that_a_backup_restores_is_discarded_where_its_epoch_begins_anew(first, tmp_path, caplog, fit_bound):
    batches = split(regression(24), [4] * 6)

    def fit(model, *more):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=5)
        callbacks = [backup, GradientAccumulation()] if first else [GradientAccumulation(), backup]
        model.fit(Batches(batches), epochs=1, shuffle=False, verbose=0, callbacks=[*callbacks, *more])

    with pytest.raises(RuntimeError, match="boom"):
        fit(wrapped(sgd(), 3), Crashes(5))  # two micro-batches into the second window
    model = wrapped(sgd(), 3)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "gradaccum"):
        fit(model)
    windows = [batches[:3], batches[:3], batches[3:]]
    expected = plain(network(), sgd(), [], 3, 1)
    keras_updates(expected, [join(window) for window in windows])
    assert int(model.optimizer.iterations) == 3
    assert error(model, expected) <= fit_bound
    assert messages(caplog)[-1] == (
        "An open window was loaded during this fit(), whose epoch begins anew: its 2 micro-batches are discarded, as "
        "they come again."
    )
    assert not any("Go on with" in message for message in messages(caplog))


class Nested(keras.callbacks.Callback):
    """Runs a `fit` of its own in the first epoch's end, or after its second micro-batch."""

    def __init__(self, batches, at_end=True):
        super().__init__()
        self.batches, self.at_end = batches, at_end

    def run(self):
        batches, self.batches = self.batches, None
        if batches is not None:
            callbacks = [GradientAccumulation()]
            self.model.fit(Batches(batches), shuffle=False, verbose=0, callbacks=callbacks)

    def on_epoch_end(self, epoch, logs=None):
        if self.at_end:
            self.run()

    def on_train_batch_end(self, batch, logs=None):
        if not self.at_end and batch == 1:
            self.run()


@compiled_on("jax")
def test_a_fit_inside_of_on_epoch_end_leaves_the_outer_one_exact(fit_bound):
    batches = split(regression(22), [4, 4, 4, 4, 4, 2])
    model = wrapped(sgd(), 4)
    callbacks = [GradientAccumulation(), Nested(batches[3:])]
    model.fit(Batches(batches), epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    expected = plain(network(), sgd(), [], 4, 1)
    windows = [batches[:4], batches[4:]]
    keras_updates(expected, [join(window) for window in [*windows, batches[3:], *windows]])
    assert error(model, expected) <= fit_bound
    assert "train_step" not in vars(model)


def test_a_fit_inside_of_an_epoch_of_another_is_an_error_that_names_it():
    batches = split(regression(16), [4] * 4)
    callbacks = [GradientAccumulation(), Nested(batches[2:], at_end=False)]
    with pytest.raises(gradaccum.WindowError, match="Another fit\\(\\) of this model"):
        wrapped(sgd(), 4).fit(Batches(batches), shuffle=False, verbose=0, callbacks=callbacks)


REDUCTIONS = [
    ("sum", 2, 1),
    *(slow(*one) for one in [("mean_with_sample_weight", 2, 1), ("sum_over_batch_size", 2, 0), ("sum", 1, 0)]),
]


@compiled_on("jax")
@pytest.mark.parametrize(("reduction", "steps", "named"), REDUCTIONS)
def test_a_loss_that_is_no_mean_over_rows_is_named_once_in_windows_of_several(reduction, steps, named, caplog):
    model = network()
    loss = keras.losses.MeanSquaredError(reduction=reduction, name="squares")
    model.compile(optimizer=Optimizer(sgd(), steps), loss=loss, jit_compile=False)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        callback = GradientAccumulation()
        for _ in range(2):
            model.fit(*regression(8), batch_size=4, verbose=0, callbacks=[callback])
    found = [message for message in messages(caplog) if "is no mean over rows" in message]
    assert len(found) == named
    for message in found:
        assert f"The loss 'squares' has reduction={reduction!r}" in message
        assert "gradaccum.keras.micro_batched" in message


def test_two_callbacks_of_one_fit_are_refused_by_name():
    model = wrapped(sgd(), 2)
    two = [GradientAccumulation({0: 8}), GradientAccumulation(2)]
    with pytest.raises(ValueError, match="two GradientAccumulation callbacks"):
        model.fit(*regression(8), batch_size=4, verbose=0, callbacks=two)
    model.fit(*regression(8), batch_size=4, verbose=0, callbacks=two[:1])
