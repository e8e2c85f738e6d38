"""`runai.ga.keras`, as Run:AI's readme and the guide print it."""

import keras
import pytest

import gradaccum
import runai.ga.keras
from tests.keras.problems import adam, compiled_on, error, network, plain, regression, split, variables_like


def test_the_guides_lines(capsys, fit_bound):
    optimizer = keras.optimizers.Adam(0.01)
    optimizer = runai.ga.keras.optimizers.Optimizer(optimizer, steps=4)
    assert capsys.readouterr().out == "Wrapping 'Adam' Keras optimizer with GA of 4 steps\n"
    x, y = regression(32)
    model = network()
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert error(model, plain(network(), adam(), split((x, y), [4] * 8), 4, 1)) <= fit_bound


def test_the_guides_line_with_tf_keras(capsys):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("tf.keras is Keras on TensorFlow")
    import tensorflow as tf

    runai.ga.keras.optimizers.Optimizer(tf.keras.optimizers.Adam(), steps=4)
    assert capsys.readouterr().out == "Wrapping 'Adam' Keras optimizer with GA of 4 steps\n"


def test_named_optimizers_with_steps_positional_or_not(capsys):
    for make in (
        lambda: runai.ga.keras.optimizers.Adam(steps=4),
        lambda: runai.ga.keras.optimizers.Adam(4),
        lambda: runai.ga.keras.optimizers.Optimizer(keras.optimizers.Adam(), 4),
    ):
        optimizer = make()
        assert capsys.readouterr().out == "Wrapping 'Adam' Keras optimizer with GA of 4 steps\n"
        assert isinstance(optimizer, runai.ga.keras.optimizers.Optimizer)
        assert (optimizer.runai.steps, optimizer.runai.step) == (4, 0)
        assert type(optimizer.optimizer).__name__ == "Adam"
    assert {"Adam", "SGD", "RMSprop"} <= set(dir(runai.ga.keras.optimizers))


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam"])
def test_a_window_is_a_step_with_the_mean_as_in_run_ais_own_tests(name):
    """And a named optimizer is of a class of that name."""
    ops = keras.ops
    gradients = [[keras.random.normal(shape, seed=s) for shape in ((2, 3), (4,))] for s in range(3)]
    ends = []
    ga, plain = runai.ga.keras.optimizers, getattr(keras.optimizers, name)
    for optimizer in (plain(), ga.Optimizer(plain(), steps=3), getattr(ga, name)(steps=3)):
        variables = variables_like([(2, 3), (4,)])
        if isinstance(optimizer, ga.Optimizer):
            assert type(optimizer.optimizer).__name__ == name
            for each in gradients:
                optimizer.apply(each, variables)
        else:
            optimizer.apply([sum(each) / 3 for each in zip(*gradients)], variables)
        ends.append([ops.convert_to_numpy(variable) for variable in variables])
    assert (type(optimizer).__name__, type(ga.Optimizer(plain(), 3)).__name__) == (name, "Optimizer")
    for expected, *found in zip(*ends):
        for one in found:
            assert abs(one - expected).max() <= 1e-6


@compiled_on("jax")
def test_a_model_is_saved_in_the_middle_of_a_window(tmp_path, capsys):
    x, y = regression(12)
    model = network()
    model.compile(optimizer=runai.ga.keras.optimizers.SGD(2, 0.1), loss="mse")
    for start in (0, 4, 8):
        model.train_on_batch(x[start : start + 4], y[start : start + 4])
    assert model.optimizer.runai.step == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.optimizer.runai.step, type(loaded.optimizer)) == (1, type(model.optimizer))
    assert loaded.optimizer.flush()
    assert model.optimizer.flush()
    assert error(loaded, model) == 0.0


class ReadsTheWindow(keras.optimizers.SGD):
    """A custom optimizer for the original, which finds the window in itself."""

    def update_step(self, gradient, variable, learning_rate):
        self.__dict__["seen"] = self.runai.steps
        super().update_step(gradient, variable, learning_rate)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables):
            self.update_step(gradient, variable, learning_rate)


def test_a_custom_inner_optimizer_finds_the_window_in_itself(capsys):
    optimizer = runai.ga.keras.optimizers.Optimizer(ReadsTheWindow(0.1), steps=2)
    optimizer.apply([keras.ops.ones((2,))], variables := variables_like([(2,)]))
    optimizer.apply([keras.ops.ones((2,))], variables)
    assert optimizer.optimizer.seen == 2
    with pytest.raises(gradaccum.WindowError, match=r"in the open window, 0\. Received: step=1\."):
        optimizer.runai.step = 1
    assert optimizer.get_config()["optimizer"]["class_name"] == "ReadsTheWindow"


def test_a_loss_scale_inside_is_refused():
    with pytest.raises(ValueError, match="goes around"):
        runai.ga.keras.optimizers.Optimizer(keras.optimizers.LossScaleOptimizer(adam()), 4)
