"""Saving and loading, in the middle of a window too."""

import keras
import numpy as np
import pytest

import gradaccum
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import Adam, BatchOptimizer, Optimizer
from tests.keras.problems import (
    BACKEND,
    SHAPES,
    HeavyBall,
    adam,
    compiled_on,
    error,
    means,
    micro_gradients,
    network,
    plain,
    regression,
    sgd,
    slow_where_compiled,
    split,
    train_by_hand,
    variables_like,
)
from tests.reference import relative_error


def trained(optimizer, batches):
    model = network()
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError())
    for batch in batches:
        model.train_on_batch(*batch)
    return model


def sized(model):
    return BatchOptimizer(adam(), 4, 12, 18, model)


@compiled_on("jax")
@pytest.mark.parametrize(
    ("make", "rows", "trained", "steps"),
    [(lambda model: Optimizer(adam(), 3), [4] * 6, 4, 3), (sized, [4, 4, 4, 4, 2], 4, 3)],
    ids=["steps", "sizes"],
)
def test_saved_in_the_middle_of_a_window_a_model_continues_exactly(make, rows, trained, steps, tmp_path, fit_bound):
    batches, model = split(regression(sum(rows)), rows), network()
    model.compile(optimizer=make(model), loss="mse")
    for batch in batches[:trained]:
        model.train_on_batch(*batch)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.optimizer.micro_batches, loaded.optimizer.steps) == (1, steps)
    for batch in batches[trained:]:
        model.train_on_batch(*batch)
        loaded.train_on_batch(*batch)
    assert int(loaded.optimizer.iterations) == 2
    assert error(loaded, model) == 0.0
    assert error(loaded, plain(network(), adam(), batches, steps, 1)) <= fit_bound


@slow_where_compiled
def test_a_file_continues_in_a_fresh_process(tmp_path, fresh_process):
    batches = split(regression(12), [4] * 3)
    model = trained(Adam(3, 0.01), batches[:2])
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", x=batches[2][0], y=batches[2][1])
    program = (
        "import keras, numpy as np, gradaccum.keras\n"
        "model = keras.models.load_model('model.keras')\n"
        "batch = np.load('batch.npz')\n"
        "model.train_on_batch(batch['x'], batch['y'])\n"
        "assert type(model.optimizer) is gradaccum.keras.optimizers.Adam, type(model.optimizer)\n"
        "np.savez('weights.npz', *model.get_weights())\n"
    )
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    done = fresh_process(tmp_path / "program.py", tmp_path)
    assert done.ok, done.stderr
    weights = np.load(tmp_path / "weights.npz")
    model.train_on_batch(*batches[2])
    assert relative_error([weights[name] for name in weights.files], model.get_weights()) <= 1e-6


@compiled_on("jax")
def test_a_plain_optimizers_checkpoint_loads(tmp_path):
    batches = split(regression(24), [4] * 6)
    model = trained(adam(), batches[:2])
    model.save_weights(tmp_path / "model.weights.h5")
    wrapped = trained(Optimizer(adam(), 1), [])
    wrapped.optimizer.build(wrapped.trainable_variables)
    wrapped.load_weights(tmp_path / "model.weights.h5")
    assert int(wrapped.optimizer.iterations) == 2
    for batch in batches[2:]:
        model.train_on_batch(*batch)
        wrapped.train_on_batch(*batch)
    assert error(wrapped, model) <= 1e-6


def wrapped_after(count, steps=3, make=sgd):
    optimizer, variables = Optimizer(make(), steps), variables_like(SHAPES)
    train_by_hand(optimizer, variables, micro_gradients(count))
    return optimizer, variables


