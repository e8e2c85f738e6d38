"""The wrapped optimizer makes the updates of the large batch, given gradients: every optimizer, setting and loop."""

import logging

import keras
import numpy as np
import pytest

import gradaccum.keras
from gradaccum.keras.optimizers import BatchOptimizer, Optimizer
from tests.keras.loops import SHAPES, error, fit, logged, means, micro_gradients, train_by_hand, variables_like
from tests.keras.marks import BACKEND, compiled_on, slow
from tests.keras.problems import HeavyBall, adam, network, regression, sgd, split
from tests.reference import relative_error

LossScale, on_jax = keras.optimizers.LossScaleOptimizer, compiled_on("jax")
BUILT_IN = sorted(
    name
    for name, member in vars(keras.optimizers).items()
    if isinstance(member, type) and issubclass(member, keras.optimizers.Optimizer) and name != "Optimizer"
)
INNER = {name: getattr(keras.optimizers, name) for name in BUILT_IN} | {"a custom one": HeavyBall}


class Oracle:
    """What a window of micro-batches has seen, and the large batch's gradient: in numpy.

    Of a variable, None is zero, and where it is in all of a window, None.
    """

    def __init__(self, inner, variables, steps, by=""):
        self.inner, self.variables, self.by = inner, variables, by
        self.steps = self.next_steps = steps
        self.held, self.updates = [], 0
        inner.build(variables)

    def add(self, gradients, rows=None):
        known = any(known for *_, known in self.held)
        if rows is None:
            weights = [weight for _, weight, _ in self.held]
            rows_of_others = sum(weights) / len(weights) if weights else 1
            self.held.append((gradients, int(rows_of_others + 0.5), known))
        else:
            self.held = self.held if known else [(some, rows, True) for some, _, _ in self.held]
            self.held.append((gradients, rows, True))
        if len(self.held) >= self.steps:
            self.close()

    def close(self):
        weights, mean = [weight for _, weight, _ in self.held], []
        for index, shape in enumerate(SHAPES):
            some = [gradients[index] for gradients, _, _ in self.held]
            filled = [np.zeros(shape) if gradient is None else gradient for gradient in some]
            absent = all(gradient is None for gradient in some)
            mean.append(None if absent else np.average(filled, axis=0, weights=weights))
        if any(gradient is not None for gradient in mean):
            train_by_hand(self.inner, self.variables, [mean], self.by)
            self.updates += 1
        self.held, self.steps = [], self.next_steps


def both(make, gradients=None, steps=4, wrapped=None):
    """The error of the variables after windows of micro-batches, against plain updates with their means."""
    gradients = micro_gradients(3 * steps) if gradients is None else gradients
    accumulated, expected = variables_like(SHAPES), variables_like(SHAPES)
    optimizer, oracle = wrapped or Optimizer(make(), steps), Oracle(make(), expected, steps)
    train_by_hand(optimizer, accumulated, gradients)
    for some in gradients:
        oracle.add(some)
    optimizer.finalize_variable_values(accumulated)
    oracle.inner.finalize_variable_values(expected)
    assert int(optimizer.iterations) == len(gradients) // steps
    return relative_error(accumulated, expected)


SETTINGS = {
    "averaged, scheduled, decayed, scaled and clipped": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), "weight_decay": 0.1,
        "global_clipnorm": 0.3, "loss_scale_factor": 8.0,
        "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2,
    },
    "each gradient clipped, and a callable learning rate": {"learning_rate": lambda: 0.05, "clipnorm": 0.3},
    "each entry clipped": {"learning_rate": 0.1, "clipvalue": 0.1},
}  # fmt: skip
MANY, *FEWER = SETTINGS
SOME = "Adam", "SGD", "a custom one"
OTHERS = [name for name in INNER if name not in (*SOME, "LossScaleOptimizer", "MultiOptimizer")]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adam", MANY), slow("SGD", MANY), slow("a custom one", MANY), *(slow("SGD", settings) for settings in FEWER),
        *(pytest.param(name, MANY, marks=pytest.mark.slow) for name in OTHERS),
    ],
)  # fmt: skip
def test_every_optimizer_matches_the_large_batch_and_settings_act_once_per_update(name, settings, bound):
    if name == "Muon":
        keras.backend.set_floatx("float32")  # a plain Muon with a schedule refuses float64
        bound = 1e-6
    assert both(lambda: INNER[name](**SETTINGS[settings])) <= bound


def test_settings_written_on_the_wrapper_are_the_inner_optimizers(bound):
    def make(of=lambda inner: inner):
        optimizer = of(sgd())
        optimizer.momentum, optimizer.nesterov, optimizer.clipnorm = 0.5, True, 0.3
        return optimizer

    wrapped = make(lambda inner: Optimizer(inner, 2))
    assert wrapped.inner_optimizer.nesterov
    assert both(make, micro_gradients(6), steps=2, wrapped=wrapped) <= bound


