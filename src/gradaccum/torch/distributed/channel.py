"""Messages between ranks: a few numbers at a window's end, from host to host.

No device waits for them, and they cannot get between the gradients' reductions, whose order must be the same on every
rank. They go over connections of their own: no thread is woken to send or receive them, as gloo's are.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import pickle
import struct
import weakref
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from socket import MSG_WAITALL, socket
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import timeout_of
from gradaccum.torch.distributed.meeting import give_up_after, meet

_NUMBERS, _OBJECT = b"n", b"o"
_HEAD = struct.Struct("<cQ")
"""What a message begins with: what it is, and how many bytes follow."""


class Kind(enum.IntEnum):
    """What a message is about."""

    WINDOW = 1  # a backward pass that reduces the window has started; what the window will weigh, if that is known
    IDLE = 2  # this rank has nothing to reduce, and takes part if others have
    ABORTED = 3  # this rank has dropped out
    TOTAL = 4  # what the window weighs, after its reduction: where that was not known before
    START = 5  # an epoch begins
    MICRO_BATCH = 6  # a micro-batch begins
    NUMBER = 7  # something to add up over the ranks
    FORWARD = 8  # the forward pass of a sharded part begins, or all of them are done
    FINISHED = 9  # a window's sum is finished, and what it weighs
    ENDED = 10  # this rank's epoch is over, and it can't take part in others' windows


class Channel:
    """Exchanges messages between these global ranks, which all construct it at the same time; or with nobody.

    The timeout of `group`, a process group of theirs, is an exchange's timeout.
    """

    made = 0
    """How many this process has made, or tried to, with other ranks."""

    def __init__(self, members: Sequence[int] = (0,), group: dist.ProcessGroup | None = None) -> None:
        self.size, self.rank = len(members), 0
        self._connections: Mapping[int, socket] = {}
        self._arrived = defaultdict[tuple[int, bytes], deque[bytes]](deque)
        """By rank and kind, messages that have come before one of the other kind that was waited for."""
        if self.size == 1:
            return
        Channel.made += 1
        self.rank, self.timeout = list(members).index(dist.get_rank()), timeout_of(group or dist.group.WORLD)
        self._patience = self.timeout()
        try:
            self._connections = meet(members, self._patience)
            for connection in self._connections.values():
                give_up_after(connection, self._patience)
                weakref.finalize(self, connection.close)
        except (RuntimeError, OSError) as error:
            if isinstance(error, WindowError):
                raise
            raise WindowError(
                f"Rank {dist.get_rank()} waited for the other ranks to build their Optimizer or TrainStep, and at "
                "least one of them is gone, or took longer than the process group's timeout. Build it on every "
                f"rank, and look at the other ranks' own errors. ({error})"
            ) from error

    def exchange(self, *numbers: float) -> list[list[float]]:
        """Send these numbers, and wait for every rank's."""
        return self.receive(self.send(*numbers))

    def send(self, *numbers: float) -> list[float]:
        """Begin an exchange, which `receive` ends."""
        self._send(_NUMBERS, array("d", numbers).tobytes())
        return [*numbers]

    def receive(self, mine: list[float]) -> list[list[float]]:
        """What `exchange` returns."""
        ranks = range(self.size)
        return [mine if one == self.rank else array("d", self._next(one, _NUMBERS)).tolist() for one in ranks]

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank: anything that can be pickled."""
        return [self.broadcast(mine, source) for source in range(self.size)]  # in turns: nobody sends to who sends

    def broadcast(self, mine: Any, source: int) -> Any:
        """The object of the rank `source`, on every rank."""
        if self.rank != source:
            return pickle.loads(self._next(source, _OBJECT))
        if self.size > 1:
            self._send(_OBJECT, pickle.dumps(mine))
        return mine

    def _send(self, kind: bytes, message: bytes) -> None:
        """To each other rank. One that is gone is noticed when its own message is read: it may have left one."""
        message = _HEAD.pack(kind, len(message)) + message
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(message)

    def _next(self, rank: int, kind: bytes) -> bytes:
        """Wait for this rank's next message of this kind."""
        if arrived := self._arrived[rank, kind]:
            return arrived.popleft()
        connection = self._connections[rank]
        if (seconds := self.timeout()) != self._patience:
            self._patience = seconds
            for one in self._connections.values():
                give_up_after(one, seconds)
        try:
            while True:
                found, size = _HEAD.unpack(_read(connection, _HEAD.size))
                message = _read(connection, size)
                if found == kind:
                    return message
                self._arrived[rank, found].append(message)
        except (OSError, EOFError) as error:
            said = f"nothing came for {seconds:g} s" if isinstance(error, BlockingIOError) else error
            raise WindowError(
                f"Rank {self.rank} waited for the other ranks at a window's end, and at least one of them is gone: it "
                "raised an error, left its loop or died, or it took longer than the process group's timeout. Look at "
                f"that rank's own error. ({said})"
            ) from error


def _read(connection: socket, size: int) -> bytes:
    """So many bytes; an EOFError where the other end is closed."""
    found = connection.recv(size, MSG_WAITALL)
    while len(found) < size:
        if not (more := connection.recv(size - len(found), MSG_WAITALL)):
            raise EOFError("its connection is closed")
        found += more
    return found


class Settings:
    """What an update does beside the gradient, which must be the same on all ranks: its hyperparameters.

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
        mine = self.hyperparameters(wait=self._compared & (self._compared - 1) == 0)
        if mine != self._last:
            self._last, self._number = mine, zlib.crc32(repr(mine).encode())
        return self._number

    def settle(self, channel: Channel) -> None:
        """The ranks' numbers differ, on all of them: a WindowError if their hyperparameters do."""
        everybody, different = channel.gather(self.hyperparameters()), list[str]()
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
