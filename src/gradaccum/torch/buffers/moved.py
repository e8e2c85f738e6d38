"""Where passes lead together that have each moved a buffer from the same start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.on_torch.buffers import Moving, put
from gradaccum.torch.buffers.rules import Rule, ruled, rules_of

__all__ = ["Move", "Moved", "move_all"]


class Moved:
    """One buffer that passes move, or make, each from the same start.

        mean:   start + sum_i n_i (end_i - start) / N        with the rows n_i of pass i, and N = sum_i n_i

    Args:
        start: Its value before each of them; not to be edited. None: there was no such buffer.
        rule: What becomes of the ends.
        rows: Of the passes so far, which have not moved it.

    Example:
        >>> moved = Moved(torch.zeros(2))
        >>> moved.add(torch.tensor([1.0, 2.0]), 3)
        >>> moved.add(torch.tensor([5.0, 2.0]), 1)
        >>> moved.end()
        tensor([2., 2.])
    """

    def __init__(self, start: Tensor | None, rule: Rule = "mean", rows: int = 0) -> None:
        self.start, self.rule, self.rows = start, rule, rows
        self._together = _exactly(start)
        self._ends: list[Tensor] = []
        self._dtype: torch.dtype | None = None
        self._moves = False

    @torch.no_grad()
    def add(self, end: Tensor | None, rows: int) -> None:
        """A pass over so many rows led here; None: it has deleted the buffer, or not made it."""
        self.rows += rows
        if end is None:
            self._together = None if self.start is not None else self._together
            return
        if callable(self.rule):
            self._ends.append(end.detach().clone())
            return
        self._dtype = end.dtype
        end, start, so_far = _exactly(end.detach()), _exactly(self.start), self._together
        assert end is not None
        if self.rule == "once":
            self._together = so_far if self._moves else end.clone()
            self._moves = self._moves or start is None or not _alike(end, start) or not torch.equal(end, start)
        elif so_far is None or not _alike(end, so_far):  # no arithmetic leads from one to the other
            self._together = end.clone()
        elif self.rule == "sum" and (start is None or _alike(end, start)):
            self._together = (
                so_far | end if end.dtype == torch.bool else so_far + (end if start is None else end - start)
            )
        elif rows == self.rows:  # the first pass
            self._together = end.clone()
        elif self.rule == "max":
            self._together = torch.maximum(so_far, end)
        elif not (end.is_floating_point() or end.is_complex()):
            self._together = end.clone()
        else:  # where nothing differs nothing changes, so that infinities and constants stay what they are
            self._together = torch.where(end == so_far, so_far, so_far + (end - so_far) * (rows / self.rows))

    @torch.no_grad()
    def end(self, module: nn.Module | None = None, name: str = "") -> Tensor | None:
        """Where all passes lead together; None: there is no such buffer any more.

        Args:
            module: For a callable rule: whose buffer it is.
            name: And what it is called there.
        """
        if callable(self.rule):
            return ruled(module, name, self.rule, self.start, self._ends) if self._ends else None
        return self._together if self._together is None or self._dtype is None else self._together.to(self._dtype)


def _exactly(value: Tensor | None) -> Tensor | None:
    """As it is; float8, which has no arithmetic of its own, as float32."""
    narrow = value is not None and value.is_floating_point() and value.itemsize == 1
    return value.float() if narrow else value  # type: ignore[union-attr]  # there is one


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.layout, one.device) == (other.shape, other.dtype, other.layout, other.device)


class Move(NamedTuple):
    """A buffer, and where it goes."""

    module: nn.Module | None
    buffer: Moving
    moved: Moved


def move_all(moves: Iterable[Move]) -> None:
    """Move buffers once: those with a callable rule last, as it may look at the others, in the order that was given."""
    moves = list(moves)
    for move in moves:
        if not callable(move.moved.rule):
            _move(move)
    callables = [
        (list(rules_of(move.module)).index(move.buffer.name), move) for move in moves if callable(move.moved.rule)
    ]
    for _, move in sorted(callables, key=lambda ranked: ranked[0]):
        _move(move)


@torch.no_grad()
def _move(move: Move) -> None:
    holder, name, tensor, _, _ = move.buffer
    end = move.moved.end(move.module, name)
    if end is None:
        if name in holder and tensor is not None:
            del holder[name]
    else:
        put(holder, name, tensor, end)
