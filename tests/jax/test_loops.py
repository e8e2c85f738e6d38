"""Loops over micro-batches: `lax.scan`, whose convolutions come in the order that XLA has quick code for on a CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum.on_jax import scan
from tests.jax.comparisons import assert_same, at_once, in_micro_batches

OWN = {"b01f_01io->b01f"}
RANDOM = np.random.default_rng(0)


def convolved(rows, kernel, dimensions, strides, padding="SAME", **options):
    return jax.lax.conv_general_dilated(rows, kernel, strides, padding, dimension_numbers=dimensions, **options)


IMAGE, NHWC = (4, 8, 7, 3), ("NHWC", "HWIO", "NHWC")
TRANSPOSED = {"strides": (1, 1), "padding": ((2, 1), (0, 2)), "lhs_dilation": (2, 3)}
CASES = {  # shapes of rows and of a kernel, and how they are convolved
    "plain": (IMAGE, (3, 3, 3, 5), NHWC, {"strides": (1, 1), "padding": "VALID"}),
    "strides": (IMAGE, (3, 2, 3, 5), NHWC, {"strides": (2, 1)}),
    "dilated": (IMAGE, (2, 2, 3, 5), NHWC, {"strides": (1, 1), "rhs_dilation": (2, 3)}),
    "transposed": (IMAGE, (2, 3, 3, 5), NHWC, TRANSPOSED),
    "groups": (IMAGE, (3, 3, 1, 6), NHWC, {"strides": (1, 1), "feature_group_count": 3}),
    "features first": ((4, 3, 8, 7), (5, 3, 3, 3), ("NCHW", "OIHW", "NCHW"), TRANSPOSED),
    "a result of another order": (IMAGE, (3, 3, 3, 5), ("NHWC", "HWIO", "NCHW"), {"strides": (1, 1)}),
    "one dimension": ((4, 9, 3), (3, 3, 5), ("NWC", "WIO", "NWC"), {"strides": (2,)}),
    "three": ((4, 5, 4, 3, 2), (2, 2, 2, 2, 3), ("NDHWC", "DHWIO", "NDHWC"), {"strides": (1,) * 3}),
}
SLOW = {"strides", "dilated", "groups", "a result of another order", "one dimension", "jit", "checkpoint"}


def loss_of(name, around=lambda function: function):
    _, _, dimensions, options = CASES[name]
    function = around(functools.partial(convolved, dimensions=dimensions, **options))
    return lambda kernel, rows: jnp.sin(function(rows, kernel)).sum()


def programs(name, **around):
    """`loop(scan)`: gradients summed over three micro-batches, by one loop or the other."""
    rows, kernel = CASES[name][:2]
    batches, kernel, loss = jnp.asarray(RANDOM.normal(size=(3, *rows))), jnp.ones(kernel), loss_of(name, **around)

    def body(total, rows):
        value, gradients = jax.value_and_grad(loss, (0, 1))(kernel, rows)
        return total + gradients[0], (value, gradients[1])

    return lambda scan: jax.jit(lambda: scan(body, jnp.zeros_like(kernel), batches))


def in_a_scan(function):
    def repeated(rows, kernel):
        again = lambda total, _: (total + function(rows, kernel), None)  # noqa: E731
        return jax.lax.scan(again, function(rows, kernel), length=2)[0]

    return repeated


def in_a_branch(function):
    return lambda rows, kernel: jax.lax.cond(
        rows.sum() > 0, function, lambda *both: 2 * function(*both), rows, kernel
    )  # fmt: skip


AROUND = {"jit": jax.jit, "checkpoint": jax.checkpoint, "scan": in_a_scan, "cond": in_a_branch}


def each(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in names]


def orders(program, *arguments):
    """In which orders of dimensions the compiled program convolves."""
    return set(re.findall(r"dim_labels=([^,\s]+)", program.lower(*arguments).compile().as_text()))


def assert_the_same(program):
    found, expected = program(scan)(), program(jax.lax.scan)()
    assert_same(found, expected)
    assert [a.dtype for a in jax.tree.leaves(found)] == [b.dtype for b in jax.tree.leaves(expected)]


@pytest.mark.parametrize("name", each(CASES))
def test_a_loops_convolutions_are_the_same_in_the_orders_that_they_have_outside_of_loops(name):
    assert_the_same(programs(name))
    if name != "groups":  # which XLA makes of it is not ours to order
        outside = jax.jit(jax.value_and_grad(loss_of(name), (0, 1)))
        assert orders(programs(name)(scan)) == orders(outside, jnp.ones(CASES[name][1]), jnp.ones(CASES[name][0]))


@pytest.mark.parametrize("around", each(AROUND))
def test_convolutions_inside_of(around):
    program = programs("plain", around=AROUND[around])
    assert_the_same(program)
    assert orders(program(scan)) == OWN


def test_xla_does_not_do_it_by_itself():
    assert orders(programs("plain")(jax.lax.scan)) > OWN


def test_an_update_in_micro_batches_convolves_in_the_order_that_is_quick():
    def loss(kernel, rows):
        return (jax.nn.relu(convolved(rows, kernel, NHWC, (1, 1))) ** 2).mean()

    step, args = in_micro_batches(loss, 2), (jnp.ones((3, 3, 3, 5)), jnp.asarray(RANDOM.normal(size=(8, 6, 6, 3))))
    assert orders(step, *args) == OWN
    assert_same(step(*args), at_once(loss)(*args))


def test_a_loop_without_convolutions_is_the_loop_that_was_written():
    def body(total, x):
        return total + jnp.tanh(x) @ total, {"x": x.sum(), "none": None}

    arguments = jnp.ones((2, 2)), jnp.ones((3, 2, 2))
    plain = jax.make_jaxpr(functools.partial(jax.lax.scan, body))(*arguments)
    assert str(jax.make_jaxpr(functools.partial(scan, body))(*arguments)) == str(plain)
