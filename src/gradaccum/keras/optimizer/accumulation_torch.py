"""Accumulation under PyTorch: plain Python decides, from counts that stay in the host's memory."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import torch

from gradaccum.keras.optimizer.counts import Counts
from gradaccum.keras.optimizer.sums import added

__all__ = ["accumulate", "beside", "close", "host", "put", "replica", "total"]


@torch.no_grad()
def accumulate(optimizer: Any, gradients: list[Any], rows: Any) -> None:
    """Add a micro-batch's gradients to the window, and close it if it is full."""
    counts = _read(optimizer)
    weight = optimizer._weigh(counts, rows)
    plain: tuple[list[Any], list[Any]] = ([], [])
    for index, (total, gradient) in enumerate(zip(optimizer._sums, gradients)):
        if gradient is None:
            continue
        optimizer._touched.value[index] = 1
        variable = optimizer._trainable_variables[index]
        if optimizer._overwrite_variable_with_gradient(variable):
            total.assign(added(optimizer, total.value, gradient, variable, None))
        else:
            plain[0].append(total.value)
            plain[1].append(gradient)
    if plain[0]:
        torch._foreach_add_(*plain, alpha=1 if weight is None else weight)
    counts, closes = optimizer._add(counts, weight)
    _write(optimizer, counts)
    if closes:
        close(optimizer)


@torch.no_grad()
def close(optimizer: Any) -> None:
    """Close the window with what it holds."""
    inner, variables = optimizer.inner_optimizer, optimizer._trainable_variables
    counts, sums = _read(optimizer), [total.value for total in optimizer._sums]
    mean = [t for t, v in zip(sums, variables) if not optimizer._overwrite_variable_with_gradient(v)]
    if counts.weight != 1:
        torch._foreach_div_(mean, counts.weight)  # in place: the sums are emptied below
    touched = optimizer._touched.value.tolist()
    gradients = [
        total.to(variable.value.dtype) if is_touched else None
        for total, variable, is_touched in zip(sums, variables, touched)
    ]
    # Reading the count waits for the device, so only where the inner optimizer may have skipped the update.
    before = int(inner.iterations) if optimizer._can_skip else -1
    if any(touched):
        inner.apply(gradients, variables)
    updated = int(not optimizer._can_skip or int(inner.iterations) != before)
    torch._foreach_zero_(sums)
    optimizer._touched.value.zero_()
    _write(optimizer, optimizer._closed(counts, updated))


def _read(optimizer: Any) -> Counts:
    return Counts(*optimizer._counts.value.tolist())


def _write(optimizer: Any, counts: Counts) -> None:
    optimizer._counts.value.copy_(torch.tensor(counts))


def replica() -> int:
    """Which replica's training step this is; Keras on PyTorch has one per process."""
    return 0


def host() -> Any:
    """Where the counts are kept: reading them must not wait for an accelerator."""
    return keras.device("cpu")


def beside(optimizer: Any, variable: Any) -> Any:
    """Where the variables that go with this one are made."""
    return contextlib.nullcontext()


def total(variable: Any) -> Any:
    """A sum over all replicas."""
    return variable.value


def put(variable: Any, value: Any) -> None:
    """Let the replicas' sums add up to this."""
    variable.assign(value)
