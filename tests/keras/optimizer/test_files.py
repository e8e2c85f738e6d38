"""Saving and loading, in the middle of a window too; files of version 0.1."""

from pathlib import Path

import keras
import numpy as np
import pytest

import gradaccum
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import Adam, BatchOptimizer, Optimizer
from tests.keras.loops import (
    SHAPES,
    assert_updates,
    ends,
    error,
    fit,
    means,
    micro_gradients,
    train_by_hand,
    variables_like,
)
from tests.keras.marks import BACKEND, compiled_on, slow, slow_where_compiled
from tests.keras.problems import HeavyBall, adam, network, regression, sgd, split
from tests.reference import keras_updates, relative_error, windows_of

on_jax = compiled_on("jax")


def trained(make, batches, **how):
    """The network after these micro-batches, with an optimizer that is made of it."""
    model = network()
    model.compile(optimizer=make(model), loss=keras.losses.MeanSquaredError(), **how)
    for batch in batches:
        model.train_on_batch(*batch)
    return model


@on_jax
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda model: Optimizer(adam(), 3), [4] * 6),
        slow(lambda model: Optimizer(adam(), {0: 3, 2: 3}), [4] * 6),
        (lambda model: BatchOptimizer(adam(), 4, 12, 18, model), [4, 4, 4, 4, 2]),
    ],
    ids=["steps", "a schedule of one length", "sizes"],
)
def test_saved_in_the_middle_of_a_window_a_model_continues_exactly(make, rows, tmp_path, fit_bound):
    batches = split(regression(sum(rows)), rows)
    model = trained(make, batches[:4])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.optimizer.micro_batches, loaded.optimizer.steps) == (1, 3)
    for batch in batches[4:]:
        model.train_on_batch(*batch)
        loaded.train_on_batch(*batch)
    assert error(loaded, model) == 0.0
    assert_updates(loaded, windows_of(batches, 3), fit_bound, adam)


@slow_where_compiled
def test_a_file_continues_in_a_fresh_process(tmp_path, fresh_process):
    batches = split(regression(12), [4] * 3)
    model = trained(lambda model: Adam(3, 0.01), batches[:2])
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


def wrapped_after(count, steps=3):
    optimizer, variables = Optimizer(sgd(), steps), variables_like(SHAPES)
    train_by_hand(optimizer, variables, micro_gradients(count, seed=5))
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
    saved, variables = (reference, expected) if saved_steps is None else wrapped_after(6)
    optimizer, others = wrapped_after(1, steps=2)
    optimizer.load_own_variables(stored(saved))
    assert (optimizer.micro_batches, optimizer.steps, int(optimizer.iterations)) == (0, 2, 2)
    for variable, value in zip(others, variables):
        variable.assign(value)
    train_by_hand(optimizer, others, gradients[6:])
    train_by_hand(reference, expected, means(gradients[6:], 2))
    assert relative_error(others, expected) <= bound


def test_a_checkpoint_of_other_steps_or_variables_in_the_middle_of_a_window_is_an_error():
    saved, other_variables = stored(wrapped_after(4)[0]), Optimizer(sgd(), 3)
    other_steps, _ = wrapped_after(0, steps=2)
    other_variables.build(variables_like([(4, 3), (3,), (3, 5)]))
    with pytest.raises(gradaccum.WindowError, match=r"1 of 3 micro-batches.*steps=3.*This one has steps=2"):
        other_steps.load_own_variables(saved)
    with pytest.raises(ValueError, match="other variables than this model's"):
        other_variables.load_own_variables(saved)


@keras.saving.register_keras_serializable("tests")
def growing(epoch, update):
    return 1 + epoch


def mine(steps):
    return lambda: Optimizer(keras.optimizers.Adam(0.5, beta_1=0.8), steps, name="mine")


CONFIGS = [
    *(mine(steps) for steps in (4, {0: 8, 4: 2}, growing)),
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


def test_a_configuration_that_is_none_is_named():
    for config in ({}, None, {"optimizer": {}}):
        with pytest.raises(ValueError, match="An Optimizer's config must have 'optimizer' and 'steps'"):
            Optimizer.from_config(config)


@on_jax
def test_a_schedule_from_the_callback_survives_a_file_in_the_middle_of_a_window(tmp_path):
    batches = split(regression(20), [4] * 5)
    model, schedule = trained(lambda model: Optimizer(sgd(), 4), []), GradientAccumulation({0: 2})
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches, schedule, ends(3, path=tmp_path / "model.keras"))
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.optimizer.micro_batches, loaded.optimizer.steps) == (1, 2)
    for batch in batches[3:]:
        fit(loaded, [batch], GradientAccumulation({0: 2}))
    assert_updates(loaded, windows_of(batches, 2), 1e-6)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's formats")
def test_tensorflow_saves_and_exports_a_model_in_the_middle_of_a_window(tmp_path):
    import tensorflow as tf

    batches = split(regression(24), [4] * 6)
    model = trained(lambda model: Optimizer(adam(), 2), batches[:3], jit_compile=False)
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


DATA = Path(__file__).parents[1] / "data"
GENERATOR = np.random.default_rng(0)
X, Y = (GENERATOR.normal(size=(16, size)).astype("float32") for size in (3, 2))
"""What the files of version 0.1 were trained on, in micro-batches of 4 rows.

Each is a Dense layer, 3 -> 2, that was trained with `jit_compile=False` and saved by `model.save` in the middle of a
window; the keywords that Keras 3.10 does not know were taken out of its config.
"""
FILES = {
    # name: (the plain optimizer, micro-batches in its open window, how many it was trained on, large batches)
    "adam": (adam, 1, 1, [slice(0, 12)]),
    "rows": (sgd, 2, 2, [slice(0, 12)]),
    "sizes": (sgd, 1, 3, [slice(0, 8), slice(8, 14)]),
}
"""`Optimizer(Adam(0.01), 3)`; `SGD({0: 3, 2: 4}, ...)` in a fit with the callback; `BatchOptimizer(..., 4, 8, 14)`."""


@slow_where_compiled
@pytest.mark.parametrize("name", ["adam", slow("rows"), slow("sizes")])
def test_a_file_of_version_0_1_continues_in_the_middle_of_its_window(name):
    make, micro_batches, trained, large_batches = FILES[name]
    model = keras.models.load_model(DATA / f"{name}.keras")
    assert model.optimizer.micro_batches == micro_batches
    expected = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    expected.set_weights([np.linspace(-1, 1, 6).reshape(3, 2), np.zeros(2)])
    expected.compile(optimizer=make(), loss="mse")
    keras_updates(expected, [(X[rows], Y[rows]) for rows in large_batches])
    for start in range(4 * trained, large_batches[-1].stop, 4):
        rows = slice(start, min(start + 4, large_batches[-1].stop))
        if name == "rows":
            model.fit(X[rows], Y[rows], batch_size=4, verbose=0, callbacks=[GradientAccumulation()])
        else:
            model.train_on_batch(X[rows], Y[rows])
    assert model.optimizer.micro_batches == 0
    assert int(model.optimizer.iterations) == len(large_batches)
    assert error(model, expected) <= 1e-6
