"""Mean and variance over more rows than one forward pass sees."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.torch.batch_norm.layers import batch_norms, ranks_of

__all__ = ["Pool", "PooledStatistics", "move_running_statistics"]


@dataclasses.dataclass
class Pool:
    """Mean and sum of squared deviations of what has been seen, per channel, merged as Chan, Golub and LeVeque do."""

    count: float
    mean: Tensor
    deviations: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, x: Tensor) -> Pool:
        """Of a batch, channels in dimension 1."""
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        dims, count = [0, *range(2, x.dim())], x.numel() // x.shape[1]
        if x.device.type != "cpu":
            variance, mean = torch.var_mean(x, dims, correction=0)
            return cls(count, mean, variance * count)
        mean = x.mean(dims, keepdim=True)  # twenty times as fast as var_mean, which the CPU doesn't vectorise
        return cls(count, mean.flatten(), (x - mean).square_().sum(dims))

    def merged(self, other: Pool) -> Pool:
        """Of the rows of both."""
        total = self.count + other.count
        difference = other.mean - self.mean
        return Pool(
            total,
            self.mean + difference * (other.count / total),
            self.deviations + other.deviations + difference.square() * (self.count * other.count / total),
        )

    def onto(self, others: Pool | None) -> Pool:
        """Merged with what was there before, if anything was."""
        return self if others is None else others.merged(self)

    def over_ranks(self, layer: nn.Module | None) -> Pool:
        """Of the rows of all ranks that a SyncBatchNorm spans; other layers are each rank's own."""
        if ranks_of(layer) == 1:
            return self
        own = torch.cat([self.mean.new_tensor([self.count]), self.mean, self.deviations])
        parts = [torch.empty_like(own) for _ in range(ranks_of(layer))]
        torch.distributed.all_gather(parts, own, group=getattr(layer, "process_group", None))
        channels = len(self.mean)
        pools = [Pool(part[0].item(), part[1 : 1 + channels], part[1 + channels :]) for part in parts]
        return functools.reduce(Pool.merged, pools)

    @property
    def unbiased_variance(self) -> Tensor:
        return self.deviations / (self.count - 1)


@torch.no_grad()
def move_running_statistics(layer: _BatchNorm, mean: Tensor, unbiased_variance: Tensor) -> None:
    """One move of a layer's running statistics, as one forward pass over a batch of these statistics makes it."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    factor: float | Tensor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # the cumulative mean; as a tensor, which waits for no device
            factor = 1.0 / layer.num_batches_tracked.to(mean.dtype)
    # `.data`, because PyTorch's own kernels don't count these moves as in-place edits of what a graph has saved either.
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased_variance)):
        running.data.copy_((1 - factor) * running.data + factor * new.to(running.dtype))


class PooledStatistics:
    """Running statistics that move once per window, with the pooled mean and variance of its micro-batches.

        mean = sum_i n_i mean_i / N        variance = sum_i ((n_i - 1) var_i + n_i (mean_i - mean)^2) / (N - 1)

    n_i counts what a channel's statistics are over (rows times positions), and N is their sum. A layer that is called
    several times per micro-batch moves once per call, as it would on the large batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.pools: dict[_BatchNorm, list[Pool]] = {}
        self.micro: dict[_BatchNorm, list[Pool]] = {}
        self.collecting = False
        self.borrowed: dict[_BatchNorm, tuple[Any, ...]] = {}

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Around a window's forward and backward passes; the statistics move at its end, if nothing was raised.

        Passes inside it that are in no `micro_batch()`, such as recomputations, leave the statistics alone.
        """
        layers = [layer for _, layer in batch_norms(self.module) if layer.running_mean is not None]
        handles: list[Any] = []
        self.pools, self.micro = {}, {}
        try:
            for layer in layers:
                handles.append(layer.register_forward_pre_hook(self._lend))
                handles.append(layer.register_forward_hook(self._collect, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
        for layer, pools in self.pools.items():
            for pool in pools:
                move_running_statistics(layer, pool.mean, pool.unbiased_variance)
        self.pools = {}

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around a micro-batch's forward pass, which counts once `commit` says so."""
        self.micro, self.collecting = {}, True
        try:
            yield
        finally:
            self.collecting = False

    def commit(self) -> None:
        """The last micro-batch is in: it won't be repeated in smaller ones for want of memory."""
        for layer, pools in self.micro.items():
            known = self.pools.setdefault(layer, [])
            for index, pool in enumerate(pools):
                if index < len(known):
                    known[index] = known[index].merged(pool)
                else:
                    known.append(pool)
        self.micro = {}

    def _lend(self, layer: _BatchNorm, args: tuple[Any, ...]) -> None:
        """Before a forward pass: buffers to write into that, with momentum 1, end up as the batch's statistics."""
        if not layer.training:
            return
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.borrowed[layer] = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.momentum = 1.0
        layer._buffers["running_mean"] = torch.zeros_like(layer.running_mean)
        layer._buffers["running_var"] = torch.zeros_like(layer.running_var)
        if layer.num_batches_tracked is not None:
            layer._buffers["num_batches_tracked"] = torch.zeros_like(layer.num_batches_tracked)

    def _collect(self, layer: _BatchNorm, args: tuple[Any, ...], output: Any) -> None:
        if layer not in self.borrowed:
            return
        mean, variance = layer._buffers["running_mean"], layer._buffers["running_var"]
        *buffers, layer.momentum = self.borrowed.pop(layer)
        for name, buffer in zip(("running_mean", "running_var", "num_batches_tracked"), buffers, strict=True):
            layer._buffers[name] = buffer
        if self.collecting and output is not None and args:
            assert mean is not None
            assert variance is not None
            count = args[0].numel() // args[0].shape[1]
            count *= ranks_of(layer)
            self.micro.setdefault(layer, []).append(Pool(count, mean, variance * (count - 1)))
