"""Loops over micro-batches: `lax.scan`, whose convolutions come in the order that XLA has quick code for on a CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum.jax
from gradaccum.on_jax import scan

OWN = {"b01f_01io->b01f"}


def convolved(rows, kernel, dimensions, **options):
    return jax.lax.conv_general_dilated(rows, kernel, dimension_numbers=dimensions, **options)


def cases():
    image, line, box = (4, 8, 7, 3), (4, 9, 3), (4, 5, 4, 3, 2)
    nhwc = ("NHWC", "HWIO", "NHWC")
    yield "plain", image, (3, 3, 3, 5), nhwc, {"window_strides": (1, 1), "padding": "VALID"}
    yield "strides", image, (3, 2, 3, 5), nhwc, {"window_strides": (2, 1), "padding": "SAME"}
    yield "dilated", image, (2, 2, 3, 5), nhwc, {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 3)}
    transposed = {"window_strides": (1, 1), "padding": ((2, 1), (0, 2)), "lhs_dilation": (2, 3)}
    yield "transposed", image, (2, 3, 3, 5), nhwc, transposed
    depthwise = {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 3}
    yield "groups", image, (3, 3, 1, 6), nhwc, depthwise
    yield "features first", (4, 3, 8, 7), (5, 3, 3, 3), ("NCHW", "OIHW", "NCHW"), transposed
    yield (
        "a result of another order",
        image,
        (3, 3, 3, 5),
        ("NHWC", "HWIO", "NCHW"),
        depthwise | {"feature_group_count": 1},
    )
    yield "one dimension", line, (3, 3, 5), ("NWC", "WIO", "NWC"), {"window_strides": (2,), "padding": "SAME"}
    yield "three", box, (2, 2, 2, 2, 3), ("NDHWC", "DHWIO", "NDHWC"), {"window_strides": (1,) * 3, "padding": "SAME"}


def programs(rows, kernel, dimensions, options, around):
    """`loop(scan)`: gradients summed over three micro-batches, by one loop or the other."""
    random = np.random.default_rng(0)
    batches = jnp.asarray(random.normal(size=(3, *rows)))
    kernel = jnp.asarray(random.normal(size=kernel))

    def loss(kernel, rows):
        return jnp.sin(around(functools.partial(convolved, dimensions=dimensions, **options))(rows, kernel)).sum()

    def body(total, rows):
        value, gradients = jax.value_and_grad(loss, (0, 1))(kernel, rows)
        return total + gradients[0], (value, gradients[1])

    return lambda scan: jax.jit(lambda: scan(body, jnp.zeros_like(kernel), batches))


def in_a_scan(function):
    def repeated(rows, kernel):
        return jax.lax.scan(lambda total, _: (total + function(rows, kernel), None), function(rows, kernel), length=2)[
            0
        ]

    return repeated


def in_a_branch(function):
    def chosen(rows, kernel):
        return jax.lax.cond(rows.sum() > 0, function, lambda *both: 2 * function(*both), rows, kernel)

    return chosen


SLOW = ("strides", "dilated", "groups", "a result of another order", "one dimension")
AROUND = {"jit": jax.jit, "checkpoint": jax.checkpoint, "scan": in_a_scan, "cond": in_a_branch}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case[0], marks=[pytest.mark.slow] * (case[0] in SLOW)) for case in cases()]
)
def test_a_loops_convolutions_are_the_same_in_the_orders_that_they_have_outside_of_loops(case):
    name, rows, kernel, dimensions, options = case
    program = programs(rows, kernel, dimensions, options, around=lambda function: function)
    same(program)

    def loss(kernel, rows):
        return jnp.sin(convolved(rows, kernel, dimensions, **options)).sum()

    if name != "groups":  # which XLA makes of it is not ours to order
        outside = jax.jit(jax.value_and_grad(loss, (0, 1)))
        assert orders(program(scan)) == orders(outside, jnp.ones(kernel), jnp.ones(rows))


@pytest.mark.parametrize(
    "around", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("jit", "checkpoint"))) for name in AROUND]
)
def test_convolutions_inside_of(around):
    program = programs(*next(cases())[1:], around=AROUND[around])
    same(program)
    assert orders(program(scan)) == OWN


def same(program):
    expected, found = program(jax.lax.scan)(), program(scan)()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max())


def orders(program, *arguments):
    """In which orders of dimensions the compiled program convolves."""
    return set(re.findall(r"dim_labels=([^,\s]+)", program.lower(*arguments).compile().as_text()))


def test_xla_does_not_do_it_by_itself():
    assert orders(programs(*next(cases())[1:], around=lambda function: function)(jax.lax.scan)) > OWN


def test_an_update_in_micro_batches_convolves_in_the_order_that_is_quick():
    kernel = jnp.ones((3, 3, 3, 5))
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6, 6, 3)))

    def loss(kernel, rows):
        images = jax.nn.relu(convolved(rows, kernel, ("NHWC", "HWIO", "NHWC"), window_strides=(1, 1), padding="SAME"))
        return (images**2).mean()

    step = jax.jit(gradaccum.jax.value_and_grad(loss, micro_batch_size=2))
    assert orders(step, kernel, rows) == OWN
    value, gradient = jax.value_and_grad(loss)(kernel, rows)
    np.testing.assert_allclose(step(kernel, rows)[0], value, rtol=1e-12)
    np.testing.assert_allclose(step(kernel, rows)[1], gradient, rtol=1e-12, atol=1e-14)


def test_a_loop_without_convolutions_is_the_loop_that_was_written():
    def body(total, x):
        return total + jnp.tanh(x) @ total, {"x": x.sum(), "none": None}

    arguments = jnp.ones((2, 2)), jnp.ones((3, 2, 2))
    plain = jax.make_jaxpr(functools.partial(jax.lax.scan, body))(*arguments)
    assert str(jax.make_jaxpr(functools.partial(scan, body))(*arguments)) == str(plain)
