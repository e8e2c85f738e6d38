"""Messages between ranks: a few numbers of each rank, in one collective of torch.distributed.

They are tensors on the CPU, so that no host waits for a device, and go over the process group on which the model
reduces: gloo serves CPUs in groups of "gloo" and of "cpu:gloo,cuda:nccl". A group of NCCL alone has one gloo group
beside it, made once per process. Collectives of one group pair up by their order, so each message begins with a number
that no other collective has: a rank that is elsewhere in its program is an error, and never somebody's weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import timeout_of

LENGTH = 24
"""Numbers in a message, its header among them."""

_MAGIC = int.from_bytes(b"grada", "big") << 12
_BESIDE: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""The gloo groups beside groups that serve no CPU, or other ranks, too."""
_CHANNELS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many channels use a group."""


class Sent(NamedTuple):
    """A message that is under way."""

    rows: Tensor
    work: Any


class Channel:
    """Exchanges messages between the ranks of a process group, which all construct it at the same time; or alone.

    A rank that doesn't come is an error of the process group's, after its timeout or when its connection is closed.
    `members`: their global ranks, if they are not all those of `group`, which they then have no other one of.
    """

    def __init__(self, group: Any = None, members: Sequence[int] | None = None) -> None:
        self.size, self.rank, self._device = 1, 0, torch.device("cpu")
        if group is None:
            return
        members = dist.get_process_group_ranks(group) if members is None else sorted(members)
        self._group, self._device = _serving_cpus(group, members)
        self.size, self.rank = len(members), dist.get_rank(self._group)
        number = _CHANNELS[self._group] = _CHANNELS.get(self._group, 0) + 1
        self._header = float(_MAGIC + number % 4096)

    def exchange(self, *numbers: float) -> list[list[float]]:
        """Send these numbers, and wait for every rank's, which zeros follow."""
        return self.receive(self.send(*numbers))

    def send(self, *numbers: float) -> Sent:
        """Begin an exchange, which `receive` ends."""
        padding = [0.0] * (LENGTH - 1 - len(numbers))
        if self.size == 1:
            return Sent(torch.tensor([[*numbers, *padding]], dtype=torch.float64), None)
        mine = torch.tensor([self._header, *numbers, *padding], dtype=torch.float64, device=self._device)
        rows = mine.new_empty(self.size, LENGTH)
        return Sent(rows, dist.all_gather([*rows], mine, group=self._group, async_op=True))

    def receive(self, sent: Sent) -> list[list[float]]:
        """What `exchange` returns."""
        if sent.work is None:
            return sent.rows.tolist()
        sent.work.wait()
        rows = sent.rows.tolist()
        if [row for row in rows if row[0] != self._header]:
            elsewhere = [rank for rank, row in enumerate(rows) if row[0] != self._header]
            raise WindowError(
                f"Rank {self.rank} came to a message of this optimizer, and rank{'s' * (len(elsewhere) > 1)} "
                f"{', '.join(map(str, elsewhere))} to another collective of the same process group. Nothing was "
                "updated. Run the same steps, in the same order, on every rank."
            )
        return [row[1:] for row in rows]

    def texts(self, mine: str) -> list[str]:
        """Every rank's text."""
        own = torch.frombuffer(bytearray(mine, "utf-8"), dtype=torch.uint8) if mine else torch.zeros(0).byte()
        sizes = [int(row[0]) for row in self.exchange(len(own))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(own)] = own
        rows = [torch.empty_like(padded) for _ in sizes]
        if self.size == 1:
            return [mine]
        dist.all_gather(rows, padded, group=self._group)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes)]

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks."""
        total = tensor.to(self._device, copy=True)
        if self.size > 1:
            dist.all_reduce(total, group=self._group)
        return total.to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the rank `source`, which has this one's size and dtype."""
        copied = tensor.to(self._device, copy=True)
        if self.size > 1:
            dist.broadcast(copied, group=self._group, group_src=source)
        return copied.to(tensor.device)


def _serving_cpus(group: Any, members: Sequence[int]) -> tuple[Any, torch.device]:
    """The group of these ranks that messages go over, and the device that their numbers are on."""
    backends, is_whole = dist.get_backend_config(group), sorted(dist.get_process_group_ranks(group)) == [*members]
    if is_whole and ("cpu:" in backends or not dist.is_gloo_available()):
        return group, torch.device("cpu" if "cpu:" in backends else backends.partition(":")[0])
    beside = _BESIDE.setdefault(group, {})
    if (key := tuple(members)) not in beside:
        beside[key] = dist.new_group([*members], timeout_of(group), "gloo", use_local_synchronization=True)
    return beside[key], torch.device("cpu")
