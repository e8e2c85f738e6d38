"""What to do about BatchNorm during a window.

BatchNorm looks across rows, so micro-batches change what it computes. One word says what is to be done about it, for
the optimizer, `TrainStep` and `chunked` alike:

| | normalises with | running statistics |
|---|---|---|
| `"warn"` | the micro-batch's statistics, and says so once, naming the modules | as without a policy |
| `"micro"` | the micro-batch's statistics, silently | moved by every micro-batch |
| `"pooled"` | the micro-batch's statistics | moved once per update, with the window's pooled mean and variance |
| `"frozen"` | the running statistics, as in eval mode | not moved |
| `"exact"` | the large batch's statistics | moved once per update, as by the large batch |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.arguments import checked_choice


def batch_norms(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The BatchNorm layers that would normalise with their batch's statistics, by path.

    Those in eval mode that have running statistics are per row, and not among them.
    """
    return [
        (path, layer)
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    ]


def check_plain(module: nn.Module) -> None:
    """Raise a ValueError if a BatchNorm layer does more than normalise: it has hooks or parametrizations."""
    for path, layer in batch_norms(module):
        hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
        if hooks or "parametrizations" in layer._modules:
            what = "hooks" if hooks else "parametrizations"
            raise ValueError(
                f'{path or "The module"!r} ({type(layer).__name__}) has {what}, which batch_norm="exact" would leave '
                f"out, because it normalises in the layer's place. Put the {what} on a layer before or after it."
            )


def described(layers: Sequence[tuple[str, nn.Module]], most: int = 8) -> str:
    """Paths and kinds, for a message."""
    named = ", ".join(f"{path or 'the module'!r} ({type(layer).__name__})" for path, layer in layers[:most])
    return named if len(layers) <= most else f"{named} and {len(layers) - most} more"


def warn_of_batch_norm(module: nn.Module, remedy: str) -> bool:
    """Name the BatchNorm layers in a warning. Returns whether there were any."""
    if layers := batch_norms(module):
        from gradaccum.torch.watch import level_of_the_user

        warnings.warn(
            "BatchNorm normalises each micro-batch by itself, so the update is not the large batch's: "
            f"{described(layers)}. {remedy}",
            stacklevel=level_of_the_user(),
        )
    return bool(layers)


@contextlib.contextmanager
def frozen(module: nn.Module, *, lends: bool = False) -> Iterator[None]:
    """BatchNorm as in eval mode inside the block, everything else as it is: of windows, and of what proves them.

    Layers without running statistics are refused; or, where `lends`, have a mean of 0 and a variance of 1 meanwhile.
    """
    layers = batch_norms(module)
    without = [(path, layer) for path, layer in layers if layer.running_mean is None]
    if without and not lends:
        raise ValueError(
            'batch_norm="frozen" normalises with running statistics, and these layers keep none: '
            f"{described(without)}. Build them with track_running_stats=True."
        )
    modes = [(layer, layer.training) for _, layer in layers]
    try:
        for layer, _ in modes:
            layer.training = False
        for _, layer in without:
            place = next(iter(layer.parameters()), torch.zeros(layer.num_features))
            layer.running_mean, layer.running_var = (place.new_full((layer.num_features,), n) for n in (0.0, 1.0))
        yield
    finally:
        for _, layer in without:
            layer.running_mean = layer.running_var = None
        for layer, training in modes:
            layer.training = training


def ranks_of(layer: nn.Module | None) -> int:
    """How many ranks' rows a layer normalises over: those of its group, if it is a SyncBatchNorm."""
    if not isinstance(layer, nn.SyncBatchNorm):
        return 1
    group = torch.distributed
    return group.get_world_size(layer.process_group) if group.is_available() and group.is_initialized() else 1


def summed_over_ranks(layer: nn.Module | None, *tensors: Tensor) -> list[Tensor]:
    """Sums over the ranks that a SyncBatchNorm spans; for other layers the tensors themselves."""
    if ranks_of(layer) == 1:
        return list(tensors)
    joined = torch.cat(tensors)
    torch.distributed.all_reduce(joined, group=getattr(layer, "process_group", None))
    return list(joined.split([len(tensor) for tensor in tensors]))


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


BatchNormChoice = Literal["warn", "micro", "pooled", "frozen", "exact"]


def checked_batch_norm(batch_norm: Any) -> BatchNormChoice:
    """`batch_norm`, if it is one of the five words."""
    return checked_choice("batch_norm", batch_norm, get_args(BatchNormChoice))


_NO_CONTEXT = contextlib.nullcontext()


