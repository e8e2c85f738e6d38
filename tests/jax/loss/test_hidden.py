"""Losses that look like a mean over rows without a derivative, in one of their traces, or as whole numbers."""

import jax
import jax.numpy as jnp
import pytest

import gradaccum.jax

X, COUNTS = jax.random.normal(jax.random.key(0), (10, 3)), jnp.arange(10) % 4
W = jnp.array([0.5, -1.0, 2.0])


def own(function, forward, backward):
    found = jax.custom_vjp(function)
    found.defvjp(forward, backward)
    return found


centred = own(lambda x: x, lambda x: (x - x.mean(0), None), lambda _, g: (g,))
clipped_tanh = own(jnp.tanh, lambda x: (jnp.tanh(x), None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
decayed = own(lambda p: p, lambda p: (p, p), lambda p, g: (g + 0.1 * p,))


@jax.custom_jvp
def centred_too(x):
    return x


centred_too.defjvp(lambda x, t: (x[0] - x[0].mean(0), t[0]))


@jax.custom_gradient
def normalised(x):
    return x, lambda g: g / jnp.sqrt((g**2).sum())


@jax.custom_gradient
def reversal(x):
    return x, lambda g: -g


def weighed(count):
    return lambda p, b: ((b[0] @ p) ** 2 * b[1]).sum() / count(b[1]).sum()


CASES = {
    "a forward function of its own": (lambda p, b: (centred(b[0] @ p) ** 2).mean(), {}, "looks across the rows"),
    "a forward function, as jvp": (lambda p, b: (centred_too(b[0] @ p) ** 2).mean(), {}, "looks across the rows"),
    "custom_gradient": (lambda p, b: (normalised(b[0] @ p) ** 2).mean(), {}, "The custom derivative"),
    "custom_gradient, by rows": (lambda p, b: (reversal(b[0] @ p) ** 2).mean(), {}, ""),
    "a derivative for JAX' function": (lambda p, b: clipped_tanh(b[0] @ p).mean(), {}, "The custom derivative"),
    "decay in a mean": (lambda p, b: ((b[0] @ decayed(p)) ** 2).mean(), {}, ""),
    "decay in a sum": (
        lambda p, b: ((b[0] @ decayed(p)) ** 2).sum(), {"reduction": "sum"}, "The custom derivative",
    ),
    "counts, weighed by whether there is one": (
        weighed(lambda n: n), {"weight": lambda b: b[1].astype(bool).sum()}, "Whether `weight` equals that is unknown",
    ),
    "whether there is one, weighed by counts": (
        weighed(lambda n: n.astype(bool)), {"weight": lambda b: b[1].sum()}, "Whether `weight` equals that is unknown",
    ),
    "whole numbers of another width": (
        weighed(lambda n: n.astype(jnp.int32)), {"weight": lambda b: b[1].astype(jnp.int16).astype(float).sum()},
        "Whether `weight` equals that is unknown",
    ),
    "the product of what all rows share": (
        lambda p, b: (b[0] @ p).mean() * jnp.prod(jnp.full(len(b[0]), 0.9)), {}, "number of rows",
    ),
    "1e-8 more rows": (lambda p, b: (b[0] @ p).sum() / (len(b[0]) + 1e-8), {}, "goes with the number of rows, but"),
    "a window that moves rows": (
        lambda p, b: (
            jax.lax.reduce_window(b[0][:, 0], 0.0, jax.lax.add, (1,), (1,), ((1, -1),)) * (b[0] @ p)
        ).mean(), {}, "looks across the rows",
    ),
    "a branch that takes other inputs": (
        lambda p, b: (lambda y, z: jax.nn.relu(y - z if len(z) > 4 else z - y))(b[0] @ p, b[0][:, 0]).mean(), {},
        "operations for 3 rows differ from those for 10",
    ),
    "a branch that takes another part": (
        lambda p, b: (lambda n, h: h[n:] if n > 4 else h[:n])(
            len(b[0]), jnp.concatenate([b[0] @ p, (b[0] @ p) ** 2])
        ).mean(), {}, "is not followed (slice)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_hides_is_named(name, caplog):
    loss_fn, options, message = CASES[name]
    try:
        jax.eval_shape(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, **options), W, (X, COUNTS))
        said = caplog.text
    except ValueError as error:
        said = str(error)
    assert message in said
    assert bool(said) == bool(message)
