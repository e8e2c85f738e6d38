"""What a loss computes is seen when it is traced: exact ones pass in silence, wrong ones are refused by line."""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gradaccum.jax
from gradaccum.jax import check_equivalence

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(8, 4)))
W = jnp.asarray(RANDOM.normal(size=4))
WIDE = jnp.asarray(RANDOM.normal(size=(4, 5)))
LABELS = jnp.asarray(RANDOM.integers(0, 5, 8))
MASK = jnp.asarray(RANDOM.random((8, 3)) > 0.3)
TEXT = jnp.asarray(RANDOM.normal(size=(8, 3, 4)))
IMAGES, KERNEL = jnp.asarray(RANDOM.normal(size=(8, 6, 6, 2))), jnp.asarray(RANDOM.normal(size=(3, 3, 2, 4)))
KEY = jax.random.key(0)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def tokens(p, b):
    return ((b[0] @ p)[:, None] ** 2 * b[1]).sum()


def class_weighed(p, b):
    weights = jnp.arange(1.0, 6.0)[b[1]]
    return (cross_entropy(b[0] @ p, b[1]) * weights).sum() / weights.sum()


def convolutional(p, x):
    h = jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = jax.lax.reduce_window(jax.nn.relu(h), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return (h.reshape(len(x), -1) ** 2).mean()


def dropout(p, x, key):
    return ((x @ p) * jax.random.bernoulli(key, 0.5, (len(x),))).mean()


def keys_for_rows(p, x, key):
    keys = jax.random.split(key, len(x))
    return ((x @ p) * jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)).mean()


MASKED = {"weight": lambda b: b[1].sum()}
EXACT = {
    "a weighed mean, guarded by where": (
        lambda p, b: jnp.where(b[1].sum() > 0, tokens(p, b) / b[1].sum(), 0.0), W, (X, MASK), MASKED,
    ),
    "a weighed mean, guarded by 1e-12": (lambda p, b: tokens(p, b) / (b[1].sum() + 1e-12), W, (X, MASK), MASKED),
    "divided before it is summed": (
        lambda p, b: ((b[0] @ p)[:, None] ** 2 * b[1] / b[1].sum()).sum(), W, (X, MASK), MASKED,
    ),
    "counted in two steps": (
        lambda p, b: tokens(p, b) / b[1].sum(-1).sum(), W, (X, MASK), {"weight": lambda b: b[1].astype(float).sum()},
    ),
    "divided by what it is multiplied with": (lambda p, b: tokens(p, b) / b[1].sum() * b[1].mean(), W, (X, MASK)),
    "mean(where=)": (lambda p, b: jnp.mean((b[0] @ p)[:, None], where=b[1][:, :1]), W, (X, MASK),
                     {"weight": lambda b: b[1][:, :1].sum()}),
    "labels by arange": (
        lambda p, b: -jax.nn.log_softmax(b[0] @ p)[jnp.arange(len(b[1])), b[1]].mean(), WIDE, (X, LABELS),
    ),
    "class weights": (class_weighed, WIDE, (X, LABELS), {"weight": lambda b: jnp.arange(1.0, 6.0)[b[1]].sum()}),
    "a triplet in each row": (
        lambda p, b: jax.nn.relu(1 + (b[0] @ p) ** 2 - (b[1] @ p) ** 2).mean(), W, (X, X + 1),
    ),
    "focal": (lambda p, b: optax.losses.sigmoid_focal_loss(b[0] @ p, b[1] * 0.2).mean(), W, (X, LABELS)),
    "convolutions and pools": (convolutional, KERNEL, IMAGES),
    "a statistic times 0": (lambda p, x: ((x @ p) ** 2).mean() + 0.0 * jnp.var(x @ p), W, X),
    "ctc": (
        lambda p, b: optax.ctc_loss(b @ p, jnp.zeros((len(b), 3)), jnp.ones((len(b), 2), int),
                                    jnp.zeros((len(b), 2))).mean(), WIDE, TEXT,
    ),
    "dropout": (dropout, W, X, {"rng_argnum": 2}, KEY),
    "a key for each row": (keys_for_rows, W, X, {"rng_argnum": 2}, KEY),
    "keys in the batch": (
        lambda p, b: ((b[0] @ p) * jax.vmap(lambda k: jax.random.bernoulli(k, 0.5))(b[1])).mean(), W,
        (X, jax.random.split(KEY, 8)),
    ),
    "buckets": (lambda p, x: ((x @ p) * jnp.searchsorted(jnp.arange(3.0), x[:, 0])).mean(), W, X),
    "noise on parameters": (lambda p, x, k: ((x @ (p + jax.random.normal(k, p.shape))) ** 2).mean(), W, X, {}, KEY),
}  # fmt: skip


