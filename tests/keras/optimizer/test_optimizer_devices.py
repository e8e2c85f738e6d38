"""Mixed precision, compilation, and several devices."""

import keras
import numpy as np
import pytest

from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import BatchOptimizer, Optimizer
from tests.keras.problems import (
    BACKEND,
    SHAPES,
    adam,
    compiled_on,
    error,
    fit,
    join,
    means,
    micro_gradients,
    network,
    plain,
    regression,
    sgd,
    slow,
    split,
    train_by_hand,
    variables_like,
)
from tests.reference import relative_error

LossScale = keras.optimizers.LossScaleOptimizer
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's")


def drive(optimizer, variables, gradients):
    """Scaled gradients, as a training step of `mixed_float16` makes them."""
    if not optimizer.built:
        optimizer.build(variables)
    for some in gradients:
        scale = float(keras.ops.convert_to_numpy(optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))))
        train_by_hand(optimizer, variables, [[gradient * scale for gradient in some]])


def scale_of(optimizer):
    while not hasattr(optimizer, "dynamic_scale"):
        optimizer = optimizer.inner_optimizer
    return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale.value))


def overflowing():
    gradients = micro_gradients(6)
    gradients[1] = [np.full(shape, np.inf) for shape in SHAPES]
    return gradients


@pytest.mark.parametrize("make", [sgd, slow(adam)])
@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_scale_halves_once_and_skips_the_window_inside_or_drops_the_micro_batch_outside(inside, make):
    gradients, variables, expected = overflowing(), variables_like(SHAPES), variables_like(SHAPES)
    scaled = lambda optimizer: LossScale(optimizer, initial_scale=1024.0)  # noqa: E731
    optimizer = Optimizer(scaled(make()), 2) if inside else scaled(Optimizer(make(), 2))
    wrapped = optimizer if inside else optimizer.inner_optimizer
    drive(optimizer, variables, gradients[:2])
    assert not wrapped.updated
    assert relative_error(variables, expected) == 0.0
    drive(optimizer, variables, gradients[2:])
    assert scale_of(optimizer) == 512.0
    finite = gradients[2:] if inside else [gradients[0], *gradients[2:5]]
    drive(make(), expected, means(finite, 2))
    assert (int(wrapped.iterations), wrapped.micro_batches) == (2, 0 if inside else 1)
    assert relative_error(variables, expected) <= 1e-6


@compiled_on("jax")
@pytest.mark.parametrize("inside", [True, slow(False)])
def test_mixed_float16_matches_the_large_batch(inside):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(32)
    model, expected = network(), network()
    inner = LossScale(sgd(), initial_scale=256.0) if inside else sgd()
    model.compile(optimizer=Optimizer(inner, 4), loss="mse")
    assert isinstance(model.optimizer, LossScale), "compile() sees that the loss is scaled"
    assert isinstance(model.optimizer, Optimizer) == inside
    expected.compile(optimizer=LossScale(sgd(), initial_scale=256.0), loss="mse")
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    expected.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 4
    assert error(model, expected) <= 5e-3  # activations, and so gradients, have 11 bits
    assert {w.dtype for w in model.get_weights()} == {np.dtype("float32")}


