"""What `windowed` cannot make exact, it refuses by name."""

import jax
import jax.numpy as jnp
import optax
import pytest

from gradaccum.jax import updated, windowed
from tests.jax.problems import assert_refused

ONES = jnp.ones(3)
SGD = optax.sgd(0.1)
PAIR = {"a": ONES, "b": None}
STATE, STRUCTURE = "`state` must be what init(params) or the last update()", "must have the structure of the parameters"
STEPS, INT, ITSELF = "`steps` must be an int >= 1", "must return an int >= 1", "accumulates gradients by itself"
OWN, SHORT, NEEDS = (
    "`{}` covers one micro-batch only",
    "sums in half precision lose",
    "inner optimizer needs `value`. Pass",
)


def update(optimizer, grads=ONES, *more, params=ONES, jit=False, **extra):
    """An update of a fresh state."""
    of = jax.jit(optimizer.update) if jit else optimizer.update
    return of(grads, optimizer.init(params), params, *more, **extra)


def of_pair(grads):
    return lambda: update(windowed(SGD, 2), grads, params=PAIR)


def scheduled(steps):
    return lambda: update(windowed(SGD, steps), jit=True)


def init(inner, params=ONES, **options):
    return lambda: windowed(inner, 2, **options).init(params)


PLATEAU = windowed(optax.chain(SGD, optax.contrib.reduce_on_plateau()), 2)
MONITOR = optax.GradientTransformation(lambda params: {}, lambda g, s, p=None: (g, {"norm": g.sum()}))
ONE = windowed(SGD, 2).init(ONES)
CASES = {
    **{f"steps {steps}": (lambda steps=steps: windowed(SGD, steps), (TypeError, ValueError), STEPS)
       for steps in (0, -1, 2.5, True, "4", {}, {2: 4}, {0: 0})},
    "no optimizer": (lambda: windowed(4, SGD), TypeError, "Received: optimizer=4 of type int"),
    "update without a state": (lambda: windowed(SGD, 2).update(ONES, None), TypeError, STATE),
    "flush without a state": (lambda: windowed(SGD, 2).flush(None, ONES), TypeError, STATE),
    "update of another's state": (lambda: windowed(SGD, 2).update(ONES, SGD.init(ONES)), TypeError, STATE),
    "flush of another's state": (lambda: windowed(SGD, 2).flush(SGD.init(ONES), ONES), TypeError, STATE),
    "MultiSteps": (init(optax.MultiSteps(SGD, 2).gradient_transformation()), ValueError, ITSELF),
    "windowed": (init(optax.chain(optax.clip(1.0), windowed(SGD, 2))), ValueError, ITSELF),
    "apply_every": (init(optax.chain(optax.apply_every(2), SGD)), ValueError, ITSELF),
    "a schedule that needs values inside jit": (
        scheduled(lambda e, u: 1 if u < 2 else 4), TypeError, "gets `epoch` and `update` as traced arrays",
    ),
    "a schedule of 0": (scheduled(lambda e, u: 0), ValueError, STEPS),
    "a schedule of 2.5": (scheduled(lambda e, u: 2.5), TypeError, STEPS),
    "a schedule of traced floats": (scheduled(lambda e, u: u / 2), TypeError, INT),
    "a schedule of traced vectors": (scheduled(lambda e, u: u[None]), TypeError, INT),
    **{f"weight {weight}": (lambda w=weight: update(windowed(SGD, 2), ONES, w), (TypeError, ValueError), "weight")
       for weight in (-1, float("nan"), float("inf"), "3", True, [1, 2], 1e200)},
    "a traced weight that is no scalar": (
        lambda: update(windowed(SGD, 2), ONES, ONES, jit=True), TypeError, "Received: weight=float64[3], traced",
    ),
    "an argument that the inner optimizer needs": (lambda: update(PLATEAU), TypeError, NEEDS),
    "the same, jitted": (lambda: update(PLATEAU, jit=True), TypeError, NEEDS),
    "gradients without a part": (of_pair({"a": ONES}), ValueError, STRUCTURE),
    "gradients of another shape": (
        of_pair(PAIR | {"a": ONES[None]}), ValueError, "Received: grads['a'] of shape (1, 3), not shape (3,)",
    ),
    "gradients of nothing": (of_pair(PAIR | {"b": ONES}), ValueError, "grads['b'] of shape (3,), not None"),
    "gradients of another dtype": (
        of_pair(PAIR | {"a": ONES.astype("f4")}), TypeError, "grads['a'] of float32 for a parameter of float64",
    ),
    "parameters that are integers": (init(SGD, {"n": jnp.arange(3)}), TypeError, "Received: params['n'] of int64"),
    **{f"lbfgs, {name}": (lambda extra=extra: update(windowed(optax.lbfgs(), 2), **extra), ValueError, OWN.format(name))
       for name, extra in {"value_fn": {"value_fn": lambda p: 0.0}, "grad": {"grad": ONES}}.items()},
    "lbfgs": (lambda: update(windowed(optax.lbfgs(), 2)), ValueError, OWN.format("grad")),
    "a value that is no scalar": (
        lambda: update(windowed(SGD, 2), value=ONES), ValueError, "must be the micro-batch's mean loss, a scalar",
    ),
    "sums in half precision": (init(SGD, accumulate_dtype=jnp.bfloat16), ValueError, SHORT),
    "updated of two": (lambda: updated((ONE, ONE)), ValueError, "Received: tuple with 2 of them"),
    "updated of none": (lambda: updated(optax.adam(0.1).init(ONES)), ValueError, "with 0 of them"),
    "an inner state that changes its structure": (
        lambda: update(windowed(optax.chain(MONITOR, SGD), 2), jit=True), ValueError, "another structure",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named(name):
    assert_refused(*CASES[name])


@pytest.mark.parametrize(("first", "second"), [({"weight": 4}, {}), ({}, {"weight": 4})])
def test_weights_on_some_micro_batches_of_a_window(first, second):
    optimizer = windowed(SGD, 2)
    _, state = optimizer.update(ONES, optimizer.init(ONES), ONES, **first)
    with pytest.raises(ValueError, match=r"must come with a `weight`, or none.*after 1 micro-batches with"):
        optimizer.update(ONES, state, ONES, **second)
    updates, state = jax.jit(lambda state: optimizer.update(ONES, state, ONES, **second))(state)
    assert jnp.isnan(updates).all()
    optimizer.update(ONES, state, ONES, **first)  # the next window may do otherwise


def test_a_traced_schedule_below_1():
    optimizer = windowed(SGD, lambda epoch, update: jnp.where(update < 1, 1, 0))
    step = jax.jit(optimizer.update)
    updates, state = step(ONES, optimizer.init(ONES), ONES)
    assert jnp.isfinite(updates).all()
    assert jnp.isnan(step(ONES, state, ONES)[0]).all()
