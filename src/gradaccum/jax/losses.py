"""Contrastive cross entropy over all pairs of rows, one tile at a time, in memory that is linear in the rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.core.contrastive import Described, check_pairs
from gradaccum.schedule import checked_count

__all__ = ["info_nce"]


def info_nce(
    a: Any, b: Any, *, temperature: Any = 0.07, tile: int = 1024, symmetric: bool = True, positives: Any = None
) -> Any:
    """Contrastive cross entropy of every row against all others, in tiles: the matrix of all pairs never exists.

    With the scores `s_ij = <a_i, b_j> / temperature`, and the positives P(i) of row i:

        L(a, b) = mean_i [ log sum_j exp(s_ij) - mean_{p in P(i)} s_ip ]          over rows i that have a positive
        loss    = (L(a, b) + L(b, a)) / 2                                         or L(a, b), where not symmetric

    Forward and backward keep rows, numbers per row, and one tile of scores; backward computes the scores again. It goes
    inside your own `jax.jit` and `jax.grad`, and under `jit` the rows may be spread over devices. `jax.grad` of
    `jax.grad` is exact too, but keeps all tiles; forward mode (`jax.jvp`) raises JAX' error about `custom_vjp`.
    Half-precision rows are compared and summed in float32, and the loss is then float32.

    Args:
        a: Rows, (N, size), compared as they are. Normalize them before, if your loss does.
        b: Rows, (M, size). Without `positives`, the first N belong to those of `a`; the others are negatives of all.
        temperature: Divides the scores: a number, or an array of one, which gets its gradient: `jnp.exp(-logit_scale)`.
        tile: Rows and columns of the scores that are in memory at a time.
        symmetric: Whether rows of `b` are compared with those of `a`, too.
        positives: The pairs that belong together: ids of the pairs (N ints: rows with the same id belong together), or
            a tuple of two such arrays, ids of `a`'s and of `b`'s rows (N and M ints). None: row i and row i.

    Returns:
        A scalar, 0 if no row has a positive.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> a, b = (jax.random.normal(jax.random.key(seed), (64, 8)) for seed in (0, 1))
        >>> def plain(a, b):
        ...     logits = a @ b.T / 0.5
        ...     return -(jnp.diag(jax.nn.log_softmax(logits)) + jnp.diag(jax.nn.log_softmax(logits.T))).mean() / 2
        >>> tiles = jax.jit(jax.grad(lambda a, b: info_nce(a, b, temperature=0.5, tile=16)))(a, b)
        >>> bool(jnp.allclose(tiles, jax.grad(plain)(a, b), atol=1e-6))
        True
    """
    check_pairs(a, b, temperature, positives, _described)
    checked_count(tile, "tile")
    dtype = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    a, b = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
    scale = 1 / jnp.asarray(temperature).astype(dtype).reshape(())
    return _loss((tile, bool(symmetric)), a, b, scale, *_ids(positives, len(a), len(b)))


def _described(value: Any) -> Described | None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    return Described(str(value.dtype), tuple(value.shape))


def _ids(positives: Any, rows: int, columns: int) -> tuple[Any, Any, Any]:
    """The ids of `a`'s and of `b`'s rows, and which of `b`'s have one."""
    of_a, of_b = positives if isinstance(positives, tuple) else (positives, None)
    of_a = jnp.arange(rows) if positives is None else jnp.asarray(of_a)
    if of_b is None:
        return of_a, jnp.pad(of_a, (0, columns - rows)), jnp.arange(columns) < rows
    return of_a, jnp.asarray(of_b), jnp.arange(columns) < columns


class _Side(NamedTuple):
    """Rows of one side, cut into tiles of the same length: (tiles, length, ...)."""

    rows: Any
    ids: Any
    known: Any
    """Whether a row has an id."""
    real: Any
    """Whether it is a row, or fills up the last tile."""

    @classmethod
    def of(cls, rows: Any, ids: Any, known: Any, tile: int) -> _Side:
        count = len(rows)
        length = min(tile, count)
        cut = [jnp.arange(count) >= 0, known, ids, rows]
        more = -count % length
        cut = [jnp.pad(one, [(0, more)] + [(0, 0)] * (one.ndim - 1)) for one in cut]
        real, known, ids, rows = (one.reshape(-1, length, *one.shape[1:]) for one in cut)
        return cls(rows, ids, known, real)


