"""Lightning's Trainer: what it is refused with, schedulers that go by updates, ranks that say where they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.extras import PrivateName
from gradaccum.integrations.trainer import Library, accumulates, check_same, replaced
from gradaccum.on_torch.arguments import needs_closure
from gradaccum.torch.distributed import Channel, Settings, by_rank

_LIGHTNING = Library(
    "lightning",
    lightning.__version__,
    "Use lightning 2.6, or remove GradientAccumulation.",
    (
        PrivateName("trainer", "fit_loop._should_accumulate", "says whether a batch closes its window"),
        PrivateName("trainer", "fit_loop._skip_backward", "weight averaging's last epoch makes no update"),
        PrivateName("trainer", "precision_plugin.backward", "is where a backward pass begins and ends"),
        PrivateName("trainer", "fit_loop.epoch_loop.automatic_optimization._optimizer_step", "closes a short window"),
        PrivateName("trainer", "fit_loop.epoch_loop.batch_progress.is_last_batch", "counts that update"),
        PrivateName("trainer", "fit_loop.epoch_loop.update_lr_schedulers", "steps the schedulers after it"),
        PrivateName("trainer", "fit_loop.epoch_loop.batch_progress.total.ready", "numbers the batches"),
    ),
)


def wrong(trainer: Trainer, module: LightningModule, callback: Callback) -> Iterator[str]:
    """What accumulates as well, or what Lightning's accumulation does not work with."""
    if not isinstance(trainer, Trainer):
        yield (
            f"This callback is for lightning's Trainer. Received: one of {type(trainer).__module__.partition('.')[0]}. "
            "Import both from lightning.pytorch."
        )
    version = lightning.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 6):
        yield (
            f"lightning {version} skips schedulers when a module ends an epoch, so windows would not match them. Use "
            "lightning 2.6, or remove GradientAccumulation."
        )
    yield from _LIGHTNING.lacks(trainer)
    both = type(callback), GradientAccumulationScheduler
    if others := [type(c).__name__ for c in trainer.callbacks if isinstance(c, both) and c is not callback]:
        yield f"Two callbacks accumulate. Remove one of them: GradientAccumulation, {', '.join(others)}."
    if trainer.accumulate_grad_batches != 1:
        yield (
            "Trainer(accumulate_grad_batches=...) and GradientAccumulation both accumulate. Received: "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}. Remove it from the Trainer."
        )
    if not module.automatic_optimization:
        yield (
            "GradientAccumulation is for automatic optimization, and this module has automatic_optimization=False. "
            "Remove the callback, and wrap each optimizer in configure_optimizers: gradaccum.torch.optim.Optimizer("
            "inner, steps=4); or call gradaccum.torch.TrainStep in training_step."
        )
    code = getattr(module.training_step, "__code__", None)
    if code is not None and "dataloader_iter" in code.co_varnames[: code.co_argcount]:
        yield (
            "training_step(dataloader_iter) fetches its batches itself, so their weight is unknown. Define "
            "training_step(batch, batch_idx)."
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        yield (
            "GradientAccumulation works on a single device and with strategy='ddp'. Received: "
            f"{type(trainer.strategy).__name__}. For sharded models use gradaccum.torch.optim.Optimizer(..., "
            "model=model) in a loop with Fabric."
        )
    if getattr(trainer.strategy, "_model_averaging_period", None):
        yield (
            "DDPStrategy(model_averaging_period=...) lets ranks make updates of their own. Remove it, or "
            "GradientAccumulation."
        )


def wrong_optimizers(trainer: Trainer) -> Iterator[str]:
    """Optimizers that accumulate by themselves, or evaluate a batch again."""
    for optimizer in trainer.optimizers:
        if accumulates(optimizer):
            yield (
                "configure_optimizers returned an optimizer that accumulates by itself, and GradientAccumulation "
                f"accumulates as well. Received: {optimizer!r}. Remove the callback, or return the inner optimizer."
            )
        if needs_closure(optimizer):
            yield (
                f"{type(optimizer).__name__} re-evaluates its closure, which would have to run the whole window again. "
                "Remove GradientAccumulation, and use gradaccum.torch.TrainStep under manual optimization."
            )


class Varying:
    """Stands for windows whose length differs from epoch to epoch, while the optimizer is configured."""

    def __rtruediv__(self, batches: object) -> float:
        raise ValueError(
            "trainer.estimated_stepping_batches assumes one window length for all epochs, but GradientAccumulation has "
            "a table. Count the updates of each epoch yourself: math.ceil(batches / steps)."
        )


def count_updates(trainer: Trainer, stack: contextlib.ExitStack) -> None:
    """Have schedulers of steps step with every `frequency`-th update of an epoch: Lightning counts its batches."""
    configs = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
    if all(config.frequency == 1 for config in configs):
        return
    loop = trainer.fit_loop.epoch_loop
    original, frequencies = loop.update_lr_schedulers, [config.frequency for config in configs]

    @functools.wraps(original)
    def update_lr_schedulers(interval: str, *args: Any, **keywords: Any) -> None:
        batches = loop.batch_idx + 1
        updates = -(-batches // trainer.accumulate_grad_batches)
        try:
            for config in configs if interval == "step" else ():  # Lightning asks whether it divides the batches
                config.frequency = 1 if updates % config.frequency == 0 else batches + 1
            return original(interval, *args, **keywords)
        finally:
            for config, frequency in zip(configs, frequencies, strict=True):
                config.frequency = frequency

    stack.enter_context(replaced(loop, update_lr_schedulers=update_lr_schedulers))


def skip_schedulers(trainer: Trainer, stack: contextlib.ExitStack) -> Callable[[], None]:
    """What leaves schedulers of steps alone in this batch: a module ends the epoch before it, and no update is made."""
    loop, skipped = trainer.fit_loop.epoch_loop, -1
    original = loop.update_lr_schedulers

    def update_lr_schedulers(interval: str, *args: Any, **keywords: Any) -> None:
        if interval != "step" or skipped != loop.batch_progress.total.ready:
            original(interval, *args, **keywords)

    def skip() -> None:
        nonlocal skipped
        skipped = loop.batch_progress.total.ready  # no other batch has this number

    stack.enter_context(replaced(loop, update_lr_schedulers=update_lr_schedulers))
    return skip


def remember_arguments(trainer: Trainer, stack: contextlib.ExitStack) -> None:
    """Have Lightning inspect training_step's signature once: for every batch it takes longer than all that we add."""
    loop = trainer.fit_loop.epoch_loop
    original = getattr(loop, "_build_kwargs", None)
    if original is None:
        return
    taken: dict[Any, list[str]] = {}

    @functools.wraps(original)
    def build_kwargs(kwargs: Any, batch: Any, batch_idx: int) -> Any:
        step = trainer.lightning_module.training_step
        function = getattr(step, "__func__", step)
        if function not in taken:
            found = original(kwargs, batch, batch_idx)
            if [*found] in (["batch"], ["batch", "batch_idx"]):
                taken[function] = [*found]
            return found
        kwargs["batch"] = batch
        if len(taken[function]) == 2:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    stack.enter_context(replaced(loop, _build_kwargs=build_kwargs))


_UNEVEN = (
    "Lightning's ranks wait for each other in every batch, but have different numbers of batches: {}. Leave "
    "use_distributed_sampler=True, or cut all ranks' loaders to the shortest one; or wrap the optimizer in a loop with "
    "Fabric, where optimizer.batches(loader) takes different numbers."
)
_PLACES = (
    "at an epoch's first batch",
    "at a batch",
    "at a window's last batch",
    "closing a window that is short",
    "before a batch",
    "stopping",
    "at an epoch's end",
)


class Ranks:
    """Several ranks of a Trainer, each of which says where it is before it waits for the others in a reduction.

    Lightning's ranks wait for each other in every batch, so all must have as many. What keeps one from coming to the
    same place is an error on all of them. All ranks make this at the same time. One that is alone says nothing.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._alone = trainer, trainer.world_size == 1
        if not self._alone:
            self._channel = Channel(dist.group.WORLD)
        self.settings = Settings(lambda: [group for one in trainer.optimizers for group in one.param_groups])
        self._epoch: int | None = None
        self._sized = True

    def meet_between_batches(self, stack: contextlib.ExitStack) -> None:
        """Name a rank that stops alone: it would validate and save, where it waits for the others, and they for it.

        Before each batch Lightning's ranks send whether a signal ends training. Theirs is sent here, with the place.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        ends_by_signal = getattr(loop, "_broadcast_sigterm_tensor", None)
        if self._alone or ends_by_signal is None:
            return
        checks = loop._should_check_val_fx

        def before_batch() -> None:
            signals = self._exchange("before a batch", float(getattr(trainer, "received_sigterm", False)))
            if any(numbers[1] for numbers in signals):
                ends_by_signal()

        def after_batch(*args: Any) -> bool:
            if trainer.should_stop and trainer.fit_loop._can_stop_early:
                self._exchange("stopping")
            return checks(*args)

        hooks = {"_broadcast_sigterm_tensor": before_batch, "_should_check_val_fx": after_batch}
        stack.enter_context(replaced(loop, **hooks))

    def batch(self, weight: float, *, unknown: bool) -> float:
        """A batch begins. Returns the largest weight on any rank, where that is unknown."""
        trainer, largest = self._trainer, weight
        if self._alone:
            return weight
        if self._epoch != trainer.current_epoch or unknown:
            self._epoch = trainer.current_epoch
            loaders = CombinedLoader(trainer.train_dataloader).flattened
            self._sized = all(sized_len(loader) is not None for loader in loaders)
            batches = float(trainer.num_training_batches)
            messages = self._exchange("at an epoch's first batch", weight, batches, self._sized)
            counts = [numbers[2] if numbers[3] else -1 for numbers in messages]
            check_same([f"{count:g} batches" if count >= 0 else "an unknown number" for count in counts], _UNEVEN)
            largest = max(numbers[1] for numbers in messages)
        if not self._sized:
            last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            lasts = [numbers[1] for numbers in self._exchange("at a batch", last)]
            check_same(["the last batch" if one else "further batches" for one in lasts], _UNEVEN)
        return largest

    def close(self, weight: float, *, manual_reduce: bool = False) -> float:
        """A window closes, which has this weight here. Returns its weight on all ranks."""
        if self._alone:
            return weight
        place = "closing a window that is short" if manual_reduce else "at a window's last batch"
        messages = self._exchange(place, weight, self.settings.number())
        if len({numbers[2] for numbers in messages}) > 1:
            self.settings.settle(self._channel)
        return sum(numbers[1] for numbers in messages)

    def end_epoch(self) -> None:
        """The epoch is over here. Raises WindowError where it is not on other ranks."""
        if not self._alone:
            self._exchange("at an epoch's end")
        self._epoch = None

    def reduce(self, number: Tensor, how: str) -> Tensor:
        """A tensor's "sum" or "mean" over the ranks."""
        strategy = self._trainer.strategy
        return number if self._alone else strategy.reduce(number.to(strategy.root_device), reduce_op=how)

    def mean_gradients(self, parameters: list[Tensor]) -> list[Tensor | None]:
        """Means of the parameters' gradients over the ranks; None where no rank has one."""
        if self._alone:
            return [p.grad for p in parameters]
        anywhere = self.reduce(torch.tensor([float(p.grad is not None) for p in parameters]), "sum").tolist()
        own = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
        return [self.reduce(g, "mean") if there else None for g, there in zip(own, anywhere, strict=True)]

    def _exchange(self, place: str, *numbers: float) -> list[list[float]]:
        messages = self._channel.exchange(_PLACES.index(place), *numbers)
        places = [_PLACES[int(numbers[0])] for numbers in messages]
        if len({*places}) > 1:
            raise WindowError(
                f"The ranks are at different places: {by_rank(places)}. Lightning's ranks "
                "wait for each other in every batch. Stop training, or return -1 from on_train_batch_start, on all of "
                "them at once: trainer.strategy.reduce_boolean_decision(stop, all=False)."
            )
        return messages
