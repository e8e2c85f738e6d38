"""Several ranks under Lightning: where each of them is, and their gradients' means."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.torch.distributed import Channel, Kind, Settings, by_rank

__all__ = ["Ranks", "mean", "over_ranks"]

_PLACES = {
    Kind.START: "at an epoch's first batch",
    Kind.MICRO_BATCH: "at a batch",
    Kind.WINDOW: "at a window's last batch",
    Kind.FINISHED: "closing a window that is short",
    Kind.NUMBER: "before a batch",
    Kind.ENDED: "stopping",
    Kind.IDLE: "at an epoch's end",
}


class Ranks:
    """Several ranks of a Trainer, each of which says where it is before it waits for the others in a reduction.

    Lightning's ranks wait for each other in every batch, so all must have as many. What keeps one from coming to the
    same place is an error on all of them. All ranks make this at the same time.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._channel = Channel(range(trainer.world_size))
        self._settings = Settings(lambda: [group for one in trainer.optimizers for group in one.param_groups])
        self._epoch: int | None = None
        self._sized = True

    def meet_between_batches(self) -> None:
        """Name a rank that stops alone: it would validate and save, where it waits for the others, and they for it.

        Before each batch Lightning's ranks send whether a signal ends training. Theirs is sent here, with the place.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        ends_by_signal, checks = getattr(loop, "_broadcast_sigterm_tensor", None), loop._should_check_val_fx

        def before_batch() -> None:
            signals = self._exchange(Kind.NUMBER, float(getattr(trainer, "received_sigterm", False)))
            if any(numbers[1] for numbers in signals) and ends_by_signal is not None:
                ends_by_signal()

        def after_batch(*args: Any) -> bool:
            if trainer.should_stop and trainer.fit_loop._can_stop_early:
                self._exchange(Kind.ENDED)
            return checks(*args)

        if ends_by_signal is not None:
            loop._broadcast_sigterm_tensor = before_batch
            loop._should_check_val_fx = after_batch  # of this object alone

    def leave(self) -> None:
        """Leave Lightning's loop as it was."""
        for name in ("_broadcast_sigterm_tensor", "_should_check_val_fx"):
            vars(self._trainer.fit_loop.epoch_loop).pop(name, None)

    def batch(self, weight: float, *, unknown: bool) -> float:
        """A batch begins. Returns the largest weight on any rank, where that is unknown."""
        trainer, largest = self._trainer, weight
        if self._epoch != trainer.current_epoch or unknown:
            self._epoch = trainer.current_epoch
            loaders = CombinedLoader(trainer.train_dataloader).flattened
            self._sized = all(sized_len(loader) is not None for loader in loaders)
            messages = self._exchange(Kind.START, weight, float(trainer.num_training_batches), self._sized)
            counts = [numbers[2] if numbers[3] else -1 for numbers in messages]
            if len({*counts}) > 1:
                raise _uneven_error([f"{count:g} batches" if count >= 0 else "an unknown number" for count in counts])
            largest = max(numbers[1] for numbers in messages)
        if not self._sized:
            last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            lasts = [bool(numbers[1]) for numbers in self._exchange(Kind.MICRO_BATCH, last)]
            if len({*lasts}) > 1:
                raise _uneven_error(["the last batch" if one else "further batches" for one in lasts])
        return largest

    def close(self, weight: float, *, manual_reduce: bool = False) -> float:
        """A window closes, which has this weight here. Returns its weight on all ranks."""
        messages = self._exchange(Kind.FINISHED if manual_reduce else Kind.WINDOW, weight, self._settings.number())
        if len({numbers[2] for numbers in messages}) > 1:
            self._settings.settle(self._channel)
        return sum(numbers[1] for numbers in messages)

    def end_epoch(self) -> None:
        """The epoch is over here. Raises WindowError where it is not on other ranks."""
        self._exchange(Kind.IDLE)
        self._epoch = None

    def abort(self) -> None:
        """An error has ended training here. Waits for nobody."""
        self._channel.post(Kind.ABORTED)

    def _exchange(self, kind: Kind, *numbers: float) -> list[list[float]]:
        messages = self._channel.exchange(kind, *numbers)
        kinds = [Kind(int(numbers[0])) for numbers in messages]
        left = [rank for rank, one in enumerate(kinds) if one is Kind.ABORTED]
        if left:
            raise WindowError(
                f"Rank{'s' * (len(left) > 1)} {', '.join(map(str, left))} left training by an error, while other ranks "
                "went on. Look at the error there."
            )
        if len({*kinds}) > 1:
            raise WindowError(
                f"The ranks are at different places: {by_rank([_PLACES[one] for one in kinds])}. Lightning's ranks "
                "wait for each other in every batch. Stop training, or return -1 from on_train_batch_start, on all of "
                "them at once: trainer.strategy.reduce_boolean_decision(stop, all=False)."
            )
        return messages


def _uneven_error(found: list[str]) -> WindowError:
    return WindowError(
        f"Lightning's ranks wait for each other in every batch, and have different numbers of them: {by_rank(found)}. "
        "Leave use_distributed_sampler=True, or cut all ranks' loaders to the shortest one; or wrap the optimizer in a "
        "loop with Fabric, where optimizer.batches(loader) takes different numbers."
    )


def over_ranks(trainer: Trainer, number: Tensor, how: str) -> Tensor:
    """A tensor's "sum", "mean" or "max" over the ranks; itself where there is one."""
    if trainer.world_size == 1:
        return number
    return trainer.strategy.reduce(number.to(trainer.strategy.root_device), reduce_op=how)


def mean(trainer: Trainer, parameters: list[Tensor]) -> list[Tensor | None]:
    """Means of the parameters' gradients over the ranks; None where no rank has one."""
    present = torch.tensor([float(p.grad is not None) for p in parameters])
    anywhere = over_ranks(trainer, present, "sum").tolist()
    own = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
    return [over_ranks(trainer, g, "mean") if there else None for g, there in zip(own, anywhere, strict=True)]
