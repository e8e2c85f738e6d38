"""`info_nce` in tiles against the whole matrix of pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum.jax.losses import info_nce
from tests.jax.problems import assert_refused, assert_same
from tests.reference import FLOAT32

ROWS, COLUMNS = 23, 31
OF_A, OF_B = np.arange(ROWS) % 7, np.arange(COLUMNS) % 9  # some have several positives, ids 7 and 8 none
PAIRS = {
    "row i and row i": (None, np.eye(ROWS, COLUMNS, dtype=bool)),
    "ids of the pairs": (OF_A, OF_A[:, None] == np.concatenate([OF_A, np.full(COLUMNS - ROWS, -1)])),
    "ids of both": ((OF_A, OF_B), OF_A[:, None] == OF_B),
}


def rows_of(dtype=np.float64):
    random = np.random.default_rng(0)
    a, b = (random.normal(size=(count, 6)) for count in (ROWS, COLUMNS))
    return [jnp.asarray(t / np.linalg.norm(t, axis=1, keepdims=True), dtype) for t in (a, b)]


def plain(a, b, temperature, pairs=PAIRS["row i and row i"][1], symmetric=True):
    scores, found = a @ b.T / temperature, []
    for s, p in ((scores, pairs), (scores.T, pairs.T)):
        has = p.any(1)
        s, p = s[has], p[has]
        found.append((jax.nn.logsumexp(s, axis=1) - jnp.where(p, s, 0.0).sum(1) / p.sum(1)).mean())
    return sum(found) / 2 if symmetric else found[0]


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


THREE = jnp.zeros((3, 2, 1))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"a": [[1.0]]}, TypeError, "`a` must be an array. Received: [[1.0]]"),
        ({"a": THREE}, ValueError, "floats, of shape (rows, size). Received: float64 of shape (3, 2, 1)"),
        ({"b": jnp.zeros((3, 2), int)}, ValueError, "Received: int64 of shape (3, 2)"),
        ({"a": jnp.zeros((0, 2))}, ValueError, "(0, 2)"),
        ({"b": jnp.zeros((3, 4))}, ValueError, "rows of the same size. Received: (3, 2) and (3, 4)"),
        ({"b": jnp.zeros((2, 2))}, ValueError, "3 rows of a, 2 of b"),
        ({"temperature": 0}, ValueError, "temperature=0"),
        ({"temperature": "warm"}, TypeError, "temperature='warm'"),
        ({"temperature": jnp.ones(2)}, ValueError, "float64 of shape (2,)"),
        ({"tile": 0}, ValueError, "tile=0"),
        ({"positives": lambda i, j: i == j}, TypeError, "a tuple of two"),
        ({"positives": jnp.zeros(3)}, TypeError, "array of ids"),
        ({"positives": jnp.zeros(4, int)}, ValueError, "(3,). Received: (4,)"),
        ({"positives": (None, jnp.zeros(3, int))}, TypeError, "a tuple of two"),
    ],
)
def test_what_is_wrong_is_named(arguments, kind, message):
    right = {"a": jnp.zeros((3, 2)), "b": jnp.zeros((3, 2))}
    assert_refused(lambda: info_nce(**right | arguments), kind, message)