class BatchNormPolicy:
    """One of the five words, applied to a module.

    "pooled" moves running statistics once per window, with the pooled mean and variance of its micro-batches:

        mean = sum_i n_i mean_i / N        variance = sum_i ((n_i - 1) var_i + n_i (mean_i - mean)^2) / (N - 1)

    n_i counts what a channel's statistics are over (rows times positions), and N is their sum. A layer that is called
    several times per micro-batch moves once per call, as it would on the large batch.
    """

    _open = _collecting = False  # of the class, since files of version 0.1 don't have them

    def __init__(self, batch_norm: Any, module: nn.Module, *, moved_once: bool = False, remedy: str = "") -> None:
        self.choice, self.module, self.remedy = checked_batch_norm(batch_norm), module, remedy
        self.idle = False
        """Whether there is nothing to do in this window's micro-batches."""
        self.pooled = self.choice == "pooled" or (self.choice == "warn" and moved_once)
        self._has_layers: bool | None = None
        self.warned, self.micro_batches = False, 0

    def window(self, looks: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Around all of a window's forward and backward passes; pooled statistics move at its end, if none raised.

        `looks`: whether there are layers is looked up once more.
        """
        self.micro_batches = 0
        if looks and self._has_layers is False:
            self._has_layers = self._look()
        self.idle = not self.pooled and (self.choice != "warn" or self.warned or self._has_layers is False)
        if self.choice == "frozen":
            return frozen(self.module)
        return self._pooling() if self.pooled else _NO_CONTEXT

    def _look(self) -> bool:
        return any(isinstance(layer, _BatchNorm) for layer in self.module.modules())

    @contextlib.contextmanager
    def _pooling(self) -> Iterator[None]:
        layers = [layer for _, layer in batch_norms(self.module) if layer.running_mean is not None]
        handles = [layer.register_forward_pre_hook(self._lend) for layer in layers]
        handles += [layer.register_forward_hook(self._collect, always_call=True) for layer in layers]
        self._pools, self._micro = dict[_BatchNorm, list[Pool]](), dict[_BatchNorm, list[Pool]]()
        self._borrowed, self._open = dict[_BatchNorm, tuple[dict[str, Tensor | None], Any]](), True
        try:
            yield
        finally:
            self._open = False
            for handle in handles:
                handle.remove()
        for layer, pools in self._pools.items():
            for pool in pools:
                move_running_statistics(layer, pool.mean, pool.unbiased_variance)

    def micro_batch(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward pass of each micro-batch of a window.

        Passes outside of it, such as recomputations, leave pooled statistics alone.
        """
        self.micro_batches += 1
        if self.choice == "warn" and self.micro_batches == 2 and not self.warned:  # one alone is the large batch
            if self._has_layers is None:
                self._has_layers = self._look()
            self.warned = self._has_layers and warn_of_batch_norm(self.module, self.remedy)
        return self._collected() if self._open else _NO_CONTEXT

    @contextlib.contextmanager
    def _collected(self) -> Iterator[None]:
        self._micro, self._collecting = {}, True
        try:
            yield
        finally:
            self._collecting = False
        for layer, pools in self._micro.items():
            known = self._pools.get(layer, [])
            merged = [before.merged(pool) for before, pool in zip(known, pools)]
            self._pools[layer] = [*merged, *known[len(pools) :], *pools[len(known) :]]

    def recomputation(self) -> contextlib.AbstractContextManager[Any]:
        """Around passes that repeat some made before, outside the window."""
        return frozen(self.module) if self.choice == "frozen" else _NO_CONTEXT

    def _lend(self, layer: _BatchNorm, args: tuple[Any, ...]) -> None:
        """Before a forward pass: buffers to write into that, with momentum 1, end up as the batch's statistics."""
        if not layer.training:
            return
        own = {name: layer._buffers.get(name) for name in ("running_mean", "running_var", "num_batches_tracked")}
        self._borrowed[layer], layer.momentum = (own, layer.momentum), 1.0
        layer._buffers.update({name: torch.zeros_like(buffer) for name, buffer in own.items() if buffer is not None})

    def _collect(self, layer: _BatchNorm, args: tuple[Any, ...], output: Any) -> None:
        if layer not in self._borrowed:
            return
        mean, variance = layer.running_mean, layer.running_var
        buffers, layer.momentum = self._borrowed.pop(layer)
        layer._buffers.update(buffers)
        if self._collecting and output is not None and args:
            assert mean is not None
            assert variance is not None
            count = args[0].numel() // args[0].shape[1] * ranks_of(layer)
            self._micro.setdefault(layer, []).append(Pool(count, mean, variance * (count - 1)))
