"""The buffers of a window's micro-batches: each finds them as the window did, and they move once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.torch.buffers.moved import Moved, move_all
from gradaccum.torch.buffers.rules import rules_of

__all__ = ["WindowBuffers"]


class _Place(NamedTuple):
    module: nn.Module | None
    holder: dict[str, Any]
    name: str
    tensor: Tensor
    moved: Moved


class WindowBuffers:
    """Puts buffers back after each micro-batch, and moves them at the window's end.

    BatchNorm's statistics are left alone: what becomes of them is `batch_norm`'s to say.

    Args:
        modules: Whose buffers move.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.register_buffer("passes", torch.zeros(()))
        >>> window = WindowBuffers([layer])
        >>> for _ in range(3):
        ...     start = layer.passes.clone()
        ...     layer.passes += 1
        ...     window.micro_batch([(layer._buffers, "passes", layer.passes, start)], rows=4)
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
        self._places: dict[tuple[int, str], _Place] = {}
        self._rows = 0

    @torch.no_grad()
    def micro_batch(self, moved: Iterable[tuple[dict[str, Any], str, Tensor, Tensor]], rows: int) -> None:
        """A micro-batch of so many rows is in. Has the next one find what this one has found.

        Args:
            moved: The dict that holds a buffer that has moved, its name there, the tensor that was there, and a copy
                of it.
            rows: Of the micro-batch.
        """
        ends = {}
        for holder, name, tensor, start in moved:
            module, key = self._owner(holder), (id(holder), name)
            if isinstance(module, _BatchNorm):
                continue
            ends[key] = tensor if holder.get(name) is None else holder[name]
            if key not in self._places:
                rule = rules_of(module).get(name, "mean")
                self._places[key] = _Place(module, holder, name, tensor, Moved(start, rule, self._rows))
        for key, place in self._places.items():
            place.moved.add(ends.get(key, place.moved.start), rows)
            if key in ends:
                place.holder[place.name] = place.tensor
                place.tensor.copy_(place.moved.start)
        self._rows += rows

    def close(self) -> None:
        """After the last micro-batch."""
        move_all(self._places.values())
        self.open()

    def _owner(self, holder: dict[str, Any]) -> nn.Module | None:
        if self._owners.get(id(holder), (None,))[0] is not holder:
            found = [module for root in self._modules for module in root.modules()]
            self._owners = {id(module._buffers): (module._buffers, module) for module in found}
        return self._owners.get(id(holder), (None, None))[1]