@compiled_on("jax")
def test_an_overflow_leaves_the_next_windows_aligned():
    keras.config.set_dtype_policy("mixed_float16")
    x, y = regression(18)
    model = network()
    model.compile(optimizer=BatchOptimizer(sgd(), 4, 8, 18, model), loss="mse")
    bad = x.copy()
    bad[1] = np.inf
    model.fit(bad, y, batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 3, "4 rows, of which the first 4 are dropped; then 4 + 4, and 2"
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 6


@compiled_on("jax")
def test_mixed_bfloat16_matches_the_large_batch():
    keras.config.set_dtype_policy("mixed_bfloat16")
    batches, model = split(regression(32), [4] * 8), network()
    model.compile(optimizer=Optimizer(sgd(), 4), loss="mse")
    fit(model, batches)
    assert error(model, plain(network(), sgd(), batches, 4, 1)) <= 4e-2  # 8 bits


DEFAULT = BACKEND == "jax"  # other tests compile so


@compiled_on("jax")
@pytest.mark.skipif(BACKEND == "torch", reason="torch.compile takes a compiler, and minutes")
@pytest.mark.parametrize("jit_compile", [not DEFAULT, slow(DEFAULT)])
def test_jit_compile_on_and_off(jit_compile, fit_bound):
    batches, model = split(regression(22), [4, 4, 4, 4, 4, 2]), network()
    model.compile(optimizer=Optimizer(adam(), 3), loss="mse", jit_compile=jit_compile)
    fit(model, batches, epochs=2)
    assert error(model, plain(network(), adam(), batches, 3, 2)) <= fit_bound


@tensorflow_only
@pytest.mark.parametrize("make", [sgd, slow(adam)])
def test_two_replicas_match_the_large_batch(make, fit_bound):
    import tensorflow as tf

    x, y = regression(38)  # windows of 3 micro-batches, and of 2 that the callback closes
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = network()
        optimizer = Optimizer(make(), 3)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
    assert optimizer.iterations.numpy() == 4
    expected = plain(network(), make(), split((x, y), [8] * 4 + [6]), 3, 2)
    assert error(model, expected) <= fit_bound


@tensorflow_only
def test_two_replicas_reduce_once_per_window():
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = [tf.Variable(np.ones((3, 2), "float32")), tf.Variable(np.ones(2, "float32"))]
        optimizer = Optimizer(keras.optimizers.SGD(0.1), 4)
        optimizer.build(variables)
    reductions = []
    extended = type(strategy.extended)
    original = extended._batch_reduce_to

    def counted(self, reduce_op, pairs, options):
        reductions.append(tf.constant(1))
        tf.py_function(lambda: ran.append(len(pairs)), [], [])
        return original(self, reduce_op, pairs, options)

    ran: list = []

    @tf.function
    def step():
        def in_replica():
            gradients = [v * 1.0 for v in variables]
            optimizer.apply_gradients(zip(gradients, variables))

        strategy.run(in_replica)

    extended._batch_reduce_to = counted
    try:
        for _ in range(8):
            step()
    finally:
        extended._batch_reduce_to = original
    assert optimizer.iterations.numpy() == 2
    assert len(ran) == 2, "one reduction of all gradients for each window of four"


@tensorflow_only
def test_replicas_under_a_loss_scale_and_saved_in_the_middle_of_a_window(tmp_path, fit_bound):
    import tensorflow as tf

    batches = split(regression(16), [8] * 2)
    # Not TensorFlow's collectives, which number their reductions per process, and mix up those of several strategies.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = network()
        model.compile(optimizer=LossScale(Optimizer(sgd(), 2), initial_scale=16.0), loss="mse", jit_compile=False)

    wrapped = model.optimizer.inner_optimizer
    model.fit(*join(batches), batch_size=8, shuffle=False, verbose=0)
    assert wrapped.iterations.numpy() == 1
    assert error(model, plain(network(), sgd(), batches, 2, 1)) <= fit_bound

    @tf.function
    def half_a_window():
        def in_replica():
            weights = model.trainable_variables
            model.optimizer.apply_gradients(
                [(tf.ones(w.shape, w.dtype) * (1.0 + tf.cast(replica(), w.dtype)), w) for w in weights]
            )

        def replica():
            return tf.distribute.get_replica_context().replica_id_in_sync_group

        strategy.run(in_replica)

    half_a_window()
    assert wrapped.micro_batches == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    total = loaded.optimizer.inner_optimizer.window.sums[0]
    np.testing.assert_allclose(total.numpy(), 3.0 / 16)  # 1 from the first replica and 2 from the second, unscaled
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    half_of = loaded.optimizer.inner_optimizer
    assert half_of.flush()
    assert wrapped.flush()
    assert error(loaded, model) <= fit_bound


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's")
@pytest.mark.parametrize("make", [sgd, slow(adam)])
def test_data_parallel_over_two_devices_matches_the_large_batch(make):
    import jax

    assert len(jax.devices()) == 2
    x, y = regression(44)
    expected = plain(network(), make(), split((x, y), [8] * 5 + [4]), 4, 2)
    previous = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    try:
        model = network()
        model.compile(optimizer=Optimizer(make(), 4), loss="mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
        assert int(model.optimizer.iterations) == 4
        assert error(model, expected) <= 1e-6
    finally:
        keras.distribution.set_distribution(previous)
