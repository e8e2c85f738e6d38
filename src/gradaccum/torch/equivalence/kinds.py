"""What kind of batch this is: what may vary among its rows, and rows in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.batch import Batch

__all__ = ["ENOUGH", "Kinds", "telling_rows"]


ENOUGH = 8
"""Rows from which on more of them say nothing new."""


class Kinds:
    """Remembers which kinds of batches have been seen.

    A batch is of a new kind where its structure is new, or the model's mode; or where something differs among its rows
    for the first time: targets below 0, which losses ignore, the length or the side of padding, a weight. Batches of
    few rows say little, so that larger ones are new after them.

    On accelerators what differs among rows is read one update later, so that no update waits for it.

    Example:
        >>> kinds = Kinds()
        >>> even, uneven = Batch((torch.tensor([[1, 2], [3, -100]]),)), Batch((torch.tensor([[1, 2], [3, 4]]),))
        >>> kinds.new(uneven, True), kinds.add(), kinds.new(uneven, True), kinds.new(even, True)
        (True, None, False, True)
    """

    def __init__(self) -> None:
        self._structures: dict[Any, int] = {}
        self._uneven: set[str] = set()
        self._suspected: set[str] = set()
        self._pending: dict[str, tuple[Tensor, torch.cuda.Event]] = {}
        self._latest: tuple[Any, int, set[str]] = None, 0, set()

    def new(self, batch: Batch, training: bool) -> bool:
        """Whether this batch is of a new kind.

        Args:
            batch: The batch.
            training: The model's mode.
        """
        structure = training, tuple([(path, leaf.dtype, len(leaf.shape)) for path, leaf, _ in batch.leaves])
        rows = min(batch.rows, ENOUGH)
        first = self._structures.get(structure, 0) < rows
        self._suspected |= {key for key, (flag, event) in self._pending.items() if event.query() and bool(flag)}
        uneven = set()
        for key, leaf, vary in _variations(batch):
            if key in self._uneven or (key.startswith("ignored") and leaf.is_cpu and leaf.min() >= 0):
                continue
            if first or key in self._suspected or not leaf.is_cuda:
                if bool(_differs(vary())):
                    uneven.add(key)
            elif key not in self._pending or self._pending[key][1].query():
                self._pending[key] = _read_later(_differs(vary()))
        self._latest = structure, rows, uneven
        return first or bool(uneven)

    def add(self) -> None:
        """The latest batch's kind is known from now on."""
        structure, rows, uneven = self._latest
        self._structures[structure] = rows
        self._uneven |= uneven


def telling_rows(batch: Batch, most: int) -> Tensor:
    """Up to so many rows that contain what varies, sorted by how much in them counts: the most padded ones first.

    Half of them are those in which the least counts, half those in which the most does.
    """
    scores = torch.zeros(batch.rows, dtype=torch.float64)
    for _, leaf, dim in batch.leaves:
        values = torch.as_tensor(leaf).detach().movedim(dim, 0)
        if values.is_floating_point() or values.is_complex():
            continue
        if values.dtype is torch.bool:
            values = values.byte()
        if values.ndim == 1:
            scores += 2 * (values >= 0).cpu() + values.cpu().double() / (1.0 + values.abs().max().item())
        else:
            scores += ((values != 0) & (values != -100)).flatten(1).sum(1).cpu()
    order = scores.argsort(stable=True)
    if len(order) <= most:
        return order
    picked = torch.cat([order[: most // 2], order[-(most - most // 2) :]])
    for place, (_, _, vary) in enumerate(_variations(batch)):
        values = vary().cpu()
        others = (values != values[picked[0]]).nonzero().flatten()
        if len(others) and not (values[picked] != values[picked[0]]).any():
            picked[1 + place % (most - 1)] = others[0]
    return picked[scores[picked].argsort(stable=True)]


def _variations(batch: Batch) -> Iterator[tuple[str, Tensor, Any]]:
    """What may differ among rows: a name, the tensor, and a function that returns a number for each row."""
    for path, leaf, dim in batch.leaves:
        if not isinstance(leaf, Tensor) or leaf.is_nested or leaf.layout is not torch.strided or not leaf.numel():
            continue
        named = "mask" in path or "weight" in path
        whole = not leaf.is_floating_point() and not leaf.is_complex()
        if whole and leaf.dtype not in (torch.bool, torch.uint8):
            yield f"ignored {path}", leaf, lambda leaf=leaf, dim=dim: _sums(leaf < 0, dim)
        if (named and leaf.dim() <= 2) or (leaf.is_floating_point() and leaf.dim() == 1):
            yield f"sum {path}", leaf, lambda leaf=leaf, dim=dim: _sums(leaf, dim)
        if named and leaf.dim() == 2:
            yield f"left {path}", leaf, lambda leaf=leaf, dim=dim: leaf.detach().movedim(dim, 0)[:, 0] == 0


def _sums(leaf: Tensor, dim: int) -> Tensor:
    rows = leaf.detach().movedim(dim, 0)
    return rows.reshape(len(rows), -1).sum(1)


def _differs(values: Tensor) -> Tensor:
    return (values != values[0]).any()


def _read_later(flag: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A number on the host, and what tells when it has arrived there."""
    host = torch.empty((), dtype=flag.dtype, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
