"""Checks of arguments that several ways in share."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

Sync = Literal["window", "micro_batch"]
"""When several ranks reduce their gradients: once per window, or on every micro-batch."""


def checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module. Received: model of type {type(model).__name__}.")
    return model


def checked_limits(**limits: Any) -> dict[str, float | None]:
    for name, limit in limits.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
            raise TypeError(f"`{name}` must be a number > 0. Received: {name}={limit!r}.")
        if limit is not None and not limit > 0:
            raise ValueError(f"`{name}` must be a number > 0. Received: {name}={limit!r}.")
    return {name: None if limit is None else float(limit) for name, limit in limits.items()}


def checked_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"`accumulate_dtype` must be a floating torch.dtype such as torch.float32. Received: {dtype!r}."
        )
    return dtype


def checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}. Received: {name}={value!r}.")
    return value


def checked_scaler(scaler: Any) -> Any:
    wanted = ("is_enabled", "get_scale", "scale", "unscale_", "step", "update")
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in wanted):
        raise TypeError(f"`scaler` must be a torch.amp.GradScaler. Received: scaler={scaler!r}.")
    return scaler if scaler is not None and scaler.is_enabled() else None


def checked_scalar(loss: Any, what: str = "The loss") -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"{what} must be a tensor. Received: loss={loss!r} of type {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"{what} must be a scalar, the mean or the sum over its rows. Received: shape {tuple(loss.shape)}."
        )
    return loss.reshape(()) if loss.dim() else loss


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` cannot be called without a closure, which it then evaluates as often as it likes."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def checked_noise(noise_scale: bool) -> bool:
    """Whether the noise scale is measured."""
    if not isinstance(noise_scale, bool):
        raise ValueError(f"`noise_scale` must be True or False. Received: noise_scale={noise_scale!r}.")
    return noise_scale
