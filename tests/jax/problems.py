"""Small networks and batches in double precision, and the naive oracle: whole batches, row by row where it matters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from tests.reference import FLOAT64, relative_error

DATA = P("data")


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


PARAMS, BATCH = network(), rows(11)


def errors(params, x, y):
    """Of each row."""
    return ((outputs(params, x) - y) ** 2).sum(axis=-1)


def squared_error(params, batch):
    """The mean over rows."""
    return errors(params, *batch).mean()


def masked_error(params, batch):
    """The mean over the rows that count."""
    x, y, mask = batch
    return (errors(params, x, y) * mask).sum() / mask.sum()


def counted(batch):
    """What `masked_error` is a mean over."""
    return batch[2].sum()


def taken(batch, start, stop):
    """Rows of a batch."""
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)


def stacked(*trees):
    """One tree, with an axis ahead for each of its leaves."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def tree_error(actual, expected):
    """`relative_error` over the leaves of two pytrees of the same structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    return relative_error(jax.tree.leaves(actual), jax.tree.leaves(expected))


def assert_same(actual, expected, within=FLOAT64):
    assert tree_error(actual, expected) <= within


def assert_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


@functools.cache
def at_once(loss_fn, **keywords):
    """The large batch's loss and gradients: the oracle, compiled once for each function and its batches' shapes."""
    return jax.jit(jax.value_and_grad(loss_fn, **keywords))


def in_micro_batches(loss_fn, micro_batch_size, **keywords):
    """The same in micro-batches."""
    return jax.jit(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=micro_batch_size, **keywords))


def assert_large_batch(loss_fn, size, *args, within=FLOAT64, **options):
    """In micro-batches of that size, loss and gradients are those of plain JAX on the whole batch."""
    plain = at_once(loss_fn, **{name: options[name] for name in ("argnums", "has_aux") if name in options})
    assert_same(in_micro_batches(loss_fn, size, **options)(*args), plain(*args), within)


def mesh_of(kind, shape=(4,), names=("data",)):
    """Devices, with "Explicit" or "Auto" axes."""
    return jax.make_mesh(shape, names, axis_types=(AxisType[kind],) * len(shape))


def placed(tree, mesh, spec=DATA):
    return jax.device_put(tree, NamedSharding(mesh, spec))
