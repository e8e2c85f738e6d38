"""Which layers are BatchNorm, whose rows they normalise over, and how to hold them still."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import gradaccum

__all__ = [
    "batch_norms",
    "check_plain",
    "frozen",
    "in_eval_mode",
    "is_of_the_user",
    "ranks_of",
    "summed_over_ranks",
    "warn_of_batch_norm",
    "warn_of_functional_batch_norm",
]


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
                f"out, as it normalises in the layer's place. Received: {what} on a BatchNorm layer; put them on a "
                "layer before or behind it."
            )


def described(layers: list[tuple[str, _BatchNorm]], most: int = 8) -> str:
    """Paths and kinds, for a message."""
    named = ", ".join(f"{path or 'the module'!r} ({type(layer).__name__})" for path, layer in layers[:most])
    return named if len(layers) <= most else f"{named} and {len(layers) - most} more"


def warn_of_batch_norm(module: nn.Module, remedy: str) -> bool:
    """Name the BatchNorm layers in a warning. Returns whether there were any."""
    layers = batch_norms(module)
    if layers:
        _warn(described(layers), remedy)
    return bool(layers)


def warn_of_functional_batch_norm(module: nn.Module, paths: Sequence[str], remedy: str) -> None:
    """Name the modules that call `torch.nn.functional.batch_norm` in a warning."""
    named = ", ".join(f"{path or 'the module'!r} ({type(module.get_submodule(path)).__name__})" for path in paths)
    _warn(f"torch.nn.functional.batch_norm, called by {named}", remedy)


def _warn(what: str, remedy: str) -> None:
    warnings.warn(
        f"BatchNorm normalises each micro-batch by itself, so the update is not the large batch's: {what}. {remedy}",
        stacklevel=_level_of_the_user(),
    )


_OTHERS = tuple(os.path.realpath(path) for path in (Path(gradaccum.__file__).parent, Path(torch.__file__).parent))


def is_of_the_user(filename: str) -> bool:
    """Whether code of this file is neither ours nor PyTorch's, nor that of a context manager between them."""
    return not (filename.startswith("<") or filename == contextlib.__file__ or _real(filename).startswith(_OTHERS))


_real = functools.lru_cache(maxsize=256)(os.path.realpath)


def _level_of_the_user() -> int:
    """The `stacklevel`, for a caller of this function, of the user's first line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_of_the_user(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


@contextlib.contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """BatchNorm as in eval mode inside the block, everything else as it is."""
    layers = batch_norms(module)
    without = [(path, layer) for path, layer in layers if layer.running_mean is None]
    if without:
        raise ValueError(
            'batch_norm="frozen" normalises with running statistics, and these layers keep none: '
            f"{described(without)}. Build them with track_running_stats=True."
        )
    try:
        for _, layer in layers:
            layer.training = False
        yield
    finally:
        for _, layer in layers:
            layer.training = True


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


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """BatchNorm layers in eval mode; those without running statistics get neutral ones meanwhile."""
    layers = batch_norms(model)
    lent = [layer for _, layer in layers if layer.running_mean is None]
    modes = [(layer, layer.training) for _, layer in layers]
    try:
        for layer, _ in modes:
            layer.training = False
        for layer in lent:
            place = next(iter(layer.parameters()), torch.zeros(layer.num_features))
            layer._buffers["running_mean"] = place.new_zeros(layer.num_features)
            layer._buffers["running_var"] = place.new_ones(layer.num_features)
        yield
    finally:
        for layer in lent:
            layer._buffers["running_mean"] = layer._buffers["running_var"] = None
        for layer, training in modes:
            layer.training = training