@on_jax
@pytest.mark.skipif(BACKEND != "torch", reason="the stages are PyTorch's")
def test_a_window_ends_with_the_stages_of_the_pytorch_shell_and_keras_clips(monkeypatch, bound):
    from gradaccum.keras.backends import on_torch

    ran, run_stages = [], on_torch.run_stages

    def seen(stages, total):
        ran.append((" ".join(type(stage).__name__ for stage in stages), total.divisor))
        return run_stages(stages, total)

    monkeypatch.setattr(on_torch, "run_stages", seen)
    assert both(lambda: keras.optimizers.SGD(0.1, clipvalue=0.1)) <= bound
    assert ran == [("Divide", 4.0)] * 3


@pytest.mark.skipif("MultiOptimizer" not in BUILT_IN, reason="not in this version of Keras")
def test_two_optimizers_for_two_parts_of_a_model(bound):
    def make():
        mapping = keras.optimizers.OptimizerMap(sgd())
        mapping[".*w1"] = adam()
        return keras.optimizers.MultiOptimizer(mapping)

    assert both(make) <= bound


FIRST, SECOND = micro_gradients(2)
HOLLOW = [SECOND[0], None, None]


def adamw():
    return keras.optimizers.AdamW(0.1, weight_decay=0.5)


@on_jax
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # a plain optimizer says so too
@pytest.mark.parametrize(
    ("make", "gradients"), [(sgd, [FIRST, HOLLOW] * 2), (adamw, [[*g[:2], None] for g in micro_gradients(4)])]
)
def test_a_gradient_that_is_none_is_zero_unless_it_is_none_in_the_whole_window(make, gradients, bound):
    assert both(make, gradients, steps=2) <= bound


@on_jax
def test_an_optimizer_that_has_trained_goes_on_with_its_state(bound):
    gradients, (accumulated, expected) = micro_gradients(6), (variables_like(SHAPES), variables_like(SHAPES))
    trained, oracle = sgd(), Oracle(sgd(), expected, 1)
    train_by_hand(trained, accumulated, gradients[:2])
    train_by_hand(Optimizer(trained, 2), accumulated, gradients[2:])
    for index, some in enumerate(gradients):
        oracle.steps = oracle.next_steps = 1 if index < 2 else 2
        oracle.add(some)
    assert relative_error(accumulated, expected) <= bound


@on_jax
@pytest.mark.parametrize("dtype", [slow("float16"), "bfloat16"])
def test_half_precision_gradients_are_summed_in_float32(dtype):
    optimizer, variables = Optimizer(keras.optimizers.SGD(1.0), 512), [keras.Variable([0.0], dtype=dtype)]
    train_by_hand(optimizer, variables, [[keras.ops.ones((1,), dtype)]] * 512, by="eager" if BACKEND != "jax" else "")
    assert float(keras.ops.convert_to_numpy(keras.ops.cast(variables[0], "float32"))[0]) == -1.0


WAYS = [("", "eager"), ("inside", "eager"), ("outside", "eager")]
if BACKEND == "jax":
    WAYS.pop()  # Keras can't: it assigns inside of a branch
if BACKEND != "tensorflow":
    WAYS += [("", "stateless"), ("inside", "stateless"), ("outside", "stateless")]


