"""Lightning: its own accumulation under automatic optimization, with every window divided by what it really weighs.

Lightning counts the micro-batches and steps once per window; the callback tells it how many, and corrects what it
computes:  (1/N) sum_i g_i  becomes  sum_i w_i g_i / sum_i w_i,  over all ranks, before hooks, clipping and the
optimizer see it. A full window of equal batches is left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from gradaccum.core.window import Window
from gradaccum.errors import WindowError
from gradaccum.integrations.lightning.monitor import Opened, PassMonitor
from gradaccum.integrations.lightning.trainer import (
    Ranks,
    Varying,
    count_updates,
    remember_arguments,
    skip_schedulers,
    wrong,
    wrong_optimizers,
)
from gradaccum.integrations.trainer import refuse, replaced
from gradaccum.on_torch.foreach import scale_
from gradaccum.on_torch.grad_buffer import ArrivalScale
from gradaccum.schedule import Schedule, Steps
from gradaccum.torch.batch_norm import warn_of_batch_norm
from gradaccum.torch.optimizer import BatchWeight
from gradaccum.torch.watch import Modification

logger = logging.getLogger("gradaccum")

_BATCH_HOOKS = {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end"}


class GradientAccumulation(Callback):
    """Makes the large batch's update once per window of batches, under `Trainer.fit` with automatic optimization.

    Each batch is a micro-batch. A window's update sees  sum_i w_i g_i / sum_i w_i,  summed over all ranks: the gradient
    of the mean loss over all of the window's rows, whether the window is full or short and the batches equal or ragged.
    Optimizer, schedulers, `gradient_clip_val`, `trainer.global_step`, `max_steps` and hooks count updates. An epoch's
    last window closes with the epoch.

    Args:
        steps: Batches in a window: an int >= 1, or `{epoch: steps}` with epoch 0 in it.
        weight: `weight(batch) -> number`, what the batch's mean loss is a mean over: valid tokens, or the sum of class
            weights. 0 leaves the batch out, even if its loss is NaN. None: the batch's rows.

    Raises:
        TypeError: `steps` or `weight` is of the wrong type.
        ValueError: `steps` is below 1, or a table without epoch 0. From `fit`, if something else accumulates too, or
            the optimizer, the module or the strategy isn't supported; the message says what to remove.

    Example:
        >>> class Module(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(3, 1)
        ...     def configure_optimizers(self):
        ...         return torch.optim.Adam(self.parameters())
        ...     def training_step(self, batch, index):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(self.layer(x), y)
        >>> callback = GradientAccumulation(4)                       # Trainer(..., callbacks=[callback])
        >>> callback.micro_batches
        0
    """

    _ranks: Ranks
    _monitor: PassMonitor
    """Both are there as long as `_trainer` trains."""

    def __init__(self, steps: Steps, *, weight: Callable[[Any], float] | None = None) -> None:
        self._schedule = Schedule(steps)
        if self._schedule.function is not None:
            raise TypeError(
                "`steps` must be an int >= 1 or {epoch: steps} here: Lightning counts windows from an epoch's first "
                f"batch, so their length cannot change within an epoch. Received: steps={steps!r}. An optimizer that "
                "is wrapped in configure_optimizers takes a callable."
            )
        self._weigh = BatchWeight(weight, "GradientAccumulation()")
        self._window = Window()
        self._unit: float | None = None
        """What all ranks' sums are multiples of: the largest weight of the first batches."""
        self._trainer: Trainer | None = None
        self._replaced = contextlib.ExitStack()
        self._total: float | None = None
        """What the window that closes weighs on all ranks."""
        self._restored: dict[str, Any] | None = None
        self._expected = self._in_pass = self._closes = False
        """Whether the batch in use has had no backward pass, is in it, and is the last of its window."""
        self._arrivals = ArrivalScale(self._parameters)
        self._opened: Opened | None = None
        """The optimizer when the window opened, in windows that are looked at."""

    @property
    def micro_batches(self) -> int:
        """Batches in the open window."""
        return self._window.micro_batches

    def _parameters(self) -> list[Tensor]:
        optimizers = [] if self._trainer is None else self._trainer.optimizers
        return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]

    # Before training.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._leave()  # training that has failed
        refuse(wrong(trainer, pl_module, self))
        logger.info("Lightning's Trainer with GA of %s steps", self._schedule)
        self._trainer, self._ranks = trainer, Ranks(trainer)
        self._replaced.callback(setattr, trainer, "accumulate_grad_batches", 1)
        # Read by `estimated_stepping_batches` in configure_optimizers.
        constant = self._schedule.constant
        trainer.accumulate_grad_batches = constant if constant is not None else Varying()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = self._schedule(trainer.current_epoch)
        if self._schedule.constant != 1:
            refuse(wrong_optimizers(trainer))
            warn_of_batch_norm(pl_module, "GroupNorm and frozen BatchNorm don't differ.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        put = self._replaced.enter_context
        # In the middle of an epoch Lightning goes on without on_train_epoch_start.
        trainer.accumulate_grad_batches = self._schedule(trainer.current_epoch)
        if is_overridden("on_train_batch_start", pl_module):
            hook, skip = pl_module.on_train_batch_start, skip_schedulers(trainer, self._replaced)

            @functools.wraps(hook)
            def on_train_batch_start(*args: Any, **kwargs: Any) -> Any:
                response = hook(*args, **kwargs)
                if response == -1:  # the epoch ends, after which schedulers step
                    if self._window.is_open:
                        self._flush(trainer)
                    else:
                        skip()
                return response

            put(replaced(pl_module, on_train_batch_start=on_train_batch_start))
        original = trainer.precision_plugin.backward

        @functools.wraps(original)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            self._begin_pass(trainer, tensor)
            original(tensor, *args, **kwargs)
            self._end_pass(trainer)

        put(replaced(trainer.precision_plugin, backward=backward))
        own = [n for n in _BATCH_HOOKS if n in vars(self) or is_overridden(n, self, parent=Callback)]
        # Each costs Lightning some microseconds, though it does nothing.
        put(replaced(self, **dict.fromkeys(_BATCH_HOOKS - {*own})))
        remember_arguments(trainer, self._replaced)
        count_updates(trainer, self._replaced)
        self._ranks.meet_between_batches(self._replaced)
        self._monitor = PassMonitor(self._parameters)
        self._replaced.callback(self._monitor.remove)
        self._replaced.callback(self._arrivals.set, 1.0)
        self._begin()
        if self._restored is not None:
            restored, self._restored = self._restored, None
            self._restore(restored, trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fit_loop._skip_backward:
            trainer.accumulate_grad_batches = self._schedule(trainer.current_epoch)

    # One batch.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop._skip_backward:
            return
        window, monitor = self._window, self._monitor
        if window.micro_batches and batch_idx % trainer.accumulate_grad_batches == 0:
            logger.warning(
                "Discarding an open window of %d micro-batches: its last batch was None, or training_step returned "
                "None for it under a GradScaler",
                window.micro_batches,
            )
            self._begin()
            monitor.close()
        if not window.micro_batches:
            monitor.update_is_over()
        if self._opened is not None and (changed := self._opened.changed_settings()):
            logger.warning(
                "Hyperparameters changed, %s inside an open window: the update uses the last ones. A scheduler with "
                "interval='step' steps once per update; make other changes in on_before_optimizer_step.",
                ", ".join(changed),
            )
        weight = self._weigh(batch)
        largest = self._ranks.batch(weight, unknown=self._unit is None)
        if self._unit is None:
            self._unit = window.unit = largest or None
        window.expect(weight, self._weigh.given)
        self._expected = True

    def _begin_pass(self, trainer: Trainer, loss: Tensor) -> None:
        if not self._expected:
            raise ValueError(
                "The closure of a batch was evaluated again, by an optimizer with a line search or by the module's "
                "optimizer_step. It would have to run the whole window again. Remove GradientAccumulation, or use "
                "gradaccum.torch.TrainStep under manual optimization."
            )
        window, monitor = self._window, self._monitor
        if (found := monitor.before_pass(first=not window.micro_batches)) is not None:
            self._refuse(found)
        factor = window.weigh()
        self._closes = not trainer.fit_loop._should_accumulate()
        if self._closes:
            self._close()
        if factor == 0:
            self._arrivals.set(0.0)  # NaN times 0 would stay NaN
        elif factor != 1:
            loss.mul_(factor)  # Lightning's own copy, the mean over N, which the backward pass starts from
        self._in_pass = True

    def _end_pass(self, trainer: Trainer) -> None:
        window, monitor = self._window, self._monitor
        self._in_pass = self._expected = False
        if self._arrivals.factor != 1:
            self._arrivals.set(1.0)
        if monitor.looking:
            if trainer.world_size == 1:  # else the reduction has written to the gradients
                self._check_sum()
            if not window.micro_batches:
                self._opened = Opened(self._ranks.settings, self._parameters)
        if not self._closes:
            monitor.counted(last_next=window.micro_batches + 2 >= trainer.accumulate_grad_batches)
        window.add()
        if self._closes:
            self._finish(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # Open: the last batch had no backward pass. Under a GradScaler Lightning makes no update then.
        if self._window.micro_batches and getattr(trainer.precision_plugin, "scaler", None) is None:
            self._check_sum()
            self._finish(trainer)

    def _check_sum(self) -> None:
        """Raise if somebody has changed the gradients of the open window."""
        if self._window.micro_batches and (found := self._monitor.modification()) is not None:
            self._refuse(found)

    def _refuse(self, found: Modification) -> NoReturn:
        raise WindowError(
            f"The gradients were {found} inside an open window, perhaps in on_after_backward. "
            "Until the window closes, p.grad holds an undivided sum. Use Trainer(gradient_clip_val=...), or edit "
            "the finished gradient in on_before_optimizer_step."
        )

    # The window's end.

    def _close(self, *, manual_reduce: bool = False) -> None:
        """Learn what the window weighs on all ranks, before anybody waits in a reduction for one that won't come."""
        weight = self._window.weight + (self._window.micro_batch.weight or 0.0)
        self._total = self._ranks.close(weight, manual_reduce=manual_reduce)

    def _finish(self, trainer: Trainer) -> None:
        """Turn what Lightning and the ranks' reduction have left into the mean over all rows of the window."""
        window, monitor = self._window, self._monitor
        if self._total is None:  # no backward pass has closed it
            self._close(manual_reduce=True)
        if self._opened is not None and self._opened.parameters_changed():
            logger.warning(
                "The parameters changed inside an open window, by clamping or by loading, perhaps: its gradients were "
                "computed at different parameter values. Change them in on_train_batch_end, where the callback's "
                "micro_batches is 0."
            )
        total = (self._total or 0.0) / (window.unit or 1.0)
        if not total:
            logger.warning("No update: the total weight of this window's %d micro-batches is 0", window.micro_batches)
            for parameter in self._parameters():
                parameter.grad = None
        elif (factor := trainer.accumulate_grad_batches * trainer.world_size / total) != 1:
            scale_([p.grad for p in self._parameters() if p.grad is not None], factor)
        self._begin()
        monitor.close()

    def _begin(self) -> None:
        """An empty window."""
        self._window.close()
        self._window.unit, self._opened, self._total = self._unit, None, None
        self._in_pass = False

    def _flush(self, trainer: Trainer, schedulers: bool = False) -> None:
        """Make the open window's update, short as it is, as Lightning makes that of an epoch's last batch."""
        loop = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        last, progress.is_last_batch = progress.is_last_batch, True
        self._check_sum()
        self._close(manual_reduce=True)
        parameters = self._parameters()
        for parameter, gradient in zip(parameters, self._ranks.mean_gradients(parameters), strict=True):
            parameter.grad = gradient
        self._finish(trainer)
        try:
            # No pass is left to be made. The loss is there because None would mean that there is nothing to unscale.
            loop.automatic_optimization._optimizer_step(loop.batch_idx, lambda: torch.zeros(()))
            if schedulers:
                loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        finally:
            progress.is_last_batch = last
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()

    # The end of an epoch, and of training.

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window.is_open:  # training stops inside of it
            self._flush(trainer, schedulers=True)
        self._ranks.end_epoch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._window.is_open:  # which a checkpoint may still be taken of
            logger.warning(
                "Training has ended inside an open window of %d micro-batches, which has made no update",
                self.micro_batches,
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._leave()

    def _leave(self) -> None:
        """Leave Trainer, module and parameters as they were found."""
        self._replaced.close()
        self._trainer = None

    # Files.

    def state_dict(self) -> dict[str, Any]:
        """The open window with its gradients, the mean over ranks. All ranks must call it, and get the same."""
        state: dict[str, Any] = {"unit": self._unit}
        trainer, window = self._trainer, self._window
        if trainer is None or not window.is_open:
            return state
        if self._in_pass:
            logger.warning("The checkpoint leaves out the open window, in which a backward pass has failed")
            return state
        self._check_sum()
        gradients = [None if g is None else g.clone() for g in self._ranks.mean_gradients(self._parameters())]
        weight = self._ranks.reduce(torch.tensor(window.weight, dtype=torch.float64), "sum") / trainer.world_size
        state["window"] = {
            "steps": trainer.accumulate_grad_batches,
            "micro_batches": window.micro_batches,
            "weight": weight.item(),
            "ranks": trainer.world_size,
            "gradients": {index: gradient for index, gradient in enumerate(gradients) if gradient is not None},
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._unit = state_dict["unit"]
        self._restored = state_dict.get("window")

    def _restore(self, window: dict[str, Any], trainer: Trainer) -> None:
        """Go on with the window that the checkpoint was taken in."""
        steps = trainer.accumulate_grad_batches
        if window["steps"] != steps:
            raise WindowError(
                f"The checkpoint was taken inside a window of {window['steps']} steps ({window['micro_batches']} of "
                f"them done), and GradientAccumulation has steps={steps} there. Resume with {window['steps']}, or from "
                "a checkpoint taken between windows."
            )
        parameters = self._parameters()
        share = window.get("ranks", trainer.world_size) / trainer.world_size  # of what all ranks had
        for index, gradient in window["gradients"].items():
            parameters[index].grad = gradient.to(parameters[index].device) * share
        self._window.restore(window["micro_batches"], window["weight"] * share)
        self._monitor.resync()
