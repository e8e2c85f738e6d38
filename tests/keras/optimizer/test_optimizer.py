"""The wrapped optimizer makes the updates of the large batch: every optimizer, setting and loop."""

import logging

import keras
import numpy as np
import pytest

import gradaccum.keras
from gradaccum.keras.optimizers import BatchOptimizer, Optimizer
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
    slow,
    split,
    train_by_hand,
    variables_like,
)
from tests.reference import relative_error

WRAPPERS = {"LossScaleOptimizer", "MultiOptimizer"}
BUILT_IN = sorted(
    name
    for name, member in vars(keras.optimizers).items()
    if isinstance(member, type) and issubclass(member, keras.optimizers.Optimizer) and name != "Optimizer"
)
INNER = {name: getattr(keras.optimizers, name) for name in BUILT_IN if name not in WRAPPERS} | {
    "a custom one": HeavyBall
}


def both(make, steps=4, windows=3, by=""):
    """The variables after windows of micro-batches, and after plain updates with their means."""
    gradients = micro_gradients(steps * windows)
    accumulated, expected = variables_like(SHAPES), variables_like(SHAPES)
    optimizer, reference = Optimizer(make(), steps), make()
    train_by_hand(optimizer, accumulated, gradients, by)
    train_by_hand(reference, expected, means(gradients, steps), by)
    optimizer.finalize_variable_values(accumulated)
    reference.finalize_variable_values(expected)
    assert int(optimizer.iterations) == windows
    return relative_error(accumulated, expected)


@pytest.mark.parametrize(
    "name",
    ["Adam", slow("SGD"), slow("a custom one")]
    + [pytest.param(n, marks=pytest.mark.slow) for n in INNER if n not in ("Adam", "SGD", "a custom one")],
)
def test_every_optimizer_matches_the_large_batch_with_ema_schedule_and_clipping(name, bound):
    if name == "Muon":
        keras.backend.set_floatx("float32")  # a plain Muon with a schedule refuses float64
        bound = 1e-6

    def make():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        return INNER[name](learning_rate=schedule, use_ema=True, ema_momentum=0.5, global_clipnorm=0.3)

    assert both(make) <= bound


SETTINGS = {
    "weight decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.3},
    "clipvalue": {"clipvalue": 0.1},
    "EMA with overwrite": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "a fixed loss scale": {"loss_scale_factor": 8.0},
    "a callable learning rate": {"learning_rate": lambda: 0.05},
}


@compiled_on("jax")
@pytest.mark.parametrize("inner", [keras.optimizers.SGD, pytest.param(keras.optimizers.Adam, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_act_once_per_update(setting, inner, bound):
    assert both(lambda: inner(**{"learning_rate": 0.1} | SETTINGS[setting])) <= bound


def test_a_torch_loop_that_calls_backward_matches_the_large_batch(fit_bound):
    if BACKEND != "torch":
        pytest.skip("a loop of PyTorch's")
    x, y = regression(24)
    model = network()
    optimizer = Optimizer(sgd(), steps=3)
    optimizer.build(model.trainable_variables)
    for start in range(0, 24, 4):
        model.zero_grad()
        keras.ops.mean(keras.losses.mean_squared_error(y[start : start + 4], model(x[start : start + 4]))).backward()
        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
    assert error(model, plain(network(), sgd(), split((x, y), [4] * 6), 3, 1)) <= fit_bound


@compiled_on("jax")
def test_constraints_apply_once_per_update(fit_bound):
    x, y = regression(32)
    hidden = {"kernel_constraint": keras.constraints.MinMaxNorm(0.9, 1.0, rate=0.5)}
    model = network(**hidden)
    model.compile(optimizer=Optimizer(sgd(), steps=4), loss="mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert error(model, plain(network(**hidden), sgd(), split((x, y), [4] * 8), 4, 1)) <= fit_bound


@compiled_on("jax")
def test_callbacks_read_and_set_the_learning_rate(fit_bound):
    x, y = regression(32)
    model, expected = network(), network()
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.compile(optimizer=Optimizer(sgd(), steps=4), loss="mse")
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[halve])
    expected.compile(optimizer=sgd(), loss="mse")
    expected.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[halve])
    np.testing.assert_allclose(history.history["learning_rate"], expected.history.history["learning_rate"])
    assert error(model, expected) <= fit_bound
    assert keras.ops.convert_to_numpy(model.optimizer.inner_optimizer.learning_rate) == pytest.approx(0.0125)


@compiled_on("jax")
@pytest.mark.parametrize("scaled", [False, True])
def test_swap_ema_weights_finds_the_average(scaled, fit_bound):
    def make():
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0) if scaled else optimizer

    x, y = regression(32)
    model, expected = network(), network()
    for one, optimizer, batch_size in ((model, Optimizer(make(), steps=4), 4), (expected, make(), 16)):
        one.compile(optimizer=optimizer, loss="mse")
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        one.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, callbacks=[swap])
    assert error(model, expected) <= fit_bound


