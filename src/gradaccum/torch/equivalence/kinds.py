"""What kind of batch this is: what may vary among its rows, and rows in which it does."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.batch import Batch

__all__ = ["ENOUGH", "GROUPS", "Kinds", "Occasions", "splits", "telling_rows"]


ROWS = 16
"""Rows that are looked at, at most."""
ENOUGH = 8
"""Rows from which on more of them say nothing new."""
GROUPS = 3
"""Groups of rows that are looked at, at least."""
OFTEN = 1024
"""Batches after which a proof is repeated at the latest."""
SMALL = 1 << 16
"""Numbers in a tensor up to which a look at each of them takes no time beside an update."""


class Kinds:
    """Remembers which kinds of batches have been seen.

    A batch is of a new kind where its structure is new, or the mode of one of the model's modules; where its whole
    numbers are smaller or larger than any before, as an index that losses ignore may be; or where something differs
    among its rows for the first time: numbers below 0, zeros or NaN, which losses ignore and masks leave out, the
    length or the side of padding, a weight. Batches of few rows say little, so that larger ones are new after them.

    On accelerators the rows' values are read one update later, so that no update waits for them.

    Example:
        >>> kinds = Kinds()
        >>> even, uneven = Batch((torch.tensor([[1, 2], [3, -100]]),)), Batch((torch.tensor([[1, 2], [3, 4]]),))
        >>> kinds.new(uneven, [True]), kinds.add(), kinds.new(uneven, [True]), kinds.new(even, [True])
        (True, None, False, True)
    """

    def __init__(self) -> None:
        self._structures: dict[Any, int] = {}
        self._modes: list[bool] = []
        self._known_modes: set[tuple[bool, int, bool]] = set()
        self._ranges: dict[str, tuple[float, float]] = {}
        self._uneven: set[str] = set()
        self._pending: dict[str, tuple[Tensor, torch.cuda.Event]] = {}
        self._latest: tuple[Any, int, list[bool], dict[str, tuple[float, float]], set[str]] = None, 0, [], {}, set()

    def new(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch is of a new kind.

        Args:
            batch: The batch.
            modes: Of each module, the model first: whether it is in training mode.
            text: The paths of what `max_tokens` cuts.
        """
        structure = modes[0], text, tuple([(path, leaf.dtype, len(leaf.shape)) for path, leaf, _ in batch.leaves])
        rows = min(batch.rows, ENOUGH)
        first = self._structures.get(structure, 0) < rows
        switched = modes != self._modes and not self._known_modes.issuperset(_in_the_models(modes))
        ranges: dict[str, tuple[float, float]] = {}
        uneven: set[str] = set()
        for path, leaf, dim in batch.leaves:
            if not _is_plain(leaf):
                continue
            look = first or leaf.is_cpu
            none_ignored, nearest = False, None
            if leaf.dtype in _WHOLE:  # these may be targets
                low, high = self._ranges.get(path, (math.inf, -math.inf))
                arrived = None if look else self._arrived(path)
                if look or (arrived is not None and not low <= arrived[0] <= arrived[1] <= high):
                    least, most = batch.ends(leaf)
                    none_ignored = least >= 0
                    if not low <= least <= most <= high:
                        ranges[path] = min(low, least), max(high, most)
                elif arrived is not None or path not in self._pending:
                    self._pending[path] = _read_later(torch.stack([*leaf.aminmax()]))
            for key, vary in _variations(path, leaf, dim, thorough=first):
                if key in self._uneven or (none_ignored and key.startswith(_IGNORED)):
                    continue
                if look and not first and key.startswith((_MISSING, _ZERO)):
                    if nearest is None:  # one number in place of many, as this runs in every update
                        nearest = (leaf if leaf.dtype is torch.bool else leaf.abs()).amin().item()
                    if nearest > 0 or (nearest == 0 and key.startswith(_MISSING)):
                        continue
                arrived = None if look else self._arrived(key)
                if look or (arrived is not None and arrived[0]):
                    if bool(_differs(vary())):
                        uneven.add(key)
                elif arrived is not None or key not in self._pending:
                    self._pending[key] = _read_later(_differs(vary()).reshape(1))
        self._latest = structure, rows, modes, ranges, uneven
        return first or switched or bool(ranges) or bool(uneven)

    def _arrived(self, key: str) -> list[float] | None:
        """What was read of an earlier batch, once it is there."""
        values, event = self._pending.get(key, (None, None))
        return None if event is None or values is None or not event.query() else values.tolist()

    def add(self) -> None:
        """The latest batch's kind is known from now on."""
        structure, rows, self._modes, ranges, uneven = self._latest
        self._structures[structure] = max(rows, self._structures.get(structure, 0))
        self._known_modes.update(_in_the_models(self._modes))
        self._ranges.update(ranges)
        self._uneven |= uneven


