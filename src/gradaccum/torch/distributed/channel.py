"""What ranks tell each other: a few numbers, once or twice per window, over a process group of their own.

The numbers travel over gloo, from host to host: no device waits for them, and they cannot get between the gradients'
reductions, whose order must be the same on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradaccum.errors import WindowError

__all__ = ["WIDTH", "Channel", "Message"]

WIDTH = 11
"""Numbers in a message. All messages have the same size, so that even mismatched ones meet, and are told apart."""


Message = tuple[Any, torch.Tensor]
"""What has been said, and where what the others say arrives."""


class Channel:
    """Rounds in which every rank says a few numbers and hears all others'. All ranks construct it at the same time.

    Args:
        members: The global ranks whose gradients are reduced together.
        group: A process group of theirs, or None: what it waits at most is what a round waits at most.
    """

    def __init__(self, members: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        self.size = len(members)
        self.rank = list(members).index(dist.get_rank())
        everybody = self.size == dist.get_world_size()
        self._group: Any = None
        if self.size > 1:
            self._group = dist.new_group(
                list(members),
                backend="gloo",
                timeout=_timeout_of(dist.group.WORLD if group is None else group),
                use_local_synchronization=not everybody,
            )
        self._posted: list[Message] = []

    def exchange(self, *numbers: float) -> list[list[float]]:
        """Say these numbers, and wait for what every rank says: a row of `WIDTH` numbers for each.

        Raises:
            WindowError: A rank is gone, or has not answered within the process group's timeout.
        """
        return self.hear(self.say(*numbers))

    def say(self, *numbers: float) -> Message:
        """The first half of `exchange`: say these numbers, and go on."""
        mine = torch.tensor([*numbers, *[0.0] * (WIDTH - len(numbers))], dtype=torch.float64)
        if self._group is None:
            return None, mine[None]
        heard = torch.empty(self.size, WIDTH, dtype=torch.float64)
        try:
            return self._group.allgather([list(heard)], [mine]), heard
        except RuntimeError as error:
            raise self._gone(error) from error

    def hear(self, message: Message) -> list[list[float]]:
        """The second half: wait for what every rank says. Messages are heard in the order in which they are said."""
        work, heard = message
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._gone(error) from error
        return heard.tolist()

    def _gone(self, error: RuntimeError) -> WindowError:
        return WindowError(
            f"Rank {self.rank} waited for the other ranks at a window's end, and at least one of them is gone, or took "
            "longer than the process group's timeout: it raised an error in the middle of the window, or left its "
            f"loop. Look at its own message. ({error})"
        )

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has, by rank: anything that can be pickled."""
        everybody = [mine] * self.size
        if self._group is not None:
            dist.all_gather_object(everybody, mine, group=self._group)
        return everybody

    def post(self, *numbers: float) -> None:
        """Say these numbers without waiting for the others; `posted` tells later what they said."""
        if self._group is not None:
            # Where the process group is gone, so is whoever could listen.
            with contextlib.suppress(WindowError, ValueError, AssertionError):
                self._posted.append(self.say(*numbers))

    def posted(self) -> list[list[list[float]]]:
        """What was said in the rounds of `post`, each once."""
        rounds, self._posted = self._posted, []
        return [self.hear(message) for message in rounds]


def _timeout_of(group: Any) -> timedelta | None:
    """How long this group waits; torch would give a new one its default of half an hour."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (RuntimeError, AttributeError):
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None
