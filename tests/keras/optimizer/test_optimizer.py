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
LossScale = keras.optimizers.LossScaleOptimizer


def both(make, gradients=None, steps=4):
    """The error of the variables after windows of micro-batches, against plain updates with their means."""
    gradients = micro_gradients(3 * steps) if gradients is None else gradients
    accumulated, expected = variables_like(SHAPES), variables_like(SHAPES)
    optimizer, reference = Optimizer(make(), steps), make()
    train_by_hand(optimizer, accumulated, gradients)
    train_by_hand(reference, expected, means_of_some(gradients, steps))
    optimizer.finalize_variable_values(accumulated)
    reference.finalize_variable_values(expected)
    assert int(optimizer.iterations) == len(gradients) // steps
    return relative_error(accumulated, expected)


def means_of_some(gradients, steps):
    """As `means`; of a variable, None is zero, and where it is in all of a window, None."""
    zeros = [[np.zeros(shape) if g is None else g for g, shape in zip(some, SHAPES)] for some in gradients]
    windows = [gradients[start : start + steps] for start in range(0, len(gradients), steps)]
    absent = [[all(some[i] is None for some in window) for i in range(len(SHAPES))] for window in windows]
    return [[None if a else m for a, m in zip(*pair)] for pair in zip(absent, means(zeros, steps))]


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


@compiled_on("jax")
@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="not in this version of Keras")
def test_two_optimizers_for_two_parts_of_a_model(bound):
    def make():
        mapping = keras.optimizers.OptimizerMap(sgd())
        mapping[".*w1"] = adam()
        return keras.optimizers.MultiOptimizer(mapping)

    assert both(make) <= bound


FIRST, SECOND = micro_gradients(2)
HOLLOW = [SECOND[0], None, None]
SOME = {"last": [FIRST, HOLLOW] * 2, "first": [HOLLOW, FIRST] * 2, "all": [[*g[:2], None] for g in micro_gradients(4)]}


def adamw():
    return keras.optimizers.AdamW(0.1, weight_decay=0.5)


@compiled_on("jax")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # a plain optimizer says so too
@pytest.mark.parametrize(
    ("none_in", "make"), [("last", sgd), *map(slow, ("last", "first", "first"), (adam, sgd, adam)), ("all", adamw)]
)
def test_a_gradient_that_is_none_is_zero_unless_it_is_none_in_the_whole_window(none_in, make, bound):
    assert both(make, SOME[none_in], steps=2) <= bound


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
@pytest.mark.parametrize("dtype", [slow("float16"), "bfloat16"])
def test_half_precision_gradients_are_summed_in_float32(dtype):
    optimizer, variables = Optimizer(keras.optimizers.SGD(1.0), 512), [keras.Variable([0.0], dtype=dtype)]
    train_by_hand(optimizer, variables, [[keras.ops.ones((1,), dtype)]] * 512, by="eager" if BACKEND != "jax" else "")
    assert float(keras.ops.convert_to_numpy(keras.ops.cast(variables[0], "float32"))[0]) == -1.0


# In `fit`.


def in_fit(make, steps=4, epochs=1, callbacks=list, **hidden):
    """The models after `fit` on micro-batches of 4 rows, and plain on large batches."""
    x, y = regression(32)
    models = []
    for optimizer, rows in ((Optimizer(make(), steps), 4), (make(), 4 * steps)):
        models.append(model := network(**hidden))
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x, y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks())
    return models


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)


@compiled_on("jax")
@pytest.mark.parametrize(
    ("make", "hidden", "callback"),
    [
        (sgd, {"kernel_constraint": keras.constraints.MinMaxNorm(0.9, 1.0, rate=0.5)}, None),
        (averaging, {}, keras.callbacks.SwapEMAWeights),
        (lambda: LossScale(averaging(), initial_scale=8.0), {}, keras.callbacks.SwapEMAWeights),
    ],
    ids=["constraints", "averages", "averages with a loss scale"],
)
def test_constraints_and_averages_follow_updates(make, hidden, callback, fit_bound):
    callbacks = lambda: [callback(swap_on_epoch=True)] if callback else []  # noqa: E731
    assert error(*in_fit(make, epochs=2, callbacks=callbacks, **hidden)) <= fit_bound


@compiled_on("jax")
def test_callbacks_read_and_set_the_learning_rate(fit_bound):
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model, expected = in_fit(sgd, epochs=3, callbacks=lambda: [halve])
    rates = [one.history.history["learning_rate"] for one in (model, expected)]
    np.testing.assert_allclose(*rates)
    assert error(model, expected) <= fit_bound
    assert keras.ops.convert_to_numpy(model.optimizer.inner_optimizer.learning_rate) == pytest.approx(0.0125)


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


# Names.


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_optimizer_is_there_by_name(name):
    wrapped = getattr(gradaccum.keras.optimizers, name)
    makes = {
        "LossScaleOptimizer": lambda: [sgd()],
        "MultiOptimizer": lambda: [keras.optimizers.OptimizerMap(sgd())],
    }
    first = makes.get(name, list)()
    for optimizer in (wrapped(4, *first), wrapped(*first, steps=4)):
        assert isinstance(optimizer, Optimizer)
        assert isinstance(optimizer.inner_optimizer, getattr(keras.optimizers, name))
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
    for optimizer in (itself, LossScale(itself), Optimizer(adam(), 2)):
        with pytest.raises(ValueError, match="accumulate"):
            Optimizer(optimizer, 4)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        gradaccum.keras.optimizers.Adam(steps=4, gradient_accumulation_steps=4)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        of_all = keras.optimizers.MultiOptimizer(lambda variable: itself)
        for optimizer in (of_all, LossScale(of_all)):
            with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
                Optimizer(optimizer, 4).build(variables_like(SHAPES))


def test_a_schedule_that_nothing_drives_or_that_comes_in_the_middle_is_an_error():
    model = network()
    model.compile(optimizer=Optimizer(keras.optimizers.SGD(0.1, use_ema=True), {0: 2, 1: 1}), loss="mse")
    with pytest.raises(ValueError, match=r"needs to know epochs. Received: steps=\{0: 2, 1: 1\}.*GradientAccumulation"):
        model.fit(*regression(8), batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="can be set to an int"):
        Optimizer(sgd(), 2).steps = {0: 2, 1: 4}
    with pytest.raises(ValueError, match="follow from its batch sizes"):
        BatchOptimizer(sgd(), 4, 8, 16, network()).steps = 2  # what they are


def test_gradients_that_fit_no_variables_are_refused():
    optimizer, variables, (gradients,) = Optimizer(sgd(), 2), variables_like(SHAPES), micro_gradients(1)
    with pytest.raises(ValueError, match="must be built"):
        optimizer.apply(gradients)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="2 gradients for 3 variables"):
        optimizer.apply(gradients[:2])
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None] * 3)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(gradients, variables_like(SHAPES))
    with pytest.raises(ValueError, match="other variables"):
        Optimizer(optimizer.inner_optimizer, 2).build(variables_like(SHAPES))
    assert optimizer.micro_batches == 0