@compiled_on("jax")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # a plain optimizer says so too
@pytest.mark.parametrize(("absent_last", "make"), [(True, sgd), *map(slow, (True, False, False), (adam, sgd, adam))])
def test_a_gradient_that_is_none_in_some_micro_batches_keeps_the_sum(absent_last, make, bound):
    first, second = micro_gradients(2)
    hollow = [second[0], None, None]
    some = [first, hollow] if absent_last else [hollow, first]
    zeros = [np.zeros(shape) if g is None else g for g, shape in zip(hollow, SHAPES)]
    accumulated, expected = variables_like(SHAPES), variables_like(SHAPES)
    train_by_hand(Optimizer(make(), 2), accumulated, some * 2)
    train_by_hand(make(), expected, means([first, zeros], 2) * 2)
    assert relative_error(accumulated, expected) <= bound


@compiled_on("jax")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_variable_without_gradient_in_the_whole_window_is_left_alone(bound):
    some = [[g[0], g[1], None] for g in micro_gradients(4)]
    accumulated, expected = variables_like(SHAPES), variables_like(SHAPES)
    make = lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5)  # noqa: E731
    train_by_hand(Optimizer(make(), 2), accumulated, some)
    mean = [[(a[0] + b[0]) / 2, (a[1] + b[1]) / 2, None] for a, b in (some[:2], some[2:])]
    train_by_hand(make(), expected, mean)
    assert relative_error(accumulated, expected) <= bound
    np.testing.assert_array_equal(accumulated[2].numpy(), variables_like(SHAPES)[2].numpy())


@compiled_on("jax")
@pytest.mark.parametrize("dtype", [slow("float16"), "bfloat16"])
def test_half_precision_gradients_are_summed_in_float32(dtype):
    optimizer, variables = Optimizer(keras.optimizers.SGD(1.0), 512), [keras.Variable([0.0], dtype=dtype)]
    train_by_hand(optimizer, variables, [[keras.ops.ones((1,), dtype)]] * 512, by="eager" if BACKEND != "jax" else "")
    assert float(keras.ops.convert_to_numpy(keras.ops.cast(variables[0], "float32"))[0]) == -1.0


@compiled_on("jax")
def test_an_optimizer_that_has_trained_goes_on_with_its_state(bound):
    gradients = micro_gradients(6)
    accumulated, expected = variables_like(SHAPES), variables_like(SHAPES)
    trained, reference = sgd(), sgd()
    train_by_hand(trained, accumulated, gradients[:2])
    train_by_hand(Optimizer(trained, 2), accumulated, gradients[2:])
    train_by_hand(reference, expected, gradients[:2] + means(gradients[2:], 2))
    assert relative_error(accumulated, expected) <= bound


@compiled_on("jax")
@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="not in this version of Keras")
def test_two_optimizers_for_two_parts_of_a_model(bound):
    def make():
        mapping = keras.optimizers.OptimizerMap(sgd())
        mapping[".*w1"] = adam()
        return keras.optimizers.MultiOptimizer(mapping)

    assert both(make) <= bound


class CountsUpdates(keras.optimizers.SGD):
    """Counts in the device's own memory how often it runs."""

    def build(self, variables):
        super().build(variables)
        self.runs = self.add_variable((), dtype="int32", name="runs")

    def update_step(self, gradient, variable, learning_rate):
        self.runs.assign_add(1)
        super().update_step(gradient, variable, learning_rate)

    _parallel_update_step = None

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables):
            self.update_step(gradient, variable, learning_rate)


