"""Contrastive cross entropy over all pairs of rows, a few rows at a time, in memory that is linear in the rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from gradaccum.core.contrastive import Described, check_pairs
from gradaccum.keras import private
from gradaccum.keras.chunking import Body, two_passes
from gradaccum.schedule import checked_count

__all__ = ["info_nce"]


_FLOATS = """Keras casts an integer `y` to float before a loss of compile() sees it: use ops.cast(y, "int32")."""


def info_nce(
    a: Any, b: Any, *, temperature: Any = 0.07, tile: int = 128, symmetric: bool = True, positives: Any = None
) -> Any:
    """Contrastive cross entropy of every row against all others, in tiles: the matrix of all pairs never exists.

    With the scores `s_ij = <a_i, b_j> / temperature`, and the positives P(i) of row i:

        L(a, b) = mean_i [ log sum_j exp(s_ij) - mean_{p in P(i)} s_ip ]          over rows i that have a positive
        loss    = (L(a, b) + L(b, a)) / 2                                         or L(a, b), where not symmetric

    Use it in a loss for `compile`, or in a layer's `call`. Forward and backward keep the rows, a few numbers per row
    and the scores of `tile` rows; backward computes the scores again. Scores of half-precision rows, and the loss, are
    float32.

    Args:
        a: Rows, (N, size). They are not normalized: do so first if your loss does.
        b: Rows, (M, size). Without `positives`, the first N belong to those of `a`; the others are negatives of all.
        temperature: Divides the scores: a number, or a tensor or variable of one, which gets its gradient:
            `ops.exp(-logit_scale)`.
        tile: Rows whose scores with all rows of the other side are in memory at a time.
        symmetric: Whether rows of `b` are compared with those of `a`, too.
        positives: The pairs that belong together: ids of the pairs (N ints: rows with the same id belong together), or
            a tuple of two such tensors, ids of `a`'s and of `b`'s rows (N and M ints). None: row i and row i. Keras
            casts an integer `y` to float: in a loss of `compile`, `ops.cast(y, "int32")` restores the ids.

    Returns:
        A scalar, 0 if no row has a positive.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> import numpy as np
        >>> a, b = (np.random.default_rng(seed).normal(size=(64, 8)).astype("float32") for seed in (0, 1))
        >>> logits = ops.matmul(a, b.T) / 0.5
        >>> rows, columns = (ops.diagonal(ops.log_softmax(logits, axis=axis)) for axis in (1, 0))
        >>> bool(abs(info_nce(a, b, temperature=0.5, tile=16) + ops.mean(rows + columns) / 2) < 1e-5)
        True
    """
    check_pairs(
        a, b, temperature, positives, _described, "a tensor", f"Keras' {keras.backend.backend()} backend", _FLOATS
    )
    checked_count(tile, "tile")
    scale, (of_a, of_b) = _scale(a, b, temperature), _ids(positives, a, b)
    a, b = (ops.cast(ops.convert_to_tensor(rows), scale.dtype) for rows in (a, b))
    loss = _mean(a, b, scale, of_a, of_b, tile)
    return (loss + _mean(b, a, scale, of_b, of_a, tile)) / 2 if symmetric else loss


def _mean(a: Any, b: Any, scale: Any, of_a: tuple[Any, Any], of_b: tuple[Any, Any], tile: int) -> Any:
    """The mean loss of `a`'s rows among `b`'s."""

    def losses(rows: list[Any], beside: list[Any]) -> list[Any]:
        (some, ids, known), (others, scale) = rows, beside
        scores = ops.matmul(some * scale, ops.transpose(others))
        pairs = ops.equal(ids[:, None], of_b[0]) & known[:, None] & of_b[1]
        number = ops.sum(ops.cast(pairs, scores.dtype), axis=1)
        positive = ops.sum(ops.where(pairs, scores, ops.zeros_like(scores)), axis=1) / ops.maximum(number, 1.0)
        has = ops.cast(number > 0, scores.dtype)
        return [has * (ops.logsumexp(scores, axis=1) - positive), has]

    rows = a.shape[0]
    if private.is_symbolic() or (rows is not None and rows <= tile):
        found, has = losses([a, *of_a], [b, scale])
    else:
        layer = keras.layers.Identity(name="info_nce")
        body = Body(layer, losses, "micro", ([a, *of_a],), {}, [b, scale])
        found, has = body.outputs(two_passes(body, tile, 0))
    return ops.sum(found) / ops.maximum(ops.sum(ops.stop_gradient(has)), 1.0)


def _described(value: Any) -> Described | None:
    kinds = (np.ndarray, np.generic, keras.Variable, keras.KerasTensor)
    if not ops.is_tensor(value) and not isinstance(value, kinds):
        return None
    return Described(keras.backend.standardize_dtype(value.dtype), tuple(value.shape))


def _scale(a: Any, b: Any, temperature: Any) -> Any:
    """What scores are multiplied by, in the dtype that they are computed in."""
    dtype = keras.backend.result_type(a.dtype, b.dtype, "float32")
    is_number = isinstance(temperature, (int, float))
    return 1.0 / ops.reshape(ops.cast(ops.convert_to_tensor(temperature, dtype if is_number else None), dtype), ())


def _ids(positives: Any, a: Any, b: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The ids of `a`'s and of `b`'s rows, and of each whether it has one."""
    rows, columns = ops.shape(a)[0], ops.shape(b)[0]
    given = positives if isinstance(positives, tuple) else (positives, None)
    of_a, of_b = (None if ids is None else ops.convert_to_tensor(ids) for ids in given)
    if of_a is None:
        of_a = ops.arange(rows, dtype="int32")
    known = ops.arange(columns) < (rows if of_b is None else columns)
    if of_b is None:
        of_b = ops.take(of_a, ops.minimum(ops.arange(columns), rows - 1))
    return (of_a, ops.arange(rows) < rows), (of_b, known)
