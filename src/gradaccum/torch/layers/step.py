"""`BlockStep`: the large batch's update, in the memory of one block's activations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import parse_bytes
from gradaccum.on_torch.arguments import checked_choice, checked_dtype, checked_limits, checked_model
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.on_torch.memory import MemoryMeter
from gradaccum.on_torch.oom_retry import OomRetry
from gradaccum.on_torch.private import leave_uncompiled
from gradaccum.on_torch.stages import gradient_stages
from gradaccum.torch.batch_norm import BatchNormChoice, BatchNormPolicy
from gradaccum.torch.layers.backward_optimizer import BackwardOptimizer
from gradaccum.torch.layers.blocks import BlocksChoice, find_blocks
from gradaccum.torch.layers.offload import OffloadChoice, OffloadedBlocks
from gradaccum.torch.layers.refused import check_combination, checked_arguments
from gradaccum.torch.layers.schedule import Layers, proof_of
from gradaccum.torch.layers.window import BlockRunner
from gradaccum.torch.loss import Objective
from gradaccum.torch.proof import Proof
from gradaccum.torch.train_step.micro_batcher import MicroBatcher
from gradaccum.torch.train_step.options import GroupsChoice, Options, check_optimized
from gradaccum.torch.train_step.update import Update

logger = logging.getLogger("gradaccum")

UpdateChoice = Literal["after_backward", "in_backward"]

_REMEDY = 'Use GroupNorm; if it is intended, "pooled", "micro" or "frozen".'
_NO_SIZE = (
    "BlockStep needs a `micro_batch_size` in rows, or `max_tokens`. Received: micro_batch_size={!r}. `gradaccum size` "
    "and gradaccum.torch.measure.estimate_ways predict what fits."
)


class BlockStep:
    """Forward, backward and update on a large batch, with the activations and gradients of one block at a time.

    Each micro-batch goes forward through the model, and only the blocks' inputs are kept. Backward runs the blocks
    again, one after the other, each on all micro-batches. So a block's gradient is finished when backward leaves it:

        g_k = sum_i w_i g_k,i / sum_i w_i      over micro-batches i, for block K, then K - 1, ..., then the layers
                                               before the blocks

    The update is the large batch's, as `TrainStep` makes it. One device.

    Args:
        model: The model, which calls each block once per forward pass.
        optimizer: A `torch.optim.Optimizer`, or a list of them.
        blocks: An `nn.ModuleList`, its dotted path, a list of modules in the order in which they are called, or
            `"auto"`: the longest list of modules of one class.
        update: `"after_backward"`: one step of the optimizer when all gradients are finished. `"in_backward"`: a
            block's parameters are updated as soon as its gradient is finished, and the gradient is freed.
        on: `"cpu"`: parameters, gradients and optimizer state of the blocks live in host memory. A block is copied to
            the device while it computes, and the next one meanwhile. None: the blocks stay where they are.
        offload: Keep what blocks are called with in host memory (True), or, given a folder, in files there.
        loss_fn: As for `TrainStep`, like all that follow.
        compute_loss: In its place, `compute_loss(model, *batch)`.
        micro_batch_size: Rows. Needed without `max_tokens`.
        max_tokens: Padded tokens of a micro-batch.
        pack: `pack(batch, rows) -> batch`, which joins rows for `max_tokens`.
        weight: `weight(*micro_batch) -> number`, what the loss is a mean over, if not rows.
        reduction: `"mean"`, or `"sum"` for losses that are sums.
        batch_dims: Where the rows are.
        groups: Rows that stay together.
        clip_grad_norm: Largest 2-norm of the finished gradient; only with update="after_backward".
        clip_grad_value: Largest absolute value of its entries.
        autocast: A dtype for the forward pass, such as `torch.bfloat16`.
        accumulate_dtype: Dtype in which gradients of narrower parameters are summed.
        batch_norm: `"warn"`, `"micro"`, `"pooled"` or `"frozen"`.
        memory_limit: Bytes, or a string such as `"4GiB"`; default: what the device, or the container, has free.
        verify: Prove on a few rows that the update is the large batch's, at updates 1, 2, 4, 8, ...

    Raises:
        TypeError, ValueError: An argument is invalid, or doesn't go with blocks.
        NotEquivalentError: `verify` found that micro-batches don't add up to the large batch.
        torch.OutOfMemoryError: One row doesn't fit, or the optimizer's step doesn't.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> loss_fn = nn.CrossEntropyLoss()
        >>> step = BlockStep(model, optimizer, update="in_backward", loss_fn=loss_fn, micro_batch_size=4)
        >>> step(torch.randn(16, 4), torch.randint(2, (16,))).shape
        torch.Size([])
    """

    @checked_arguments
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        blocks: BlocksChoice = "auto",
        update: UpdateChoice = "after_backward",
        on: Literal["cpu"] | None = None,
        offload: OffloadChoice = False,
        loss_fn: Callable[..., Any] | None = None,
        compute_loss: Callable[..., Any] | None = None,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        pack: Callable[..., Any] | None = None,
        weight: Callable[..., Any] | None = None,
        reduction: str = "mean",
        batch_dims: BatchDims = 0,
        groups: GroupsChoice = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        autocast: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        batch_norm: BatchNormChoice = "warn",
        memory_limit: int | str | None = None,
        verify: bool = True,
    ) -> None:
        leave_uncompiled()
        self.model = checked_model(model)
        in_backward = checked_choice("update", update, get_args(UpdateChoice)) == "in_backward"
        if on not in (None, "cpu"):
            raise ValueError(
                f"`on` must be 'cpu' or None. Received: on={on!r}. Blocks live in host memory or on the device; "
                "activations between blocks can be kept in files, with `offload`."
            )
        if max_tokens is None and micro_batch_size in (None, "auto"):
            raise ValueError(_NO_SIZE.format(micro_batch_size))
        options = Options(
            optimizers=optimizer,
            micro_batch_size="auto" if micro_batch_size is None else micro_batch_size,
            max_tokens=max_tokens,
            pack=pack,
            groups=groups,
            scaler=None,
            gradients={
                **checked_limits(clip_grad_norm=clip_grad_norm, clip_grad_value=clip_grad_value),
                "accumulate_dtype": checked_dtype(accumulate_dtype),
            },
            batch_norm=batch_norm,
            offload=False,
            noise_scale=False,
            sync="window",
        )
        self.updates = 0
        """Updates made so far."""
        self.losses: dict[Any, Tensor] = {}
        """Of several losses, the mean of each over the last large batch, by name: detached scalars."""
        self.grad_norm: Tensor | None = None
        """The 2-norm of the last finished gradient before clipping, a tensor; None without `clip_grad_norm`."""
        options.check_optimizers()
        listed = find_blocks(model, blocks)
        check_combination(
            model,
            listed,
            options.optimizers,
            batch_norm=batch_norm,
            in_backward=in_backward,
            clips=clip_grad_norm is not None,
        )
        self._objective = objective = Objective(
            model,
            loss_fn=loss_fn,
            compute_loss=compute_loss,
            weight=weight,
            reduction=reduction,
            batch_dims=batch_dims,
            autocast=autocast,
        )
        meter = MemoryMeter(objective.device, parse_bytes(memory_limit))
        self._optimizers = Update(options, meter)
        self._batcher = MicroBatcher(objective, meter, options, judge=verify)
        offloaded = None if on is None else OffloadedBlocks(model, listed)
        self._layers = Layers(model, listed, offloaded, offload)
        self._in_backward: BackwardOptimizer | None = None
        if in_backward:
            stages = gradient_stages(options.gradients)
            optimizers, buffer = self._optimizers.optimizers, self._optimizers.buffer
            self._in_backward = BackwardOptimizer(optimizers, buffer, listed, model, meter, stages)
            self._layers.listener = self._in_backward
        parts = objective, self._layers, self._optimizers, self._batcher
        policy, oom = BatchNormPolicy(batch_norm, model, remedy=_REMEDY), OomRetry(meter)
        self._runner = BlockRunner(*parts, policy, oom)
        self._rehearsal = BlockRunner(*parts, policy, oom, proving=True)
        self._runner.not_proven, self._is_checked = self._prove, False
        self._verify = verify and (offloaded is None or offloaded.proves)
        self._proof = Proof(
            objective,
            self._rehearse,
            parameters=self._optimizers.parameters,
            batch_norm=options.batch_norm,
            explain=self._batcher.cause,
        )

    def __dir__(self) -> list[str]:
        """What is public: the methods and properties, `grad_norm`, `losses`, `model` and `updates`."""
        return sorted({*dir(type(self)), "grad_norm", "losses", "model", "updates"})

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers.optimizers)
        names = names if len(self._optimizers.optimizers) == 1 else f"[{names}]"
        return (
            f"BlockStep({type(self.model).__name__}, {names}, {len(self._layers.blocks)} blocks, "
            f"micro_batch_size={self.micro_batch_size!r}, updates={self.updates})"
        )

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of a micro-batch at the moment: fewer than given, if those didn't fit; None with `max_tokens` alone."""
        return self._batcher.finder.size

    def __call__(self, *batch: Any) -> Tensor:
        """Make one update with this batch. Returns the large batch's loss, a detached scalar on the device.

        A batch in which nothing counts, as its targets are all ignored, makes no update, and its loss is NaN.
        """
        large = self._objective.batch(batch)
        if large.rows == 0:
            raise ValueError("A batch must have at least one row. Received: 0 rows.")
        with self._layers.reachable():
            return self._guarded(self._batcher.grouped(large))

    def _guarded(self, batch: Batch) -> Tensor:
        state = self._runner.state
        if not self._is_checked:
            check_optimized(self._optimizers.optimizers, self._runner.roots)
            self._is_checked = True
        state.open()
        try:
            self._prove(batch)
            loss = self._make_update(batch)
            self._proof.tell()
        except BaseException as error:
            self._optimizers.abandon()
            state.abandon()
            self._batcher.explain(error, batch)
            self._proof.check_error(error)
            raise
        state.close()
        return loss

    def _make_update(self, batch: Batch) -> Tensor:
        finished = self._runner.run(batch)
        self.losses, self.grad_norm = finished.losses, finished.grad_norm
        if not finished.weighs:
            logger.info("No update: the total weight of this batch's %d rows is 0.", batch.rows)
        elif self._in_backward is not None:
            self.updates += 1
        else:
            self.updates += int(self._optimizers.step(finished.loss, lambda: self._evaluated(batch)))
        return finished.loss

    def _evaluated(self, batch: Batch) -> Tensor:
        """What an optimizer's closure evaluates: the window once more, from the state that the last one has left."""
        self._runner.state.evaluate()
        return self._runner.run(batch).loss

    def _rehearse(self, objective: Objective, batch: Batch, sizes: Sequence[int]) -> Tensor:
        return self._rehearsal.rehearse(objective, batch, sizes, modules_known=self._proof.quick)

    def _prove(self, batch: Batch) -> None:
        if not (self._verify and self._batcher.splits(batch)):
            return
        text = self._batcher.text(batch)
        if not self._proof.schedule.includes(batch, self._runner.state.modes, text):
            return
        self._optimizers.buffer.clear()  # of the last update's gradients, beside which the proof's would take memory
        self._batcher.plan(batch)  # max_tokens judges the padding
        with proof_of(self._layers):
            self._proof.run(batch, self._batcher.finder.given, text)
        self._runner.state.retake()

    def state_dict(self) -> dict[str, Any]:
        """The counters and the size, as plain numbers. Model and optimizer have their own."""
        return {"updates": self.updates, "sizes": self._batcher.finder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._batcher.load_state_dict(state)
        self.updates = state["updates"]
