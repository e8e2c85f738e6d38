"""What a loss computes is seen when it is traced: exact ones pass in silence, wrong ones are refused by line.

A row is a loss of what it names among parameters, the batch, a key and a state, and what is said of it. tests/jax/fuzz
has many more, of pieces.
"""

import inspect
import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import gradaccum.jax
from gradaccum.jax import check_equivalence
from tests.jax.comparisons import assert_large_batch, mesh_of
from tests.jax.problems import taken

RANDOM = np.random.default_rng(0)
KEY, STATE = jax.random.key(0), {"n": jnp.zeros((), int), "u": jnp.ones(())}
PARAMS = {
    name: jnp.asarray(RANDOM.normal(size=shape))
    for name, shape in {
        "v": (4,), "w": (4, 5), "table": (20, 4), "qkv": (4, 12), "square": (3, 3),
        "kernel": (3, 3, 2, 4), "taps": (3, 2, 4), "line": (3,),
    }.items()
}  # fmt: skip
BATCH = {
    **{name: jnp.asarray(RANDOM.normal(size=(8, *shape))) for name, shape in {
        "x": (4,), "z": (4,), "text": (3, 4), "squares": (3, 3), "images": (6, 6, 2), "signals": (6, 2),
    }.items()},
    "mask": jnp.asarray(RANDOM.random((8, 3)) > 0.3),
    "soft": jnp.asarray(RANDOM.random((8, 3))),
    "labels": jnp.asarray(RANDOM.integers(0, 5, 8)),
    "counts": jnp.arange(8) % 4,
    "ids": jnp.asarray(RANDOM.permutation(100)[:8]),
    "keys": jax.random.split(KEY, 8),
}  # fmt: skip


def by_names(function):
    """Of parameters, batch, key and state a function gets what it names."""
    names = inspect.signature(function).parameters

    def named(p, b, *more):
        known = p | b | dict(zip(("key", "state"), more))
        return function(**{name: known[name] for name in names if name in known})

    return named


def case(loss, says="", *, size=3, weight=None, **options):
    """A loss, what is said of it, the rows of micro-batches, and keywords."""
    if weight is not None:
        options["weight"] = lambda b: by_names(weight)({}, b)
    return by_names(loss), says, size, options


def traced(loss, size=3, batch=BATCH, more=(KEY, STATE), **options):
    jax.eval_shape(gradaccum.jax.value_and_grad(loss, micro_batch_size=size, **options), PARAMS, batch, *more)


COUNTED = {"weight": lambda mask: mask.sum()}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def tokens(v, x, mask):
    return ((x @ v)[:, None] ** 2 * mask).sum()


def token_mean(v, x, mask):
    return tokens(v, x, mask) / mask.sum()


def over(denominator, of=lambda mask, soft: mask):
    """A mean over what is in the mask, or over the soft one, guarded so."""
    return lambda v, x, mask, soft: tokens(v, x, of(mask, soft)) / denominator(of(mask, soft).sum())


def class_weighed(w, x, labels):
    weights = jnp.arange(1.0, 6.0)[labels]
    return (cross_entropy(x @ w, labels) * weights).sum() / weights.sum()


def in_single(denominator, says=""):
    def loss(v, x, mask):
        mask = mask.astype(jnp.float32)
        return tokens(v.astype(jnp.float32), x.astype(jnp.float32), mask) / denominator(mask.sum())

    return case(loss, says, weight=lambda mask: mask.astype(jnp.float32).sum())


def by_confidence(detached):
    """A mean weighed by what follows from the parameters, and its weight, which a gradient doesn't flow through."""

    def loss(v, x, z):
        each = jax.nn.sigmoid(z @ v)
        return {"it": (((x @ v) ** 2 * each).sum() / detached(each.sum()), lax.stop_gradient(each.sum()))}

    return case(loss)[0]


def by_position(labels, w, x, numbers=jnp):
    return -jax.nn.log_softmax(x @ w)[numbers.arange(len(x)), labels].mean()


def contrastive(w, x):
    return -jnp.diag(jax.nn.log_softmax((h := x @ w) @ h.T)).mean()


# Random numbers and state.


def dropout(v, x, key):
    return ((x @ v) * jax.random.bernoulli(key, 0.5, (len(x),))).mean()


def keys_for_rows(v, x, key):
    draws = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(jax.random.split(key, len(x)))
    return ((x @ v) * draws).mean()


def folded(v, x, ids):
    keep = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(KEY, i), 0.5))
    return ((x @ v) * keep(ids)).mean()


def with_state(loss, moved, says=""):
    return case(lambda v, x, state: (loss(v, x, state).mean(), state | moved(v, state)), says, state_argnum=3)


def beside(how, aside, says="", loss=lambda v, x, mask: (x @ v).mean(), **options):
    """A loss with an aux."""
    return case(
        lambda v, x, mask: (loss(v, x, mask), {"it": aside(v, x, mask)}), says, has_aux=True, aux=how, **options
    )


# Custom derivatives.


def own(backward, function=lambda x: x, forward=None):
    """A function with a derivative of its own, and perhaps another function where it is differentiated."""
    found = jax.custom_vjp(lambda x: function(x))
    found.defvjp(lambda x: ((forward or function)(x), x), lambda x, g: (backward(x, g),))
    return found