class _Seen(NamedTuple):
    """Of rows, what is known from the scores seen so far: these sums' logarithm, and sum and number of positives."""

    log_sum: Any
    positive: Any
    number: Any

    @classmethod
    def none(cls, side: _Side) -> _Seen:
        zeros = jnp.zeros(side.ids.shape, side.rows.dtype)
        return cls(zeros - jnp.inf, zeros, zeros)

    def plus(self, scores: Any, pairs: Any, real: Any, axis: int) -> _Seen:
        log_sum = jax.nn.logsumexp(jnp.where(real, scores, -jnp.inf), axis)
        positive = jnp.where(pairs, scores, 0).sum(axis)
        return _Seen(jnp.logaddexp(self.log_sum, log_sum), self.positive + positive, self.number + pairs.sum(axis))

    def weights(self, share: float) -> tuple[Any, Any]:
        """Of each row in the loss, and of each of its positives."""
        has = self.number > 0
        weight = share * has / jnp.maximum(has.sum(), 1)
        return weight, weight / jnp.maximum(self.number, 1)

    def loss(self, share: float) -> Any:
        weight, each = self.weights(share)
        return jnp.where(weight > 0, weight * self.log_sum, 0).sum() - (each * self.positive).sum()


def _tile(a: _Side, b: _Side, scale: Any) -> tuple[Any, Any]:
    """The scores of a tile, and which of them are positives'."""
    scores = (a.rows * scale) @ b.rows.T
    pairs = (a.ids[:, None] == b.ids) & (a.known & a.real)[:, None] & (b.known & b.real)
    return scores, pairs


def _sides(static: tuple[int, bool], a: Any, b: Any, ids: tuple[Any, Any, Any]) -> tuple[_Side, _Side]:
    of_a, of_b, known = ids
    return _Side.of(a, of_a, of_a == of_a, static[0]), _Side.of(b, of_b, known, static[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: tuple[int, bool], a: Any, b: Any, scale: Any, *ids: Any) -> Any:
    return _forward(static, a, b, scale, *ids)[0]


def _forward(static: tuple[int, bool], a: Any, b: Any, scale: Any, *ids: Any) -> tuple[Any, Any]:
    of_a, of_b = _sides(static, a, b, ids)

    def row_of_tiles(columns: _Seen, here: _Side) -> tuple[_Seen, _Seen]:
        def one(rows: _Seen, there: tuple[_Side, _Seen]) -> tuple[_Seen, _Seen]:
            scores, pairs = _tile(here, there[0], scale)
            seen = there[1].plus(scores, pairs, here.real[:, None], 0) if static[1] else there[1]
            return rows.plus(scores, pairs, there[0].real, 1), seen

        rows, columns = jax.lax.scan(one, _Seen.none(here), (of_b, columns))
        return columns, rows

    columns, rows = jax.lax.scan(row_of_tiles, _Seen.none(of_b), of_a)
    share = 0.5 if static[1] else 1.0
    loss = rows.loss(share) + (columns.loss(share) if static[1] else 0)
    return loss, (a, b, scale, ids, rows, columns)


def _backward(static: tuple[int, bool], kept: Any, grad: Any) -> Any:
    a, b, scale, ids, rows, columns = kept
    of_a, of_b = _sides(static, a, b, ids)
    share = 0.5 if static[1] else 1.0
    given = [(rows.log_sum, *rows.weights(share)), (columns.log_sum, *columns.weights(share))]

    def row_of_tiles(grad_b: Any, xs: Any) -> tuple[Any, Any]:
        here, (log_sum, weight, each) = xs

        def one(grad_a: Any, ys: Any) -> tuple[Any, Any]:
            there, (their_log_sum, their_weight, their_each), grad_there = ys
            scores, pairs = _tile(here, there, scale)
            found = jnp.exp(scores - log_sum[:, None]) * weight[:, None] - pairs * each[:, None]
            if static[1]:
                found += jnp.exp(scores - their_log_sum) * their_weight - pairs * their_each
            found = jnp.where(here.real[:, None] & there.real, found, 0)
            return grad_a + found @ there.rows, grad_there + found.T @ here.rows

        grad_a, grad_b = jax.lax.scan(one, jnp.zeros_like(here.rows), (of_b, given[1], grad_b))
        return grad_b, grad_a

    grad_b, grad_a = jax.lax.scan(row_of_tiles, jnp.zeros_like(of_b.rows), (of_a, given[0]))
    grad_a = grad * grad_a.reshape(-1, a.shape[1])[: len(a)]
    grad_b = grad * scale * grad_b.reshape(-1, b.shape[1])[: len(b)]
    return grad_a * scale, grad_b, (grad_a * a).sum(), None, None, None


_loss.defvjp(_forward, _backward)