@pytest.mark.parametrize(("scaled", "by"), WAYS)
@pytest.mark.parametrize("alone", [False, True])
def test_what_overwrites_its_variable_is_the_largest_of_the_window(scaled, alone, by):
    amax = keras.Variable([0.0, 0.0], name="amax")
    amax.overwrite_with_gradient = True
    variables = [amax] if alone else [amax, keras.Variable([0.0], name="weight")]
    inner = keras.optimizers.SGD(1.0)
    optimizer = ours = Optimizer(LossScale(inner, initial_scale=8.0) if scaled == "inside" else inner, 3)
    if scaled == "outside":
        optimizer = LossScale(ours, initial_scale=8.0)
    optimizer.build(variables)
    for rows, largest in ((None, [1.0, 5.0]), (2, [3.0, 2.0]), (2, [2.0, 4.0])):
        gradients = [np.array(largest), np.array([48.0 if scaled else 6.0])][: len(variables)]
        with ours.window.with_rows(0, rows):
            train_by_hand(optimizer, variables, [gradients], by=by)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(amax.value), [3.0, 5.0])
    if not alone:
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1].value), [-6.0], rtol=1e-6)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow refuses stateless_apply")
def test_an_optimizer_may_keep_the_gradient_that_it_is_given(bound):
    class Keeps(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.last = [self.add_variable_from_reference(v, name="last") for v in variables]

        def update_step(self, gradient, variable, learning_rate):
            self.assign(self.last[self._get_variable_index(variable)], gradient)

    inner, variables = Keeps(1.0), [keras.Variable([0.0], name="weight")]
    gradients = [[np.array([value])] for value in (1.0, 2.0, 6.0, 4.0)]
    train_by_hand(Optimizer(inner, 2), variables, gradients, by="stateless")
    assert float(keras.ops.convert_to_numpy(inner.last[0].value)[0]) == 5.0


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


# Random windows: ragged rows, rows not known, None gradients, new steps, flushes, and saving anywhere.


def copied(optimizer, make, steps, variables):
    """Another optimizer that was loaded from what this one saves."""
    store, other = {}, Optimizer(make(), steps)
    optimizer.save_own_variables(store)
    other.build(variables)
    other.load_own_variables(store)
    return other


@compiled_on("tensorflow")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "seed", [0, *map(slow, range(1, 8)), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 300))]
)
def test_random_windows_are_the_large_batches(seed, bound):
    random = np.random.default_rng(seed)
    make, steps = [sgd, adam][random.integers(2)], int(random.integers(1, 6))
    known = random.choice(["always", "never", "sometimes"])
    variables, expected = variables_like(SHAPES), variables_like(SHAPES)
    optimizer, oracle = Optimizer(make(), steps), Oracle(make(), expected, steps, by="eager")
    for index, gradients in enumerate(micro_gradients(int(random.integers(5, 16)), seed)):
        absent = random.random(len(SHAPES)) < random.choice([0.0, 0.4])
        absent[random.integers(len(SHAPES))] = False
        gradients = [None if none else gradient for none, gradient in zip(absent, gradients)]
        is_known = known == "always" or (known == "sometimes" and random.random() < 0.5)
        rows = int(random.integers(1, 9)) if is_known else None
        with optimizer.window.with_rows(0, rows):
            train_by_hand(optimizer, variables, [gradients], by="eager")
        oracle.add(gradients, rows)
        assert optimizer.micro_batches == len(oracle.held), f"micro-batch {index}"
        assert (optimizer.updated, optimizer.steps) == (not oracle.held, oracle.steps), f"micro-batch {index}"
        event = random.random()
        if event < 0.1:
            assert optimizer.flush() == bool(oracle.held)
            assert optimizer.updated
            if oracle.held:
                oracle.close()
        elif event < 0.3:
            optimizer = copied(optimizer, make, steps, variables)
        elif event < 0.4:  # inside a window: from the next one on
            optimizer.steps = oracle.next_steps = steps = int(random.integers(1, 6))
            oracle.steps = oracle.steps if oracle.held else steps
        assert relative_error(variables, expected) <= bound, f"micro-batch {index}"
    assert int(optimizer.iterations) == oracle.updates


# Loss scales, mixed precision, and compilation.


def drive(optimizer, variables, gradients):
    """Scaled gradients, as a training step of `mixed_float16` makes them."""
    if not optimizer.built:
        optimizer.build(variables)
    for some in gradients:
        scale = float(keras.ops.convert_to_numpy(optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))))
        train_by_hand(optimizer, variables, [[gradient * scale for gradient in some]])


@pytest.mark.parametrize("make", [sgd, slow(adam)])
@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_scale_halves_once_and_skips_the_window_inside_or_drops_the_micro_batch_outside(inside, make):
    gradients, variables, expected = micro_gradients(6), variables_like(SHAPES), variables_like(SHAPES)
    gradients[1] = [np.full(shape, np.inf) for shape in SHAPES]
    scaled = lambda optimizer: LossScale(optimizer, initial_scale=1024.0)  # noqa: E731
    optimizer = Optimizer(scaled(make()), 2) if inside else scaled(Optimizer(make(), 2))
    wrapped, scaling = (optimizer, optimizer.inner_optimizer)[:: 1 if inside else -1]
    drive(optimizer, variables, gradients[:2])
    assert not wrapped.updated
    assert relative_error(variables, expected) == 0.0
    drive(optimizer, variables, gradients[2:])
    assert float(keras.ops.convert_to_numpy(scaling.dynamic_scale.value)) == 512.0
    finite = gradients[2:] if inside else [gradients[0], *gradients[2:5]]
    drive(make(), expected, means(finite, 2))
    assert (int(wrapped.iterations), wrapped.micro_batches) == (2, 0 if inside else 1)
    assert relative_error(variables, expected) <= 1e-6


MIXED = {
    # policy: (a loss scale inside, the error: activations, and so gradients, have 11 bits, or 8)
    "mixed_float16, scaled inside": (True, 5e-3),
    "mixed_float16": (False, 5e-3),
    "mixed_bfloat16": (False, 4e-2),
}


