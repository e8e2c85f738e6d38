"""The naive oracle: ordinary steps on whole batches, written so that nothing in it can be wrong unnoticed.

Everything the library does is compared with these few lines. They import no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

FLOAT64 = 1e-12
FLOAT32 = 1e-6
"""The promise: largest relative error of the update, per tensor, against its largest entry."""


def relative_error(actual: Iterable[Any], expected: Iterable[Any]) -> float:
    """The largest `max|a - b| / max|b|` over pairs of tensors; NaN in one and not in the other is infinitely wrong."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        a, b = _array(a), _array(b)
        assert a.shape == b.shape, f"shapes differ: {a.shape}, {b.shape}"
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        difference = np.nanmax(np.abs(a - b), initial=0.0)
        worst = max(worst, float(difference / (np.nanmax(np.abs(b), initial=0.0) or 1.0)))
    return worst


def _array(tensor: Any) -> np.ndarray:
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().to_dense().double()
    return np.asarray(tensor, dtype=np.float64)


def windows_of(micro_batches: Sequence[Any], steps: int) -> list[list[Any]]:
    """The micro-batches of one epoch, grouped: the last window may be shorter."""
    return [list(micro_batches[start : start + steps]) for start in range(0, len(micro_batches), steps)]


def ragged(rows: int, sizes: Iterable[int]) -> list[slice]:
    """Slices of the given sizes, in order, over all rows."""
    slices, start = [], 0
    for size in sizes:
        slices.append(slice(start, start + size))
        start += size
    assert start == rows, f"the sizes add up to {start}, not {rows}"
    return slices


def torch_updates(
    model: Any,
    optimizer: Any,
    large_batches: Iterable[tuple[Any, ...]],
    loss: Callable[..., Any],
    *,
    clip_grad_norm: float | None = None,
    after_update: Callable[[], None] | None = None,
) -> list[float]:
    """One ordinary PyTorch step per large batch; `loss(model, *batch)` is the large batch's. Returns the losses."""
    import torch

    losses = []
    for batch in large_batches:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        losses.append(value.item())
        if after_update is not None:
            after_update()
    return losses


WINDOWS = {
    # name: (rows of each micro-batch of an epoch, steps)
    "4+4+2 rows": ([4, 4, 2], 3),
    "12 rows in micro-batches of 2, 4 steps": ([2] * 6, 4),
    "ragged everywhere": ([3, 1, 4, 1, 5, 9, 2], 3),
    "a window longer than the epoch": ([2, 3, 1], 10),
    "windows that divide the epoch": ([2] * 8, 4),
    "one row at a time": ([1] * 7, 3),
    "the plain loop": ([4, 4, 3], 1),
}
"""The contract: on each of these an epoch's updates are those of the large batches. One table for every shell."""


def keras_updates(model: Any, large_batches: Iterable[tuple[Any, ...]]) -> None:
    """One ordinary Keras step per large batch, on a model compiled with a plain optimizer; then the end of `fit`."""
    for batch in large_batches:
        model.train_on_batch(*batch)
    model.optimizer.finalize_variable_values(model.trainable_variables)
