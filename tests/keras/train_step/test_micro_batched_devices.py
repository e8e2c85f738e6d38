"""`micro_batched` on several devices makes plain `fit`'s updates there; under torch.compile it is refused."""

from __future__ import annotations

import contextlib
import re

import keras
import numpy as np
import pytest
from keras import losses

from gradaccum.keras.micro_batched import micro_batched
from tests.keras.problems import BACKEND, compiled_on, slow
from tests.keras.train_step.test_micro_batched import (
    TAGS,
    TOKENS,
    TWO_INPUTS,
    TWO_TARGETS,
    X,
    classifier,
    run,
    tagger,
    two_losses,
    two_outputs,
)
from tests.reference import relative_error

ROWS = 20
CLASSES = np.arange(ROWS) % 3


@contextlib.contextmanager
def two_devices():
    """Rows are spread over two devices, as each backend does it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        # Not TensorFlow's collectives, which number their reductions per process, and mix up those of several models.
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
        with strategy.scope():
            yield
        return
    previous = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    try:
        yield
    finally:
        keras.distribution.set_distribution(previous)


def both(make, compiled, x, y, micro_batch_size=3, **fit):
    """Weights and logs of plain `fit` and of ours, both on two devices."""
    found = []
    for size in (None, micro_batch_size):
        with two_devices():
            model, history = run(make, compiled, x, y, size, **{"batch_size": 16, **fit})
        found.append((model.get_weights(), history))
    (expected, logs), (weights, ours) = found
    error = relative_error(weights, expected)
    assert ours.keys() == logs.keys()
    return max([error, *(relative_error([ours[name]], [logs[name]]) for name in logs)])


def crossentropy(**kwargs):
    return {
        "loss": losses.SparseCategoricalCrossentropy(**kwargs),
        "metrics": ["accuracy"],
        "jit_compile": BACKEND == "jax",
    }


several_devices = pytest.mark.skipif(BACKEND == "torch", reason="Keras has no distribution on PyTorch")


@compiled_on("jax")
@several_devices
@pytest.mark.parametrize("size", [slow(1), slow(3), "auto"])
def test_two_devices_match_plain_fit_on_them(fit_bound, size):
    assert both(classifier, crossentropy, X[:ROWS], CLASSES, size) <= 10 * fit_bound  # batches of 16 and 4 rows


@compiled_on("jax")
@several_devices
@pytest.mark.parametrize("reduction", [slow("sum_over_batch_size"), slow("sum"), "mean_with_sample_weight"])
def test_masks_and_weights_on_two_devices_match_plain_fit(fit_bound, reduction):
    weights = np.linspace(0.5, 2, ROWS)[:, None] * np.ones((ROWS, 6))
    compiled = lambda: {**crossentropy(reduction=reduction), "optimizer": keras.optimizers.SGD(0.01)}  # noqa: E731
    error = both(tagger, compiled, TOKENS[:ROWS], TAGS[:ROWS], sample_weight=weights, epochs=1)
    assert error <= 10 * fit_bound


@compiled_on("jax")
@several_devices
def test_several_outputs_on_two_devices_match_plain_fit(fit_bound):
    x, y = ({name: array[:ROWS] for name, array in some.items()} for some in (TWO_INPUTS, TWO_TARGETS))
    compiled = lambda: {**two_losses(), "jit_compile": BACKEND == "jax"}  # noqa: E731
    # Batches of the same number of rows: on TensorFlow plain fit's logs average each output's loss over batches.
    assert both(two_outputs, compiled, x, y, epochs=1, batch_size=ROWS // 2) <= 10 * fit_bound


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's")
def test_fit_may_be_called_outside_of_the_strategys_scope():
    with two_devices():
        model = micro_batched(classifier(), 3)
        model.compile(optimizer="sgd", **crossentropy())
    model.fit(X[:ROWS], CLASSES, batch_size=16, verbose=0)
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


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's")
def test_torch_compile_is_refused_before_anything_is_trained():
    model = micro_batched(classifier(), 3)
    model.compile(optimizer="sgd", **{**crossentropy(), "jit_compile": True})
    before = model.get_weights()
    for train in (lambda: model.fit(X[:ROWS], CLASSES, verbose=0), lambda: model.train_on_batch(X[:ROWS], CLASSES)):
        with pytest.raises(ValueError, match="torch.compile.*Received: jit_compile=True"):
            train()
    assert relative_error(model.get_weights(), before) == 0
    model.compile(optimizer="sgd", **crossentropy())
    model.fit(X[:ROWS], CLASSES, verbose=0)
