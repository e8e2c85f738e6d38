"""Accumulation under PyTorch: plain Python decides, from counts that stay in the host's memory."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import torch

from gradaccum.keras.optimizer.window import Counts, Window, is_overwritten
from gradaccum.keras.private import in_stateless_scope

__all__ = ["accumulate", "beside", "close", "host", "place_of", "put", "replica", "total"]


@torch.no_grad()
def accumulate(window: Window, gradients: list[Any], rows: Any) -> None:
    """Add a micro-batch's gradients to the window, and close it if it is full."""
    if in_stateless_scope():  # what the caller gave stays as it is
        for variable in [*window.sums, window.counts, window.touched]:
            variable.assign(variable.value.clone())
    counts, weight, rescale, closes = window.rule.add(_read(window), rows)
    if rescale not in (None, 1):
        scaled = [t.value for t, v in zip(window.sums, window.variables) if not is_overwritten(v)]
        if scaled:
            torch._foreach_mul_(scaled, rescale)
    plain: tuple[list[Any], list[Any]] = ([], [])
    for index, (total, gradient) in enumerate(zip(window.sums, gradients)):
        if gradient is None:
            continue
        window.touched.value[index] = 1
        if is_overwritten(window.variables[index]):
            total.assign(torch.maximum(total.value, gradient.to(total.value.dtype)))
        else:
            plain[0].append(total.value)
            plain[1].append(gradient)
    if plain[0]:
        torch._foreach_add_(*plain, alpha=weight)
    _write(window, counts)
    if closes:
        close(window)


@torch.no_grad()
def close(window: Window) -> None:
    """Close the window with what it holds."""
    inner, variables = window.inner, window.variables
    counts, sums = _read(window), [total.value for total in window.sums]
    mean = [t for t, v in zip(sums, variables) if not is_overwritten(v)]
    if counts.weight != 1 and mean:
        torch._foreach_div_(mean, counts.weight)  # in place: the sums are emptied below
    touched = window.touched.value.tolist()
    gradients = [
        total.to(variable.value.dtype) if is_touched else None
        for total, variable, is_touched in zip(sums, variables, touched)
    ]
    # Reading the count waits for the device, so only where the inner optimizer may have skipped the update.
    before = int(inner.iterations) if window.may_skip else -1
    if any(touched):
        inner.apply(gradients, variables)
    updated = int(not window.may_skip or int(inner.iterations) != before)
    if in_stateless_scope():  # where assigning keeps the tensor: these may be the new values of something
        for total in window.sums:
            total.assign(torch.zeros_like(total.value))
    else:
        torch._foreach_zero_(sums)
    window.touched.value.zero_()
    _write(window, window.rule.closed(counts, updated))


def _read(window: Window) -> Counts:
    return Counts(*window.counts.value.tolist())


def _write(window: Window, counts: Counts) -> None:
    window.counts.value.copy_(torch.tensor(counts))


def replica() -> int:
    """Which replica's training step this is; Keras on PyTorch has one per process."""
    return 0


def place_of(optimizer: Any) -> None:
    """Where an optimizer's variables live: PyTorch knows by itself."""


def host() -> Any:
    """Where the counts are kept: reading them must not wait for an accelerator."""
    return keras.device("cpu")


def beside(place: Any, variable: Any) -> Any:
    """Where the variables that go with this one are made."""
    return contextlib.nullcontext()


def total(variable: Any) -> Any:
    """A sum over all replicas."""
    return variable.value


def put(variable: Any, value: Any) -> None:
    """Let the replicas' sums add up to this."""
    variable.assign(value)
