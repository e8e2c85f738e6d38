"""On PyTorch: `"auto"` climbs by exact updates, and running out of memory is a size that failed, no more."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum.keras.micro_batched import micro_batched
from tests.keras.loops import logged
from tests.keras.marks import BACKEND
from tests.keras.problems import sgd
from tests.keras.train_step.cases import assert_same, crossentropy, mse, run
from tests.keras.train_step.data import TAGS, TOKENS, WEIGHTS
from tests.reference import relative_error

if BACKEND != "torch":
    pytest.skip("TensorFlow and JAX compile the whole update", allow_module_level=True)

import torch  # not in the processes of the other backends

from tests.torch.train_step.problems import OUT, Faulty

ROWS = 64
random = np.random.default_rng(3)
X, Y = random.normal(size=(ROWS, 5)), random.normal(size=(ROWS, 3))


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
            raise torch.OutOfMemoryError(OUT)
        fault = Faulty()
        fault.most["backward"] = backward
        return fault(x)


def network(probe, *more):
    return keras.Sequential([layers.Input((5,)), layers.Dense(7, activation="tanh"), *more, probe, layers.Dense(3)])


def softmax(probe):
    return keras.Sequential([layers.Input((5,)), layers.Dense(5), probe, layers.Dense(40, activation="softmax")])


def tagging(probe, regularizer=None):
    inputs = layers.Input((6,), dtype="int32")
    embedded = probe(layers.Embedding(7, 3, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax", kernel_regularizer=regularizer)(embedded))


def averaged():
    return crossentropy(reduction="mean_with_sample_weight")


def with_mae():
    return {**mse(), "metrics": ["mae"]}


def weighted():
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy()]
    return {**crossentropy(), "metrics": metrics, "weighted_metrics": ["accuracy"]}


WEIGHED = {"sample_weight": np.broadcast_to(WEIGHTS[:, None], TAGS.shape).copy()}
LABELS = random.integers(0, 40, ROWS)
TOO_LARGE = {
    **{limits: (network, with_mae, X, Y, {}) for limits in [(4, 99), (99, 4), (1, 99), (99, 1), (6, 3)]},
    "metrics that are streamed": (softmax, weighted, X, LABELS, {"sample_weight": np.linspace(0.5, 2, ROWS)}),
    "masks": (tagging, averaged, TOKENS, TAGS, WEIGHED),
    "masks beside a regulariser": (lambda probe: tagging(probe, "l2"), averaged, TOKENS, TAGS, WEIGHED),
}


@pytest.mark.parametrize("size", [6, 13, "auto"])
@pytest.mark.parametrize(
    ("case", "limits"),
    [(case, one) for case in TOO_LARGE for one in ([case] if isinstance(case, tuple) else [(3, 99), (99, 3)])],
)
def test_updates_logs_and_states_are_exact_when_micro_batches_do_not_fit(size, case, limits, caplog):
    make, compiled, x, y, fit = TOO_LARGE[case]
    probes = [Probe(*limits), Probe()]
    wrapped = lambda: make(probes.pop())  # noqa: E731
    ours, plain = assert_same(wrapped, compiled, x, y, micro_batch_size=size, batch_size=len(x), **fit)
    seen = [[layer.seen.value for layer in model.layers if isinstance(layer, Probe)] for model in (ours, plain)]
    assert seen == [[2 * len(x)]] * 2, "each row counts once"
    if case == "metrics that are streamed":
        assert {plan.metrics for plan in ours.train_step.plans.values()} == {"streamed"}
    told = [line for line in logged(caplog) if "Out of memory with a micro-batch of " in line]
    assert 0 < len(told) <= 8, "a size that failed is not tried again"


class DrawnMask(layers.Layer):
    """Lets some of the time steps through: drawn by Keras, or others with each call."""

    def __init__(self, repeatable, **kwargs):
        super().__init__(**kwargs)
        self.seed, self.repeatable, self.drawn, self.calls = keras.random.SeedGenerator(5), repeatable, [], 0

    def call(self, inputs):
        self.calls += 1
        mask = keras.random.uniform(inputs.shape[:2], seed=self.seed) > 0.4
        mask = mask if self.repeatable else torch.ones(inputs.shape[:2]).cumsum(1) <= 1 + self.calls % 5
        if torch.is_grad_enabled():
            self.drawn.append(ops.convert_to_numpy(mask))
        outputs = inputs * 1.0
        outputs._keras_mask = mask
        return outputs


SERIES = random.normal(size=(22, 6, 2)), random.normal(size=(22, 6, 2))


def masking(size, mask, probe):
    inputs = layers.Input((6, 2))
    scaled = layers.Dense(2, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2", name="dense")
    model = keras.Model(inputs, mask(probe(scaled(inputs))))
    micro_batched(model, size, verify=False).compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return model


@pytest.mark.parametrize("limit", [99, 5])
@pytest.mark.parametrize("size", [8, "auto"])
def test_random_masks_are_counted_as_the_updates_micro_batches_draw_them(size, limit):
    drawn, weight, (x, y) = DrawnMask(repeatable=True), np.ones((2, 2)), SERIES
    model = masking(size, drawn, Probe(backward=limit))
    for _ in range(3):
        drawn.drawn.clear()
        model.train_on_batch(x, y)
        mask = np.zeros((0, 6))
        while len(mask) < len(x):  # the last ones, up to all rows: what had no memory was drawn again
            mask = np.concatenate([drawn.drawn.pop(), mask])
        wrong = (x @ weight - y) * mask[..., None] / mask.sum()
        weight = weight - 0.1 * (np.einsum("rti,rto->io", x, wrong) + 2 * 0.01 * weight)
        assert relative_error([model.get_layer("dense").kernel], [weight]) <= 1e-6


def test_masks_that_no_second_pass_draws_again_are_refused_by_name_and_nothing_is_touched():
    model = masking(8, DrawnMask(repeatable=False), Probe())
    before = [ops.convert_to_numpy(v) for v in model.variables]
    with pytest.raises(ValueError, match="divide by changes each time the batch runs: a mask is drawn"):
        model.train_on_batch(*SERIES)
    assert relative_error([ops.convert_to_numpy(v) for v in model.variables], before) == 0


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
    probe, ones = Probe(before=fail_at_the_end), np.ones((512, 1))
    compiled = lambda: {"loss": summed, "optimizer": keras.optimizers.SGD(1.0)}  # noqa: E731
    model, _ = run(make, compiled, ones, ones, 2, batch_size=512, epochs=1)
    assert probe.sizes == [2] * 256 + [1] * 512
    assert float(ops.convert_to_numpy(ops.cast(model.layers[-1].bias, "float32")).item()) == 1.0


@pytest.mark.parametrize("limits", [(0, 99), (99, 0)], ids=str)
def test_one_row_that_does_not_fit_is_an_error_and_nothing_is_touched(limits):
    def state():
        return [ops.convert_to_numpy(v).copy() for v in (*model.variables, *model.optimizer.variables)]

    model = micro_batched(network(Probe()), 8, verify=False)
    model.compile(optimizer=sgd(), **with_mae())
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    before, generator = state(), torch.get_rng_state()
    model.layers[1].limits = limits
    with pytest.raises(torch.OutOfMemoryError, match="one row(.|\n)*(simulated|no memory)(.|\n)*No update was made"):
        model.train_on_batch(X, Y)
    assert relative_error(state(), before) == 0
    assert torch.equal(generator, torch.get_rng_state())
    model.layers[1].limits = (99, 99)
    model.fit(X, Y, batch_size=ROWS, verbose=0)


def test_a_batch_norm_never_gets_a_single_row():
    probe = Probe()
    model = keras.Sequential([layers.Input((5,)), probe, layers.BatchNormalization(), layers.Dense(3)])
    micro_batched(model, "auto", batch_norm="micro", verify=False).compile(optimizer=sgd(), loss="mse")
    for rows in (13, 16, 2):
        model.train_on_batch(X[:rows], Y[:rows])
    assert min(probe.sizes) >= 2