def traced(case, **keywords):
    loss_fn, params, batch, *rest = case
    options, args = rest[0] if rest else {}, rest[1:]
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=3, **options, **keywords)
    jax.eval_shape(grad_fn, params, batch, *args)


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_loss_passes_in_silence(name, caplog):
    traced(EXACT[name])
    assert not caplog.records


def contrastive(p, x):
    h = x @ p
    return -jnp.diag(jax.nn.log_softmax(h @ h.T)).mean()


def two_views(p, b):
    z = jnp.concatenate([b[0] @ p, b[1] @ p])
    count = len(b[0])
    similar = z @ z.T - 1e9 * jnp.eye(2 * count)
    return -jax.nn.log_softmax(similar)[jnp.arange(2 * count), (jnp.arange(2 * count) + count) % (2 * count)].mean()


def batch_norm(p, x):
    h = x @ p
    return (jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)) ** 2).mean()


def dice(p, b):
    chance = jax.nn.sigmoid(b[0] @ p)
    return 1 - 2 * (chance * b[1]).sum() / (chance.sum() + b[1].sum())


WRONG = {
    "a sum": (lambda p, x: ((x @ p) ** 2).sum(), W, X, 'Pass reduction="sum"'),
    "a mean and a tenth of a sum": (
        lambda p, x: (x @ p).mean() + 0.1 * ((x @ p) ** 2).sum(), W, X, "looks across the rows",
    ),
    "a sum over a constant": (lambda p, x: ((x @ p) ** 2).sum() / 8, W, X, "It is a sum over its rows"),
    "a sum and a penalty": (lambda p, x: (x @ p).sum() + (p**2).sum(), W, X, "counted once per micro-batch"),
    "a penalty times rows": (lambda p, x: (x @ p).mean() + len(x) * (p**2).sum(), W, X, "a term without rows"),
    "a token mean": (lambda p, b: tokens(p, b) / b[1].sum(), W, (X, MASK), r"summed at test_verdict.py:\d+.*weight="),
    "class weights": (class_weighed, WIDE, (X, LABELS), "Pass weight="),
    "labels that are ignored": (
        lambda p, b: jnp.where(b[1] != -100, (b[0] @ p) ** 2, 0).sum() / (b[1] != -100).sum(), W, (X, LABELS),
        "weight=",
    ),
    "rows, weighed": (lambda p, b: (b[0] @ p).mean(), W, (X, MASK), "Leave `weight` out", MASKED),
    "two denominators": (
        lambda p, b: tokens(p, b) / b[1].sum() + (b[0] @ p).mean(), W, (X, MASK), r"Return them as {name: \(loss",
    ),
    "a wrong weight of several": (
        lambda p, b: {"t": (tokens(p, b) / b[1].sum(), len(b[0]))}, W, (X, MASK), "As to the loss 't'",
    ),
    "contrastive": (contrastive, WIDE, X, r"`dot_general` at test_verdict.py:\d+.*gradaccum.jax.chunked"),
    "two views": (two_views, WIDE, (X, X + 1), "gradaccum.jax.chunked"),
    "batch norm": (batch_norm, WIDE, X, r"`reduce_sum` at test_verdict.py:\d+.*state_argnum"),
    "dice": (dice, W, (X, LABELS > 2), "looks across the rows"),
    "a detached statistic": (
        lambda p, x: ((x @ p) ** 2 / jax.lax.stop_gradient(((x @ p) ** 2).mean())).mean(), W, X,
        "looks across the rows",
    ),
    "its place as its label": (
        lambda p, x: cross_entropy(x @ p, jnp.arange(len(x)) % 3).mean(), WIDE, X, "looks across the rows",
    ),
    "columns by place": (
        lambda p, x: jnp.take_along_axis(x @ p, jnp.arange(len(x))[:, None] % 3, 1).mean(), WIDE, X,
        "looks across the rows",
    ),
    "a column by place, row by row": (
        lambda p, x: jax.vmap(lambda row, i: (row @ p)[i % 3])(x, jnp.arange(len(x))).mean(), WIDE, X,
        "looks across the rows",
    ),
    "a key": (dropout, W, X, "from a key that all micro-batches share.*rng_argnum=", {}, KEY),
    "a raw key": (dropout, W, X, "rng_argnum=", {}, jax.random.PRNGKey(0)),
    "a key that is split for rows": (keys_for_rows, W, X, "rng_argnum=", {}, KEY),
    "a key in the loss": (lambda p, x: dropout(p, x, jax.random.key(1)), W, X, "rng_argnum="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_refused_when_it_is_traced(name):
    loss_fn, params, batch, message, *rest = WRONG[name]
    case = loss_fn, params, batch, *rest
    with pytest.raises(ValueError, match=f"(?s)would not give the large batch's gradient.*{message}"):
        traced(case)
    if name in ("a sum", "a penalty times rows", "a token mean"):
        traced(case, verify=False)


UNSURE = {
    "each row with itself": (lambda p, x: jnp.diag((x @ p) @ (x @ p).T).mean(), WIDE, X, "dot_general"),
    "a shift that cancels": (
        lambda p, x: (lambda z, top: (jnp.log(jnp.exp(z - top).sum(-1)) + top).mean())(
            x @ p, jax.lax.stop_gradient((x @ p).max())
        ), WIDE, X, "reduce_max",
    ),
    "a number by what is in the batch": (
        lambda p, x: jnp.where((x > 9).any(), 1.0, 2.0) * (x @ p).mean(), W, X, "reduce_or",
    ),
    "a branch by what is in the batch": (
        lambda p, x: jax.lax.cond((x > 9).any(), lambda: 1.0, lambda: 2.0) * (x @ p).mean(), W, X, "`reduce_or`",
    ),
    "rows that are written down": (lambda p, x: (x.reshape(-1, 3, 4) @ p).mean(), W, X[:6], "can't be traced for"),
    "an unknown operation": (
        lambda p, x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x).mean() + p.sum(), W, X,
        "pure_callback",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "an unknown operation",
        "a number by what is in the batch",
        "a branch by what is in the batch",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("each row with itself", "a shift that cancels")),
    ],
)
def test_what_cannot_be_told_is_one_line_that_check_equivalence_silences(name, caplog):
    loss_fn, params, batch, message = UNSURE[name]
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=3)
    for _ in range(2):
        jax.eval_shape(grad_fn, params, batch)
    jax.eval_shape(grad_fn, params, batch[:7])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert message in record.getMessage()
    assert "check_equivalence" in record.getMessage()
    caplog.clear()
    traced((loss_fn, params, batch), verify=False)
    if name == "each row with itself":
        assert check_equivalence(loss_fn, params, batch).ok
        traced((loss_fn, params, batch))
    assert not caplog.records


