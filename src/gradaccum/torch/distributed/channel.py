"""Messages between ranks: a few numbers at a window's end, over a process group of their own.

The numbers travel over gloo, from host to host: no device waits for them, and they cannot get between the gradients'
reductions, whose order must be the same on every rank.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import default_store, gloo_timeout, timeout_of

WIDTH = 24
"""Numbers in a message. All messages have the same size, so that even mismatched ones meet, and are told apart."""


class Kind(enum.IntEnum):
    """What a message is about."""

    WINDOW = 1  # a backward pass that reduces the window has started; what the window will weigh, if that is known
    IDLE = 2  # this rank has nothing to reduce, and takes part if others have
    ABORTED = 3  # this rank has dropped out
    TOTAL = 4  # what the window weighs, after its reduction: where that was not known before
    START = 5  # how long the windows are, and what else must be the same
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
        self.line: Line | None = None
        if self.size == 1:
            return
        Channel.made += 1
        self.rank = list(members).index(dist.get_rank())
        try:
            self.line = _meet(members, timeout_of(dist.group.WORLD if group is None else group))
        except WindowError:
            raise
        except RuntimeError as error:
            raise WindowError(
                f"Rank {dist.get_rank()} waited for the other ranks to build their Optimizer or TrainStep, and at "
                "least one of them is gone, or took longer than the process group's timeout. Build it on every "
                f"rank, and look at the other ranks' own errors. ({error})"
            ) from error
        weakref.finalize(self, self.line.release).atexit = False

    def exchange(self, *numbers: float) -> list[list[float]]:
        """Send these numbers, and wait for every rank's: a row of `WIDTH` numbers for each."""
        return self.receive(self.send(*numbers))

    def send(self, *numbers: float) -> tuple[list[Any], list[float]]:
        """Begin an exchange, which `receive` ends."""
        mine = [*numbers, *[0.0] * (WIDTH - len(numbers))]
        if self.line is None:
            return [], mine
        try:
            return self.line.send(mine), mine
        except RuntimeError as error:
            raise self._gone(error) from error

    def receive(self, message: tuple[list[Any], list[float]]) -> list[list[float]]:
        """What `exchange` returns."""
        sent, mine = message
        if self.line is None:
            return [mine]
        try:
            return self.line.receive(sent, mine)
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> WindowError:
        return WindowError(
            f"Rank {self.rank} waited for the other ranks at a window's end, and at least one of them is gone: it "
            "raised an error, left its loop or died, or it took longer than the process group's timeout. Look at that "
            f"rank's own error. ({error})"
        )

    def post(self, *numbers: float) -> None:
        """Send these numbers without waiting for the others; `posted` returns theirs later."""
        if self.line is not None:
            # Where the process group is gone, nobody can receive them.
            with contextlib.suppress(WindowError, ValueError, AssertionError):
                self.line.posted.append(self.send(*numbers))

    def posted(self) -> list[list[list[float]]]:
        """What all ranks sent in the exchanges that `post` began, each once."""
        if self.line is None or not self.line.posted:
            return []
        messages, self.line.posted = self.line.posted, []
        return [self.receive(message) for message in messages]

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank: anything that can be pickled."""
        objects = [mine] * self.size
        with self._collective() as group:
            if group is not None:
                dist.all_gather_object(objects, mine, group=group)
        return objects

    def broadcast(self, mine: Any, source: int) -> Any:
        """The object of the rank `source`, on every rank."""
        objects = [mine]
        with self._collective() as group:
            if group is not None:
                dist.broadcast_object_list(objects, group=group, group_src=source)
        return objects[0]

    @contextlib.contextmanager
    def _collective(self) -> Iterator[Any]:
        group = None if self.line is None else self.line.begin()
        try:
            yield group
        except RuntimeError as error:
            raise self._gone(error) from error
        if self.line is not None:
            self.line.met += 1


class Line:
    """A process group over gloo, for one channel after the other: one with a message under way can't be destroyed.

    It has the same name on all ranks.
    """

    idle: ClassVar[list[Line]] = []
    """Those that channels have laid down here."""

    def __init__(self, name: str, group: Any, timeout: timedelta | None) -> None:
        self.name, self.timeout = name, timeout
        self.group = weakref.ref(group)  # torch holds it until the process group is destroyed
        self.begun = self.met = 0
        """Exchanges, and in how many of them all ranks have met."""
        self.posted: list[tuple[list[Any], list[float]]] = []
        self._rank, self._others = group.rank(), [rank for rank in range(group.size()) if rank != group.rank()]
        self._timeout_now = gloo_timeout(group)
        self._received = torch.empty(len(self._others), WIDTH, dtype=torch.float64)
        self._expect()

    def _expect(self) -> None:
        """Be ready for the next message of each other rank, which then needs no thread to send it."""
        if (group := self.group()) is not None:
            self._arriving = [group.recv([row], rank, 0) for row, rank in zip(self._received, self._others)]

    def send(self, numbers: list[float]) -> list[Any]:
        """These numbers are on their way to each other rank."""
        group, mine = self.begin(), [torch.tensor(numbers, dtype=torch.float64)]
        return [group.send(mine, rank, 0) for rank in self._others]

    def receive(self, sent: list[Any], mine: list[float]) -> list[list[float]]:
        """Wait for what each rank has sent in an exchange, of those that are begun the earliest."""
        timeout = self._timeout_now()
        for work in [*self._arriving, *sent]:
            work.wait(timeout)
        found: list[list[float]] = self._received.tolist()
        found.insert(self._rank, mine)
        self.met += 1
        self._expect()
        return found

    def begin(self) -> Any:
        """The group, for one more exchange."""
        group = self.group()
        if group is None:
            raise ValueError("The process group has been destroyed, so the ranks can't exchange messages.")
        self.begun += 1
        return group

    def release(self) -> None:
        """The channel is gone. Where ranks may not have met in all that was begun, nobody uses the group again."""
        Line.idle.append(self)  # with messages that may still be on their way


def _meet(members: Sequence[int], timeout: timedelta | None) -> Line:
    """Wait until every rank is about to make a channel, or one says that it won't: no collective waits for that one."""
    store, (meeting, place) = default_store(), _place(members)
    # A group that all ranks know by the same name, and in which as much has been sent, can be used again.
    Line.idle = [line for line in Line.idle if line.group() is not None]
    free = [line for line in Line.idle if line.met == line.begun]
    fit = [line for line in free if line.name.startswith(meeting) and line.timeout == timeout]
    offered = {f"{line.name} {line.begun}": line for line in fit}
    store.set(f"{place}/offers/{dist.get_rank()}", "\n".join(offered))
    if store.add(f"{place}/arrived", 1) == len(members):
        offers = [store.get(f"{place}/offers/{member}").decode().splitlines() for member in members]
        known = [name for name in offers[0] if all(name in theirs for theirs in offers)]
        store.set(f"{place}/outcome", f"use {known[0]}" if known else "new")
    store.wait([f"{place}/outcome"], timeout or timedelta(minutes=30))
    outcome, _, name = store.get(f"{place}/outcome").decode().partition(" ")
    if outcome == "absent":
        raise WindowError(
            f"Rank {name} raised an error while it built its Optimizer or TrainStep. Nothing was built on rank "
            f"{dist.get_rank()} either. Look at rank {name}'s own error."
        )
    if outcome == "use":
        Line.idle.remove(offered[name])
        return offered[name]
    group = dist.new_group(
        list(members), backend="gloo", timeout=timeout, use_local_synchronization=len(members) != dist.get_world_size()
    )
    return Line(place, group, timeout)


def stay_away(members: Sequence[int]) -> None:
    """This rank won't make the channel that the other ones are about to make, or wait for. Waits for nobody."""
    if len(members) > 1:
        with contextlib.suppress(RuntimeError):
            default_store().set(f"{_place(members)[1]}/outcome", f"absent {dist.get_rank()}")


def _place(members: Sequence[int]) -> tuple[str, str]:
    """Where these ranks leave word about channels, and about the one that each of them tries to make for the n-th
    time."""
    meeting = f"gradaccum/{'-'.join(map(str, members))}/"
    return meeting, f"{meeting}{default_store().add(f'{meeting}{dist.get_rank()}', 1)}"


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
