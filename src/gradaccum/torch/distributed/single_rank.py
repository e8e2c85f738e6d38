"""What a window asks of the other ranks, and what it is told where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = ["Listener", "SingleRank", "Total"]


class Total(NamedTuple):
    """What a window weighs: on one rank, and then over all of them."""

    weight: float
    given: bool = False
    """Whether a weight was said anywhere."""
    largest: float = 0.0
    """The largest weight of a micro-batch."""
    scale: float = 0.0
    """The GradScaler's scale in which the sum is; 0 without one."""
    wish: float = 0.0
    """The scale that this rank's GradScaler has come to."""
    overflow: bool = False
    """Whether a gradient has overflowed that scale."""


class Listener(Protocol):
    """What an optimizer's window does while its ranks run a micro-batch. `SingleRank` never calls it."""

    def forward_done(self, loss_scale: float) -> None:
        """The forward pass of the micro-batch that closes the window is done; the ranks agreed on this loss scale."""

    def backward_starts(self) -> None:
        """A backward pass starts: any of a sharded model, else one that reduces."""

    def foreseen(self) -> Total | None:
        """What the window will weigh with the micro-batch in progress; None where that may still change.

        Asked when a backward pass starts that reduces.
        """

    def reduced(self) -> None:
        """A backward pass has reduced the window's sum."""


class SingleRank:
    """One device: nothing to agree upon."""

    several = False
    in_step = False
    """Whether all ranks must run the same forward and backward passes, as sharded models do."""
    size = 1
    rank = 0
    by_hand = False
    """Whether the reduction waits until the window's sum is finished, rather than run in the last backward pass."""
    loss_scale = 0.0
    """The scale of a GradScaler that all ranks agreed upon at the last window's end."""

    def attach(self, listener: Listener) -> None:
        """Call this listener from now on. It is not kept alive."""

    @property
    def place(self) -> list[int]:
        """This rank, and how many there are."""
        return [self.rank, self.size]

    def expect(self, closes: bool, steps: int, last: bool = False, counts: bool = True) -> None:
        """What the next micro-batch is, before its forward pass.

        Args:
            closes: It closes the window.
            steps: The window's length.
            last: It is the last one of this rank's epoch.
            counts: It weighs something.
        """

    def meet(self, last: bool, repeatable: bool = True) -> bool:
        """A micro-batch of `batches()` begins: sharded models cannot do without the other ranks in any of them.

        Args:
            last: It is this rank's last one, or none at all: the last one's passes are to be repeated.
            repeatable: They can be.

        Returns:
            Whether it is the last one of all that run passes together.

        Raises:
            WindowError: It is the last one on some ranks only, and cannot be repeated there.
        """
        return last

    def repeat(self) -> None:
        """Run the passes of this rank's last micro-batch again, for the other ranks' sake, with nothing."""

    def most(self, passes: int) -> int:
        """The largest number of passes that any rank has in this window, of a sharded model; else one's own."""
        return passes

    def scale(self, factor: float) -> None:
        """Multiply what arrives at a sharded model's outputs in the backward pass."""

    def clear(self) -> None:
        """Drop what an open window has added up beside `p.grad`."""

    @property
    def pending(self) -> Callable[[], list[Tensor]]:
        """Returns what an open window has added up beside `p.grad`. Holds no reference to this object."""
        return list

    @property
    def reduced(self) -> bool:
        """Whether a backward pass has reduced the open window's sum."""
        return False

    def total(self, mine: Total) -> Total:
        """At the window's end: bring `p.grad` to its mean over the ranks. Returns what the window weighs on all."""
        return mine

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks, in place."""
        return tensor

    def add_up(self, number: float) -> float:
        """A number's sum over the ranks."""
        return number

    def everybody(self, mine: Any) -> list[Any]:
        """What every rank has, by rank. All ranks take part."""
        return [mine]

    def end(self) -> None:
        """This rank's epoch is over."""

    def goes_on(self) -> None:
        """A micro-batch is in, and the window stays open."""

    def others_go_on(self) -> bool:
        """Whether other ranks close one more window, in which this one takes part with nothing."""
        return False

    def begin(self) -> None:
        """The epoch is over on all ranks: the next one may begin."""

    def gather(self) -> None:
        """Have all that a sharded model's open window has added up in `p.grad`, to be saved. All ranks take part."""

    def restored(self) -> None:
        """The open window came from a checkpoint: DDP has not seen where its gradients came from."""

    def leave(self) -> None:
        """This rank drops out in the middle of an epoch; the others shall not wait for it."""
