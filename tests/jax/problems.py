"""Small networks, batches and losses in double precision."""

import jax
import jax.numpy as jnp
import numpy as np


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
