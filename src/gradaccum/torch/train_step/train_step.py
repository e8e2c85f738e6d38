"""Split the batch: the large batch goes in, one exact update comes out, in micro-batches that fit."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gradaccum.core.noise import NoiseScale
from gradaccum.core.sizes import Rows, Tokens
from gradaccum.on_torch.arguments import Sync, checked_choice, checked_dtype, checked_model, checked_norm
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.on_torch.fitting import Fitting, StartOver
from gradaccum.on_torch.memory import Gauge, parse_bytes
from gradaccum.on_torch.noise import NoiseChoice, checked_noise, noise_meter
from gradaccum.on_torch.transaction import Transaction
from gradaccum.torch.batch_norm import BatchNormChoice, BatchNormPolicy
from gradaccum.torch.buffers import WindowBuffers
from gradaccum.torch.distributed import SingleRank, leaving_on_error, run_by_blocks, run_together
from gradaccum.torch.head import tiling
from gradaccum.torch.layers import BlocksChoice, Layers, OffloadChoice, checked_blocks, proof_of
from gradaccum.torch.loss import Objective, Terms
from gradaccum.torch.proof import Proof
from gradaccum.torch.train_step.cutting import Cutting, GroupsChoice
from gradaccum.torch.train_step.exact_batch_norm import EXACT_MICRO_BATCH_SIZE, WholeBatch, check_exact, run_at_once
from gradaccum.torch.train_step.global_batch import GlobalBatch, Window, check_members, find_ranks, inside, spans_ranks
from gradaccum.torch.train_step.passes import Passes, count_terms
from gradaccum.torch.train_step.update import Update

__all__ = ["TrainStep"]

logger = logging.getLogger("gradaccum")


class TrainStep:
    """Forward, backward and update on a large batch, in micro-batches that fit into memory.

    The update is the one that `loss_fn(model(x), y).backward(); optimizer.step()` makes on the whole batch:

        g = sum_i w_i g_i / sum_i w_i      over micro-batches i, with w_i what the loss of micro-batch i is a mean over

    Args:
        model: The model.
        optimizer: A `torch.optim.Optimizer`, or a list of them. Those that evaluate a closure re-run the window.
        loss_fn: `loss_fn(model(x), y)` on an `(x, y)` batch; tuples of outputs and of targets are unpacked. What a
            `torch.nn` loss divides by is known; any other callable is taken to be a mean over rows, and verified.
        compute_loss: In its place: `compute_loss(model, *batch) -> loss` or `(loss, weight)`; or several losses, each
            with its own denominator, `{name: (loss, weight)}` or a list of pairs, which are added up.
        micro_batch_size: Rows, or `"auto"`: the fastest size that fits, found during the first updates, all exact.
        max_tokens: Padded tokens of a micro-batch: rows with an attention mask are sorted, trimmed and packed.
        pack: `pack(batch, rows) -> batch`: lays rows one behind the other for `max_tokens`, in place of padding.
        weight: `weight(*micro_batch) -> number`: what the loss is a mean over, where that isn't rows. Additive. Of
            several losses `{name: number}`, which saves a counting pass: `compute_loss` returns `{name: loss}` then.
        reduction: `"mean"`, or `"sum"` for losses that are sums; those are divided by the weight, if one is given.
        batch_dims: Where the rows are, like `in_dims` of `torch.vmap`; None marks what every micro-batch shares.
        groups: Rows that stay together, as pairs do: an int (so many in a row), the rows' group ids as a tensor, or
            `groups(*batch) -> ids`. Rows of a group that lie apart are brought together.
        clip_grad_norm: Largest 2-norm of the finished gradient. `grad_norm` tells the norm before.
        scaler: A `torch.amp.GradScaler`.
        autocast: A dtype for the forward pass, such as `torch.bfloat16`.
        accumulate_dtype: What gradients of narrower parameters are summed in, such as `torch.float32`.
        batch_norm: What is done about BatchNorm: `"warn"`, `"micro"` (as is, silent), `"pooled"` (statistics once per
            update, pooled over the window), `"frozen"`, or `"exact"`.
        offload: Keep in host memory what crosses exact BatchNorm layers or lies between `blocks`; a folder: in files.
        memory_limit: Bytes, or a string such as `"4GiB"`; default: what the device, or the container, has free.
        noise_scale: Measure the gradient noise scale while training, for `noise_scale`; `"layer_norm"`: by the rows'
            gradients of normalization layers alone.
        verify: Prove at the first update, on a few rows, that its micro-batches give what these rows give at once;
            again where a batch is of a new kind, and at updates 2, 4, 8, ..., 1024, 2048, 3072, ...
        sync: When ranks reduce their gradients: `"window"`, once per update; `"micro_batch"`, on every micro-batch, for
            sharded models whose unsharded gradients don't fit; with `blocks`, forward passes gather one at a time.
        blocks: Layer by layer: the model's blocks, an `nn.ModuleList`, its dotted path, a list of modules, or `"auto"`;
            or `gradaccum.torch.Blocks(...)` around any of these, which says when they are updated and where they live.
            Of a micro-batch only what the blocks are called with is kept; backward runs the blocks again, one after
            the other, each on all micro-batches. A sharded model gathers a block once per pass.
        head: The linear layer whose outputs are logits over a huge vocabulary, its dotted path, or `"auto"` for models
            of transformers: it and the cross entropy run in tiles, so that the logits never exist.

    Raises:
        TypeError, ValueError: An argument is not what it must be.
        NotEquivalentError: `verify` found that micro-batches don't add up to the large batch.
        torch.OutOfMemoryError: Even one row does not fit, or the optimizer's step doesn't.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=3)
        >>> loss = step(torch.randn(10, 4), torch.randint(2, (10,)))
        >>> loss.shape, step.updates, step.micro_batch_size
        (torch.Size([]), 1, 3)
    """

    @leaving_on_error
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
        scaler: Any = None,
        autocast: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        batch_norm: BatchNormChoice = "warn",
        offload: OffloadChoice = False,
        memory_limit: int | str | None = None,
        noise_scale: NoiseChoice = False,
        verify: bool = True,
        sync: Sync = "window",
        blocks: BlocksChoice = None,
        head: nn.Module | str | None = None,
    ) -> None:
        self.model = checked_model(model)
        remedy = 'Use batch_norm="exact", or GroupNorm; "pooled", "micro" or "frozen" say that it is meant.'
        self.batch_norm = BatchNormPolicy(batch_norm, model, remedy=remedy)
        self.sync = checked_choice("sync", sync, get_args(Sync))
        self._whole: WholeBatch | None = None
        check_exact(self.batch_norm.choice, offload, max_tokens, groups, blocks)
        chosen = checked_blocks(blocks, batch_norm=batch_norm, noise_scale=bool(noise_scale))
        if self.batch_norm.choice == "exact":
            self._whole = WholeBatch(model, batch_dims, loss_fn is not None, offload=bool(offload))
            micro_batch_size = EXACT_MICRO_BATCH_SIZE if micro_batch_size == "auto" else micro_batch_size
        loss: dict[str, Any] = {"loss_fn": loss_fn, "compute_loss": compute_loss, "weight": weight}
        loss |= {"reduction": reduction, "batch_dims": batch_dims, "autocast": autocast}
        self.objective = Objective(model if self._whole is None else self._whole.model, **loss)
        self._layers = None if chosen is None else Layers(model, chosen, offload)
        self.gauge = Gauge(self.objective.device, parse_bytes(memory_limit))
        self.update = Update(
            optimizer,
            self.gauge,
            clip_grad_norm=checked_norm(clip_grad_norm),
            scaler=scaler,
            accumulate_dtype=checked_dtype(accumulate_dtype),
            noise=noise_meter(checked_noise(noise_scale), model),
        )
        plain = self.objective.on(inside(model))
        self.cutting = Cutting(plain, self.gauge, micro_batch_size, max_tokens, pack, groups=groups, judge=verify)
        self.updates = 0
        """Updates made so far."""
        self.losses: dict[Any, Tensor] = {}
        """Of several losses, the mean of each over the last large batch, by name: detached scalars."""
        self.proving = False
        """Whether passes run just now that only prove something: nothing is kept of them."""
        # By hand: a backward pass that runs out of memory halfway through a reduction could not be taken back.
        options = {"sync": self.sync, "batch_norm": self.batch_norm.choice.replace("warn", "micro")}
        self.ranks = find_ranks(model, self.objective, self.update, options)
        self._spans = spans_ranks(self.model, self.ranks, exact=self._whole is not None, verify=verify)
        self._verify = verify and not self._spans and (self._layers is None or self._layers.proves)
        in_blocks = self._layers is not None
        self.global_batch = GlobalBatch(self.ranks, self.update.sums, in_blocks=in_blocks)
        self.update.sums.attach(self.ranks.pending)
        if self.ranks.sharded:
            self.cutting.without_trying(self.update.optimizers, self.ranks, proves=verify)
        if self._layers is not None:
            self.update.take_turns(self._layers, self.ranks, searched=self.cutting.searches)
        self._checked, own, device = False, [self.objective.evaluate], self.objective.device
        self._transaction = Transaction(self._modules(), self.update.parameters, device, functions=own)
        self._tiles = tiling(inside(model), head)
        self._fitting = Fitting(self._transaction, self.gauge, self._tiles)
        self._proof = Proof(
            plain,
            self._rehearsed,
            parameters=self.update.parameters,
            batch_norm=self.batch_norm.choice,
            scaler=self.update.scaler,
            explain=self.cutting.cause,
        )

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of a micro-batch at the moment; None before `"auto"` has seen a batch."""
        return self.cutting.sizers.size

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

    def __call__(self, *batch: Any) -> Tensor:
        """Make one update with this batch. Returns the large batch's loss, a detached scalar on the device.

        Raises:
            ValueError: The tensors of the batch disagree about its rows; the message lists every path and shape.
            torch.OutOfMemoryError: Even one row does not fit, or the optimizer's step. Parameters, state, buffers and
                random numbers are then as they were before, as after any other error; where the optimizer's step on a
                large model cannot be taken back, the message says so.
        """
        return self._call(batch, self._make_update)

    def backward(self, *batch: Any) -> Tensor:
        """Leave the finished gradient of this batch in `.grad`, as a plain loop's `loss.backward()` does.

        What comes next is up to the loop: clipping (`clip_grad_norm` has been done), `optimizer.step()`, or
        `scaler.step(optimizer)` on gradients that a `scaler` still scales. None is left where nothing in the batch
        weighs anything. Returns what a call of the step does; `updates` counts only those.

        Raises:
            WindowError: There are gradients already: call `zero_grad()` before. Else what a call of the step raises.

        Example:
            >>> model = nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> step = TrainStep(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=3)
            >>> loss = step.backward(torch.randn(10, 4), torch.randn(10, 1))
            >>> optimizer.step()
        """
        return self._call(batch, self._leave_gradients)

    def _call(self, arguments: tuple[Any, ...], run: Callable[[Batch], Tensor]) -> Tensor:
        try:
            with contextlib.nullcontext() if self._layers is None else self._layers.reachable():
                return self._guarded(self.objective.batch(arguments), run)
        except BaseException:
            self.ranks.abort(notified=True)
            raise

    def _guarded(self, batch: Batch, run: Callable[[Batch], Tensor]) -> Tensor:
        if batch.rows == 0 and not self.ranks.is_distributed:
            raise ValueError("A batch must have at least one row. Received: 0 rows.")
        batch = self.cutting.grouped(batch)
        if not self._checked:
            check_members(self.model, self.update.parameters(), self.ranks)
            self._checked = True
        self._transaction.open()
        try:
            self._prove(batch)
            loss = run(batch)
            self._proof.tell()
        except BaseException as error:
            self.update.abandon()
            self._transaction.abandon()
            self.cutting.explain(error, batch)
            raise
        self._transaction.close()
        return loss

    def _make_update(self, batch: Batch) -> Tensor:
        loss, weighs = self.gradients(batch)
        losses = self.losses
        if not weighs:
            logger.info("Nothing in this batch of %d rows weighs anything: no update.", batch.rows)
            return loss
        self.updates += int(self.update.step(loss, lambda: self.gradients(batch)[0]))
        self.losses = losses  # a closure may have evaluated others since
        return loss

    def _leave_gradients(self, batch: Batch) -> Tensor:
        self.update.check_empty()
        loss, weighs = self.gradients(batch)
        if not weighs:
            self._clear()
        return loss

    def gradients(self, batch: Batch, sizes: Sequence[int] | None = None) -> tuple[Tensor, bool]:
        """Leave the finished gradients of a batch in `p.grad`, as the optimizers get them.

        Args:
            batch: The large batch.
            sizes: Rows of its micro-batches, in order; None: as `micro_batch_size` and `max_tokens` say. One size, for
                all rows, leaves out the packing of `max_tokens`, too.

        Returns:
            The loss, and whether the batch weighs anything.
        """
        self._clear()
        window = self.global_batch.open(self.objective, batch, lambda: self._count(batch, sizes, True))
        while True:
            try:
                plan = self._run(batch, window, sizes)
                window.check()
                break
            except StartOver:
                self._transaction.start_over()
            if sizes is None:
                self._prove(batch)
            else:
                sizes = self.cutting.halved(batch, sizes)
            self._clear()
            count = functools.partial(self._count, batch, sizes, False)
            window = self.global_batch.anew(window, self.objective, batch, count)
        loss, divisor, weighs = self.global_batch.close(window, self._transaction)
        self.losses = window.losses
        if weighs:
            global_rows = round(self.ranks.sum_number(batch.rows)) if self.update.noise is not None else batch.rows
            self.update.finish(divisor, global_rows, mean=window.is_mean, outside=self._transaction.outside)
        self.cutting.close(plan, batch)
        return loss, weighs

    def _clear(self) -> None:
        self.update.clear()
        self.ranks.clear()
        self.ranks.expect(closes=False, steps=1)

    def _run(self, batch: Batch, window: Window, sizes: Sequence[int] | None) -> Rows | Tokens:
        """Run all micro-batches of a batch. Returns the plan that they followed."""
        rows, plan = batch.rows, self.cutting.plan(batch, sizes)
        take = functools.partial(self.cutting.take, batch)
        buffers, layers = WindowBuffers(self._modules()), self._layers
        passes = Passes(window, take, self.update, self.batch_norm, self.ranks, self._fitting, buffers, rows, layers)
        anew = self._verify and sizes is None and rows <= (self.cutting.sizers.size or 0)  # nothing was proven
        run = functools.partial(self._fitting.run, anew=anew, coupled=self.batch_norm.couples)
        at_once = None
        if self._whole is not None and self._all_at_once and isinstance(plan, Rows) and rows:
            at_once = functools.partial(run_at_once, self._whole, rows, plan, passes, self._fitting, self.gauge)
        with self.batch_norm.window():
            if layers is not None and (rows or self.ranks.sharded):
                once = functools.partial(self._fitting.once if self.ranks.sharded else run, plan=plan, passes=passes)
                losses = self.global_batch.of_all_ranks(window)
                turns = functools.partial(layers.run, plan, once, self.gauge, losses, proving=self.proving)
                run_by_blocks(self.ranks, layers.ranks, self._fitting, plan, turns)
            elif self.ranks.sharded:
                run_together(self.ranks, self._fitting, plan, passes, rows, self.cutting.least, at_once)
            elif at_once is not None:
                at_once()
            else:
                for piece in plan:  # without rows, other ranks have some
                    run(piece, plan, passes)
        buffers.close()
        return plan

    def _count(self, batch: Batch, sizes: Sequence[int] | None, first: bool) -> list[Terms] | None:
        """What several losses divide by, counted; None where the micro-batches' own passes tell in time."""
        if self.ranks.is_distributed and (self._all_at_once or self._spans):
            return None  # it would have to run on all ranks at once
        plan = functools.partial(self.cutting.without_measuring, batch, sizes)
        if not self.ranks.is_distributed and (self._all_at_once or (first and len(list(plan())) == 1)):
            return None
        objective, take = self.objective.on(inside(self.objective.model)), functools.partial(self.cutting.take, batch)
        return count_terms(objective, take, plan, self._fitting, self.batch_norm, self._modules())

    def _rehearsed(self, objective: Objective, batch: Batch, sizes: Sequence[int]) -> Tensor:
        """What `gradients` does, by this rank alone: nothing is clipped, measured or learned."""
        update = self.update
        held = self.ranks, self.global_batch, self.objective, update.noise, update.clip_grad_norm, update.scaler
        self.ranks, self.global_batch = SingleRank(), GlobalBatch(SingleRank(), update.sums)
        self.objective = objective.on(inside(self.model) if self._whole is None else self._whole.chunks)
        update.noise, update.clip_grad_norm, update.scaler = None, None, update.scaler and self._proof.scale
        self._transaction.open()
        try:
            return self.gradients(batch, sizes)[0]
        finally:
            self._transaction.forget()
            self.ranks, self.global_batch, self.objective, update.noise, update.clip_grad_norm, update.scaler = held

    @property
    def _all_at_once(self) -> bool:
        """Whether the loss is to see all rows together, since BatchNorm layers do."""
        return self._whole is not None and self._whole.needed

    def _prove(self, batch: Batch) -> None:
        split = self._whole is not None or self.cutting.splits(batch)
        if self._verify and split and self._proof.is_due(batch, self._transaction.modes, self.cutting.text(batch)):
            self.proving = True
            try:
                self.cutting.plan(batch)  # max_tokens judges the padding
                self._transaction.abandon()
                with proof_of(self._layers), self._tiles():
                    self._proof.run(batch, self.cutting.sizers.given)
            finally:
                self.proving = False
            self._transaction.open()

    def _modules(self) -> list[nn.Module]:
        return [self.model, *(module for prefix, module in self.objective.modules.items() if prefix)]

    def state_dict(self) -> dict[str, Any]:
        """The counters and the sizes that have been found, as plain numbers. Model and optimizer have their own."""
        return {"updates": self.updates, "sizes": self.cutting.sizers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` wrote."""
        self.cutting.load_state_dict(state)
        self.updates = state["updates"]
