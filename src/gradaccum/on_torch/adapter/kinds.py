"""Kinds of batches, so that one of a new kind is proven: what varies among the rows, and which rows show it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradaccum.core import numpy_arrays
from gradaccum.core.numpy_arrays import FEW
from gradaccum.core.proof_schedule import ENOUGH
from gradaccum.core.ways import informative_units
from gradaccum.on_torch.batch import Batch, read_later

SMALL = 1 << 12
"""Whole numbers in a tensor up to which zeros among them are looked for in every update."""
MOST_NUMBERS = 1 << 20
"""Floating-point numbers of a tensor that rows are chosen by, about: of larger ones every n-th."""
_OF_NUMPY = (torch.float64, torch.float32, torch.float16)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
_MISSING, _IGNORED, _ZERO = "missing", "ignored", "zero"
Vary = Callable[[Tensor, int], Tensor]


class BatchKinds:
    """Remembers which kinds of batches have been seen.

    A batch is of a new kind where its structure is new, or the mode of one of the model's modules; where its whole
    numbers are smaller or larger than any before, as an index that losses ignore may be; or where something differs
    among its rows for the first time: numbers below 0, zeros or NaN, which losses ignore and masks leave out, the
    length or the side of padding, a weight. Batches of few rows say little, so that larger ones are new after them.
    Floating-point inputs with many numbers per row are looked at in batches of a new structure alone.

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
        self._known: dict[Any, _Known] = {}
        self._latest: tuple[Any, int, list[bool]] = None, 0, []
        self._familiar: tuple[Any, ...] | None = None
        """Signature, modes and text of the latest batch, where nothing was new in it."""
        self._looks: list[tuple[int, _Known]] = []
        """Its tensors, by their places, and what is known of them."""

    def is_new(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch is of a new kind."""
        if self._familiar == (batch.signature, modes, text) and not any(
            [known.may_show(batch, batch.leaves[place][1]) for place, known in self._looks]
        ):
            return False  # as mostly
        rows, leaves = min(batch.rows, ENOUGH), batch.leaves
        structure = modes[0], text, tuple([(path, leaf.dtype, leaf.ndim) for path, leaf, _ in leaves])
        first = self._structures.get(structure, 0) < rows
        new = first or (modes != self._modes and not self._known_modes.issuperset(_in_the_models(modes)))
        self._latest, self._looks = (structure, rows, modes), []
        for known in self._known.values():
            known.forget()
        for place, (path, leaf, dim) in enumerate(leaves):
            if _is_plain(leaf):
                known = self._known.setdefault((path, leaf.dtype, leaf.ndim), _Known(path, leaf))
                if known.is_followed(batch, leaf):
                    self._looks.append((place, known))
                if first or leaf.is_cpu or known.was_new(batch, leaf, dim):
                    new |= known.look(batch, leaf, dim, closely=first)
        on_host = all(leaves[place][1].is_cpu for place, _ in self._looks)
        self._familiar = (batch.signature, modes, text) if on_host and not new else None
        return new

    def add(self) -> None:
        """The latest batch's kind is known from now on."""
        structure, rows, self._modes = self._latest
        self._structures[structure] = max(rows, self._structures.get(structure, 0))
        self._known_modes.update(_in_the_models(self._modes))
        for known in self._known.values():
            known.learn()


class _Known:
    """What has been seen in a tensor: the ends of its whole numbers, and what has differed among its rows."""

    def __init__(self, path: str, leaf: Tensor) -> None:
        self._is_whole, self._ends = leaf.dtype in _WHOLE, (math.inf, -math.inf)
        self._unseen = {small: dict(variations(path, leaf.dtype, leaf.ndim, small)) for small in (True, False)}
        self._pending: tuple[Tensor | None, Any] = None, None
        self.forget()

    def forget(self) -> None:
        """What was new in a batch is left to another."""
        self._new_ends, self._differing = self._ends, set[str]()

    def learn(self) -> None:
        self._ends = self._new_ends
        self._unseen = {
            small: {key: vary for key, vary in unseen.items() if key not in self._differing}
            for small, unseen in self._unseen.items()
        }

    def is_followed(self, batch: Batch, leaf: Tensor) -> bool:
        """Whether something new in tensors of this shape would be noticed."""
        return self._is_whole or bool(self._unseen[_is_small(batch, leaf)])

    def may_show(self, batch: Batch, leaf: Tensor) -> bool:
        """Whether something may be new in the tensor, at one look: it is taken in every update."""
        if not leaf.is_cpu or leaf.layout is not torch.strided:
            return True
        least, most = batch.ends(leaf) if self._is_whole else (None, None)
        outside = least is not None and not self._ends[0] <= least <= most <= self._ends[1]  # type: ignore[operator]  # both are there
        return outside or self._may_differ(leaf, _is_small(batch, leaf), least)

    def look(self, batch: Batch, leaf: Tensor, dim: int, *, closely: bool) -> bool:
        """Whether something is new in the tensor."""
        least, small = None, closely or _is_small(batch, leaf)
        if self._is_whole:  # these may be targets
            least, most = batch.ends(leaf)
            self._new_ends = min(self._ends[0], least), max(self._ends[1], most)
        if closely or self._may_differ(leaf, small, least):
            self._differing = {key for key, vary in self._unseen[small].items() if bool(_differs(vary(leaf, dim)))}
        return self._new_ends != self._ends or bool(self._differing)

    def _may_differ(self, leaf: Tensor, small: bool, least: float | None) -> bool:
        """Whether one number leaves open that something differs: a NaN, or one below 0, or 0, where that counts."""
        unseen = self._unseen[small]
        if not unseen.keys() <= {_MISSING, _IGNORED, _ZERO}:
            return True
        if not unseen:
            return False
        negative, zero = _IGNORED in unseen, _ZERO in unseen
        if least is None or (zero and least < 0 and not negative):
            signed = negative or leaf.dtype is torch.bool
            least = (leaf if signed else leaf.abs()).amin().item()
        return not (least > 0 or (not zero and (least == 0 or (least < 0 and not negative))))

    def was_new(self, batch: Batch, leaf: Tensor, dim: int) -> bool:
        """Whether something was new in this tensor of an earlier batch, on a device. Asks the same of this batch."""
        host, event = self._pending
        if event is not None and not event.query():
            return False
        new = [leaf.amin() < self._ends[0], leaf.amax() > self._ends[1]] if self._is_whole else []
        new += [_differs(vary(leaf, dim)) for vary in self._unseen[_is_small(batch, leaf)].values()]
        if new:
            self._pending = read_later(torch.stack(new).any())
        return host is not None and bool(host)


def rows_to_prove(batch: Batch, most: int) -> list[int]:
    """Up to so many rows that contain what varies, sorted by how much in them counts; whole groups, where there are."""
    rows = numpy_arrays.rows_to_prove(arrays_of(batch), batch.rows, most)
    return rows if batch.groups is None else informative_units(rows, [unit.tolist() for unit in batch.units()], most)


def arrays_of(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a batch in host memory, rows in front, with their paths; of large ones some numbers."""
    for path, leaf, dim in batch.leaves:
        if not isinstance(leaf, Tensor):
            yield path, np.moveaxis(np.asarray(leaf), dim, 0)
        elif _is_plain(leaf) and not leaf.is_complex():
            values = leaf.detach().movedim(dim, 0)
            if values.is_floating_point():
                if values.numel() > MOST_NUMBERS:
                    values = values.flatten(1)[:, :: -(-values.numel() // MOST_NUMBERS)]
                if values.dtype not in _OF_NUMPY:
                    values = values.float()
            yield path, values.resolve_neg().cpu().numpy()


def _in_the_models(modes: list[bool]) -> Iterator[tuple[bool, int, bool]]:
    """Each module's mode, with the model's."""
    return ((modes[0], place, mode) for place, mode in enumerate(modes))


def _is_small(batch: Batch, leaf: Tensor) -> bool:
    """Whether zeros and NaN are looked for in every update: in ids, masks, targets and weights."""
    return leaf.numel() <= (FEW * batch.rows if leaf.is_floating_point() or leaf.is_complex() else SMALL)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested and leaf.numel() > 0


@functools.lru_cache(maxsize=256)
def variations(path: str, dtype: torch.dtype, dims: int, small: bool) -> tuple[tuple[str, Vary], ...]:
    """What may differ among the rows of this tensor: a name, and a function that returns a number for each row."""
    floating, named = dtype.is_floating_point, "mask" in path or "weight" in path
    found: dict[str, tuple[bool, Vary]] = {
        _MISSING: (floating and small, lambda leaf, dim: _sums(leaf.isnan(), dim)),
        _IGNORED: (dtype in _WHOLE or (floating and small), lambda leaf, dim: _sums(leaf < 0, dim)),
        _ZERO: (small, functools.partial(_equal, 0)),
        "sum": ((named and dims <= 2) or (floating and dims == 1), _sums),
        "left": (named and dims == 2, lambda leaf, dim: leaf.detach().movedim(dim, 0)[:, 0] == 0),
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