@on_jax
@pytest.mark.parametrize("case", [slow(case) if case == "mixed_float16" else case for case in MIXED])
def test_mixed_precision_matches_the_large_batch(case):
    policy, (inside, allowed) = case.partition(",")[0], MIXED[case]
    batches = split(regression(32), [4] * 8)
    keras.config.set_dtype_policy(policy)
    model, expected, scales = network(), network(), policy == "mixed_float16"
    model.compile(Optimizer(LossScale(sgd(), initial_scale=256.0) if inside else sgd(), 4), loss="mse")
    assert isinstance(model.optimizer, LossScale) == scales, "compile() sees that the loss is scaled"
    assert isinstance(model.optimizer, Optimizer) == (inside or not scales)
    fit(model, batches, epochs=2)
    expected.compile(LossScale(sgd(), initial_scale=256.0) if scales else sgd(), loss="mse")
    x, y = regression(32)
    expected.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 4
    assert error(model, expected) <= allowed
    assert {w.dtype for w in model.get_weights()} == {np.dtype("float32")}


# Names.


def test_every_built_in_optimizer_is_there_by_name_and_takes_the_inner_ones_arguments_and_name():
    assert gradaccum.keras.optimizers.Adam(4).name == "adam"
    assert gradaccum.keras.optimizers.Adam(4, name="mine").name == "mine"
    optimizer = gradaccum.keras.optimizers.Adam(4, 0.5, beta_1=0.8)
    assert (float(optimizer.inner_optimizer.learning_rate), optimizer.beta_1) == (0.5, 0.8)
    with pytest.raises(TypeError, match=r"Adam\(steps=4\)"):
        gradaccum.keras.optimizers.Adam(learning_rate=0.5)
    makes = {"LossScaleOptimizer": lambda: [sgd()], "MultiOptimizer": lambda: [keras.optimizers.OptimizerMap(sgd())]}
    for name in BUILT_IN:
        wrapped, first = getattr(gradaccum.keras.optimizers, name), makes.get(name, list)()
        for optimizer in (wrapped(4, *first), wrapped(*first, steps=4)):
            assert isinstance(optimizer, Optimizer)
            assert isinstance(optimizer.inner_optimizer, getattr(keras.optimizers, name))
            assert optimizer.steps == 4


def test_the_start_up_lines(caplog):
    with caplog.at_level(logging.INFO, "gradaccum"):
        Optimizer(adam(), steps=4)
        Optimizer(sgd(), {0: 8, 4: 2})
        for sizes in ((16, 256, 1000), (48, 100, 1000), (16, 256, 100)):
            BatchOptimizer(adam(), *sizes, network())
    assert [line.split(": micro-batches of")[0] for line in logged(caplog)] == [
        "Wrapping 'Adam' Keras optimizer with GA of 4 steps",
        "Wrapping 'SGD' Keras optimizer with GA of {0: 8, 4: 2} steps",
        "Wrapping 'Adam' Keras optimizer with GA of 16 steps",
        "Wrapping 'Adam' Keras optimizer with GA of 3 steps",
        "The effective batch size is 144, not the desired 100",
        "Wrapping 'Adam' Keras optimizer with GA of 16 steps",
        "The effective batch size is 100, not the desired 256",
    ]


# Bad input.


def accumulating():
    return keras.optimizers.Adam(gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("make", "steps", "error", "message"),
    [
        *((adam, steps, ValueError, "Received: steps=") for steps in (0, -1, {}, {2: 4})),
        *((adam, steps, TypeError, "Received: steps=") for steps in (2.5, True, "4", None, {0: 2.5})),
        *((lambda one=one: one, 4, TypeError, r"must be a keras\.optimizers\.Optimizer .* Received")
          for one in ("adam", None, 0.1)),
        *((make, 4, ValueError, "accumulate")
          for make in (accumulating, lambda: LossScale(accumulating()), lambda: Optimizer(adam(), 2))),
    ],
)  # fmt: skip
def test_what_is_no_optimizer_accumulates_by_itself_or_is_no_steps_is_refused(make, steps, error, message):
    with pytest.raises(error, match=message):
        Optimizer(make(), steps)


def test_what_is_found_to_accumulate_by_itself_later_is_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        gradaccum.keras.optimizers.Adam(steps=4, gradient_accumulation_steps=4)
    optimizer = Optimizer(adam(), 4)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2. Set `optimizer.steps`"):
        optimizer.gradient_accumulation_steps = 2
    if "MultiOptimizer" in BUILT_IN:
        of_all = keras.optimizers.MultiOptimizer(lambda variable: accumulating())
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
    for arguments, message in [
        ((gradients[:2],), "2 gradients for 3 variables"),
        (([None] * 3,), "No gradients provided"),
        ((gradients, variables_like(SHAPES)), "Unknown variable"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.apply(*arguments)
    with pytest.raises(ValueError, match="other variables"):
        Optimizer(optimizer.inner_optimizer, 2).build(variables_like(SHAPES))
    assert optimizer.micro_batches == 0