def test_the_inner_optimizer_runs_only_when_a_window_closes():
    inner, variables = CountsUpdates(0.1), variables_like([(2,)])
    train_by_hand(Optimizer(inner, 4), variables, [[np.ones(2)]] * 11)
    assert int(keras.ops.convert_to_numpy(inner.runs)) == 2
    if BACKEND == "jax":
        import jax

        optimizer = Optimizer(keras.optimizers.Adam(), 4)
        optimizer.build(variables)
        values = [v.value for v in variables]
        program = jax.make_jaxpr(optimizer.stateless_apply)([v.value for v in optimizer.variables], values, values)
        outside = [str(equation.primitive) for equation in program.jaxpr.eqns]
        assert outside.count("cond") == 1
        assert "sqrt" not in outside, "Adam runs outside of the branch that closes a window"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_optimizer_is_there_by_name(name):
    wrapped = getattr(gradaccum.keras.optimizers, name)
    inner = getattr(keras.optimizers, name)
    makes = {
        "LossScaleOptimizer": lambda: [sgd()],
        "MultiOptimizer": lambda: [keras.optimizers.OptimizerMap(sgd())],
    }
    first = makes.get(name, list)()
    for optimizer in (wrapped(4, *first), wrapped(*first, steps=4)):
        assert isinstance(optimizer, keras.optimizers.Optimizer)
        assert isinstance(optimizer, Optimizer)
        assert isinstance(optimizer.inner_optimizer, inner)
        assert optimizer.steps == 4


def test_a_named_optimizer_takes_the_inner_ones_arguments_and_name():
    assert gradaccum.keras.optimizers.Adam(4).name == "adam"
    assert gradaccum.keras.optimizers.Adam(4, name="mine").name == "mine"
    optimizer = gradaccum.keras.optimizers.Adam(4, 0.5, beta_1=0.8)
    assert (float(optimizer.inner_optimizer.learning_rate), optimizer.beta_1) == (0.5, 0.8)
    with pytest.raises(TypeError, match=r"Adam\(steps=4\)"):
        gradaccum.keras.optimizers.Adam(learning_rate=0.5)


def test_the_start_up_line(caplog):
    with caplog.at_level(logging.INFO, "gradaccum"):
        Optimizer(adam(), steps=4)
        Optimizer(sgd(), {0: 8, 4: 2})
    assert [record.getMessage() for record in caplog.records] == [
        "Wrapping 'Adam' Keras optimizer with GA of 4 steps",
        "Wrapping 'SGD' Keras optimizer with GA of {0: 8, 4: 2} steps",
    ]


def test_steps_updated_and_flush_between_calls(bound):
    gradients = micro_gradients(7)
    accumulated, expected = variables_like(SHAPES), variables_like(SHAPES)
    optimizer = Optimizer(sgd(), steps=2)
    seen = []
    optimizer.build(accumulated)
    for index, some in enumerate(gradients):
        if index == 1:
            optimizer.steps = 5
            optimizer.steps = 2  # set back
        if index == 3:
            optimizer.steps = 3  # inside a window: from the next one on
            assert optimizer.steps == 2
        train_by_hand(optimizer, accumulated, [some])
        seen.append(optimizer.updated)
    assert seen == [False, True, False, True, False, False, True]
    assert not optimizer.flush()
    train_by_hand(optimizer, accumulated, gradients[:1])
    assert (optimizer.micro_batches, optimizer.steps, optimizer.updated) == (1, 3, False)
    assert optimizer.flush()
    assert optimizer.updated
    windows = [gradients[:2], gradients[2:4], gradients[4:7], gradients[:1]]
    train_by_hand(sgd(), expected, [mean for window in windows for mean in means(window, len(window))])
    assert relative_error(accumulated, expected) <= bound


