"""What `windowed` cannot make exact, it refuses by name."""

import jax
import jax.numpy as jnp
import optax
import pytest

from gradaccum.jax import updated, windowed

ONES = jnp.ones(3)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "4", {}, {2: 4}, {0: 0}])
def test_steps_that_are_none(steps):
    with pytest.raises((TypeError, ValueError), match="`steps` must be an int >= 1"):
        windowed(optax.sgd(0.1), steps)


def test_what_is_no_optimizer():
    with pytest.raises(TypeError, match="must be an optax.GradientTransformation.*Received: optimizer=4 of type int"):
        windowed(4, optax.sgd(0.1))


def test_a_state_of_another_optimizer():
    optimizer = windowed(optax.sgd(0.1), 2)
    for state in (None, optax.sgd(0.1).init(ONES)):
        for call in (
            lambda state=state: optimizer.update(ONES, state),
            lambda state=state: optimizer.flush(state, ONES),
        ):
            with pytest.raises(TypeError, match=r"`state` must be what init\(params\) or the last update\(\)"):
                call()


@pytest.mark.parametrize(
    "inner",
    [
        lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        lambda: optax.chain(optax.clip(1.0), windowed(optax.sgd(0.1), 2)),
        lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    ],
    ids=["MultiSteps", "windowed", "apply_every"],
)
def test_an_inner_optimizer_that_accumulates_by_itself(inner):
    with pytest.raises(ValueError, match="accumulates gradients by itself"):
        windowed(inner(), 2).init(ONES)


def test_a_callable_schedule_that_needs_values_inside_jit():
    optimizer = windowed(optax.sgd(0.1), lambda epoch, update: 1 if update < 2 else 4)
    with pytest.raises(TypeError, match=r"gets `epoch` and `update` as traced arrays.*jnp.where"):
        jax.jit(optimizer.update)(ONES, optimizer.init(ONES), ONES)


@pytest.mark.parametrize("steps", [lambda e, u: 0, lambda e, u: 2.5, lambda e, u: u / 2, lambda e, u: u[None]])
def test_a_callable_schedule_that_returns_no_steps(steps):
    optimizer = windowed(optax.sgd(0.1), steps)
    with pytest.raises((TypeError, ValueError, IndexError), match=r"`steps` must|must return an int >= 1"):
        jax.jit(optimizer.update)(ONES, optimizer.init(ONES), ONES)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", True, [1, 2], 1e200])
def test_weights_that_are_none(weight):
    optimizer = windowed(optax.sgd(0.1), 2)
    with pytest.raises((TypeError, ValueError), match=r"weight"):
        optimizer.update(ONES, optimizer.init(ONES), ONES, weight)


@pytest.mark.parametrize(("first", "second"), [({"weight": 4}, {}), ({}, {"weight": 4})])
def test_weights_on_some_micro_batches_of_a_window(first, second):
    optimizer = windowed(optax.sgd(0.1), 2)
    _, state = optimizer.update(ONES, optimizer.init(ONES), ONES, **first)
    with pytest.raises(ValueError, match=r"must come with a `weight`, or none.*after 1 micro-batches with"):
        optimizer.update(ONES, state, ONES, **second)
    updates, state = jax.jit(lambda state: optimizer.update(ONES, state, ONES, **second))(state)
    assert jnp.isnan(updates).all()
    optimizer.update(ONES, state, ONES, **first)  # the next window may do otherwise


def test_a_traced_schedule_below_1():
    optimizer = windowed(optax.sgd(0.1), lambda epoch, update: jnp.where(update < 1, 1, 0))
    update = jax.jit(optimizer.update)
    updates, state = update(ONES, optimizer.init(ONES), ONES)
    assert jnp.isfinite(updates).all()
    assert jnp.isnan(update(ONES, state, ONES)[0]).all()


def test_an_argument_that_the_inner_optimizer_needs():
    optimizer = windowed(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), 2)
    state = optimizer.init(ONES)
    with pytest.raises(TypeError, match="inner optimizer needs `value`. Pass it with every micro-batch"):
        optimizer.update(ONES, state, ONES)
    with pytest.raises(TypeError, match="inner optimizer needs `value`. Pass it with every micro-batch"):
        jax.jit(optimizer.update)(ONES, state, ONES)


def test_a_traced_weight_that_is_no_scalar():
    optimizer = windowed(optax.sgd(0.1), 2)
    with pytest.raises(TypeError, match=r"Received: weight=float64\[3\], traced"):
        jax.jit(optimizer.update)(ONES, optimizer.init(ONES), ONES, ONES)


def test_gradients_that_do_not_fit_the_parameters():
    optimizer = windowed(optax.sgd(0.1), 2)
    params = {"a": ONES, "b": None}
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="must have the structure of the parameters"):
        optimizer.update({"a": ONES}, state, params)
    with pytest.raises(ValueError, match=r"Received: grads\['a'\] of shape \(1, 3\), not shape \(3,\)"):
        optimizer.update({"a": ONES[None], "b": None}, state, params)
    with pytest.raises(ValueError, match=r"grads\['b'\] of shape \(3,\), not None"):
        optimizer.update({"a": ONES, "b": ONES}, state, params)
    with pytest.raises(TypeError, match=r"grads\['a'\] of float32 for a parameter of float64"):
        optimizer.update({"a": ONES.astype(jnp.float32), "b": None}, state, params)


def test_parameters_that_are_integers():
    with pytest.raises(TypeError, match=r"Received: params\['n'\] of int64"):
        windowed(optax.sgd(0.1), 2).init({"n": jnp.arange(3)})


@pytest.mark.parametrize("extra", [{"value_fn": lambda params: 0.0}, {"grad": ONES}, {}])
def test_an_inner_optimizer_that_evaluates_the_loss_again(extra):
    optimizer = windowed(optax.lbfgs(), 2)
    with pytest.raises(ValueError, match=f"`{next(iter(extra), 'grad')}` covers one micro-batch only"):
        optimizer.update(ONES, optimizer.init(ONES), ONES, **extra)


def test_a_value_that_is_no_scalar():
    optimizer = windowed(optax.sgd(0.1), 2)
    with pytest.raises(ValueError, match="`value` must be the micro-batch's mean loss, a scalar"):
        optimizer.update(ONES, optimizer.init(ONES), ONES, value=ONES)


def test_half_precision_sums():
    with pytest.raises(ValueError, match="must be float32 or float64: sums in half precision lose"):
        windowed(optax.sgd(0.1), 2, accumulate_dtype=jnp.bfloat16)


def test_updated_of_a_state_that_has_none_or_two():
    one = windowed(optax.sgd(0.1), 2).init(ONES)
    with pytest.raises(ValueError, match="Received: tuple with 2 of them"):
        updated((one, one))
    with pytest.raises(ValueError, match="with 0 of them"):
        updated(optax.adam(0.1).init(ONES))


def test_an_inner_state_that_changes_its_structure():
    monitor = optax.GradientTransformation(lambda params: {}, lambda g, s, p=None: (g, {"norm": g.sum()}))
    optimizer = windowed(optax.chain(monitor, optax.sgd(0.1)), 2)
    state = optimizer.init(ONES)
    with pytest.raises(ValueError, match="another structure.*Leave such a part out"):
        jax.jit(optimizer.update)(ONES, state, ONES)
