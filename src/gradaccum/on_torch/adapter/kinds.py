"""Kinds of batches, so that one of a new kind is proven: what varies among the rows, and which rows show it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.proof import ENOUGH, informative_rows, informative_units
from gradaccum.on_torch.batch import Batch, read_later

SMALL = 1 << 16
"""Numbers in a tensor up to which a look at each of them takes no time beside an update."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
_MISSING, _IGNORED, _ZERO = "missing ", "ignored ", "zero "
Vary = Callable[[Tensor, int], Tensor]


class BatchKinds:
    """Remembers which kinds of batches have been seen.

    A batch is of a new kind where its structure is new, or the mode of one of the model's modules; where its whole
    numbers are smaller or larger than any before, as an index that losses ignore may be; or where something differs
    among its rows for the first time: numbers below 0, zeros or NaN, which losses ignore and masks leave out, the
    length or the side of padding, a weight. Batches of few rows say little, so that larger ones are new after them.

    On accelerators the rows' values are read one update later, so that no update waits for them.

    Example:
        >>> kinds = BatchKinds()
        >>> even, uneven = Batch((torch.tensor([[1, 2], [3, -100]]),)), Batch((torch.tensor([[1, 2], [3, 4]]),))
        >>> kinds.is_new(uneven, [True]), kinds.add(), kinds.is_new(uneven, [True]), kinds.is_new(even, [True])
        (True, None, False, True)
    """

    def __init__(self) -> None:
        self._structures: dict[Any, int] = {}
        self._modes: list[bool] = []
        self._known_modes: set[tuple[bool, int, bool]] = set()
        self._ranges: dict[str, tuple[float, float]] = {}
        self._uneven: set[str] = set()
        self._pending: dict[str, tuple[Tensor, torch.cuda.Event]] = {}
        self._latest: tuple[Any, int, list[bool]] = None, 0, []
        self._new_ranges: dict[str, tuple[float, float]] = {}
        self._newly_uneven: set[str] = set()

    def is_new(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch is of a new kind."""
        structure = modes[0], text, tuple([(path, leaf.dtype, len(leaf.shape)) for path, leaf, _ in batch.leaves])
        rows = min(batch.rows, ENOUGH)
        first = self._structures.get(structure, 0) < rows
        switched = modes != self._modes and not self._known_modes.issuperset(_in_the_models(modes))
        self._latest, self._new_ranges, self._newly_uneven = (structure, rows, modes), {}, set()
        for path, leaf, dim in batch.leaves:
            if _is_plain(leaf) and (first or leaf.is_cpu or self._was_new(path, leaf, dim)):
                self._look(batch, path, leaf, dim, first)
        return first or switched or bool(self._new_ranges) or bool(self._newly_uneven)

    def _look(self, batch: Batch, path: str, leaf: Tensor, dim: int, first: bool) -> None:
        """Look at the values of a tensor now."""
        least = -math.inf
        if leaf.dtype in _WHOLE:  # these may be targets
            low, high = self._ranges.get(path, (math.inf, -math.inf))
            least, most = batch.ends(leaf)
            if not low <= least <= most <= high:
                self._new_ranges[path] = min(low, least), max(high, most)
        nearest = None
        for key, vary in _variations(path, leaf.dtype, leaf.dim(), first or leaf.numel() <= SMALL):
            if key in self._uneven or (least >= 0 and key.startswith(_IGNORED)):
                continue
            if not first and key.startswith((_MISSING, _ZERO)):
                if nearest is None:  # one number in place of many, as this runs in every update
                    nearest = (leaf if leaf.dtype is torch.bool else leaf.abs()).amin().item()
                if nearest > 0 or (nearest == 0 and key.startswith(_MISSING)):
                    continue
            if bool(_differs(vary(leaf, dim))):
                self._newly_uneven.add(key)

    def _was_new(self, path: str, leaf: Tensor, dim: int) -> bool:
        """Whether something was new in this tensor of an earlier batch, on a device. Asks the same of this batch."""
        host, event = self._pending.get(path, (None, None))
        if event is not None and not event.query():
            return False
        low, high = self._ranges.get(path, (math.inf, -math.inf))
        new = [leaf.amin() < low, leaf.amax() > high] if leaf.dtype in _WHOLE else []
        variations = _variations(path, leaf.dtype, leaf.dim(), leaf.numel() <= SMALL)
        new += [_differs(vary(leaf, dim)) for key, vary in variations if key not in self._uneven]
        if new:
            self._pending[path] = read_later(torch.stack(new).any())
        return host is not None and bool(host)

    def add(self) -> None:
        """The latest batch's kind is known from now on."""
        structure, rows, self._modes = self._latest
        self._structures[structure] = max(rows, self._structures.get(structure, 0))
        self._known_modes.update(_in_the_models(self._modes))
        self._ranges.update(self._new_ranges)
        self._uneven |= self._newly_uneven


def rows_to_prove(batch: Batch, most: int) -> list[int]:
    """Up to so many rows that contain what varies, sorted by how much in them counts; whole groups, where there are."""
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
    rows = informative_rows(scores.tolist(), _columns(batch), most)
    return rows if batch.groups is None else informative_units(rows, [unit.tolist() for unit in batch.units()], most)


def _columns(batch: Batch) -> Iterator[Callable[[], Sequence[float]]]:
    """Functions that return a number for each row; the smallest and the largest values last."""
    plain = [(path, leaf, dim) for path, leaf, dim in batch.leaves if _is_plain(leaf) and not leaf.is_complex()]
    for path, leaf, dim in plain:
        for _, vary in _variations(path, leaf.dtype, leaf.dim(), True):
            yield functools.partial(_listed, vary, leaf, dim)
    for _, leaf, dim in plain:
        if leaf.dtype is not torch.bool:
            for end in batch.ends(leaf):
                yield functools.partial(_listed, functools.partial(_equal, end), leaf, dim)


def _listed(vary: Vary, leaf: Tensor, dim: int) -> list[float]:
    return vary(leaf, dim).tolist()


def _in_the_models(modes: list[bool]) -> Iterator[tuple[bool, int, bool]]:
    """Each module's mode, with the model's."""
    return ((modes[0], place, mode) for place, mode in enumerate(modes))


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_nested and leaf.layout is torch.strided and bool(leaf.numel())


@functools.lru_cache(maxsize=256)
def _variations(path: str, dtype: torch.dtype, dims: int, small: bool) -> tuple[tuple[str, Vary], ...]:
    """What may differ among the rows of this tensor: a name, and a function that returns a number for each row."""
    floating, named = dtype.is_floating_point, "mask" in path or "weight" in path
    found: dict[str, tuple[bool, Vary]] = {
        _MISSING + path: (floating and small, lambda leaf, dim: _sums(leaf.isnan(), dim)),
        _IGNORED + path: (dtype in _WHOLE or (floating and small), lambda leaf, dim: _sums(leaf < 0, dim)),
        _ZERO + path: (small, functools.partial(_equal, 0)),
        f"sum {path}": ((named and dims <= 2) or (floating and dims == 1), _sums),
        f"left {path}": (named and dims == 2, lambda leaf, dim: leaf.detach().movedim(dim, 0)[:, 0] == 0),
    }
    return tuple((key, vary) for key, (there, vary) in found.items() if there)


def _equal(value: float, leaf: Tensor, dim: int) -> Tensor:
    return _sums(leaf == value, dim)


def _sums(leaf: Tensor, dim: int) -> Tensor:
    rows = leaf.detach().movedim(dim, 0)
    return rows.reshape(len(rows), -1).sum(1)


def _differs(values: Tensor) -> Tensor:
    return (values != values[0]).any()
