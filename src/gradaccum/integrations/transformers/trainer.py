"""A Trainer whose batch is the batch of an update, in micro-batches that fit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.integrations.transformers.denominator import Denominator
from gradaccum.integrations.transformers.rehearsal import rehearsing
from gradaccum.integrations.transformers.settings import MicroBatches, check_hooks, check_settings
from gradaccum.integrations.transformers.stacked import can_be_trimmed, check_cuttable, stacked, stacks, unstacked
from gradaccum.torch import TrainStep

__all__ = ["MicroBatchTrainer"]

logger = logging.getLogger("gradaccum")

WITHOUT_LIMIT = 1 << 40
"""Tokens of a micro-batch that holds so many rows, whatever their lengths."""


class MicroBatchTrainer(transformers.Trainer):
    """A `transformers.Trainer` whose `per_device_train_batch_size` is the batch of an update, cut into micro-batches.

    The update is the one that the stock Trainer makes with this batch at once: clipping, schedules, callbacks, logs and
    checkpoints see one finished gradient per batch. Put it in front of another trainer to change that one alike:
    `class MicroBatchSFTTrainer(MicroBatchTrainer, SFTTrainer): pass`.

    What the loss is a mean over (rows, labels that count, labels shifted by one) is found out on two rows where a batch
    first tells, and the first update proves it on a few more.

    Args:
        micro_batch_size: Rows of a micro-batch on each device, or `"auto"`: the fastest size that fits. In a single
            process rows of text are sorted by length, and each micro-batch rid of the padding that all its rows have,
            if it is an int, `verify` is on, and the gradient shows that padding doesn't count.
        max_tokens: Padded tokens of a micro-batch: rows are sorted by length, trimmed and packed.
        weight: `weight(inputs) -> number`: what the loss is a mean over, where it is neither rows nor labels. Additive.
        memory_limit: Bytes, or a string such as `"4GiB"`; default: what the device, or the container, has free.
        verify: Prove the first update, and the first of each new kind of batch, on a few rows.

    All other arguments are the Trainer's.

    Raises:
        ValueError: A setting accumulates, too, or updates in the backward pass; the message names the one to remove.
        NotEquivalentError: In training: the loss looks across the batch, so that micro-batches don't add up to it.

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
        check_hooks(transformers.Trainer)
        self._micro_batches = MicroBatches(micro_batch_size, max_tokens, weight, memory_limit, verify)
        self._denominator: Denominator | None = None
        self._step: TrainStep | None = None
        self._step_state: dict[str, Any] = {}
        self._trims = micro_batch_size != "auto" and max_tokens is None and verify
        super().__init__(*args, **kwargs)
        check_settings(self, self._micro_batches)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """What the Trainer does with a batch, where its loss and gradients come from micro-batches."""
        # On the instance: a subclass may have a compute_loss of its own, which a method here would not be asked for.
        attributes = self.__dict__
        own, kept = self.compute_loss, attributes.get("compute_loss")
        attributes["compute_loss"] = self._large_batch(own)
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            del attributes["compute_loss"]
            if kept is not None:
                attributes["compute_loss"] = kept

    def _large_batch(self, own: Callable[..., Any]) -> Callable[..., Tensor]:
        """A `compute_loss` that leaves the finished gradient: a backward pass from what it returns adds nothing."""

        def compute_loss(
            model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Tensor:
            if return_outputs:
                raise TypeError(
                    f"{type(self).__name__}.training_step asks compute_loss for the outputs of the large batch, which "
                    "are never there at once. Leave out return_outputs=True in training."
                )
            batch = self._as_batch(inputs)
            if self.args.world_size > 1 or self.args.neftune_noise_alpha is not None:  # its noise goes by the length
                self._trims = False
            self._trims = self._trims and can_be_trimmed(batch)
            step = self._step_on(model, own)
            assert self._denominator is not None
            with self._own_tokens_alone():
                self._denominator.look_at(batch)
                try:
                    try:
                        loss = step.backward(batch)
                    except NotEquivalentError as error:
                        if not self._trims:
                            raise
                        logger.debug("Padding is not cut off: %s", error)
                        self._trims = False
                        loss = self._step_on(model, own).backward(batch)
                except NotEquivalentError as error:
                    raise NotEquivalentError(f"{error}\n{self._advice()}") from None
            return loss.requires_grad_()

        return compute_loss

    def _step_on(self, model: nn.Module, own: Callable[..., Any]) -> TrainStep:
        """The machinery on this model and today's optimizer."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper has the user's inside
        step = self._step
        same = step is not None and step.model is model and step.update.optimizers == [optimizer]
        packs = self._trims or self._micro_batches.max_tokens is not None
        if step is not None and same and packs == (step.cutting.packing is not None):
            return step
        check_settings(self, self._micro_batches)
        state = self._step_state if step is None else step.state_dict()

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return self._loss(own, model, batch, rehearsed=new.proving or new.cutting.predicting)

        def rehearsed_loss(batch: Any) -> Tensor:
            return self._loss(own, self.accelerator.unwrap_model(model), batch, rehearsed=True)

        if not same or self._denominator is None:
            self._denominator = Denominator(self, rehearsed_loss, self._micro_batches.weight)
        new = TrainStep(
            model,
            optimizer,
            compute_loss=loss,
            weight=self._denominator,
            scaler=getattr(self.accelerator, "scaler", None),
            micro_batch_size=self._micro_batches.micro_batch_size,
            max_tokens=WITHOUT_LIMIT if self._trims else self._micro_batches.max_tokens,
            memory_limit=self._micro_batches.memory_limit,
            verify=self._micro_batches.verify,
        )
        if state:
            new.load_state_dict(state)
        self._denominator.exchanges = new.ranks.is_distributed
        self._denominator.idle = new.ranks.sharded
        self._step = new
        return new

    def _loss(self, own: Callable[..., Any], model: nn.Module, batch: Any, *, rehearsed: bool) -> Tensor:
        """The Trainer's loss on a micro-batch, a mean over what it counts there."""
        assert self._denominator is not None
        inputs = unstacked(batch, stacks(self))
        items = self._denominator.items(batch)
        if not rehearsed:
            return own(model, inputs, num_items_in_batch=items)
        with rehearsing(self, own) as alone:
            return alone(model, inputs, num_items_in_batch=items)

    def _as_batch(self, inputs: Any) -> dict[str, Any]:
        blocks = stacks(self)
        check_cuttable(inputs, blocks, self._micro_batches.max_tokens)
        return stacked(inputs, blocks)

    @contextlib.contextmanager
    def _own_tokens_alone(self) -> Iterator[None]:
        """Losses are means over this rank's own micro-batch: TrainStep weighs them, over all ranks."""
        average, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = average

    def _advice(self) -> str:
        return (
            f"The loss is {type(self).__name__}.compute_loss on a part of the batch, with the `num_items_in_batch` of "
            "that part. MicroBatchTrainer(weight=...) takes a `weight`, where it is a mean over something else."
        )

    # The sizes that "auto" has found belong to a checkpoint: other micro-batches draw other dropout masks.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._step is not None:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self._step.state_dict() | {"trims": self._trims}, self._state_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and os.path.isfile(file := self._state_file(checkpoint)):
            self._step_state = torch.load(file, weights_only=True)
            self._trims = self._step_state.get("trims", False)
            if self._step is not None:
                self._step.load_state_dict(self._step_state)

    def _state_file(self, folder: str) -> str:
        return os.path.join(folder, f"micro_batches_{self.args.process_index}.pt")