class Occasions:
    """When a batch is to be proven, and how much of it: the first of each kind, and the 2nd, 4th, 8th, ... of all.

    A repetition is to see what time has changed. It looks at fewer rows, split in one way, at a third of the price.

    Example:
        >>> occasions, batch = Occasions(), Batch((torch.randn(64, 3),))
        >>> occasions.due(batch, [True]), occasions.scope(None), occasions.kinds.add()
        (True, (16, None), None)
        >>> occasions.due(batch, [True]), occasions.scope(None), occasions.due(batch, [True])
        (True, (8, 0), False)
    """

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.batches = 0
        self.repeated = False
        """Whether the latest batch is of a kind that has been proven."""
        self._put_off = False
        self._looked_at = self._repetitions = 0

    def due(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch, the next one, is to be proven. The arguments are those of `Kinds.new`."""
        self.batches += 1
        self.repeated = not self.kinds.new(batch, modes, text)
        put_off, self._put_off = self._put_off, False
        return put_off or not self.repeated or self.batches & (self.batches - 1) == 0 or self.batches % OFTEN == 0

    def put_off(self) -> None:
        """There was nothing finite to compare with this batch: the next one is due."""
        self._put_off = True

    def scope(self, size: int | None) -> tuple[int, int | None]:
        """How much of this batch to look at.

        Args:
            size: Rows of its micro-batches, where that is known: not many more are looked at.

        Returns:
            Rows, and which of the ways to split them; None: all ways.
        """
        rows = ROWS if size is None else min(ROWS, max(ENOUGH, 2 * size))
        if size is not None and self.batches == 2:
            rows = max(rows, size)  # of what a micro-batch holds, some may begin above so many rows
        if not self.repeated or rows > self._looked_at:
            self._looked_at = rows
            return rows, None
        self._repetitions += 1
        return min(rows, ENOUGH), (self._repetitions - 1) % 2


def _in_the_models(modes: list[bool]) -> Iterator[tuple[bool, int, bool]]:
    """Each module's mode, with the model's."""
    return ((modes[0], place, mode) for place, mode in enumerate(modes))


def telling_rows(batch: Batch, most: int) -> Tensor:
    """Up to so many rows that contain what varies, sorted by how much in them counts: the most padded ones first.

    Half of them are those in which the least counts, half those in which the most does. Where rows belong together,
    whole groups of such rows, three at least: more rows, if these are large.
    """
    if batch.groups is not None:
        return _telling_groups(batch, _telling_rows(batch, most), most)
    return _telling_rows(batch, most)


def _telling_groups(batch: Batch, rows: Tensor, most: int) -> Tensor:
    """The groups of these rows, from both ends; as many as have so many rows together, and three at least."""
    units = batch.units()
    group_of = torch.cat([torch.full((len(unit),), place) for place, unit in enumerate(units)])
    places = group_of[rows].tolist()
    ends = [places[place // 2] if place % 2 == 0 else places[-1 - place // 2] for place in range(len(places))]
    picked: list[int] = []
    for place in dict.fromkeys([*ends, *range(len(units))]):
        if len(picked) >= GROUPS and sum(len(units[known]) for known in (*picked, place)) > most:
            break
        picked.append(place)
    ranks = {place: rank for rank, place in reversed([*enumerate(places)])}
    return torch.cat([units[place] for place in sorted(picked, key=lambda place: ranks.get(place, len(places)))])


def _telling_rows(batch: Batch, most: int) -> Tensor:
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
    places = itertools.cycle(sorted(range(most), key=lambda place: abs(place - most // 2)))  # the least telling first
    for vary in _ways_to_vary(batch):
        values = vary().cpu()
        others = (values != values[picked[0]]).nonzero().flatten()
        if len(others) and not (values[picked] != values[picked[0]]).any():
            picked[next(places)] = others[0]
    return picked[scores[picked].argsort(stable=True)]


def splits(few: Batch) -> list[tuple[Tensor, list[int]]]:
    """Ways to cut sorted rows, those that belong together as one: an order of the rows, and sizes."""
    units, found = few.units(), []
    for order, counts in _splits_of(len(units)):
        ordered = [units[place] for place in order.tolist()]
        sizes = iter([len(unit) for unit in ordered])
        found.append((torch.cat(ordered), [sum(itertools.islice(sizes, count)) for count in counts]))
    return found


def _splits_of(rows: int) -> list[tuple[Tensor, list[int]]]:
    """Two ways to cut sorted rows: the extremes apart, and mixed; parts of unequal sizes, of two rows or more."""
    order = torch.arange(rows)
    if rows < 4:
        return [(order, [1, rows - 1]), (order.flip(0), [1, rows - 1])][: rows - 1]
    first = max(2, rows // 3)
    mixed = torch.cat([order[::3], order[1::3], order[2::3]])
    if rows < 6:
        return [(order, [first, rows - first]), (mixed, [rows - 2, 2])]
    return [(order, [first, rows - first]), (mixed, [rows - first - 2, 2, first])]


def _ways_to_vary(batch: Batch) -> Iterator[Callable[[], Tensor]]:
    """Functions that return a number for each row; the smallest and the largest values last."""
    plain = [(path, leaf, dim) for path, leaf, dim in batch.leaves if _is_plain(leaf) and not leaf.is_complex()]
    for path, leaf, dim in plain:
        for _, vary in _variations(path, leaf, dim, thorough=True):
            yield vary
    for _, leaf, dim in plain:
        if leaf.dtype is not torch.bool:
            for end in batch.ends(leaf):
                yield functools.partial(_equal, leaf, dim, end)


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_nested and leaf.layout is torch.strided and bool(leaf.numel())


_MISSING, _IGNORED, _ZERO = "missing ", "ignored ", "zero "


def _variations(path: str, leaf: Tensor, dim: int, thorough: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What may differ among the rows of this tensor: a name, and a function that returns a number for each row.

    Args:
        path: Of the tensor.
        leaf: The tensor.
        dim: Where its rows are.
        thorough: Whether to look at each number of a large tensor, too.
    """
    floating, small = leaf.is_floating_point(), thorough or leaf.numel() <= SMALL
    if floating and small:
        yield _MISSING + path, lambda: _sums(leaf.isnan(), dim)
    if leaf.dtype in _WHOLE or (floating and small):
        yield _IGNORED + path, lambda: _sums(leaf < 0, dim)
    if small:
        yield _ZERO + path, lambda: _sums(leaf == 0, dim)
    named = "mask" in path or "weight" in path
    if (named and leaf.dim() <= 2) or (floating and leaf.dim() == 1):
        yield f"sum {path}", lambda: _sums(leaf, dim)
    if named and leaf.dim() == 2:
        yield f"left {path}", lambda: leaf.detach().movedim(dim, 0)[:, 0] == 0


def _equal(leaf: Tensor, dim: int, value: float) -> Tensor:
    return _sums(leaf == value, dim)


def _sums(leaf: Tensor, dim: int) -> Tensor:
    rows = leaf.detach().movedim(dim, 0)
    return rows.reshape(len(rows), -1).sum(1)


def _differs(values: Tensor) -> Tensor:
    return (values != values[0]).any()


def _read_later(flag: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A number on the host, and what tells when it has arrived there."""
    host = torch.empty_like(flag, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
