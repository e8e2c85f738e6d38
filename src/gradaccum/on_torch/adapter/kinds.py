"""Kinds of batches, so that one of a new kind is proven: what varies among the rows, and which rows show it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.proof import ENOUGH, informative_rows, informative_units
from gradaccum.on_torch.batch import Batch, read_later

SMALL = 1 << 12
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
        self._unseen: dict[Any, _Unseen] = {}
        self._pending: dict[str, tuple[Tensor, torch.cuda.Event]] = {}
        self._latest: tuple[Any, int, list[bool]] = None, 0, []
        self._new_ranges: dict[str, tuple[float, float]] = {}
        self._newly_uneven: set[str] = set()
        self._familiar: tuple[Any, ...] | None = None
        """Signature, modes and text of the latest batch, where nothing was new in it."""
        self._looks: list[tuple[int, tuple[float, float] | None, _Unseen]] = []
        """What can be new in another one like it: for each tensor its place, its range, and what has not differed."""

    def is_new(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch is of a new kind."""
        if self._familiar == (batch.signature, modes, text) and not any(
            [self._shows(batch, *one) for one in self._looks]
        ):
            return False  # as mostly
        leaves, rows = batch.leaves, min(batch.rows, ENOUGH)
        structure = modes[0], text, tuple([(path, leaf.dtype, leaf.ndim) for path, leaf, _ in leaves])
        first = self._structures.get(structure, 0) < rows
        switched = modes != self._modes and not self._known_modes.issuperset(_in_the_models(modes))
        self._latest, self._new_ranges, self._newly_uneven = (structure, rows, modes), {}, set()
        plain = [(place, *leaf) for place, leaf in enumerate(leaves) if _is_plain(leaf[1])]
        for _, path, leaf, dim in plain:
            if first or leaf.is_cpu or self._was_new(path, leaf, dim):
                self._look(batch, path, leaf, dim, first)
        new = first or switched or bool(self._new_ranges) or bool(self._newly_uneven)
        self._familiar, self._looks = None, []
        if not new and all(leaf.is_cpu for _, _, leaf, _ in plain):
            self._familiar = batch.signature, modes, text
            self._looks = [(place, self._ranges.get(path), self._of(path, leaf)) for place, path, leaf, _ in plain]
        return new

    def _shows(self, batch: Batch, place: int, known: tuple[float, float] | None, unseen: _Unseen) -> bool:
        """Whether a tensor of a batch like the one before may show something new."""
        leaf, least = batch.leaves[place][1], None
        if not leaf.is_cpu or leaf.layout is not torch.strided:
            return True
        if known is not None:
            least, most = batch.ends(leaf)
            if not known[0] <= least <= most <= known[1]:
                return True
        return bool(unseen.variations) and not unseen.impossible(leaf, least)

    def _look(self, batch: Batch, path: str, leaf: Tensor, dim: int, first: bool) -> None:
        """Look at the values of a tensor now."""
        unseen, least = self._of(path, leaf, first), None
        if leaf.dtype in _WHOLE:  # these may be targets
            low, high = self._ranges.get(path, (math.inf, -math.inf))
            least, most = batch.ends(leaf)
            if not low <= least <= most <= high:
                self._new_ranges[path] = min(low, least), max(high, most)
        if unseen.variations and (first or not unseen.impossible(leaf, least)):
            self._newly_uneven.update(key for key, vary in unseen.variations if bool(_differs(vary(leaf, dim))))

    def _of(self, path: str, leaf: Tensor, first: bool = False) -> _Unseen:
        kind = path, leaf.dtype, leaf.ndim, first or leaf.numel() <= SMALL
        if kind not in self._unseen:
            self._unseen[kind] = _Unseen(one for one in _variations(*kind) if one[0] not in self._uneven)
        return self._unseen[kind]

    def _was_new(self, path: str, leaf: Tensor, dim: int) -> bool:
        """Whether something was new in this tensor of an earlier batch, on a device. Asks the same of this batch."""
        host, event = self._pending.get(path, (None, None))
        if event is not None and not event.query():
            return False
        low, high = self._ranges.get(path, (math.inf, -math.inf))
        new = [leaf.amin() < low, leaf.amax() > high] if leaf.dtype in _WHOLE else []
        new += [_differs(vary(leaf, dim)) for _, vary in self._of(path, leaf).variations]
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
        self._unseen = {}


class _Unseen:
    """What has not differed yet among the rows of a tensor."""

    def __init__(self, variations: Iterable[tuple[str, Vary]]) -> None:
        self.variations = tuple(variations)
        keys = [key for key, _ in self.variations]
        self._negative, self._zero = (any(key.startswith(word) for key in keys) for word in (_IGNORED, _ZERO))
        self._by_sign = all(key.startswith((_MISSING, _IGNORED, _ZERO)) for key in keys)

    def impossible(self, leaf: Tensor, least: float | None) -> bool:
        """Whether one number says that none of it differs: no entry is NaN, and none below 0, or 0, where that counts.

        One look in place of several, as it is taken in every update.
        """
        if not self._by_sign:
            return False
        if least is None or (self._zero and least < 0 and not self._negative):
            signed = self._negative or leaf.dtype is torch.bool
            least = (leaf if signed else leaf.abs()).amin().item()
        return least > 0 or (not self._zero and (least == 0 or (least < 0 and not self._negative)))


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
        nowhere = leaf.dtype.is_floating_point and leaf.abs().amin().item() > 0  # neither 0 nor NaN
        for key, vary in _variations(path, leaf.dtype, leaf.dim(), True):
            if not (nowhere and key.startswith((_MISSING, _ZERO))):
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
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested and leaf.numel() > 0


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
    flat = rows.reshape(len(rows), -1)
    return flat.count_nonzero(1) if flat.dtype is torch.bool else flat.sum(1)  # in half the time


def _differs(values: Tensor) -> Tensor:
    return (values != values[0]).any()