def stored(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


@pytest.mark.parametrize("saved_steps", [None, 3])
def test_a_plain_checkpoint_or_one_of_other_steps_loads_between_windows_and_empties_the_window(saved_steps, bound):
    gradients = micro_gradients(8, seed=5)
    reference, expected = sgd(), variables_like(SHAPES)
    train_by_hand(reference, expected, means(gradients[:6], 3))
    saved, variables = (reference, expected) if saved_steps is None else (Optimizer(sgd(), 3), variables_like(SHAPES))
    if saved_steps is not None:
        train_by_hand(saved, variables, gradients[:6])
    optimizer, others = wrapped_after(1, steps=2)
    optimizer.load_own_variables(stored(saved))
    assert (optimizer.micro_batches, optimizer.steps, int(optimizer.iterations)) == (0, 2, 2)
    for variable, value in zip(others, variables):
        variable.assign(value)
    train_by_hand(optimizer, others, gradients[6:])
    train_by_hand(reference, expected, means(gradients[6:], 2))
    assert relative_error(others, expected) <= bound


def test_a_checkpoint_of_other_steps_in_the_middle_of_a_window_is_an_error():
    saved, _ = wrapped_after(4, steps=3)
    optimizer, _ = wrapped_after(0, steps=2)
    with pytest.raises(gradaccum.WindowError, match=r"1 of 3 micro-batches.*steps=3.*This one has steps=2"):
        optimizer.load_own_variables(stored(saved))


def test_a_window_of_other_variables_is_an_error():
    saved, _ = wrapped_after(1)
    other = Optimizer(sgd(), 3)
    other.build(variables_like([(4, 3), (3,), (3, 5)]))
    with pytest.raises(ValueError, match="other variables than this model's"):
        other.load_own_variables(stored(saved))


@keras.saving.register_keras_serializable("tests")
def growing(epoch, update):
    return 1 + epoch


CONFIGS = [
    *(
        lambda s=s: Optimizer(keras.optimizers.Adam(0.5, beta_1=0.8), s, name="mine")
        for s in (4, {0: 8, 4: 2}, growing)
    ),
    lambda: Optimizer(HeavyBall(momentum=0.7), 2),
    lambda: Adam(3),
    lambda: BatchOptimizer(sgd(), 4, 12, 18, network()),
    lambda: Optimizer(keras.optimizers.LossScaleOptimizer(sgd()), 2),
]


@pytest.mark.parametrize("make", CONFIGS)
def test_config_round_trip(make):
    optimizer = make()
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(copy) is type(optimizer)
    assert copy.get_config() == optimizer.get_config()
    assert copy.schedule == optimizer.schedule
    if copy.name == "mine":
        assert (copy.beta_1, float(copy.inner_optimizer.learning_rate)) == (0.8, 0.5)


@compiled_on("jax")
def test_a_schedule_from_the_callback_survives_a_file_in_the_middle_of_a_window(tmp_path):
    batches = split(regression(20), [4] * 5)

    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.model.save(tmp_path / "model.keras")

    model, (x, y) = network(), [np.concatenate(parts) for parts in zip(*batches)]
    model.compile(optimizer=Optimizer(sgd(), 4), loss="mse")
    callbacks = [GradientAccumulation({0: 2}), Saves()]
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.optimizer.micro_batches, loaded.optimizer.steps) == (1, 2)
    for x, y in batches[3:]:
        loaded.fit(x, y, batch_size=4, verbose=0, callbacks=[GradientAccumulation({0: 2})])
    assert error(loaded, plain(network(), sgd(), [*batches[:2], *batches[2:4], batches[4]], 2, 1)) <= 1e-6


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's formats")
def test_tensorflow_saves_and_exports_a_model_in_the_middle_of_a_window(tmp_path):
    import tensorflow as tf

    batches = split(regression(24), [4] * 6)
    model = network()
    model.compile(optimizer=Optimizer(adam(), 2), loss="mse", jit_compile=False)
    for batch in batches[:3]:
        model.train_on_batch(*batch)
    model.export(tmp_path / "exported", verbose=False)
    tf.saved_model.save(model, tmp_path / "saved")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    model.train_on_batch(*batches[3])
    expected = model.get_weights()
    model.train_on_batch(*batches[4])
    checkpoint.restore(path).assert_existing_objects_matched()
    assert model.optimizer.micro_batches == 1
    model.train_on_batch(*batches[3])
    assert relative_error(model.get_weights(), expected) == 0.0


def test_a_configuration_that_is_none_is_named():
    for config in ({}, None, {"optimizer": {}}):
        with pytest.raises(ValueError, match="An Optimizer's config must have 'optimizer' and 'steps'"):
            Optimizer.from_config(config)
