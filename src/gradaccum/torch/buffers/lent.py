"""The buffers of a chunked module: every first pass finds them as the call did, and they move once."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.state import BufferDicts, BufferSnapshot
from gradaccum.torch.buffers.moves import Move, Moved, move_all
from gradaccum.torch.buffers.rules import rules_of

__all__ = ["LentBuffers"]

LOOKED_AT = 1 << 14
"""Bytes of a buffer in host memory that is compared by value."""

_NO_CONTEXT = contextlib.nullcontext()


class LentBuffers:
    """Buffers that every forward pass finds as they were at first, and that move once.

    They move to where the passes took them on average over rows, or as `combine_buffers` says. The former is exact for
    what doesn't depend on the rows (counters, power iterations) and for moving averages of means over rows.

    Example:
        >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
        >>> parts = [part._buffers for part in layer.modules()]
        >>> buffers = LentBuffers([(part, name, part[name]) for part in parts for name in part])
        >>> for rows in torch.randn(6, 2).split(3):
        ...     with buffers.lent(rows=3):
        ...         y = layer(rows)
        >>> buffers.move()            # one power iteration, not two
    """

    @torch.no_grad()
    def __init__(
        self,
        places: Sequence[tuple[dict[str, Any], str, Tensor]],
        excluded: Collection[int] = (),
        owners: Mapping[int, nn.Module] | None = None,
        holders: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.places, self._owners = places, owners or {}
        self.originals = {id(buffer): buffer for _, _, buffer in places}
        self.before = {key: buffer.detach().clone() for key, buffer in self.originals.items()}
        self._aliases = _sharing_memory(self.originals)
        self._holders = BufferDicts(holders)
        self.excluded = excluded
        # PyTorch's normalisation kernels don't count their moves as in-place edits, so these are told by their names.
        self.uncounted = {id(buffer) for _, name, buffer in places if name.startswith("running_")}
        self.moved: dict[int, Moved] = {}
        self.made: dict[tuple[int, str], Move] = {}
        self.rows = 0

    def lent(self, rows: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Around one pass: a first pass over so many rows, or, without rows, a repetition that moves nothing."""
        return self._lent(rows) if self.before or self._holders.any else _NO_CONTEXT

    @contextlib.contextmanager
    def _lent(self, rows: int | None) -> Iterator[None]:
        copies = self._copies({key for key in self.before if rows is None or key not in self.excluded})
        versions = {key: copy._version for key, copy in copies.items() if not copy.is_inference()}
        places = [(holder, name, buffer) for holder, name, buffer in self.places if id(buffer) in copies]
        left: dict[int, Tensor | None] = {}
        made: list[tuple[BufferSnapshot, Tensor]] = []
        try:
            for holder, name, buffer in places:
                holder[name] = copies[id(buffer)]
            yield
        finally:
            made = [(found, found.owner[found.name]) for found in self._holders.made()]
            self._holders.unmake()
            for holder, name, buffer in places:
                left[id(buffer)] = holder.get(name)
                holder[name] = buffer
        if rows is not None:
            edited = {key for key, value in left.items() if self._edited(value, copies[key], versions, key)}
            self._note(rows, left, edited, made)

    def _copies(self, keys: Collection[int]) -> dict[int, Tensor]:
        copies = {key: buffer.clone() for key, buffer in self.before.items() if key in keys}
        for whole, views in self._aliases:
            memory = whole.clone()
            copies.update({key: memory.as_strided(*where) for key, where in views.items() if key in keys})
        return copies

    def _edited(self, value: Tensor | None, copy: Tensor, versions: dict[int, int], key: int) -> bool:
        if value is not copy or key in self.uncounted or key not in versions or value._version != versions[key]:
            return True
        # What moves through `.data` or NumPy shows in its value alone; elsewhere a look would wait for the device.
        return copy.is_cpu and copy.nbytes <= LOOKED_AT and not torch.equal(copy, self.before[key])

    @torch.no_grad()
    def _note(
        self,
        rows: int,
        left: Mapping[int, Tensor | None],
        edited: Collection[int],
        made: Sequence[tuple[BufferSnapshot, Tensor]],
    ) -> None:
        for holder, name, buffer in self.places:
            key = id(buffer)
            if key in edited and key not in self.moved:
                self.moved[key] = Moved(self.before[key], self._rule(holder, name), self.rows)
        for key, moved in self.moved.items():
            if key in left:
                moved.add(left[key], rows)
        ends = {(id(found.owner), found.name): end for found, end in made}
        for found, _ in made:
            place = id(found.owner), found.name
            if place not in self.made:
                moved = Moved(None, self._rule(found.owner, found.name), self.rows)
                self.made[place] = Move(self._owners.get(place[0]), found, moved)
        for place, move in self.made.items():
            move.moved.add(ends.get(place), rows)
        self.rows += rows

    def _rule(self, holder: dict[str, Any], name: str) -> Any:
        return rules_of(self._owners.get(id(holder))).get(name, "mean")

    def move(self) -> None:
        """After all first passes."""
        once = {id(place[2]): place for place in reversed(self.places) if id(place[2]) in self.moved}
        moves = [
            Move(self._owners.get(id(holder)), _snapshot(holder, name, buffer), self.moved[key])
            for key, (holder, name, buffer) in once.items()
        ]
        move_all([*moves, *self.made.values()])


def _snapshot(holder: dict[str, Any], name: str, buffer: Tensor) -> BufferSnapshot:
    snapshot = BufferSnapshot(holder, name)
    snapshot.tensor = buffer
    return snapshot


def _sharing_memory(tensors: Mapping[int, Tensor]) -> list[tuple[Tensor, dict[int, tuple[Any, ...]]]]:
    """Those that are views of the same numbers: these, and where in them each is."""
    found: dict[tuple[Any, ...], dict[int, Tensor]] = {}
    for key, tensor in tensors.items():
        if (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.numel()
            and tensor.device.type != "meta"
        ):
            memory = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device
            found.setdefault(memory, {})[key] = tensor
    groups = []
    for views in found.values():
        if len(views) > 1:
            first = min(view.storage_offset() for view in views.values())
            extents = [sum((n - 1) * s for n, s in zip(v.shape, v.stride())) for v in views.values()]
            last = max(view.storage_offset() + extent for view, extent in zip(views.values(), extents))
            whole = next(iter(views.values())).detach().as_strided((last - first + 1,), (1,), first).clone()
            groups.append((whole, {k: (v.shape, v.stride(), v.storage_offset() - first) for k, v in views.items()}))
    return groups
