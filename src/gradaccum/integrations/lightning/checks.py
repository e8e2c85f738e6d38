"""Lightning's Trainer: settings that accumulate as well are refused."""

from __future__ import annotations

import lightning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from gradaccum.extras import PrivateName
from gradaccum.torch.optim import Optimizer
from gradaccum.torch.optimizer import needs_closure

__all__ = ["Varying", "check", "check_optimizer"]

_NAMES = (
    PrivateName("trainer", "fit_loop._should_accumulate", "says whether a batch closes its window"),
    PrivateName("trainer", "fit_loop._skip_backward", "weight averaging's last epoch makes no update"),
    PrivateName("trainer", "fit_loop.epoch_loop.automatic_optimization._optimizer_step", "closes a short window"),
    PrivateName("trainer", "fit_loop.epoch_loop.batch_progress.is_last_batch", "counts that update"),
    PrivateName("trainer", "fit_loop.epoch_loop.update_lr_schedulers", "steps the schedulers after it"),
)


def check(trainer: Trainer, module: LightningModule, callback: Callback) -> None:
    """Raise for settings that accumulate as well, or that Lightning's accumulation does not work with."""
    if not isinstance(trainer, Trainer):
        raise ValueError(
            f"This callback is for lightning's Trainer. Received: one of {type(trainer).__module__.partition('.')[0]}. "
            "Import both from lightning.pytorch."
        )
    if tuple(int(part) for part in lightning.__version__.split(".")[:2]) < (2, 6):
        raise ValueError(
            f"lightning {lightning.__version__} leaves schedulers out where a module ends an epoch, so that windows "
            "would not match them. Use lightning 2.6, or remove GradientAccumulation."
        )
    for name in _NAMES:
        missing = name.missing_from(trainer, f"lightning {lightning.__version__}")
        if missing:
            raise ValueError(f"{missing} Use lightning 2.6, or remove GradientAccumulation.")
    others = [
        type(c).__name__
        for c in trainer.callbacks
        if isinstance(c, (type(callback), GradientAccumulationScheduler)) and c is not callback
    ]
    if others:
        raise ValueError(f"Two callbacks accumulate. Remove one of them: GradientAccumulation, {', '.join(others)}.")
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            "Trainer(accumulate_grad_batches=...) and GradientAccumulation both accumulate. Received: "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}. Remove it from the Trainer."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "GradientAccumulation is for automatic optimization, and this module has automatic_optimization=False. "
            "Remove the callback, and wrap each optimizer in configure_optimizers: gradaccum.torch.optim.Optimizer("
            "inner, steps=4); or call gradaccum.torch.TrainStep in training_step."
        )
    code = getattr(module.training_step, "__code__", None)
    if code is not None and "dataloader_iter" in code.co_varnames[: code.co_argcount]:
        raise ValueError(
            "training_step(dataloader_iter) fetches its batches itself, so that their weight is not known. Take the "
            "batch: training_step(batch, batch_idx)."
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            "GradientAccumulation works on a single device and with strategy='ddp'. Received: "
            f"{type(trainer.strategy).__name__}. For sharded models use gradaccum.torch.optim.Optimizer(..., "
            "model=model) in a loop with Fabric."
        )
    if getattr(trainer.strategy, "_model_averaging_period", None):
        raise ValueError(
            "DDPStrategy(model_averaging_period=...) lets ranks make updates of their own. Remove it, or "
            "GradientAccumulation."
        )


def check_optimizer(trainer: Trainer) -> None:
    """Raise for optimizers that accumulate by themselves, or evaluate a batch again."""
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, Optimizer):
            raise ValueError(
                "configure_optimizers returned an optimizer that accumulates by itself, and GradientAccumulation "
                f"accumulates as well. Received: {optimizer!r}. Remove the callback, or return the inner optimizer."
            )
        if needs_closure(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} re-evaluates its closure, which would have to run the whole window again. "
                "Remove GradientAccumulation, and use gradaccum.torch.TrainStep under manual optimization."
            )


class Varying:
    """Stands for windows whose length differs from epoch to epoch, while the optimizer is configured."""

    def __rtruediv__(self, batches: object) -> float:
        raise ValueError(
            "trainer.estimated_stepping_batches takes one length of windows for all epochs, and GradientAccumulation "
            "was given a table. Count the updates of each epoch yourself: math.ceil(batches / steps)."
        )
