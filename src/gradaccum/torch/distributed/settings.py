"""What an update does beside the gradient, which must be the same on all ranks: its hyperparameters."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.torch.distributed.channel import Channel


class Settings:
    """The hyperparameters of an update, as a number that goes with a window's message, and in full where it differs.

    `groups` returns the groups of the optimizers that make the update.
    """

    known_early = True
    """Whether they are what they will be at the update when the window's last backward pass starts."""

    def __init__(self, groups: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._groups, self._compared = groups, 0
        self._last, self._number = list[dict[str, Any]](), 0

    def number(self) -> float:
        """Goes with a window's message, and differs where these do. Waits for a device at calls 1, 2, 4, 8, ..."""
        self._compared += 1
        current = self.hyperparameters(wait=self._compared & (self._compared - 1) == 0)
        if current != self._last:
            self._last, self._number = current, zlib.crc32(repr(current).encode())
        return self._number

    def settle(self, channel: Channel) -> None:
        """The ranks' numbers differ, on all of them: a WindowError if their hyperparameters do."""
        everybody, different = [*map(json.loads, channel.texts(json.dumps(self.hyperparameters())))], list[str]()
        for place, groups in enumerate(itertools.zip_longest(*everybody, fillvalue={})):
            for name in dict.fromkeys(name for group in groups for name in group):
                values = [group.get(name, "none") for group in groups]
                if any(value != values[0] for value in values):
                    different.append(f"{name}{f' of group {place}' if place else ''} is {by_rank(values)}")
        if different:
            raise WindowError(
                f"Ranks have different hyperparameters: {'; '.join(different)}. Nothing was updated. Change them "
                "in the same way on every rank. A schedule that is stepped in the loop's body misses updates that come "
                "after the loop, on ranks that have fewer batches. A hook does not: "
                "optimizer.register_step_post_hook(lambda *_: scheduler.step())."
            )

    def hyperparameters(self, *, wait: bool = True) -> list[dict[str, Any]]:
        """The numbers and names in each group, as plain values; `wait`: tensors on a device, too."""
        return [
            {
                name: plain
                for name, value in group.items()
                if (plain := value if type(value) in _PLAIN else _plain(value, wait)) is not None and name != "params"
            }
            for group in self._groups()
        ]


_PLAIN = frozenset({bool, float, int, str, type(None)})


def _plain(value: Any, wait: bool) -> Any:
    """None for what is no number or name, or is not looked at."""
    if isinstance(value, Tensor):
        looked_at = value.numel() == 1 and not value.requires_grad and (wait or value.device.type == "cpu")
        return value.item() if looked_at else None
    if isinstance(value, tuple | list):  # betas; not parameters, or their names
        return [v if type(v) in _PLAIN else _plain(v, wait) for v in value] if len(value) < 5 else None
    return value.item() if getattr(value, "ndim", None) == 0 else None  # NumPy's numbers


def by_rank(values: Sequence[Any]) -> str:
    """Each rank's value, for a message."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