@compiled_on("tensorflow")
def test_sparse_gradients_of_an_embedding_match_the_dense_gradient(fit_bound):
    ids, y = np.random.default_rng(0).integers(0, 6, (24, 4)), np.random.default_rng(1).normal(size=(24, 2))

    def make(first, optimizer):
        model = keras.Sequential([*first, keras.layers.Flatten(), keras.layers.Dense(2)])
        model.compile(optimizer=optimizer, loss="mse")
        return model

    model = make([keras.Input((4,), dtype="int32"), keras.layers.Embedding(6, 3)], Optimizer(sgd(), steps=3))
    # The same layer with a dense gradient: on TensorFlow, plain Keras applies the rows of a sparse one one by one.
    expected = make([keras.Input((4, 6)), keras.layers.Dense(3, use_bias=False)], sgd())
    expected.set_weights(model.get_weights())
    model.fit(ids, y, batch_size=4, shuffle=False, verbose=0)
    expected.fit(np.eye(6)[ids], y, batch_size=12, shuffle=False, verbose=0)
    assert error(model, expected) <= fit_bound


# Bad input.


@pytest.mark.parametrize(
    ("optimizer", "steps", "error", "message"),
    [
        *((keras.optimizers.Adam, steps, ValueError, "Received: steps=") for steps in (0, -1, {}, {2: 4})),
        *((keras.optimizers.Adam, s, TypeError, "Received: steps=") for s in (2.5, True, "4", None, {0: 2.5})),
        *((lambda other=other: other, 4, TypeError, r"must be a keras\.optimizers\.Optimizer .* Received")
          for other in ("adam", None, 0.1)),
    ],
)  # fmt: skip
def test_what_is_no_optimizer_and_no_steps_is_refused(optimizer, steps, error, message):
    with pytest.raises(error, match=message):
        Optimizer(optimizer(), steps)


def test_an_optimizer_that_accumulates_by_itself_is_refused():
    itself = keras.optimizers.Adam(gradient_accumulation_steps=4)
    for optimizer in (itself, keras.optimizers.LossScaleOptimizer(itself), Optimizer(adam(), 2)):
        with pytest.raises(ValueError, match="accumulate"):
            Optimizer(optimizer, 4)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        gradaccum.keras.optimizers.Adam(steps=4, gradient_accumulation_steps=4)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        of_all = keras.optimizers.MultiOptimizer(lambda variable: itself)
        for optimizer in (of_all, keras.optimizers.LossScaleOptimizer(of_all)):
            with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
                Optimizer(optimizer, 4).build(variables_like(SHAPES))


def test_a_schedule_that_nothing_drives_is_an_error():
    x, y = regression(8)
    model = network()
    model.compile(optimizer=Optimizer(keras.optimizers.SGD(0.1, use_ema=True), {0: 2, 1: 1}), loss="mse")
    with pytest.raises(ValueError, match=r"needs to know epochs. Received: steps=\{0: 2, 1: 1\}.*GradientAccumulation"):
        model.fit(x, y, batch_size=4, verbose=0)


def test_another_models_variables_are_refused():
    optimizer = Optimizer(sgd(), 2)
    train_by_hand(optimizer, variables_like(SHAPES), micro_gradients(1))
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(micro_gradients(1)[0], variables_like(SHAPES))
    with pytest.raises(ValueError, match="other variables"):
        Optimizer(optimizer.inner_optimizer, 2).build(variables_like(SHAPES))


def test_gradients_that_fit_no_variables_are_refused():
    optimizer, variables = Optimizer(sgd(), 2), variables_like(SHAPES)
    with pytest.raises(ValueError, match="must be built"):
        optimizer.apply(micro_gradients(1)[0])
    optimizer.build(variables)
    with pytest.raises(ValueError, match="2 gradients for 3 variables"):
        optimizer.apply(micro_gradients(1)[0][:2])
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None] * 3)
    assert optimizer.micro_batches == 0


def test_a_schedule_is_not_set_in_the_middle():
    with pytest.raises(ValueError, match="can be set to an int"):
        Optimizer(sgd(), 2).steps = {0: 2, 1: 4}
    with pytest.raises(ValueError, match="follow from its batch sizes"):
        BatchOptimizer(sgd(), 4, 8, 16, network()).steps = 2  # what they are