reversal = own(lambda x, g: -0.5 * g)
decayed = own(lambda x, g: g + 0.1 * x)
centred = own(lambda x, g: g, forward=lambda x: x - x.mean(0))
centred_too = jax.custom_jvp(lambda x: x)
centred_too.defjvp(lambda x, t: (x[0] - x[0].mean(0), t[0]))
clipped_tanh = jax.custom_vjp(jnp.tanh)
clipped_tanh.defvjp(lambda x: (jnp.tanh(x), None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
reversal_too = jax.custom_gradient(lambda x: (x, lambda g: -g))

# Layers, linear systems, devices.


def attention(qkv, text):
    q, k, v = jnp.split(text @ qkv, 3, -1)
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ v


def recurrent(qkv, text):
    def step(h, u):
        reset, update, new = jnp.split((u + h) @ qkv, 3, -1)
        return jax.nn.sigmoid(update) * h + jnp.tanh(reset * new), h

    return jnp.swapaxes(lax.scan(step, jnp.zeros_like(text[:, 0]), jnp.swapaxes(text, 0, 1))[1], 0, 1)


def mean_of(h, mask):
    return ((h**2).mean(-1) * mask).sum() / mask.sum()


def positive(x):
    return x @ jnp.swapaxes(x, -1, -2) + 3 * jnp.eye(3)


MESH = mesh_of("Auto", (2,), ("d",))
SHARD, ALL = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()


def on_devices(function, out=ALL, of_parameters=ALL, check=True):
    specs = (of_parameters, SHARD, SHARD)
    return jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=out, check_vma=check)


def tokens_of(v, x, m):
    return ((x @ v.reshape(4)) ** 2 * m).sum()


def over_devices(v, text, mask):
    mean = lambda v, x, m: lax.psum(((x @ v) ** 2 * m).sum(), "d") / lax.psum(m.sum(), "d")  # noqa: E731
    return on_devices(mean)(v, text, mask)


def rows_on_devices(row):
    return lambda w, x, z: (on_devices(lambda w, x, _: jnp.tanh(row(x @ w)), SHARD)(w, x, z) ** 2).mean()


def by_counts(mask):
    return jnp.stack([mask.sum() > 8, mask.sum() > 20])


def known(z):
    return jnp.where(jnp.isnan(z), 0.0, 1.0)


def count_of(count):
    return lambda v, x, counts: ((x @ v) ** 2 * counts).sum() / count(counts).sum()


# Convolutions.


def convolved(image, kernel, numbers="NWC WIO NWC", padding="SAME", **options):
    return lax.conv_general_dilated(image, kernel, (1,), padding, dimension_numbers=numbers.split(), **options)


def squares(x):
    return (x**2).mean()


def pooled(kernel, images):
    h = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = lax.reduce_window(jax.nn.relu(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return (h.reshape(len(images), -1) ** 2).mean()


def batches_of_rows(taps, signals):
    kernels = jnp.broadcast_to(taps[:, :, None], (3, 2, len(signals), 4)).reshape(3, 2, -1)
    return squares(convolved(signals, kernels, batch_group_count=len(signals)))


def contracted_features(line, signals):
    kernel = line[:2, None, None] * line * jnp.ones((1, len(signals), 1))
    return convolved(signals[None, :, :3, 0], kernel, "NCW OIW NCW")


def contracted_kernels(line, signals):
    image = jnp.ones((1, 5, len(signals))) * line.sum()
    return convolved(jnp.concatenate([image] * 2, -1), signals, "NWC IWO NWC", feature_group_count=2)


def gradients_of_all(taps, signals, **groups):
    return squares(jax.grad(lambda q: squares(jnp.tanh(convolved(signals, q, **groups))))(taps))


SUM = {"reduction": "sum"}
EXACT_CONVOLUTIONS = {
    "groups of features": case(lambda taps, signals: squares(convolved(signals, taps[:, :1], feature_group_count=2))),
    "groups of the batch": case(
        lambda taps, signals: squares(convolved(jnp.concatenate([signals, 2 * signals]), taps, batch_group_count=2))
    ),
    "rows are kernels": case(lambda taps, signals: squares(convolved(taps[None, ..., 0], signals, "NWC OWI NWC"))),
    "a group for each row": case(
        lambda line, z: squares(convolved(
            z[None], line[:, None, None] * jnp.ones((1, 1, len(z))), "NCW WIO NCW", feature_group_count=len(z)
        ))
    ),
    "a group of the batch for each row": case(batches_of_rows),
    "each row's gradients":
        case(lambda taps, signals: jax.vmap(lambda row: gradients_of_all(taps, row[None]))(signals).mean()),
    "a sum over features that are rows": case(lambda line, signals: contracted_features(line, signals).sum(), **SUM),
    "a sum over kernels' features that are rows, of two groups":
        case(lambda line, signals: contracted_kernels(line, signals).sum(), **SUM),
    "gradients of a sum":
        case(lambda taps, signals: (jax.grad(lambda q: convolved(signals, q).sum())(taps) * taps).sum(), **SUM),
}  # fmt: skip
BY_LINE = "`conv_general_dilated` at test_verdict.py:"
WRONG_CONVOLUTIONS = {
    "features that are rows": case(lambda line, signals: squares(contracted_features(line, signals)), BY_LINE),
    "two groups of kernels' features that are rows":
        case(lambda line, signals: squares(contracted_kernels(line, signals)), BY_LINE),
    "along the rows": case(lambda taps, signals: squares(convolved(signals[None, :, 0, :1], taps[:, :1])), BY_LINE),
    "halves of the rows in groups":
        case(lambda taps, signals: squares(convolved(signals, taps, batch_group_count=2)), BY_LINE, size=4),
    "halves of the kernels in groups": case(
        lambda taps, signals: squares(
            convolved(taps[None, ..., 0], signals[:, :, :1], "NWC OWI NWC", feature_group_count=2)
        ), BY_LINE, size=4,
    ),
    "each row with each":
        case(lambda line, signals: squares(convolved(signals, signals * line.sum(), "NWC OWI NWC")), BY_LINE),
    "gradients of all rows": case(gradients_of_all, BY_LINE),
    "grouped gradients of all rows":
        case(lambda taps, signals: gradients_of_all(taps[:, :1], signals, feature_group_count=2), BY_LINE),
}  # fmt: skip

SILENT = {
    "a count, in a branch":
        case(lambda v, x, mask: lax.cond(mask.sum() > 0, lambda: token_mean(v, x, mask), lambda: 0.0), **COUNTED),
    "1 where there is nothing": case(over(lambda n: jnp.where(n == 0, 1, n)), **COUNTED),
    "1e-12 more": case(over(lambda n: n + 1e-12), **COUNTED),
    "1e-13 more than numbers": case(over(lambda n: n + 1e-13, lambda mask, soft: soft), weight=lambda soft: soft.sum()),
    "1e-8 more in single precision": in_single(lambda n: n + jnp.float32(1e-8)),
    "divided before it is summed":
        case(lambda v, x, mask: ((x @ v)[:, None] ** 2 * mask / mask.sum()).sum(), **COUNTED),
    "counted in two steps":
        case(lambda v, x, mask: tokens(v, x, mask) / mask.sum(-1).sum(), weight=lambda mask: mask.astype(float).sum()),
    "divided by what it is multiplied with, which is never 0": case(
        lambda v, x, soft: tokens(v, x, jnp.exp(soft)) / jnp.exp(soft).sum() * jnp.exp(soft).mean()
    ),
    "a sum over itself, or 1 where it is 0": case(
        lambda v, x, mask: (x @ v).mean() * jnp.where(mask.any(), mask.sum() / mask.sum(), 1.0)
    ),
    "a sum over itself, where the micro-batch weighs nothing":
        case(lambda v, x, mask: token_mean(v, x, mask) * mask.sum() / mask.sum(), **COUNTED),
    "mean(where=)":
        case(lambda v, x, mask: jnp.mean((x @ v)[:, None], where=mask[:, :1]), weight=lambda mask: mask[:, :1].sum()),
    "targets that are NaN, weighed":
        case(lambda v, x, soft: tokens(v, x, known(soft)) / known(soft).sum(), weight=lambda soft: known(soft).sum()),
    "labels by place": case(by_position),
    "labels by place, in NumPy's numbers": case(lambda labels, w, x: by_position(labels, w, x, np)),
    "one-hot labels, written by place":
        case(lambda w, x, labels: (jnp.zeros((len(x), 5)).at[jnp.arange(len(x)), labels].set(1.0) * (x @ w)).mean()),
    "class weights": case(class_weighed, weight=lambda labels: jnp.arange(1.0, 6.0)[labels].sum()),
    "convolutions and pools": case(pooled),
    **{
        f"tokens of all rows in one axis, {how}": case(
            lambda v, text, mask: jnp.sum((text @ v).reshape(-1), where=mask.reshape(-1))
            / jnp.count_nonzero(mask.reshape(-1)), weight=weight,
        )
        for how, weight in {
            "by a sum": lambda mask: mask.sum(), "by a count": lambda mask: jnp.count_nonzero(mask),
        }.items()
    },
    "labels of all rows in one axis": case(
        lambda v, x, mask, counts: (lambda y, m: jnp.where((y != 0) & m, (x @ v).repeat(3), 0).sum()
            / ((y != 0) & m).sum())((counts[:, None] * jnp.ones(3, int)).reshape(-1), mask.reshape(-1)),
        weight=lambda mask, counts: ((counts[:, None] * jnp.ones(3, int) != 0) & mask).sum(),
    ),
    "at least 1, of a mask of floats": case(
        over(lambda n: jnp.maximum(n, 1), lambda mask, soft: mask.astype(float)),
        weight=lambda mask: mask.astype(float).sum(),
    ),
    "a mean over a detached sum": (by_confidence(lax.stop_gradient), "", 3, {}),
    "a mean that is 0 where nothing counts": case(
        lambda v, x, mask: jnp.where(jnp.isnan(it := token_mean(v, x, mask)), 0.0, it), **COUNTED
    ),
    "two sums in one guard": case(
        lambda v, x, mask, soft: tokens(v, x, mask) / jnp.where(soft.sum() + mask.sum() > 0, mask.sum(), 1), **COUNTED
    ),
    "a statistic times 0": case(lambda v, x: ((x @ v) ** 2).mean() + 0.0 * jnp.var(x @ v)),
    "ctc": case(
        lambda w, text: optax.ctc_loss(
            text @ w, jnp.zeros((len(text), 3)), jnp.ones((len(text), 2), int), jnp.zeros((len(text), 2))
        ).mean()
    ),
    "dropout": case(dropout, rng_argnum=2),
    "a key for each row": case(keys_for_rows, rng_argnum=2),
    "keys in the batch":
        case(lambda v, x, keys: ((x @ v) * jax.vmap(lambda k: jax.random.bernoulli(k, 0.5))(keys)).mean()),
    "keys by ids": case(folded),
    "noise on parameters": case(lambda v, x, key: ((x @ (v + jax.random.normal(key, v.shape))) ** 2).mean()),
    "parameters for each row, repeated": case(lambda v, x: (jnp.tile(v, (len(x), 1)) * x).mean()),
    "parameters for each row, one behind the other":
        case(lambda v, x: (jnp.tile(v**2, len(x)).reshape(x.shape) * x + jnp.tile(v[:1] * x[:, :2], (1, 2))).mean()),
    "buckets": case(lambda v, x: ((x @ v) * jnp.searchsorted(jnp.arange(3.0), x[:, 0])).mean()),
    "masks with what all rows share": case(lambda w, x, mask: (x @ w[:, :3] * (mask | (jnp.arange(3) == 0))).mean()),
    # Custom derivatives.
    "in a loop over layers":
        case(lambda v, x: lax.scan(lambda h, k: (reversal(jnp.tanh(h * k)), None), x @ v, jnp.ones(3))[0].mean()),
    "custom_gradient, by rows": case(lambda v, x: (reversal_too(x @ v) ** 2).mean()),
    "decay in a mean": case(lambda v, x: ((x @ decayed(v)) ** 2).mean()),
    # State and aux.
    "a counter": with_state(lambda v, x, state: x @ v, lambda v, state: {"n": state["n"] + 1}),
    "what stands still": with_state(lambda v, x, state: x @ v * state["u"], lambda v, state: {"n": state["n"] + 1}),
    "a key of state": with_state(
        lambda v, x, state: x @ v * jax.random.bernoulli(jax.random.fold_in(KEY, state["n"]), 0.5, (len(x),)),
        lambda v, state: {"n": state["n"] + 1},
    ),
    "aux: a mean": beside("mean", lambda v, x, mask: (x @ v).mean()),
    "aux: the norm of parameters": beside("mean", lambda v, x, mask: (v**2).sum()),
    "aux: a sum": beside("sum", lambda v, x, mask: {"right": ((x @ v) > 0).sum(), "of": len(x)}),
    "aux: rows": beside("concat", lambda v, x, mask: jax.nn.softmax(x[:, :, None] * v, axis=1)),
    "aux: a mean over the same": beside("mean", token_mean, loss=token_mean, **COUNTED),
    # Layers, linear systems, devices.
    "query, key and value of one product": case(lambda qkv, text, mask: mean_of(attention(qkv, text), mask), **COUNTED),
    "gates of a recurrent cell": case(lambda qkv, text, mask: mean_of(recurrent(qkv, text), mask), **COUNTED),
    "systems of rows":
        case(lambda v, squares, x: jnp.linalg.solve(positive(squares) * v[0] ** 2, x[:, :3, None]).mean()),
    "one system": case(lambda square, x: (jnp.linalg.solve(positive(square), x[:, :3].T) ** 2).mean()),
    "a system that is solved step by step": case(
        lambda square, x: (
            x[:, :3] @ jax.scipy.sparse.linalg.cg(lambda v: positive(square) @ v, jnp.ones(3))[0]
        ).mean()
    ),
    "a density": case(
        lambda square, x: -jax.scipy.stats.multivariate_normal.logpdf(x[:, :3], square[0], positive(square)).mean()
    ),
    "what isn't NaN, with its weight":
        case(lambda v, x, soft: (lambda z: {"it": (jnp.nanmean(z), (~jnp.isnan(z)).sum())})(x @ v[:, None] * soft)),
    "a list in each row":
        case(lambda v, text, soft: optax.losses.ranking_softmax_loss(text @ v, soft, reduce_fn=jnp.mean)),
    "rows on devices": case(rows_on_devices(lambda h: h), size=4),
    "tokens on devices": case(over_devices, size=4, **COUNTED),
    **{
        f"tokens but the first, {how}": case(lambda v, x, mask: token_mean(v, x, mask[:, 1:]), weight=weight)
        for how, weight in {
            "as they are": lambda mask: mask[:, 1:].sum(),
            "transposed": lambda mask: mask[:, 1:].T.astype(float).sum(),
            "reversed": lambda mask: mask[:, :0:-1].sum(),
        }.items()
        if how != "reversed" or jax.__version_info__ >= (0, 10)  # before, a gather, which isn't followed: it can't tell
    },
    **EXACT_CONVOLUTIONS,
}  # fmt: skip
ACROSS, CHUNK, DERIVATIVE, RNG = (
    "looks across the rows", "gradaccum.jax.chunked", "The custom derivative", "rng_argnum=",
)  # fmt: skip
REFUSED = {
    "a sum": case(lambda v, x: ((x @ v) ** 2).sum(), 'Pass reduction="sum"'),
    "a mean and a tenth of a sum": case(lambda v, x: (x @ v).mean() + 0.1 * ((x @ v) ** 2).sum(), ACROSS),
    "a sum over a constant": case(lambda v, x: ((x @ v) ** 2).sum() / 8, "It is a sum over its rows"),
    "a sum and a penalty": case(lambda v, x: (x @ v).sum() + (v**2).sum(), "counted once per micro-batch"),
    "a penalty times rows": case(lambda v, x: (x @ v).mean() + len(x) * (v**2).sum(), "a term without rows"),
    "a token mean": case(token_mean, "It divides by what is summed at test_verdict.py:"),
    "class weights": case(class_weighed, "Pass weight="),
    "labels that are ignored": case(
        lambda v, x, labels: jnp.where(labels != -100, (x @ v) ** 2, 0).sum() / (labels != -100).sum(), "Pass weight="
    ),
    "rows, weighed": case(lambda v, x: (x @ v).mean(), "Leave `weight` out", **COUNTED),
    "two denominators":
        case(lambda v, x, mask: token_mean(v, x, mask) + (x @ v).mean(), "Return them as {name: (loss, weight)}"),
    "a wrong weight of several":
        case(lambda v, x, mask: {"t": (token_mean(v, x, mask), len(x))}, "As to the loss 't': It divides by"),
    "a mean over a sum that a gradient flows through": (by_confidence(lambda s: s), ACROSS, 3, {}),
    "contrastive": case(contrastive, "`dot_general` at test_verdict.py:"),
    "two views": case(
        lambda w, x, z: -jax.nn.log_softmax(
            (h := jnp.concatenate([x @ w, z @ w])) @ h.T - 1e9 * jnp.eye(len(h))
        )[at := jnp.arange(len(h)), (at + len(x)) % len(h)].mean(), CHUNK,
    ),
    "batch norm": case(
        lambda w, x: (jnp.tanh(((h := x @ w) - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)) ** 2).mean(),
        "`reduce_sum` at test_verdict.py:",
    ),
    "dice": case(
        lambda v, x, soft: 1 - 2 * ((h := jax.nn.sigmoid(x @ v)[:, None]) * soft).sum() / (h.sum() + soft.sum()), ACROSS
    ),
    "a detached statistic": case(lambda v, x: ((x @ v) ** 2 / lax.stop_gradient(((x @ v) ** 2).mean())).mean(), ACROSS),
    "its place as its label": case(lambda w, x: cross_entropy(x @ w, jnp.arange(len(x)) % 3).mean(), ACROSS),
    "columns by place":
        case(lambda w, x: jnp.take_along_axis(x @ w, jnp.arange(len(x))[:, None] % 3, 1).mean(), ACROSS),
    "a column by place, row by row":
        case(lambda w, x: jax.vmap(lambda row, i: (row @ w)[i % 3])(x, jnp.arange(len(x))).mean(), ACROSS),
    "a key": case(dropout, "from a key that all micro-batches share"),
    "a key that is split for rows": case(keys_for_rows, RNG),
    "a raw key": case(lambda v, x: dropout(v, x, jax.random.PRNGKey(0)), RNG),
    "keys by place": case(lambda v, x: folded(v, x, jnp.arange(len(x))), RNG),
    "dropout over its count":
        case(lambda x, v: ((x * v * (h := jax.random.uniform(KEY, x.shape))).sum(-1) / h.sum(-1)).mean(), RNG),
    "targets that are NaN": case(lambda v, x, soft: tokens(v, x, known(soft)) / known(soft).sum(), "It divides by"),
    "what isn't NaN": case(lambda v, x, soft: jnp.nanmean(x @ v[:, None] * soft), "Pass weight="),
    "tokens behind a split": case(lambda qkv, text, mask: mean_of(attention(qkv, text), mask), "Pass weight="),
    "tokens behind gates": case(lambda qkv, text, mask: mean_of(recurrent(qkv, text), mask), "Pass weight="),
    "tokens on devices, unweighed": case(over_devices, "Pass weight=", size=4),
    "a product of all rows": case(lambda v, x: (x @ v).mean() * jnp.prod(jnp.full(len(x), 0.9)), "the number of rows"),
    "the largest of all rows, nearly": case(lambda v, x: lax.approx_max_k(x @ v, 2)[0].sum(), ACROSS, **SUM),
    # Custom derivatives.
    "a derivative for JAX' function": case(lambda v, x: clipped_tanh(x @ v).mean(), DERIVATIVE),
    "decay in a sum": case(lambda v, x: ((x @ decayed(v)) ** 2).sum(), DERIVATIVE, **SUM),
    "a forward function of its own": case(lambda v, x: (centred(x @ v) ** 2).mean(), ACROSS),
    "a forward function, as jvp": case(lambda v, x: (centred_too(x @ v) ** 2).mean(), ACROSS),
    # Statistics of the batch.
    "halves of the batch": case(lambda w, x: (lambda a, b: (a * b).mean())(*jnp.split(x @ w, 2)), ACROSS, size=4),
    "a batch mixed with its reverse":
        case(lambda v, x: jnp.tanh((0.7 * x + 0.3 * x[::-1]) @ v).mean(), ACROSS),
    "a system of all rows":
        case(lambda v, x: (x @ jnp.linalg.solve(x.T @ x + jnp.eye(4), x.T @ (x @ v))).mean(), ACROSS),
    "statistics of devices": case(rows_on_devices(lambda h: h - h.mean(0)), ACROSS, size=4),
    "sums with weights of the batch":
        case(lambda w, x: ((x @ w * (h := jax.nn.softmax((x @ w).mean(0)))).sum(-1) / h.sum()).mean(), ACROSS),
    "a statistic over its mirror image": case(lambda w, x: (x @ w * (h := (x @ w).mean(0)) / h[::-1]).mean(), ACROSS),
    "a half of what is negative, by a sum that may be":
        case(lambda v, x: (jax.nn.relu((x @ v) * x[:, 0].sum()) / x[:, 0].sum()).mean(), ACROSS),
    "columns by the counts of others":
        case(lambda w, x, mask: ((x @ w[:, :3]) * mask.mean(0) / jnp.roll(mask.mean(0), 1)).mean(), ACROSS),
    "a choice for each column, by counts": case(
        lambda v, x, mask: (jnp.where(by_counts(mask), 1.0, 0.3) * (x @ v)[:, None]).mean(), ACROSS
    ),
    "a choice in a loop, by counts": case(
        lambda v, x, mask: lax.scan(lambda h, c: (jnp.where(c, h, 0.3 * h), None), x @ v, by_counts(mask))[0].mean(),
        ACROSS,
    ),
    "a mean over two sums, weighed by a third": case(
        lambda v, x, z, soft: (lambda a, b, c: {"it": ((x @ v).sum() / (a + c), b)})(
            *(jnp.exp(each).sum() for each in (x, z, soft))
        ), ACROSS,
    ),
    "a window that moves rows":
        case(lambda v, x: (lax.reduce_window(x[:, 0], 0.0, lax.add, (1,), (1,), ((1, -1),)) * (x @ v)).mean(), ACROSS),
    **WRONG_CONVOLUTIONS,
}  # fmt: skip
ELSE, DECIDED, A_SUM = "Whether `weight` equals that is unknown", "can't be decided", "a sum over the rows"
JOINED = "those of aux['it'] look at other rows"
LINES = {
    "each row with itself": case(lambda w, x: jnp.diag((x @ w) @ (x @ w).T).mean(), "dot_general"),
    "a shift that cancels": case(
        lambda w, x: (jnp.log(jnp.exp((h := x @ w) - (top := lax.stop_gradient(h.max()))).sum(-1)) + top).mean(),
        "reduce_max",
    ),
    "a shift by the largest":
        case(lambda w, x: (jax.nn.logsumexp(h := x @ w - (x @ w).max(), axis=-1) - h[:, 0]).mean(), DECIDED),
    "a branch by what is in the batch":
        case(lambda v, x: lax.cond((x > 9).any(), lambda: 1.0, lambda: 2.0) * (x @ v).mean(), "`reduce_or`"),
    "an unknown operation": case(
        lambda v, x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x).mean() + v.sum(),
        "pure_callback",
    ),
    "a sum over what is the same for any rows":
        case(lambda v, x: ((x @ v) ** 2).sum(), A_SUM, weight=lambda x: 1.0),
    # What goes with the number of rows.
    "a power": case(lambda v, x: (x @ v).mean() * v[0] ** len(x), "y=2 for 2 rows, y=8 for 8"),
    "as many of a row as there are rows":
        case(lambda v, text: lax.top_k(text[:, 0] * v[0], len(text) // 3)[0].mean(), "k=1 for 4 rows", size=4),
    "where a slice of each row begins":
        case(lambda v, text: (text.reshape(len(text), -1)[:, len(text) // 3] * v[0]).mean(), "limit_indices="),
    "1e-8 more rows": case(lambda v, x: (x @ v).sum() / (len(x) + 1e-8), "goes with the number of rows, but"),
    "a branch by the number of rows": case(
        lambda v, x: (x @ v).mean() if len(x) > 4 else jnp.tanh(x @ v).mean(),
        "operations for 2 rows differ from those for 8",
    ),
    "a branch for one row": case(
        lambda v, x: (x @ v).mean() * (1.0 if len(x) > 1 else 2.0), "operations for one row differ from those for more",
        size=1,
    ),
    "a branch that takes other inputs": case(
        lambda v, x: (lambda y, z: jax.nn.relu(y - z if len(z) > 4 else z - y))(x @ v, x[:, 0]).mean(),
        "operations for 2 rows differ from those for 8",
    ),
    "a branch that takes another part": case(
        lambda v, x: (lambda n, h: h[n:] if n > 4 else h[:n])(
            len(x), jnp.concatenate([x @ v, (x @ v) ** 2])
        ).mean(), "is not followed (slice)",
    ),
    # What a mean is over.
    "at least 1, of others": case(
        over(lambda n: jnp.maximum(n, 1.0), lambda mask, soft: soft), "(0.25 becomes 1)", weight=lambda soft: soft.sum()
    ),
    "at least 2, of others": case(
        over(lambda n: jnp.maximum(n, 2.0), lambda mask, soft: soft), "(0.25 becomes 2)", weight=lambda soft: soft.sum()
    ),
    "a trace of products": case(
        lambda w, x: jnp.trace(x @ w @ (x @ w).T) / len(x), "compute these alone: (a * b).sum(-1)"
    ),
    "a mask and another one that is transposed, weighed by both as they are": case(
        lambda v, x, squares: (lambda some: ((x @ v)[:, None, None] ** 2 * some).sum() / some.sum())(
            (squares > 0) & (squares.swapaxes(1, 2) > -0.5)
        ), ELSE, weight=lambda squares: ((squares > 0) & (squares > -0.5)).sum(),
    ),
    "1e-8 more in double precision": in_single(lambda n: n.astype(float) + 1e-8, "`add` at test_verdict.py"),
    "a weight that isn't a sum": case(
        lambda v, x, mask: token_mean(v, x, mask) * mask.sum() / (mask.sum() + 1), "(1 becomes 2)",
        weight=lambda mask: mask.sum() + 1,
    ),
    **{
        f"a weight that is 1 where nothing counts, {how}": case(over(lambda n: jnp.maximum(n, 1)), A_SUM, weight=weight)
        for how, weight in {
            "by the larger": lambda mask: jnp.maximum(mask.sum(), 1),
            "by where": lambda mask: jnp.where(mask.any(), mask.sum(), 1),
            "by a branch": lambda mask: lax.cond(mask.sum() == 0, lambda: 1, lambda: mask.sum()),
        }.items()
    },
    "a mean as weight":
        case(lambda v, x, mask: tokens(v, x, mask) / mask.mean(), A_SUM, weight=lambda mask: mask.mean()),
    "a weight by a statistic": case(
        lambda v, x, mask: tokens(v, x, mask) / (mask * mask.mean()).sum(), A_SUM,
        weight=lambda mask: (mask * mask.mean()).sum(),
    ),
    **{
        f"tokens but the first, weighed by {how}":
            case(lambda v, x, mask: token_mean(v, x, mask[:, 1:]), ELSE, weight=weight)
        for how, weight in {"all": lambda mask: mask.sum(), "others": lambda mask: mask[:, :-1].sum()}.items()
    },
    "counts, weighed by whether there is one":
        case(count_of(lambda n: n), ELSE, weight=lambda counts: counts.astype(bool).sum()),
    "whether there is one, weighed by counts":
        case(count_of(lambda n: n.astype(bool)), ELSE, weight=lambda counts: counts.sum()),
    "whole numbers of another width":
        case(count_of(lambda n: n.astype(jnp.int32)), ELSE, weight=lambda counts: counts.astype(jnp.int16).sum() * 1.0),
    "means of devices": case(
        lambda v, text, mask: on_devices(lambda v, x, m: lax.pmean(mean_of((x @ v)[..., None], m), "d"))(v, text, mask),
        ELSE, size=4, **COUNTED,
    ),
    "means of groups of devices": case(
        lambda v, text, mask: on_devices(
            lambda v, x, m: lax.pmean(lax.psum(tokens_of(v, x, m), "d", axis_index_groups=[[0], [1]]), "d"), check=False
        )(v, text, mask), "`psum`", size=4, **SUM,
    ),
    "parameters in parts on devices": case(
        lambda v, text, mask: on_devices(lambda v, x, m: lax.psum(tokens_of(v, x, m), "d"), of_parameters=SHARD)(
            v[:2, None] * jnp.ones(4), text, mask
        ), "`shard_map`", size=4, **SUM,
    ),
    "a loss that isn't divided by what it asks for":
        case(lambda v, x, mask: token_mean(v, x, mask) + jnp.where(mask.any(1).sum() > 0, v[0], 0), DECIDED, **COUNTED),
    "a branch by a mean that may be below 0":
        case(lambda v, x, mask: lax.cond(x.sum() > 0, lambda: token_mean(v, x, mask), lambda: 0.0), DECIDED, **COUNTED),
    # What is 0 / 0 in a micro-batch alone.
    **{
        f"{how} where nothing counts": case(loss, "is 0, it is 0 / 0 or infinite", **options)
        for how, loss, options in [
            ("roots", lambda v, x, mask: (lambda n: (x @ v).mean() * n / n)(jnp.sqrt(mask.sum())), {}),
            ("a mean times its denominator", lambda v, x, mask: token_mean(v, x, mask) * mask.mean(), {}),
            ("a sum of it", lambda v, x, mask: token_mean(v, x, mask) * mask.sum(), {"reduction": "sum"}),
            ("rows", lambda v, x, mask: jnp.tanh(x @ v * (mask.sum() / mask.sum())).mean(), {}),
            ("a penalty times 1", lambda v, x, mask: (x @ v).mean() + (v**2).sum() * (mask.sum() / mask.sum()), {}),
            ("0 times a mean", lambda v, x, mask: (x @ v).mean() + 0.0 * token_mean(v, x, mask), {}),
            ("logarithms", lambda v, x, mask: (lambda n: (x @ v).mean() + (n - n))(jnp.log(mask.sum())), {}),
            ("parts", lambda v, x, soft: (lambda n: (x @ v).mean() * (n / n))(jnp.exp(soft).astype(int).sum()), {}),
            ("a mean over others",
             lambda v, x, mask, soft: token_mean(v, x, mask) * soft.sum() / soft.sum(), COUNTED),
        ]
    },
    # Others.
    "a loss that isn't NaN, where something else is so": case(
        lambda v, x: (lambda it: jnp.where(jnp.isfinite(it) & (x.mean() > 0), 2 * it, 0.0))((x @ v).mean()), DECIDED
    ),
    "a loss that isn't NaN, where something else may be 0": case(
        lambda v, x, mask, counts: (lambda it: jnp.where(jnp.isnan(it), 0.0, it))(
            token_mean(v, x, mask) * counts.sum() / counts.sum()
        ), DECIDED,
        **COUNTED,
    ),
    "the size of a mean": case(lambda v, x: jnp.abs((x @ v).mean()), DECIDED),
    "parts that make the whole":
        case(lambda w, x: sum((part**2).mean() for part in jnp.split(x @ w, 2)) / 2, DECIDED, size=4),
    "a number that doubles with each row":
        case(lambda v, x: lax.scan(lambda c, r: (c + c, None), v[0], x)[0] + (x @ v).mean(), "`scan`"),
    "a sum in a loop over rows":
        case(lambda v, x: lax.scan(lambda c, r: (c + r @ v, None), 0.0, x)[0] / len(x), DECIDED),
    "a power iteration": with_state(
        lambda v, x, state: x @ v / state["u"], lambda v, state: {"u": state["u"] * 0.5 + v.sum()},
        "computed from state that each micro-batch moves: state['u']",
    ),
    "aux: a root of a mean": beside("mean", lambda v, x, mask: jnp.sqrt(((x @ v) ** 2).mean()), "no mean over rows"),
    "aux: a largest": beside("mean", lambda v, x, mask: (x @ v).max(), f"no mean over rows: It {ACROSS}"),
    "aux: a mean that is summed":
        beside("sum", lambda v, x, mask: (x @ v).mean(), "no sum over rows: It is a mean over rows"),
    "aux: a mean over tokens": beside("mean", token_mean, "no mean over rows: It divides by"),
    "aux: a mean over others": beside(
        "mean", lambda v, x, mask: (x @ v).mean(), "no mean over what the loss is a mean over", token_mean, **COUNTED
    ),
    "aux: ranks": beside("concat", lambda v, x, mask: jnp.argsort(x @ v), JOINED),
    "aux: centred rows": beside("concat", lambda v, x, mask: x @ v - (x @ v).mean(), JOINED),
    "aux: numbers of rows": beside("concat", lambda v, x, mask: jnp.arange(len(x)), JOINED),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_an_exact_loss_passes_in_silence(name, caplog):
    loss, _, size, options = SILENT[name]
    traced(loss, size, **options)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_CONVOLUTIONS)
def test_it_is_exact(name):
    loss, _, size, options = EXACT_CONVOLUTIONS[name]
    assert_large_batch(loss, size, PARAMS, BATCH, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_loss_is_refused_when_it_is_traced_unless_it_is_not_verified(name, caplog):
    loss, says, size, options = REFUSED[name]
    with pytest.raises(ValueError, match="would not give the large batch's gradient") as caught:
        traced(loss, size, **options)
    assert says in str(caught.value)
    assert CHUNK in str(caught.value) or says not in (ACROSS, BY_LINE)
    traced(loss, size, verify=False, **options)
    assert not caplog.records


@pytest.mark.parametrize("name", LINES)
def test_what_cannot_be_told_is_one_line(name, caplog):
    loss, says, size, options = LINES[name]
    grad_fn = gradaccum.jax.value_and_grad(loss, micro_batch_size=size, **options)
    for count in (8, 8, 6) if size == 3 else (8, 8):
        jax.eval_shape(grad_fn, PARAMS, taken(BATCH, 0, count), KEY, STATE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert says in record.getMessage()
    assert "verify=False" in record.getMessage()
    caplog.clear()
    traced(loss, size, verify=False, **options)
    assert not caplog.records


@pytest.mark.slow
def test_check_equivalence_silences_the_line(caplog):
    loss = LINES["each row with itself"][0]
    assert check_equivalence(loss, {"w": PARAMS["w"]}, {"x": BATCH["x"]}).ok
    traced(loss)
    assert not caplog.records


def test_an_error_of_the_loss_comes_without_a_line_before_it(caplog):
    with pytest.raises(TypeError, match="reshape"):
        traced(by_names(lambda v, x: (x[:, :3].reshape(-1, 5) @ v).mean()))
    assert not caplog.records


def test_nothing_is_asked_of_a_batch_that_is_one_micro_batch():
    traced(by_names(contrastive), 8)


class Network(nnx.Module):
    def __init__(self, norm, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = norm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


@pytest.mark.parametrize("norm", [nnx.BatchNorm, pytest.param(nnx.LayerNorm, marks=pytest.mark.slow)])
def test_nnx_models_are_seen_through_and_batch_norm_with_its_state_is_a_line(norm, caplog):
    graph, params, state = nnx.split(Network(norm, nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, state):
        model = nnx.merge(graph, params, state, copy=True)
        return cross_entropy(model(batch[0]), batch[1]).mean(), nnx.split(model, nnx.Param, ...)[2]

    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=3, state_argnum=2)
    jax.eval_shape(grad_fn, params, (BATCH["x"].astype(jnp.float32), BATCH["labels"]), state)
    if norm is nnx.LayerNorm:
        assert not caplog.records
    else:
        (record,) = caplog.records
        assert "as BatchNorm's in training mode: each micro-batch is normalised by itself" in record.getMessage()


def test_equinox_models_are_seen_through(caplog):
    params, static = eqx.partition(eqx.nn.MLP(4, 5, 8, 2, key=KEY), eqx.is_inexact_array)

    def loss_fn(params, batch, key):
        network = eqx.nn.Sequential([eqx.combine(params, static), eqx.nn.Dropout(0.1)])
        keys = jax.random.split(key, len(batch["x"]))
        return cross_entropy(jax.vmap(network)(batch["x"], key=keys), batch["labels"]).mean()

    def trace(**options):
        grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=3, **options)
        jax.eval_shape(grad_fn, params, BATCH, KEY)

    trace(rng_argnum=2)
    assert not caplog.records
    with pytest.raises(ValueError, match=RNG):
        trace()
