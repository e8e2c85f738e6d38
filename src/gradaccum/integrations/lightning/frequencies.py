"""The `frequency` of a scheduler: Lightning takes it by the batches of an epoch, the large batch by its updates."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Trainer

__all__ = ["count_batches", "count_updates"]


def count_updates(trainer: Trainer) -> None:
    """Have schedulers of steps step with every `frequency`-th update of an epoch."""
    loop = trainer.fit_loop.epoch_loop
    original = loop.update_lr_schedulers

    @functools.wraps(original)
    def update_lr_schedulers(interval: str, *args: Any, **keywords: Any) -> None:
        if interval != "step":
            return original(interval, *args, **keywords)
        batches = loop.batch_idx + 1
        updates = -(-batches // trainer.accumulate_grad_batches)
        configs = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
        frequencies = [config.frequency for config in configs]
        try:
            for config in configs:  # Lightning asks whether this divides the number of batches
                config.frequency = 1 if updates % config.frequency == 0 else batches + 1
            return original(interval, *args, **keywords)
        finally:
            for config, frequency in zip(configs, frequencies, strict=True):
                config.frequency = frequency

    loop.update_lr_schedulers = update_lr_schedulers  # of this object alone


def count_batches(trainer: Trainer) -> None:
    """Undo `count_updates`."""
    vars(trainer.fit_loop.epoch_loop).pop("update_lr_schedulers", None)
