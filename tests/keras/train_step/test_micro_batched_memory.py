"""On PyTorch: `"auto"` climbs by exact updates, and running out of memory is a size that failed, no more."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum.keras.micro_batched import micro_batched
from tests.keras.problems import BACKEND
from tests.keras.train_step.test_micro_batched import (
    TAGS,
    TOKENS,
    WEIGHTS,
    assert_same,
    crossentropy,
    run,
    sgd,
)
from tests.reference import relative_error

if BACKEND != "torch":
    pytest.skip("TensorFlow and JAX compile the whole update", allow_module_level=True)

import torch  # not in the processes of the other backends

from gradaccum.on_torch.memory import MemoryMeter

ROWS = 64
random = np.random.default_rng(3)
X, Y = random.normal(size=(ROWS, 5)), random.normal(size=(ROWS, 3))


class Backward(torch.autograd.Function):
    """Identity that runs out of memory in the backward pass above a number of rows."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if len(grad) > ctx.limit:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return grad, None


class Probe(layers.Layer):
    """Sees the rows of each training pass, moves a statistic, and runs out of memory above a number of rows."""

    def __init__(self, forward=10**6, backward=10**6, before=lambda rows: None, **kwargs):
        super().__init__(**kwargs)
        self.limits, self.before, self.sizes = (forward, backward), before, []
        self.supports_masking = True

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="float32", name="seen")

    def call(self, x):
        if torch.is_grad_enabled():
            self.sizes.append(len(x))
            self.before(len(x))
        forward, backward = self.limits
        self.seen.assign_add(float(len(x)))
        if len(x) > forward and x.device.type != "meta":  # where Keras infers shapes
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return Backward.apply(x, backward)


def network(probe=None):
    hidden = [layers.Dense(7, activation="tanh"), probe or Probe(), layers.Dense(3)]
    return keras.Sequential([layers.Input((5,)), *hidden])


def mse():
    return {"loss": "mse", "metrics": ["mae"]}


class Clock:
    """A clock that a model's forward passes move, and the memory that they take."""

    def __init__(self, monkeypatch, fastest=8):
        self.now, self.highest, self.fastest = 0.0, 0, fastest
        monkeypatch.setattr("gradaccum.on_torch.oom_retry.time.perf_counter", lambda: self.now)
        monkeypatch.setattr(MemoryMeter, "mark", lambda gauge: self.highest)
        monkeypatch.setattr(MemoryMeter, "live", lambda gauge: 100)

    def __call__(self, rows):
        self.now += self.fastest + rows + 2.0 * max(rows - self.fastest, 0)
        self.highest = max(self.highest, 100 + 50 * rows)


def test_it_climbs_on_the_rows_of_exact_updates_and_settles_within_two(monkeypatch, caplog):
    clock = Clock(monkeypatch)
    probe = Probe(before=clock)
    probes = iter([Probe(), probe])
    with caplog.at_level(logging.INFO, logger="gradaccum"):
        assert_same(lambda: network(next(probes)), mse, X, Y, micro_batch_size="auto", batch_size=ROWS, epochs=4)
    assert probe.sizes[:5] == [1, 2, 4, 8, 16]
    assert sum(probe.sizes) == 4 * ROWS, "no row is run for the measurement alone"
    assert probe.sizes[-16:] == [8] * 16
    (told,) = [record.message for record in caplog.records if "auto" in record.message]
    assert "8 of 64 rows" in told


@pytest.mark.parametrize("size", [6, 13, "auto"])
@pytest.mark.parametrize("limits", [(4, 99), (99, 4), (1, 99), (99, 1), (6, 3)], ids=str)
def test_updates_logs_and_states_are_exact_when_micro_batches_do_not_fit(size, limits, caplog):
    probes = iter([Probe(), Probe(*limits)])
    make = lambda: network(next(probes))  # noqa: E731
    ours, plain = assert_same(make, mse, X, Y, micro_batch_size=size, batch_size=ROWS)
    assert ours.layers[1].seen.value == plain.layers[1].seen.value == 2 * ROWS
    told = [record.message for record in caplog.records if "Out of memory" in record.message]
    assert told
    assert len(told) <= 8, "a size that failed is not tried again"


@pytest.mark.parametrize("size", [8, "auto"])
def test_streamed_metrics_count_each_row_once_when_micro_batches_do_not_fit(size):
    def make():
        return keras.Sequential([layers.Input((5,)), next(probes), layers.Dense(40, activation="softmax")])

    probes = iter([Probe(), Probe(99, 3)])
    labels = random.integers(0, 40, ROWS)
    ours, _ = assert_same(make, crossentropy, X, labels, micro_batch_size=size, batch_size=ROWS)
    assert {plan.metrics for plan in ours.train_step.plans.values()} == {"streamed"}


@pytest.mark.parametrize("size", [8, "auto"])
@pytest.mark.parametrize("regularizer", [None, "l2"])
@pytest.mark.parametrize("limits", [(3, 99), (99, 3)], ids=str)
def test_masks_are_counted_right_when_micro_batches_do_not_fit(size, regularizer, limits):
    def make():
        inputs = layers.Input((6,), dtype="int32")
        embedded = next(probes)(layers.Embedding(7, 3, mask_zero=True)(inputs))
        return keras.Model(inputs, layers.Dense(3, activation="softmax", kernel_regularizer=regularizer)(embedded))

    probes = iter([Probe(), Probe(*limits)])
    weights = np.broadcast_to(WEIGHTS[:, None], TAGS.shape).copy()
    compiled = lambda: crossentropy(reduction="mean_with_sample_weight")  # noqa: E731
    assert_same(make, compiled, TOKENS, TAGS, micro_batch_size=size, batch_size=22, sample_weight=weights)


