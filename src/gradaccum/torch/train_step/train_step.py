"""Split the batch: the large batch goes in, one exact update comes out, in micro-batches that fit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import parse_bytes
from gradaccum.on_torch.arguments import Sync, checked_dtype, checked_limits, checked_model
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.on_torch.memory import MemoryMeter
from gradaccum.on_torch.oom_retry import OomRetry
from gradaccum.on_torch.private import leave_uncompiled
from gradaccum.torch.batch_norm import BatchNormChoice, BatchNormPolicy
from gradaccum.torch.proof import Proof
from gradaccum.torch.train_step.features import (
    check_ranks,
    features_of,
    find_ranks,
    noise_meter,
    objective_of,
    rehearsal_features,
    spans_ranks,
    whole_batch,
    window_runner,
)
from gradaccum.torch.train_step.micro_batcher import MicroBatcher
from gradaccum.torch.train_step.options import GroupsChoice, Options, check_optimized, inside, loss_by_name
from gradaccum.torch.train_step.update import Update
from gradaccum.torch.train_step.window import Finished

if TYPE_CHECKING:
    from gradaccum.core.noise import NoiseScale
    from gradaccum.torch.loss import Objective

logger = logging.getLogger("gradaccum")

_REMEDY = 'Use batch_norm="exact", or GroupNorm; if it is intended, "pooled", "micro" or "frozen".'


class TrainStep:
    """Forward, backward and update on a large batch, in micro-batches that fit into memory.

    The update is the one that `loss_fn(model(x), y).backward(); optimizer.step()` makes on the whole batch:

        g = sum_i w_i g_i / sum_i w_i      over micro-batches i, with w_i what the loss of micro-batch i is a mean over

    Args:
        model: The model.
        optimizer: A `torch.optim.Optimizer`, or a list of them. Those that evaluate a closure re-run the window.
        loss_fn: `loss_fn(model(x), y)` on an `(x, y)` batch; tuples of outputs and of targets are unpacked. The
            denominator of a `torch.nn` loss is known; any other callable is treated as a mean over rows, and verified.
        compute_loss: In its place, `compute_loss(model, *batch) -> loss` or `(loss, weight)`; or several losses, each
            with its own denominator, `{name: (loss, weight)}` or a list of pairs, which are added up.
        micro_batch_size: Rows, or `"auto"`, the fastest size that fits, found during the first updates, all exact.
        max_tokens: Padded tokens of a micro-batch: rows with an attention mask are sorted, trimmed and packed.
        pack: `pack(batch, rows) -> batch`, which joins rows for `max_tokens`, in place of padding.
        weight: `weight(*micro_batch) -> number`, what the loss is a mean over, if not rows. It must add up over rows.
            For several losses, return `{name: number}` here and `{name: loss}` there, which saves a counting pass.
        reduction: `"mean"`, or `"sum"` for losses that are sums; those are divided by the weight, if one is given.
        batch_dims: Where the rows are, like `in_dims` of `torch.vmap`; None marks tensors that all micro-batches share.
        groups: Rows that stay together, such as pairs: an int (so many consecutive rows), the rows' group ids as a
            tensor, or `groups(*batch) -> ids`. A group's rows may be anywhere in the batch.
        clip_grad_norm: Largest 2-norm of the finished gradient. `grad_norm` has the norm before.
        clip_grad_value: Largest absolute value of its entries.
        scaler: A `torch.amp.GradScaler`.
        autocast: A dtype for the forward pass, such as `torch.bfloat16`.
        accumulate_dtype: Dtype in which gradients of narrower parameters are summed, such as `torch.float32`.
        batch_norm: How BatchNorm is handled: `"warn"`, `"micro"` (as is, silent), `"pooled"` (statistics once per
            update, pooled over the window), `"frozen"`, or `"exact"`.
        offload: Keep tensors that cross exact BatchNorm layers in host memory.
        memory_limit: Bytes, or a string such as `"4GiB"`; default: what the device, or the container, has free.
        noise_scale: Measure the gradient noise scale for the property `noise_scale`.
        verify: Prove on a few rows that micro-batches give the same as these rows at once, at the first update, at
            updates 2, 4, 8, ..., 1024, 2048, 3072, ..., and for batches of a new kind.
        sync: When ranks reduce their gradients: `"window"`, once per update; `"micro_batch"`, on every micro-batch, for
            sharded models whose unsharded gradients don't fit.
        reproducible: Make the same bits on any number of ranks, from rows that `GlobalBatchSampler` shares out: sums
            that don't depend on their order, random numbers that follow from seed, update and place in the batch.
        compile: Run forward and backward passes, weights and their sum as compiled programs. True, or a dict of
            `torch.compile`'s `mode`, `backend` and `options`. `compiled` says whether the last update ran so.
        has_aux: `compute_loss` returns `(loss, aux)` or `(loss, weight, aux)`; with `loss_fn` the aux is the model's
            outputs. A call returns `(loss, aux)`, detached.
        aux: What becomes of the aux over micro-batches: `"concat"` in the batch's order, `"mean"` weighed as the loss,
            `"sum"`, `"last"`, or a container of these, a prefix of its structure. `"auto"`: what has a row for every
            row is concatenated, scalars are averaged, and anything else is an error.

    Raises:
        TypeError, ValueError: An argument is invalid.
        NotEquivalentError: `verify` found that micro-batches don't add up to the large batch.
        torch.OutOfMemoryError: One row doesn't fit, or the optimizer's step doesn't.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=3)
        >>> loss = step(torch.randn(10, 4), torch.randint(2, (10,)))
        >>> loss.shape, step.updates, step.micro_batch_size
        (torch.Size([]), 1, 3)
    """

    @loss_by_name
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        loss_fn: Callable[..., Any] | None = None,
        compute_loss: Callable[..., Any] | None = None,
        micro_batch_size: int | Literal["auto"] = "auto",
        max_tokens: int | None = None,
        pack: Callable[..., Any] | None = None,
        weight: Callable[..., Any] | None = None,
        reduction: str = "mean",
        batch_dims: BatchDims = 0,
        groups: GroupsChoice = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        batch_norm: BatchNormChoice = "warn",
        offload: bool = False,
        memory_limit: int | str | None = None,
        noise_scale: bool = False,
        verify: bool = True,
        sync: Sync = "window",
        reproducible: bool = False,
        compile: bool | Mapping[str, Any] = False,
        has_aux: bool = False,
        aux: Any = "auto",
    ) -> None:
        leave_uncompiled()
        self.model = checked_model(model)
        options = Options(
            optimizers=optimizer,
            micro_batch_size=micro_batch_size,
            max_tokens=max_tokens,
            pack=pack,
            groups=groups,
            scaler=scaler,
            gradients={
                **checked_limits(clip_grad_norm=clip_grad_norm, clip_grad_value=clip_grad_value),
                "accumulate_dtype": checked_dtype(accumulate_dtype),
            },
            batch_norm=batch_norm,
            offload=offload,
            noise_scale=noise_scale,
            sync=sync,
            reproducible=reproducible,
            compile=compile,
            verify=verify,
            has_aux=has_aux,
            aux=aux,
        )
        self.updates = 0
        """Updates made so far."""
        self.losses: dict[Any, Tensor] = {}
        """Of several losses, the mean of each over the last large batch, by name: detached scalars."""
        self.proving = False
        """Whether passes run just now that only prove something: nothing is kept of them."""
        self._is_checked, exact = False, options.batch_norm == "exact"
        whole = whole_batch(model, batch_dims, loss_fn is not None, offload=offload) if exact else None
        self.objective, around = objective_of(
            model if whole is None else whole.model,
            options,
            loss_fn=loss_fn,
            compute_loss=compute_loss,
            weight=weight,
            reduction=reduction,
            batch_dims=batch_dims,
            autocast=autocast,
        )
        self._answer: Callable[..., Any] = self._call if around is None else around(self._call)
        plain = self.objective.on(inside(model))
        meter = MemoryMeter(self.objective.device, parse_bytes(memory_limit))
        self.update = update = Update(options, meter, noise_meter(noise_scale))
        self.batcher = MicroBatcher(plain, meter, options, judge=verify)
        self.ranks = find_ranks(model, self.objective, update, options)
        spans = spans_ranks(model, self.ranks, exact=exact, verify=verify)
        self._verify = verify and not spans
        if self.ranks.is_distributed:
            update.buffer.attach(self.ranks.engine.pending)
        if self.ranks.sharded:
            self.batcher.without_trying(update.optimizers, self.ranks, proves=verify)
        runner = functools.partial(
            window_runner,
            self.objective,
            model,
            update,
            self.batcher,
            batch_norm=BatchNormPolicy(batch_norm, model, remedy=_REMEDY),
            oom=OomRetry(meter),
        )
        # Where all ranks run passes together, no window restarts by itself.
        self._windows = runner(features_of(model, options, update, self.ranks, whole), always=spans)
        self._rehearsal = functools.cache(lambda: runner(rehearsal_features(options, model, whole), always=True))
        self._always_proves = whole is not None
        self._windows.not_proven, self._state = self._prove, self._windows.state
        self._proof = Proof(
            plain,
            self._rehearse,
            parameters=update.parameters,
            batch_norm=options.batch_norm,
            scaler=update.scaler,
            explain=self.batcher.cause,
        )
        self._schedule = self._proof.schedule

    def __dir__(self) -> list[str]:
        """What is public: the methods and properties, `losses`, `model` and `updates`."""
        return sorted({*dir(type(self)), "losses", "model", "updates"})

    def __repr__(self) -> str:
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.update.optimizers)
        names = optimizers if len(self.update.optimizers) == 1 else f"[{optimizers}]"
        size = self.micro_batch_size or "auto"
        return f"TrainStep({type(self.model).__name__}, {names}, micro_batch_size={size!r}, updates={self.updates})"

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of a micro-batch at the moment; None before `"auto"` has seen a batch."""
        return self.batcher.finder.size

    @property
    def compiled(self) -> bool:
        """Whether all micro-batches of the last update ran as compiled programs."""
        return bool(getattr(self._windows, "compiled", False))

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of the last finished gradient before clipping, a tensor; None without `clip_grad_norm`."""
        return self.update.grad_norm

    @property
    def noise_scale(self) -> NoiseScale:
        """How many rows an update can use, measured over the last 500 updates; reading it waits for the device.

        Raises:
            ValueError: It is not measured.
        """
        if self.update.noise is None:
            raise ValueError("The noise scale is not measured. Pass noise_scale=True to TrainStep.")
        return self.update.noise.estimate()

    def __call__(self, *batch: Any) -> Any:
        """Make one update with this batch. Returns the large batch's loss, a detached scalar on the device.

        With `has_aux=True`, it returns `(loss, aux)`, with the aux of this rank's rows.

        A batch in which nothing counts, as its targets are all ignored, makes no update, and its loss is NaN.
        """
        return self._answer(batch)

    def backward(self, *batch: Any) -> Any:
        """Leave the finished gradient of this batch in `.grad`, as a plain loop's `loss.backward()` does.

        Call `optimizer.step()` then, or `scaler.step(optimizer)`, because the gradients are still scaled.
        `clip_grad_norm` has been applied. A batch of weight 0 leaves no gradient. Returns what a call
        of the step returns; `updates` doesn't count this one.

        Raises:
            WindowError: There are gradients already; call `zero_grad()` first. Otherwise as a call of the step.

        Example:
            >>> model = nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> step = TrainStep(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=3)
            >>> loss = step.backward(torch.randn(10, 4), torch.randn(10, 1))
            >>> optimizer.step()
        """
        return self._answer(batch, leaves=True)

    def _call(self, arguments: tuple[Any, ...], *, leaves: bool = False) -> Tensor:
        try:
            batch = self.objective.batch(arguments)
            return self._guarded(batch, leaves)
        except BaseException:
            if self.ranks.is_distributed:
                self.ranks.abort(notified=True)
            raise

    def _guarded(self, batch: Batch, leaves: bool) -> Tensor:
        if batch.rows == 0 and not self.ranks.is_distributed:
            raise ValueError("A batch must have at least one row. Received: 0 rows.")
        batch, state = self.batcher.grouped(batch), self._state
        if not self._is_checked:
            check_ranks(self.model, self.update.parameters(), self.ranks)
            check_optimized(self.update.optimizers, self._windows.roots)
            self._is_checked = True
        state.open()
        try:
            if leaves:
                self.update.check_empty()
            self._prove(batch)
            loss = self._leave_gradients(batch) if leaves else self._make_update(batch)
            if self._proof.ran:
                self._proof.tell()
        except BaseException as error:
            self.update.abandon()
            state.abandon()
            self.batcher.explain(error, batch)
            self._proof.check_error(error)
            raise
        state.close()
        return loss

    def _make_update(self, batch: Batch) -> Tensor:
        self.update.meet_scaler()
        finished = self._finished(batch)
        if not finished.weighs:
            logger.info("No update: the total weight of this batch's %d rows is 0.", batch.rows)
            return finished.loss
        self.updates += int(self.update.step(finished.loss, lambda: self._evaluated(batch)))
        self.losses = finished.losses  # a closure may have evaluated others since
        return finished.loss

    def _evaluated(self, batch: Batch) -> Tensor:
        """What a closure evaluates: the window once more, from the state that the last one has left."""
        self._state.evaluate()
        return self._finished(batch).loss

    def _leave_gradients(self, batch: Batch) -> Tensor:
        finished = self._finished(batch)
        if not finished.weighs:
            self._windows.clear()
        return finished.loss

    def _finished(self, batch: Batch) -> Finished:
        finished = self._windows.run(batch)
        self.losses, self.update.grad_norm = finished.losses, finished.grad_norm
        return finished

    def _rehearse(self, objective: Objective, batch: Batch, sizes: Sequence[int]) -> Tensor:
        scaler = self.update.scaler and self._proof.scale
        return self._rehearsal().rehearse(objective, batch, sizes, scaler, known=self._proof.quick)

    def _prove(self, batch: Batch) -> None:
        if not self._verify or not (self._always_proves or self.batcher.splits(batch)):
            return
        text = self.batcher.text(batch)
        if not self._schedule.includes(batch, self._state.modes, text):
            return
        self.proving = True
        self.update.buffer.clear()  # of the last update's gradients, beside which the proof's would take memory
        try:
            self.batcher.plan(batch)  # max_tokens judges the padding
            self._proof.run(batch, self.batcher.finder.given, text)
        finally:
            self.proving = False
        self._state.retake()

    def state_dict(self) -> dict[str, Any]:
        """The counters and the sizes that have been found, as plain numbers. Model and optimizer have their own."""
        own = {"updates": self.updates, "sizes": self.batcher.finder.state_dict()}
        return own | self._windows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.batcher.load_state_dict(state)
        self._windows.load_state_dict(state)
        self.updates = state["updates"]
