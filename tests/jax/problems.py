"""Small networks and batches in double precision, and the naive oracle: whole batches, row by row where it matters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import gradaccum.jax
from tests.reference import relative_error


def network(seed=0, inputs=5, outputs=3, dtype=jnp.float64):
    """Parameters of two layers, in a dict."""
    random = np.random.default_rng(seed)
    shapes = {"hidden": {"kernel": (inputs, 7), "bias": (7,)}, "out": {"kernel": (7, outputs), "bias": (outputs,)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(0.5 * random.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def outputs(params, x):
    """What the network makes of rows."""
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def rows(count, seed=1, inputs=5, outputs=3, dtype=jnp.float64):
    """`(x, y)` with so many rows."""
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(count, inputs)), random.normal(size=(count, outputs))
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def squared_error(params, batch):
    """The mean over rows."""
    x, y = batch
    return ((outputs(params, x) - y) ** 2).sum(axis=-1).mean()


def tree_error(actual, expected):
    """`relative_error` over the leaves of two pytrees of the same structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    return relative_error(jax.tree.leaves(actual), jax.tree.leaves(expected))


@functools.cache
def at_once(loss_fn, **keywords):
    """The large batch's loss and gradients: the oracle, compiled once for each function and its batches' shapes."""
    return jax.jit(jax.value_and_grad(loss_fn, **keywords))


def in_micro_batches(loss_fn, micro_batch_size, **keywords):
    """The same in micro-batches."""
    return jax.jit(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=micro_batch_size, **keywords))
