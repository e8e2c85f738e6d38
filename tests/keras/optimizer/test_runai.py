"""`runai.ga.keras`, as Run:AI's readme and the guide print it; signatures of optimizers that are wrapped by name."""

import inspect

import keras
import pytest

import gradaccum
import runai.ga.keras
from scripts.stubs import path_of, stub
from tests.keras.loops import assert_updates, error, variables_like
from tests.keras.marks import BACKEND, compiled_on
from tests.keras.problems import adam, network, regression, split
from tests.reference import windows_of

LINE = "Wrapping 'Adam' Keras optimizer with GA of 4 steps\n"
ours = runai.ga.keras.optimizers


def test_named_optimizers_with_steps_positional_or_not(capsys):
    makes = [lambda: ours.Adam(steps=4), lambda: ours.Adam(4), lambda: ours.Optimizer(keras.optimizers.Adam(), 4)]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        makes.append(lambda: ours.Optimizer(tf.keras.optimizers.Adam(), steps=4))  # tf.keras is Keras on TensorFlow
    for make in makes:
        optimizer = make()
        assert capsys.readouterr().out == LINE
        assert isinstance(optimizer, ours.Optimizer)
        assert (optimizer.runai.steps, optimizer.runai.step) == (4, 0)
        assert type(optimizer.optimizer).__name__ == "Adam"
    assert {"Adam", "SGD", "RMSprop"} <= set(dir(ours))


@compiled_on("jax")
def test_a_model_is_saved_in_the_middle_of_a_window(tmp_path, capsys):
    model, batches = network(), split(regression(12), [4] * 3)
    model.compile(optimizer=ours.SGD(2, 0.1), loss="mse")
    for batch in batches:
        model.train_on_batch(*batch)
    assert (type(model.optimizer).__name__, model.optimizer.runai.step) == ("SGD", 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.optimizer.runai.step, type(loaded.optimizer)) == (1, type(model.optimizer))
    assert loaded.optimizer.flush()
    assert model.optimizer.flush()
    assert error(loaded, model) == 0.0
    assert_updates(model, windows_of(batches, 2), 1e-6, lambda: keras.optimizers.SGD(0.1))


class ReadsTheWindow(keras.optimizers.SGD):
    """A custom optimizer for the original, which finds the window in itself."""

    def update_step(self, gradient, variable, learning_rate):
        self.__dict__["seen"] = self.runai.steps
        super().update_step(gradient, variable, learning_rate)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables):
            self.update_step(gradient, variable, learning_rate)


def test_a_custom_inner_optimizer_finds_the_window_in_itself(capsys):
    optimizer, variables = ours.Optimizer(ReadsTheWindow(0.1), steps=2), variables_like([(2,)])
    for _ in range(2):
        optimizer.apply([keras.ops.ones((2,))], variables)
    assert optimizer.optimizer.seen == 2
    with pytest.raises(gradaccum.WindowError, match=r"in the open window, 0\. Received: step=1\."):
        optimizer.runai.step = 1
    assert optimizer.get_config()["optimizer"]["class_name"] == "ReadsTheWindow"


def test_a_loss_scale_inside_is_refused():
    with pytest.raises(ValueError, match="goes around"):
        ours.Optimizer(keras.optimizers.LossScaleOptimizer(adam()), 4)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_signature_shows_the_inner_optimizers_arguments_and_steps(name):
    found = inspect.signature(getattr(gradaccum.keras.optimizers, name)).parameters
    inner = inspect.signature(getattr(keras.optimizers, name)).parameters
    assert set(found) == {*inner, "steps"}
    assert found["learning_rate"].default == inner["learning_rate"].default


@pytest.mark.skipif(BACKEND != "torch", reason="once is enough")
def test_the_stubs_are_what_keras_own_signatures_make():
    """Otherwise: `python -m scripts.stubs`."""
    face = "gradaccum.keras.optimizers"
    written = path_of(face).read_text(encoding="utf-8")
    if f"keras {keras.__version__}:" not in written:
        pytest.skip("made from another version")
    assert written == stub(face)
