"""The buffers of a window's micro-batches: each finds them as the window did, and they move once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.buffers import Moving, set_to
from gradaccum.torch.buffers.moved import Move, Moved, move_all
from gradaccum.torch.buffers.rules import rules_of

__all__ = ["WindowBuffers"]


class WindowBuffers:
    """Puts buffers back after each micro-batch, and moves them at the window's end.

    BatchNorm's statistics are left alone: what becomes of them is `batch_norm`'s to say.

    Args:
        modules: Whose buffers move.

    Example:
        >>> from gradaccum.on_torch.buffers import Moving
        >>> layer = nn.Linear(2, 2)
        >>> layer.register_buffer("passes", torch.zeros(()))
        >>> window = WindowBuffers([layer])
        >>> for _ in range(3):
        ...     start = layer.passes.clone()
        ...     layer.passes += 1
        ...     window.micro_batch([Moving(layer._buffers, "passes", layer.passes, start)], rows=4)
        >>> window.close()
        >>> layer.passes
        tensor(1.)
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._owners: dict[int, tuple[Any, nn.Module]] = {}
        self.open()

    def open(self) -> None:
        """A window begins."""
        self._moves: dict[tuple[int, str], Move] = {}
        self._rows = 0

    @torch.no_grad()
    def micro_batch(self, moved: Iterable[Moving], rows: int) -> None:
        """A micro-batch of so many rows is in. Has the next one find what this one has found.

        Args:
            moved: The buffers that it has moved, or made.
            rows: Of the micro-batch.
        """
        ends = {}
        for buffer in moved:
            module, key = self._owner(buffer.holder), (id(buffer.holder), buffer.name)
            if isinstance(module, _BatchNorm):
                continue
            ends[key] = buffer.holder.get(buffer.name)
            if key not in self._moves:
                rule = rules_of(module).get(buffer.name, "mean")
                self._moves[key] = Move(module, buffer, Moved(buffer.start, rule, self._rows))
        for key, move in self._moves.items():
            move.moved.add(ends.get(key, move.moved.start), rows)
        for key in ends:  # all ends are known: some may share memory
            holder, name, tensor, start, named = self._moves[key].buffer
            if tensor is not None and start is not None:
                holder[name] = tensor
                set_to(tensor, start)
            elif named:
                holder[name] = None
            else:
                del holder[name]
        self._rows += rows

    def close(self) -> None:
        """After the last micro-batch."""
        move_all(self._moves.values())
        self.open()

    def _owner(self, holder: dict[str, Any]) -> nn.Module | None:
        if self._owners.get(id(holder), (None,))[0] is not holder:
            found = [module for root in self._modules for module in root.modules()]
            self._owners = {id(module._buffers): (module._buffers, module) for module in found}
        return self._owners.get(id(holder), (None, None))[1]
