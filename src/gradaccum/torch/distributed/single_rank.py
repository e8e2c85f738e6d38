"""What a window asks of the other ranks of a data-parallel model, and the answers on a single device."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradaccum.errors import WindowError
from gradaccum.torch.distributed.by_blocks import ByBlocks

__all__ = ["SUMS", "Listener", "Meeting", "RankOutOfMemory", "Settings", "SingleRank", "Total", "by_rank"]

SUMS = 8


class Total(NamedTuple):
    """What a window weighs: on one rank, or over all of them."""

    weight: float
    given: bool = False
    """Whether a weight was given anywhere."""
    largest: float = 0.0
    """The largest weight of a micro-batch."""
    scale: float = 0.0
    """The GradScaler's scale that the sum is multiplied by; 0 without one."""
    next_scale: float = 0.0
    """The scale that this rank's GradScaler would go on with."""
    overflow: bool = False
    """Whether a gradient has overflowed that scale."""
    equal: bool = False
    """Whether micro-batches count equally, since nobody has said what they weigh."""
    idle: bool = False
    """Whether no micro-batch has run."""
    sums: tuple[float, ...] = ()
    """Up to `SUMS` numbers to be added up along with it."""


class RankOutOfMemory(Exception):  # no error of its own: all ranks hear of one's at once
    """Memory ran out on some ranks, in passes that all of them run together.

    `costs`: by rank, the rows or tokens of the micro-batch that did not fit; `final`: nothing smaller can be tried.
    """

    def __init__(self, costs: Mapping[int, int], final: bool) -> None:
        self.costs, self.final = dict(costs), final
        self.ranks = f"rank{'s' * (len(costs) > 1)} {', '.join(map(str, sorted(costs)))}"
        super().__init__(f"Memory ran out on {self.ranks}.")


class Listener:
    """What an optimizer's window does while its ranks run a micro-batch. `SingleRank` never calls it."""

    def forward_done(self, loss_scale: float) -> None:
        """The forward pass of the micro-batch that closes the window is done; the ranks agreed on this loss scale."""

    def backward_starts(self) -> None:
        """A backward pass starts: any of a sharded model, else one that reduces."""

    def share(self) -> Total | None:
        """What `total` will be called with after the backward pass that starts; None: only that pass will tell."""
        return None

    def own_unit(self) -> float:
        """What the gradients that are about to arrive are multiples of; 0: they weigh nothing."""
        return 0.0

    def take_unit(self, unit: float) -> float:
        """They are multiples of this unit from now on, on all ranks; the sum is empty. Returns their factor."""
        return 1.0

    def reduced(self) -> None:
        """A backward pass has reduced the window's sum."""