class RandomMask(layers.Layer):
    """Lets some of the time steps through."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed, self.drawn = keras.random.SeedGenerator(5), []

    def call(self, inputs):
        mask = keras.random.uniform(inputs.shape[:2], seed=self.seed) > 0.4
        if torch.is_grad_enabled():
            self.drawn.append(ops.convert_to_numpy(mask))
        outputs = inputs * 1.0
        outputs._keras_mask = mask
        return outputs


@pytest.mark.parametrize("limit", [99, 5])
@pytest.mark.parametrize("size", [8, "auto"])
def test_random_masks_are_counted_as_the_updates_micro_batches_draw_them(size, limit):
    x, y = random.normal(size=(22, 6, 2)), random.normal(size=(22, 6, 2))
    masking = RandomMask()
    inputs = layers.Input((6, 2))
    scaled = layers.Dense(2, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2", name="dense")
    model = keras.Model(inputs, masking(Probe(backward=limit)(scaled(inputs))))
    micro_batched(model, size, verify=False).compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    masking.drawn.clear()
    weight = np.ones((2, 2))
    for _ in range(3):
        model.train_on_batch(x, y)
        mask = np.zeros((0, 6))
        while len(mask) < len(x):  # the last ones, up to all rows: what had no memory was drawn again
            mask = np.concatenate([masking.drawn.pop(), mask])
        masking.drawn.clear()
        wrong = (x @ weight - y) * mask[..., None] / mask.sum()
        weight = weight - 0.1 * (np.einsum("rti,rto->io", x, wrong) + 2 * 0.01 * weight)
        assert relative_error([model.get_layer("dense").kernel], [weight]) <= 1e-6


def test_masks_that_no_second_pass_draws_again_are_refused_by_name_and_nothing_is_touched():
    class Unrepeatable(layers.Layer):
        calls = 0

        def call(self, inputs):
            self.calls += 1
            outputs = inputs * 1.0
            outputs._keras_mask = torch.ones(inputs.shape[:2]).cumsum(1) <= 1 + self.calls % 5
            return outputs

    inputs = layers.Input((6, 2))
    model = keras.Model(inputs, Unrepeatable()(layers.Dense(2, kernel_regularizer="l2")(inputs)))
    micro_batched(model, 8, verify=False).compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    before = model.get_weights()
    with pytest.raises(ValueError, match="divide by changes each time the batch runs: a mask is drawn"):
        model.train_on_batch(random.normal(size=(22, 6, 2)), random.normal(size=(22, 6, 2)))
    assert relative_error(model.get_weights(), before) == 0


def test_half_precision_sums_survive_running_out_of_memory_in_the_last_micro_batch():
    def fail_at_the_end(rows):
        if sum(probe.sizes) == 512:
            probe.limits = (99, 1)

    def make():
        keras.config.set_dtype_policy("bfloat16")
        first = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([layers.Input((1,)), first, probe, layers.Dense(1)])
        keras.config.set_dtype_policy("float32")
        return model

    def summed(y_true, y_pred):
        return -ops.sum(y_pred, axis=-1)

    # The last bias has its gradient before memory runs out; 512 of 1/512: a sum in bfloat16 stays at one half.
    probe = Probe(before=fail_at_the_end)
    compiled = lambda: {"loss": summed, "optimizer": keras.optimizers.SGD(1.0)}  # noqa: E731
    model, _ = run(make, compiled, np.ones((512, 1)), np.ones((512, 1)), 2, batch_size=512, epochs=1)
    assert probe.sizes == [2] * 256 + [1] * 512
    assert float(ops.convert_to_numpy(ops.cast(model.layers[-1].bias, "float32")).item()) == 1.0


@pytest.mark.parametrize("limits", [(0, 99), (99, 0)], ids=str)
def test_one_row_that_does_not_fit_is_an_error_and_nothing_is_touched(limits):
    model = micro_batched(network(Probe()), 8, verify=False)
    model.compile(optimizer=sgd(), **mse())
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    states = [[ops.convert_to_numpy(v).copy() for v in (*model.variables, *model.optimizer.variables)]]
    model.layers[1].limits = limits
    generator = torch.get_rng_state()
    with pytest.raises(torch.OutOfMemoryError, match="one row(.|\n)*simulated(.|\n)*No update was made"):
        model.train_on_batch(X, Y)
    states.append([ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)])
    assert relative_error(*states) == 0
    assert torch.equal(generator, torch.get_rng_state())
    model.layers[1].limits = (99, 99)
    model.fit(X, Y, batch_size=ROWS, verbose=0)


def test_dropout_draws_what_smaller_micro_batches_draw_where_rows_did_not_fit(caplog):
    def make():
        hidden = [layers.Dense(7, activation="tanh"), layers.Dropout(0.5), next(probes), layers.Dense(3)]
        return keras.Sequential([layers.Input((5,)), *hidden])

    probes = iter([Probe(), Probe(backward=4)])
    expected, _ = run(make, mse, X, Y, 4, batch_size=ROWS)
    ours, _ = run(make, mse, X, Y, 8, batch_size=ROWS)
    assert relative_error(ours.get_weights(), expected.get_weights()) <= 1e-6
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"][:1] == [
        "Out of memory with a micro-batch of 8 rows: starting the batch again in micro-batches of at most 4 rows."
    ]


def test_a_batch_norm_never_gets_a_single_row():
    probe = Probe()
    model = keras.Sequential([layers.Input((5,)), probe, layers.BatchNormalization(), layers.Dense(3)])
    model = micro_batched(model, "auto", batch_norm="micro", verify=False)
    model.compile(optimizer=sgd(), loss="mse")
    for rows in (13, 16, 2):
        model.train_on_batch(X[:rows], Y[:rows])
    assert min(probe.sizes) >= 2
