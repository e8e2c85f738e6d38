"""Where passes lead together that have each moved a buffer from the same start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch.buffers.rules import Rule, rules_of

__all__ = ["Moved", "move_all"]


class Moved:
    """One buffer that passes move, each from the same start.

        mean:   start + sum_i n_i (end_i - start) / N        with the rows n_i of pass i, and N = sum_i n_i

    Args:
        start: Its value before each of them; not to be edited.
        rule: What becomes of the ends.
        rows: Of the passes so far, which have not moved it.

    Example:
        >>> moved = Moved(torch.zeros(2))
        >>> moved.add(torch.tensor([1.0, 2.0]), 3)
        >>> moved.add(torch.tensor([5.0, 2.0]), 1)
        >>> moved.end(None)
        tensor([2., 2.])
    """

    def __init__(self, start: Tensor, rule: Rule = "mean", rows: int = 0) -> None:
        self.start, self.rule, self.rows = start, rule, rows
        self._together = start
        self._ends: list[Tensor] = []

    @torch.no_grad()
    def add(self, end: Tensor, rows: int) -> None:
        """A pass over so many rows led here."""
        end, start, so_far = end.detach(), self.start, self._together
        self.rows += rows
        if callable(self.rule):
            self._ends.append(end.clone())
        elif not _alike(end, start):  # no arithmetic leads from one to the other
            self._together = end.clone()
        elif self.rule == "once":
            self._together = end.clone() if so_far is start else so_far
        elif self.rule == "sum":
            self._together = so_far + (end - start)
        elif rows == self.rows:  # the first pass
            self._together = end.clone()
        elif self.rule == "max":
            self._together = torch.maximum(so_far, end)
        elif not (end.is_floating_point() or end.is_complex()):
            self._together = end.clone()
        else:  # where nothing differs nothing changes, so that infinities and constants stay what they are
            self._together = torch.where(end == so_far, so_far, so_far + (end - so_far) * (rows / self.rows))

    @torch.no_grad()
    def end(self, module: nn.Module | None) -> Tensor:
        """Where all passes lead together."""
        return self.rule(module, self.start, self._ends) if callable(self.rule) else self._together


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.layout, one.device) == (other.shape, other.dtype, other.layout, other.device)


def move_all(moves: Iterable[tuple[nn.Module | None, dict[str, Any], str, Tensor, Moved]]) -> None:
    """Move buffers once: those with a callable rule last, as it may look at the others, in the order that was given.

    Args:
        moves: The module, the dict that holds the buffer and its name there, the tensor, and where it goes.
    """
    moves = list(moves)
    for module, holder, name, tensor, moved in moves:
        if not callable(moved.rule):
            _set(holder, name, tensor, moved.end(module))
    callables = [
        (list(rules_of(module)).index(name), move)
        for move in moves
        for module, _, name, _, moved in [move]
        if callable(moved.rule)
    ]
    for _, (module, holder, name, tensor, moved) in sorted(callables, key=lambda ranked: ranked[0]):
        _set(holder, name, tensor, moved.end(module))


@torch.no_grad()
def _set(holder: dict[str, Any], name: str, tensor: Tensor, end: Tensor) -> None:
    if _alike(end, tensor):
        # PyTorch's normalisation kernels don't count their moves as edits of what a graph has saved: told by name.
        (tensor.data if name.startswith("running_") else tensor).copy_(end)
    else:
        holder[name] = end