class Meeting(Protocol):
    """Where all ranks are at the same time."""

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank."""

    def broadcast(self, mine: Any, source: int) -> Any:
        """That rank's object, on every rank."""


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

    def settle(self, ranks: Meeting) -> None:
        """The ranks' numbers differ, on all of them: a WindowError if their hyperparameters do."""
        self.check(ranks.gather(self.hyperparameters()))

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

    @staticmethod
    def check(everybody: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Raise a WindowError where the hyperparameters of all ranks differ."""
        different = list[str]()
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


class SingleRank:
    """One device: there are no other ranks to agree with."""

    is_distributed = False
    sharded = False
    """Whether all ranks must run the same forward and backward passes, as the ranks of a sharded model do."""
    size = 1
    rank = 0
    manual_reduce = False
    """Whether the open window is reduced when its sum is finished, rather than in its last backward pass."""

    def reduce_manually(self) -> None:
        """From now on, reduce windows when their sums are finished."""

    unit: float | None = None
    """What all ranks' sums are multiples of in a window that a backward pass reduces: a micro-batch's weight, so that
    what is reduced is of the gradients' own size, in float16 too. None until the ranks have agreed on one."""
    reduced_unit = 1.0
    """What the sum is a multiple of that `total` has reduced last."""
    buffers_from: int | None = None
    """The first rank whose micro-batches have run in the last window; None where they have on all ranks, or on none."""
    loss_scale = 0.0
    """The scale of a GradScaler that all ranks agreed upon at the last window's end."""
    settings = Settings(list)
    """What all ranks compare at a window's end."""

    def attach(self, listener: Listener) -> None:
        """Call this listener from now on. It is not kept alive."""

    @property
    def place(self) -> list[int]:
        """This rank, and how many there are."""
        return [self.rank, self.size]

    # Passes.

    def expect(self, closes: bool, steps: int, last: bool = False, counts: bool = True) -> None:
        """Before the next micro-batch: whether it closes the window, is the epoch's last here, weighs anything."""

    def agree_on_last(self, last: bool) -> bool:
        """A micro-batch of `batches()` begins, this rank's `last` one perhaps. A WindowError where that can't be."""
        return last

    def scale(self, factor: float, idle: bool = False) -> None:
        """Multiply the gradients of a sharded model as they arrive; `idle`: as if there had been no backward pass."""

    def continue_window(self) -> None:
        """A micro-batch was counted, and the window stays open."""

    # Passes of a sharded model, which all ranks run together.

    def begin_passes(self) -> None:
        """The passes of a window begin: before each collective of the model the ranks ask each other."""

    def end_passes(self) -> None:
        """They are over; a RankOutOfMemory where they aren't on all ranks."""

    def ran_out(self, cost: int, *, final: bool) -> RankOutOfMemory:
        """Tell the other ranks that memory ran out here, on so many rows or tokens. Returns what they all know."""
        return RankOutOfMemory({self.rank: cost}, final)

    @property
    def failure(self) -> RankOutOfMemory | None:
        """What the ranks know of each other's memory since `begin_passes`."""
        return None

    def start_over(self) -> None:
        """Forget the passes that failed; all ranks do."""

    def by_blocks(self, model: nn.Module, blocks: Sequence[nn.Module]) -> ByBlocks:
        """What gathers the parameters of a sharded model for the turns of these blocks, and reduces their gradients."""
        return ByBlocks()

    def alone(self) -> contextlib.AbstractContextManager[dict[Tensor, torch.dtype]]:
        """Passes inside are this rank's alone, on whole parameters that somebody else puts into place."""
        return contextlib.nullcontext({})

    def gathered_bytes(self, gradients: int) -> int:
        """What a sharded model's gathered parameters and whole gradients take at most in a backward pass."""
        return gradients

    # The window's sum.

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

    def total(self, mine: Total, rescale: Callable[[float], None] | None = None) -> Total:
        """Bring `p.grad` to its mean over the ranks, at the window's end. Returns what the window weighs on all.

        `rescale` brings this rank's sum to the unit that it is called with, where no backward pass has reduced it.
        """
        return mine

    def compare_settings(self) -> None:
        """Compare `settings` by a message of their own, where an update begins before `total`."""

    def reduce_pending(self) -> None:
        """Have all that a sharded model's open window has added up in `p.grad`, to be saved. All ranks take part."""

    def restored(self, parameters: Sequence[Tensor]) -> None:
        """The open window came from a checkpoint, in which these parameters have a gradient."""

    # Numbers and objects of all ranks. All ranks take part.

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks, in place."""
        return tensor

    def sum_number(self, number: float) -> float:
        """A number's sum over the ranks."""
        return number

    def sum_by_name(self, mine: Mapping[Any, float]) -> dict[Any, float]:
        """Numbers summed over the ranks, each by its name; some ranks may lack some names."""
        return dict(mine)

    def most_passes(self, passes: int) -> int:
        """The largest number of passes that any rank of a sharded model has in this window; else one's own."""
        return passes

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank."""
        return [mine]

    def gather_different(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank; only one's own where the `repr` of all is the same."""
        return [mine]

    def broadcast(self, mine: Any, source: int) -> Any:
        """That rank's object, on every rank."""
        return mine

    # Epochs.

    def end_epoch(self) -> None:
        """This rank's epoch is over."""

    def others_continue(self) -> bool:
        """Whether other ranks close one more window, in which this one takes part with nothing."""
        return False

    def begin_epoch(self) -> None:
        """The epoch is over on all ranks: the next one may begin."""

    def offer_end(self) -> None:
        """The batches that several optimizers share are used up here. `check_end` waits for the other ranks' word."""

    def check_end(self) -> None:
        """A WindowError where other ranks go on after `offer_end`."""

    def abort(self, *, notified: bool = False) -> None:
        """This rank drops out in the middle of an epoch: the others must not wait for it.

        `notified`: whoever called has an error of this rank's own, and may go on with all ranks.
        """
