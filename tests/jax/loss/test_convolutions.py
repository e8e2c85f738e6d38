"""Convolutions are followed: those that keep rows apart pass in silence, those that mix them are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum.jax
from tests.reference import FLOAT64, relative_error

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(8, 6, 2)))
SIGNALS = X[:, :3, 0]
KERNEL = jnp.asarray(RANDOM.normal(size=(3, 2, 4)))
LINE = KERNEL[:, 0, 0]
SUM = {"reduction": "sum"}


def convolved(image, kernel, numbers="NWC WIO NWC", padding="SAME", **options):
    return jax.lax.conv_general_dilated(image, kernel, (1,), padding, dimension_numbers=numbers.split(), **options)


def squares(x):
    return (x**2).mean()


def of_parts(image, kernel):
    """Two parts of the batch behind each other, each with its kernels."""
    return convolved(jnp.concatenate([image, 2 * image]), kernel, batch_group_count=2)


def own_gradients(p, x):
    def penalty(row):
        return squares(jax.grad(lambda q: squares(jnp.tanh(convolved(row[None], q))))(p))

    return jax.vmap(penalty)(x).mean()


def groups_of_rows(p, x):
    kernel = p[:, None, None] * jnp.ones((1, 1, len(x)))
    return convolved(x[None], kernel, "NCW WIO NCW", feature_group_count=len(x))


def batches_of_rows(p, x):
    kernels = jnp.broadcast_to(p[:, :, None], (3, 2, len(x), 4)).reshape(3, 2, -1)
    return convolved(x, kernels, batch_group_count=len(x))


def contracted_features(p, x):
    kernel = p[:2, None, None] * p * jnp.ones((1, len(x), 1))
    return convolved(x[None], kernel, "NCW OIW NCW")


def contracted_kernels(p, x, groups=1):
    image = jnp.ones((1, 5, len(x))) * p.sum()
    return convolved(jnp.concatenate([image] * groups, -1), x, "NWC IWO NWC", feature_group_count=groups)


EXACT = {
    "rows are the batch": (lambda p, x: squares(convolved(x, p)), KERNEL, X),
    "groups of features": (
        lambda p, x: squares(convolved(x, p[:, :1], feature_group_count=2)), KERNEL, X,
    ),
    "groups of the batch": (lambda p, x: squares(of_parts(x, p)), KERNEL, X),
    "rows are kernels": (
        lambda p, x: squares(convolved(p[None], x, "NWC OWI NWC")), KERNEL[..., 0], X,
    ),
    "a kernel for each row": (
        lambda p, x: jax.vmap(lambda row: squares(convolved(row[None], p * row.sum())))(x).mean(), KERNEL, X,
    ),
    "a group for each row": (lambda p, x: squares(groups_of_rows(p, x)), LINE, SIGNALS),
    "a group of the batch for each row": (lambda p, x: squares(batches_of_rows(p, x)), KERNEL, X),
    "each row's gradients": (own_gradients, KERNEL, X),
    "a sum over features that are rows": (lambda p, x: contracted_features(p, x).sum(), LINE, SIGNALS, SUM),
    "a sum over kernels' features that are rows": (lambda p, x: contracted_kernels(p, x).sum(), LINE, X, SUM),
    "the same of two groups": (lambda p, x: contracted_kernels(p, x, 2).sum(), LINE, X, SUM),
    "gradients of a sum": (
        lambda p, x: (jax.grad(lambda q: convolved(x, q).sum())(p) * p).sum(), KERNEL, X, SUM,
    ),
}  # fmt: skip
WRONG = {
    "features that are rows": (lambda p, x: squares(contracted_features(p, x)), LINE, SIGNALS),
    "kernels' features that are rows": (lambda p, x: squares(contracted_kernels(p, x)), LINE, X),
    "two groups of kernels' features that are rows": (lambda p, x: squares(contracted_kernels(p, x, 2)), LINE, X),
    "along the rows": (lambda p, x: squares(convolved(x[None], p, "NWC WIO NWC")), KERNEL[:, :1], X[:, :1, 0]),
    "halves of the rows in groups": (lambda p, x: squares(convolved(x, p, batch_group_count=2)), KERNEL, X),
    "halves of the kernels in groups": (
        lambda p, x: squares(convolved(p[None], x[:, :, :1], "NWC OWI NWC", feature_group_count=2)), KERNEL[..., 0], X,
    ),
    "each row with each": (lambda p, x: squares(convolved(x, x * p.sum(), "NWC OWI NWC")), LINE, X),
    "gradients of all rows": (
        lambda p, x: squares(jax.grad(lambda q: squares(convolved(x, q)))(p)), KERNEL, X,
    ),
    "grouped gradients of all rows": (
        lambda p, x: squares(jax.grad(lambda q: squares(convolved(x, q, feature_group_count=2)))(p)), KERNEL[:, :1], X,
    ),
}  # fmt: skip


QUICK = (
    "groups of the batch",
    "a kernel for each row",
    "the same of two groups",
    "features that are rows",
    "along the rows",
)


def each(cases):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in cases]


def gradients(loss_fn, params, batch, keywords=None, **more):
    return gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, **(keywords or {}), **more), params, batch


@pytest.mark.parametrize("name", each(EXACT))
def test_convolutions_that_keep_rows_apart_or_add_them_up_pass_in_silence(name, caplog):
    jax.eval_shape(*gradients(*EXACT[name]))
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_they_are_exact(name):
    grad_fn, params, batch = gradients(*EXACT[name])
    found, expected = (jax.jit(f)(params, batch) for f in (grad_fn, jax.value_and_grad(EXACT[name][0])))
    assert relative_error(jax.tree.leaves(found), jax.tree.leaves(expected)) <= FLOAT64


@pytest.mark.parametrize("name", each(WRONG))
def test_convolutions_over_rows_are_refused_by_line(name):
    with pytest.raises(ValueError, match=r"`conv_general_dilated` at test_convolutions.py:\d+.*gradaccum.jax.chunked"):
        jax.eval_shape(*gradients(*WRONG[name]))
