"""Two devices: wrapped optimizers and `micro_batched` make the large batch's updates there."""

from __future__ import annotations

import contextlib
import re

import keras
import numpy as np
import pytest
from keras import losses

from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.micro_batched import micro_batched
from gradaccum.keras.optimizers import Optimizer
from tests.keras.loops import assert_updates, error, updated
from tests.keras.marks import BACKEND, compiled_on, slow
from tests.keras.problems import adam, join, network, regression, sgd, split
from tests.keras.train_step.cases import TWO, classifier, run, tagger
from tests.keras.train_step.data import CLASSES, TAGS, TOKENS, X
from tests.reference import relative_error, windows_of

if BACKEND == "torch":
    pytest.skip("Keras has no distribution on PyTorch", allow_module_level=True)

ROWS = 20
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's")
LossScale = keras.optimizers.LossScaleOptimizer


def mirrored():
    import tensorflow as tf

    # Not TensorFlow's collectives, which number their reductions per process, and mix up those of several strategies.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


@contextlib.contextmanager
def two_devices():
    """Rows are spread over two devices, as each backend does it."""
    if BACKEND == "tensorflow":
        with mirrored().scope():
            yield
        return
    devices, previous = keras.distribution.list_devices(), keras.distribution.distribution()
    assert len(devices) == 2
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    try:
        yield
    finally:
        keras.distribution.set_distribution(previous)


@pytest.mark.parametrize("make", [sgd, slow(adam)])
def test_windows_on_two_devices_match_the_large_batch(make, fit_bound):
    x, y = regression(38)  # windows of 3 micro-batches, and of 2 that the callback closes
    expected = updated(windows_of(split((x, y), [8] * 4 + [6]), 3) * 2, make)
    with two_devices():
        model = network()
        model.compile(optimizer=Optimizer(make(), 3), loss="mse", jit_compile=BACKEND == "jax")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[GradientAccumulation()])
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 4
        assert error(model, expected) <= fit_bound


@tensorflow_only
def test_two_replicas_reduce_once_per_window():
    import tensorflow as tf

    strategy = mirrored()
    with strategy.scope():
        variables = [tf.Variable(np.ones((3, 2), "float32")), tf.Variable(np.ones(2, "float32"))]
        optimizer = Optimizer(keras.optimizers.SGD(0.1), 4)
        optimizer.build(variables)
    ran, extended = [], type(strategy.extended)
    original = extended._batch_reduce_to

    def counted(self, reduce_op, pairs, options):
        tf.py_function(lambda: ran.append(len(pairs)), [], [])
        return original(self, reduce_op, pairs, options)

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply_gradients(zip([v * 1.0 for v in variables], variables)))

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

    batches, strategy = split(regression(16), [8] * 2), mirrored()
    with strategy.scope():
        model = network()
        model.compile(optimizer=LossScale(Optimizer(sgd(), 2), initial_scale=16.0), loss="mse", jit_compile=False)
    wrapped = model.optimizer.inner_optimizer
    model.fit(*join(batches), batch_size=8, shuffle=False, verbose=0)
    assert_updates(model, [batches], fit_bound)

    def in_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        weights = model.trainable_variables
        ones = [tf.ones(w.shape, w.dtype) * (1.0 + tf.cast(replica, w.dtype)) for w in weights]
        model.optimizer.apply_gradients(zip(ones, weights))

    tf.function(lambda: strategy.run(in_replica))()
    assert wrapped.micro_batches == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    total = loaded.optimizer.inner_optimizer.window.sums[0]
    np.testing.assert_allclose(total.numpy(), 3.0 / 16)  # 1 from the first replica and 2 from the second, unscaled
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.inner_optimizer.flush()
    assert wrapped.flush()
    assert error(loaded, model) <= fit_bound


# Split the batch.


def crossentropy(reduction="sum_over_batch_size"):
    loss = losses.SparseCategoricalCrossentropy(reduction=reduction)
    return {"loss": loss, "metrics": ["accuracy"], "jit_compile": BACKEND == "jax"}


def tags(reduction):
    weights = np.linspace(0.5, 2, ROWS)[:, None] * np.ones((ROWS, 6))
    compiled = lambda: {**crossentropy(reduction), "optimizer": keras.optimizers.SGD(0.01)}  # noqa: E731
    return tagger, compiled, TOKENS[:ROWS], TAGS[:ROWS], 3, {"sample_weight": weights, "epochs": 1}


SOME = [{name: array[:ROWS] for name, array in some.items()} for some in TWO[2:]]
CASES = {
    # (model, compiled, x, y, rows of a micro-batch, fit); batches of 16 and 4 rows
    **{f"micro-batches of {size}": (classifier, crossentropy, X[:ROWS], CLASSES[:ROWS], size, {})
       for size in (1, 3, "auto")},
    **{f"masks, weights and {reduction}": tags(reduction)
       for reduction in ("sum_over_batch_size", "sum", "mean_with_sample_weight")},
    # Batches of the same number of rows: on TensorFlow plain fit's logs average each output's loss over batches.
    "several outputs": (TWO[0], lambda: {**TWO[1](), "jit_compile": BACKEND == "jax"}, *SOME, 3,
                        {"epochs": 1, "batch_size": ROWS // 2}),
}  # fmt: skip
OFTEN = ["micro-batches of auto", "masks, weights and mean_with_sample_weight", "several outputs"]


@compiled_on("jax")
@pytest.mark.parametrize("case", [case if case in OFTEN else slow(case) for case in CASES])
def test_micro_batches_on_two_devices_match_plain_fit_on_them(case, fit_bound):
    make, compiled, x, y, size, options = CASES[case]
    found = []
    for most in (None, size):
        with two_devices():
            model, history = run(make, compiled, x, y, most, **{"batch_size": 16, **options})
        found.append((model.get_weights(), history))
    (expected, logs), (weights, ours) = found
    assert relative_error(weights, expected) <= 10 * fit_bound
    assert ours.keys() == logs.keys()
    assert all(relative_error([ours[name]], [logs[name]]) <= 10 * fit_bound for name in logs)


@tensorflow_only
def test_fit_may_be_called_outside_of_the_strategys_scope():
    with two_devices():
        model = micro_batched(classifier(), 3)
        model.compile(optimizer="sgd", **crossentropy())
    model.fit(X[:ROWS], CLASSES[:ROWS], batch_size=16, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2


def device_flops():
    """What one device computes for 16 rows, all its micro-batches of 4 rows together."""
    import jax
    from keras.src.backend.jax.trainer import _distribute_data

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(3)])
    model = micro_batched(model, 4, verify=False)
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
    data = np.zeros((16, 64), "float32"), np.zeros(16, "int32")
    model.train_on_batch(*data)
    state = model._get_jax_state(
        trainable_variables=True, non_trainable_variables=True, optimizer_variables=True, metrics_variables=True
    )
    compiled = jax.jit(model.train_step).lower(state, _distribute_data(data)).compile()
    (loops,) = re.findall(r"known_trip_count\D*(\d+)", compiled.as_text())
    return compiled.cost_analysis()["flops"] * int(loops)  # the analysis counts a loop's body once


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's")
def test_each_of_two_devices_computes_half_of_the_rows():
    alone = device_flops()
    with two_devices():
        assert device_flops() <= 0.6 * alone