def test_a_branch_by_the_number_of_rows_is_a_line(caplog):
    traced((lambda p, x: (x @ p).mean() if len(x) > 4 else jnp.tanh(x @ p).mean(), W, X))
    assert "operations for 2 rows differ from those for 8" in caplog.text
    caplog.clear()
    grad_fn = gradaccum.jax.value_and_grad(
        lambda p, x: (x @ p).mean() * (1.0 if len(x) > 1 else 2.0), micro_batch_size=1
    )
    jax.eval_shape(grad_fn, W, X)
    assert "operations for one row differ from those for more" in caplog.text


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
    jax.eval_shape(grad_fn, params, (X.astype(jnp.float32), LABELS), state)
    messages = [record.getMessage() for record in caplog.records]
    if norm is nnx.LayerNorm:
        assert not messages
    else:
        assert len(messages) == 1
        assert "as BatchNorm's in training mode: each micro-batch is normalised by itself" in messages[0]


def test_equinox_models_are_seen_through(caplog):
    model = eqx.nn.MLP(4, 5, 8, 2, key=KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch, key):
        network = eqx.nn.Sequential([eqx.combine(params, static), eqx.nn.Dropout(0.1)])
        outputs = jax.vmap(network)(batch[0], key=jax.random.split(key, len(batch[0])))
        return cross_entropy(outputs, batch[1]).mean()

    traced((loss_fn, params, (X, LABELS), {"rng_argnum": 2}, KEY))
    assert not caplog.records
    with pytest.raises(ValueError, match="rng_argnum="):
        traced((loss_fn, params, (X, LABELS), {}, KEY))


def test_nothing_is_asked_of_a_batch_that_is_one_micro_batch():
    grad_fn = gradaccum.jax.value_and_grad(contrastive, micro_batch_size=8)
    jax.eval_shape(grad_fn, WIDE, X)
