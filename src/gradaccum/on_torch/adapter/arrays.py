"""How far tensors are from each other, and from what rounding makes of them: a proof's arithmetic in PyTorch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradaccum.core.proof import Measured

__all__ = ["bits_flipped", "is_finite", "largest", "measure", "relative_error", "sample"]

ENTRIES = 1 << 18
"""Entries of a gradient that are compared, at most."""


@torch.no_grad()
def measure(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Measured]:
    """How far each first tensor is from its second one: `max|a - b|`, with `max|b|`. None stands for zeros.

    The ends of all are read in one go. What isn't finite counts where the other one is.

    Example:
        >>> measure([(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0])), (None, torch.tensor([2.0]))])
        [Measured(distance=0.5, scale=4.0, entries=2), Measured(distance=2.0, scale=2.0, entries=1)]
    """
    found: list[Measured | None] = []
    ends: list[Tensor] = []
    for actual, expected in pairs:
        one = actual if expected is None else expected
        if one is None or not one.numel():
            shapes = [t.shape for t in (actual, expected) if t is not None]
            found.append(Measured(0.0 if len(set(shapes)) < 2 else math.inf, 0.0, 0))
        elif actual is not None and expected is not None and actual.shape != expected.shape:
            found.append(Measured(math.inf, largest(expected), expected.numel()))
        else:
            found.append(None)
            ours, theirs = _comparable(actual, expected)
            ends += [_ends(ours - theirs), _ends(theirs)]
    read = iter(_read(ends))
    return [
        one if one is not None else _measured(pair, next(read), next(read))
        for one, pair in zip(found, pairs, strict=True)
    ]


def _measured(pair: tuple[Tensor | None, Tensor | None], distance: float, scale: float) -> Measured:
    entries = next(tensor.numel() for tensor in pair if tensor is not None)
    if math.isfinite(distance) and math.isfinite(scale):
        return Measured(distance, scale, entries)
    ours, theirs = _comparable(*pair)
    finite = theirs.isfinite()
    if not ours.isfinite().equal(finite):
        return Measured(math.inf, largest(theirs[finite]), entries)
    return Measured(largest((ours - theirs)[finite]), largest(theirs[finite]), entries)


def _comparable(actual: Tensor | None, expected: Tensor | None) -> tuple[Tensor, Tensor]:
    one = actual if expected is None else expected
    assert one is not None
    ours, theirs = (one.new_zeros(()).expand(one.shape) if t is None else t for t in (actual, expected))
    if ours.device != theirs.device:
        ours, theirs = ours.cpu(), theirs.cpu()
    return _wide(ours), _wide(theirs)


def _wide(tensor: Tensor) -> Tensor:
    """Whole numbers in float64, narrow floats in float32."""
    if tensor.is_complex():
        return tensor
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        return tensor.double()
    return tensor.float() if tensor.itemsize < 4 else tensor


def _ends(tensor: Tensor) -> Tensor:
    """The smallest and the largest number; NaN where there is one. A norm takes ten times as long on a CPU."""
    return torch.stack([*torch.aminmax(tensor.abs() if tensor.is_complex() else tensor)]).double()


def _read(ends: Sequence[Tensor]) -> list[float]:
    """The largest absolute values, each device waited for once."""
    devices = {one.device for one in ends}
    on_host = {
        device: torch.stack([e for e in ends if e.device == device]).abs().amax(1).tolist() for device in devices
    }
    values = {device: iter(numbers) for device, numbers in on_host.items()}
    return [next(values[one.device]) for one in ends]


def is_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers in these tensors are finite."""
    floating = [t.detach() for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel()]
    return all(map(math.isfinite, _read([_ends(_wide(tensor)) for tensor in floating])))


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """`max|actual - expected| / max|expected|`; inf for another shape, or where only one of both is finite.

    Example:
        >>> relative_error(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
        0.125
    """
    return measure([(actual, expected)])[0].error(floor)


def largest(tensor: Tensor) -> float:
    """`max|tensor|`; 0 without entries."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def sample(gradient: Tensor) -> Tensor:
    """Some entries from all over a large gradient, so that no second copy of it is needed."""
    stride = -(-gradient.numel() // ENTRIES)
    return gradient if stride <= 1 else gradient.flatten()[::stride]


@contextlib.contextmanager
def bits_flipped(parameters: Iterable[Tensor], mask: int) -> Iterator[None]:
    """These last bits of every number in these tensors are the others meanwhile."""
    numbers = []
    for parameter in {id(p): p.data for p in parameters}.values():
        whole = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        if whole.layout is torch.strided and whole.itemsize in _INTEGERS and whole.is_floating_point():
            numbers.append(whole.view(_INTEGERS[whole.itemsize]))
    for each in numbers:
        each.bitwise_xor_(mask)
    try:
        yield
    finally:
        for each in numbers:
            each.bitwise_xor_(mask)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
