"""What the GradientAccumulation callback makes of other optimizers, losses and fits, and of files."""

import logging

import keras
import pytest

import gradaccum
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import Optimizer
from tests.keras.optimizer.test_rows import Ends
from tests.keras.problems import (
    compiled_on,
    error,
    fit,
    logged,
    network,
    regression,
    sgd,
    slow,
    split,
    updated,
    wrapped,
)

TWO = split(regression(8), [4, 4])


@compiled_on("jax")
def test_a_second_wrapped_optimizer_is_named_once(caplog):
    model, callback = network(), GradientAccumulation()
    model.critic_optimizer = Optimizer(sgd(), 4)  # as a GAN has
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse")
    with caplog.at_level(logging.WARNING, "gradaccum"):
        for _ in range(2):
            fit(model, TWO, callback)
    (message,) = logged(caplog)
    assert "drives only the optimizer that the model was compiled with" in message
    assert "Not driven: model.critic_optimizer." in message


@compiled_on("jax")
@pytest.mark.parametrize("first", [False, slow(True)])
def test_a_window_that_a_backup_restores_is_discarded_where_its_epoch_begins_anew(first, tmp_path, caplog, fit_bound):
    batches = split(regression(24), [4] * 6)

    def with_backup(model, *more):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=5)
        return fit(model, batches, *([backup, GradientAccumulation()][:: 1 if first else -1]), *more)

    with pytest.raises(RuntimeError):
        with_backup(wrapped(sgd(), 3), Ends(5, RuntimeError))  # two micro-batches into the second window
    caplog.clear()
    with caplog.at_level(logging.WARNING, "gradaccum"):
        model = with_backup(wrapped(sgd(), 3))
    assert int(model.optimizer.iterations) == 3
    assert error(model, updated([batches[:3], batches[:3], batches[3:]])) <= fit_bound
    assert logged(caplog)[-1] == (
        "An open window was loaded during this fit(), whose epoch starts again: the window's 2 micro-batches "
        "are discarded, because they come again."
    )


class Nested(keras.callbacks.Callback):
    """Runs a `fit` of its own in the first epoch's end, or after its second micro-batch."""

    def __init__(self, batches, at_end=True):
        super().__init__()
        self.batches, self.at_end = batches, at_end

    def run(self):
        batches, self.batches = self.batches, None
        if batches is not None:
            fit(self.model, batches)

    def on_epoch_end(self, epoch, logs=None):
        if self.at_end:
            self.run()

    def on_train_batch_end(self, batch, logs=None):
        if not self.at_end and batch == 1:
            self.run()


@compiled_on("jax")
def test_a_fit_inside_of_on_epoch_end_leaves_the_outer_one_exact(fit_bound):
    batches = split(regression(22), [4, 4, 4, 4, 4, 2])
    model = fit(wrapped(sgd(), 4), batches, GradientAccumulation(), Nested(batches[3:]), epochs=2)
    windows = [batches[:4], batches[4:]]
    assert error(model, updated([*windows, batches[3:], *windows])) <= fit_bound
    assert "train_step" not in vars(model)


def test_a_fit_inside_of_an_epoch_of_another_is_an_error_that_names_it():
    with pytest.raises(gradaccum.WindowError, match="Another fit\\(\\) of this model"):
        fit(wrapped(sgd(), 4), TWO * 2, GradientAccumulation(), Nested(TWO, at_end=False))


REDUCTIONS = [
    ("sum", 2, 1),
    *(slow(*one) for one in [("mean_with_sample_weight", 2, 1), ("sum_over_batch_size", 2, 0), ("sum", 1, 0)]),
]


@compiled_on("jax")
@pytest.mark.parametrize(("reduction", "steps", "named"), REDUCTIONS)
def test_a_loss_that_is_no_mean_over_rows_is_named_once_in_windows_of_several(reduction, steps, named, caplog):
    model, callback = network(), GradientAccumulation()
    loss = keras.losses.MeanSquaredError(reduction=reduction, name="squares")
    model.compile(optimizer=Optimizer(sgd(), steps), loss=loss, jit_compile=False)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        for _ in range(2):
            fit(model, TWO, callback)
    found = [message for message in logged(caplog) if "is no mean over rows" in message]
    assert len(found) == named
    for message in found:
        assert f"The loss 'squares' has reduction={reduction!r}" in message
        assert "gradaccum.keras.micro_batched" in message


def test_two_callbacks_of_one_fit_are_refused_by_name():
    model, two = wrapped(sgd(), 2), [GradientAccumulation({0: 8}), GradientAccumulation(2)]
    with pytest.raises(ValueError, match="two GradientAccumulation callbacks"):
        fit(model, TWO, *two)
    fit(model, TWO, two[0])
