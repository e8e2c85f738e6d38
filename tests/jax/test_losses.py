"""`info_nce` in tiles against the whole matrix of pairs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum.jax.losses import info_nce
from tests import contrastive
from tests.contrastive import COLUMNS, OF_A, PAIRS, assert_refused, each_refused, unit_rows
from tests.jax.comparisons import assert_same
from tests.reference import FLOAT32

OPS = types.SimpleNamespace(**vars(jnp), logsumexp=jax.nn.logsumexp)


def rows_of(dtype=np.float64):
    return [jnp.asarray(rows, dtype) for rows in unit_rows()]


def plain(a, b, temperature, pairs=PAIRS["row i and row i"][1], symmetric=True):
    return contrastive.info_nce(OPS, a, b, temperature, pairs, symmetric=symmetric)


def with_gradients(loss, *inputs):
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)
    return [value, *gradients]


CASES = [("ids of both", 5, True), ("row i and row i", 8, False)]
MORE = [(said, tile, symmetric) for said in PAIRS for tile in (1, 5, 8, 23, 100) for symmetric in (True, False)]


@pytest.mark.parametrize(
    ("said", "tile", "symmetric"), [*CASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
def test_the_value_and_all_gradients_are_those_of_the_whole_matrix(said, tile, symmetric):
    (positives, pairs), inputs = PAIRS[said], (*rows_of(), jnp.float64(2.3))  # CLIP's, learned as a logarithm

    def tiles(a, b, scale):
        return info_nce(a, b, temperature=jnp.exp(-scale), tile=tile, symmetric=symmetric, positives=positives)

    whole = with_gradients(lambda a, b, scale: plain(a, b, jnp.exp(-scale), pairs, symmetric), *inputs)
    assert_same(with_gradients(tiles, *inputs), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "temperature", "within"), [(np.float32, 0.5, FLOAT32), (np.float64, 1e-5, 1e-9)],
    ids=["single precision", "large scores, which don't overflow"],
)  # fmt: skip
def test_rounding_is_small(dtype, temperature, within):
    whole = with_gradients(lambda a, b: plain(a, b, temperature), *rows_of(dtype))
    tiles = with_gradients(lambda a, b: info_nce(a, b, temperature=temperature, tile=8), *rows_of(dtype))
    assert_same(tiles, whole, within)


@pytest.mark.slow
def test_half_precision_is_summed_in_single():
    half = [one.astype(jnp.bfloat16) for one in rows_of()]
    value, *gradients = with_gradients(lambda a, b: info_nce(a, b, temperature=0.5, tile=5), *half)
    assert (value.dtype, gradients[0].dtype) == (jnp.float32, jnp.bfloat16)
    assert_same([value], [plain(*(one.astype(jnp.float32) for one in half), 0.5)], FLOAT32)


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_whole_matrix():
    a, b = rows_of()

    def second(loss):
        return jax.jit(jax.grad(lambda a: jnp.sum(jax.grad(loss)(a) ** 2)))(a)

    found = second(lambda a: info_nce(a, b, temperature=0.5, tile=8))
    assert_same([found], [second(lambda a: plain(a, b, 0.5))])


def test_rows_without_a_positive_have_loss_zero():
    a, b = rows_of()
    ids = (OF_A, np.full(COLUMNS, 99))
    value, gradient = jax.jit(jax.value_and_grad(lambda a: info_nce(a, b, tile=8, positives=ids)))(a)
    assert value == 0
    assert not gradient.any()


def test_memory_is_linear_in_the_rows():
    def memory(rows):
        a = jax.ShapeDtypeStruct((rows, 8), np.float32)
        step = jax.jit(jax.grad(lambda a, b: info_nce(a, b, tile=64), argnums=(0, 1)))
        return step.lower(a, a).compile().memory_analysis().temp_size_in_bytes

    small, large = memory(512), memory(4096)
    assert large < 8 * small
    assert large < 4096 * 4096  # a quarter of the matrix


@each_refused
def test_what_is_wrong_is_named(case):
    assert_refused(case, info_nce, jnp.asarray, "an array")


def test_no_rows_and_functions_are_refused():
    a = jnp.zeros((3, 2))
    with pytest.raises(ValueError, match=r"\(0, 2\)"):
        info_nce(a[:0], a)
    with pytest.raises(TypeError, match="a tuple of two"):
        info_nce(a, a, positives=lambda i, j: i == j)
