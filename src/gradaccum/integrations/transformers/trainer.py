"""A Trainer whose batch is the batch of an update, in micro-batches that fit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from gradaccum.integrations.trainer import refuse, replaced
from gradaccum.integrations.transformers.large_batch import LargeBatch
from gradaccum.integrations.transformers.settings import TRANSFORMERS, MicroBatches, wrong


class MicroBatchTrainer(transformers.Trainer):
    """A `transformers.Trainer` whose `per_device_train_batch_size` is the batch of an update, cut into micro-batches.

    The update is the stock Trainer's with this batch at once, because clipping, schedules, callbacks, logs and
    checkpoints see one finished gradient per batch. To change another trainer likewise, make it the first base class:
    `class MicroBatchSFTTrainer(MicroBatchTrainer, SFTTrainer): pass`.

    The gradients of two rows show what the loss is a mean over (rows, labels that count, shifted labels), and the first
    update proves it on a few more.

    Args:
        micro_batch_size: Rows of a micro-batch on each device, or `"auto"`, the fastest size that fits. In a single
            process with an int and `verify`, rows of text are sorted by length and trimmed, if the gradient shows
            that padding doesn't count.
        max_tokens: Padded tokens of a micro-batch: rows are sorted by length, trimmed and packed.
        weight: `weight(inputs) -> number`, what the loss is a mean over, if neither rows nor labels. It must add up
            over rows.
        memory_limit: Bytes, or a string such as `"4GiB"`; default: what the device, or the container, has free.
        verify: Prove the first update, and the first of each new kind of batch, on a few rows.

    All other arguments are the Trainer's.

    Raises:
        ValueError: A setting accumulates too, or updates in the backward pass; the message names the setting to remove.
        NotEquivalentError: In training, if the loss looks across the batch, so micro-batches don't add up to it.

    Example:
        >>> import tempfile
        >>> data = [{"x": torch.randn(4), "labels": torch.randint(2, ())} for _ in range(24)]
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(4, 2)
        ...     def forward(self, x, labels):
        ...         return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}
        >>> arguments = transformers.TrainingArguments(
        ...     tempfile.mkdtemp(), per_device_train_batch_size=12, num_train_epochs=1, save_strategy="no",
        ...     report_to=[], use_cpu=True, disable_tqdm=True)
        >>> trainer = MicroBatchTrainer(Model(), arguments, train_dataset=data, micro_batch_size=5)
        >>> trainer.remove_callback(transformers.PrinterCallback)
        >>> trainer.train().global_step
        2
    """

    rows_per_example: int | None = None
    """Rows of a batch that belong to one example, in as many blocks: 2 where the chosen ones come before the rejected.
    None: 2 for TRL's DPOTrainer and RewardTrainer, 1 for others."""

    def __init__(
        self,
        *args: Any,
        micro_batch_size: int | Literal["auto"] = "auto",
        max_tokens: int | None = None,
        weight: Callable[[Any], Any] | None = None,
        memory_limit: int | str | None = None,
        verify: bool = True,
        **kwargs: Any,
    ) -> None:
        refuse(TRANSFORMERS.lacks(transformers.Trainer), ImportError)
        # A name that no trainer in front or behind can have: TRL's count their steps in `_step`.
        micro_batches = MicroBatches(micro_batch_size, max_tokens, weight, memory_limit, verify)
        self._gradaccum_large_batch = LargeBatch(self, micro_batches)
        super().__init__(*args, **kwargs)
        refuse(wrong(self, micro_batches))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Do what the Trainer does with a batch, in micro-batches."""
        # On the instance: a subclass may have a compute_loss of its own, which a method here would not be asked for.
        with replaced(self, compute_loss=functools.partial(self._gradaccum_large_batch, self.compute_loss)):
            return super().training_step(model, inputs, num_items_in_batch)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._gradaccum_large_batch.step is not None:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self._gradaccum_large_batch.state_dict(), self._gradaccum_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and os.path.isfile(file := self._gradaccum_file(checkpoint)):
            self._gradaccum_large_batch.load_state_dict(torch.load(file, weights_only=True))

    def _gradaccum_file(self, folder: str) -> str:
        return os.path.join(folder, f"micro_batches_{self.args.process_index}.pt")
