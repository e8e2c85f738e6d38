"""Norms, scaling, division and finite checks of many gradients at once, by PyTorch's `_foreach` operators."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def grouped(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Lists of tensors of one device, dtype and layout, which `torch._foreach_*` handles in one kernel."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if type(tensor) is not Tensor and hasattr(tensor, "to_local"):  # a DTensor: what is here, in the same memory
            tensor = tensor.to_local()
        groups[tensor.device, tensor.dtype, tensor.layout].append(tensor)
    return groups.values()


def values_of(gradient: Tensor) -> Tensor:
    """Its entries; of a sparse one those that it has, each once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@torch.no_grad()
def scale_(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor in place; a tensor factor stays on its device."""
    for group in grouped(tensors):
        here = factor.to(group[0].device, group[0].dtype) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(group, here)


_KIND = operator.attrgetter("__class__", "dtype", "is_cpu", "requires_grad")
_DIVISIONS: dict[Any, tuple[Callable[..., None], Tensor]] = {}
"""By divisor and kind of all tensors: an operator, and the number that it takes."""
_PLAIN = {(Tensor, dtype, True, False) for dtype in (torch.float32, torch.float64)}


def divide_(tensors: list[Tensor], divisor: float) -> None:
    kinds = {*map(_KIND, tensors)}
    known = _DIVISIONS.get((divisor, *kinds)) or _division(divisor, kinds)
    if isinstance(known[1], Tensor):  # nearly always
        operation, number = known
        operation(tensors, number)
        return
    with torch.no_grad():  # after create_graph=True
        for group in grouped(tensors):
            known[0](group, known[1])


def _division(divisor: float, kinds: set[Any]) -> tuple[Callable[..., None], Any]:
    """The operator that divides by this, and what it takes; kept where that is a tensor."""
    exact = 2 <= divisor < 2**64 and math.frexp(divisor)[0] == 0.5  # times 1/4 is divided by 4, in less time
    number, operation = (1.0 / divisor, torch._foreach_mul_) if exact else (divisor, torch._foreach_div_)
    kind = next(iter(kinds)) if len(kinds) == 1 else None
    if kind not in _PLAIN:
        return operation, number
    # On CPU a number would be made into a tensor once for each gradient, at half of a small division's cost.
    found = operation, torch.tensor(number, dtype=kind[1], device="cpu")
    if len(_DIVISIONS) >= 64:  # ragged batches: each window has another divisor
        _DIVISIONS.clear()
    _DIVISIONS[divisor, kind] = found
    return found


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether every entry is finite: a bool tensor of no dimensions. Waits for no device; few operators for many."""
    found = []
    for group in grouped(t.coalesce().values() if t.is_sparse else t for t in tensors):
        filled = [t for t in group if t.numel()]
        # On CPU a 2-norm takes a tenth of the largest entry's time. One that isn't finite may itself have overflowed.
        norms = torch._foreach_norm(filled, 2.0) if filled and filled[0].is_cpu else ()
        if filled and not (norms and math.isfinite(torch.stack(norms).sum().item())):
            found.append(torch.stack(torch._foreach_norm(filled, math.inf)).isfinite().all())
    return torch.stack([one.to(found[0].device) for one in found]).all() if found else torch.tensor(True)


@torch.no_grad()
def clip_norm_(tensors: list[Tensor], max_norm: float | None) -> Tensor:
    """Scale tensors so that their joint 2-norm is at most `max_norm` (None: leave them). Returns the norm before.

    Source: `torch.nn.utils.clip_grad_norm_`, whose formula this is: factor min(1, max_norm / (norm + 1e-6)).
    """
    if not tensors:
        return torch.tensor(0.0)
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        dense = tensor.coalesce().values() if tensor.is_sparse else tensor
        groups[dense.device, dense.dtype, hasattr(dense, "to_local")].append(dense)
    each = [norm for group in groups.values() for norm in torch._foreach_norm(group, 2.0)]
    found: Any = torch.linalg.vector_norm(torch.stack([one.to(each[0].device) for one in each]), 2.0)
    norm: Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found  # each rank has summed its shards
    if max_norm is not None:
        scale_(tensors, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
