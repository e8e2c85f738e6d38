"""What passes through a model leave behind, and how far apart two such outcomes are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.equivalence import Difference

__all__ = ["LoweredScale", "Outcome", "largest", "relative_error", "worst"]


@dataclass(frozen=True)
class Outcome:
    """What one way of computing a batch's gradient leaves behind."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are."""
        known = [gradient for gradient in self.gradients.values() if gradient is not None]
        return all(bool(tensor.isfinite().all()) for tensor in (self.loss, *known))

    def differences(self, expected: Outcome) -> list[Difference]:
        """How far this is from `expected`: the loss, each gradient, each buffer that moved or differs."""
        found = [Difference("loss", relative_error(self.loss, expected.loss), "loss")]
        # A gradient that is zero but for rounding has no relative error of its own: floor its scale.
        scale = max((largest(g) for g in expected.gradients.values() if g is not None), default=0.0)
        for name, theirs in expected.gradients.items():
            ours = self.gradients[name]
            if ours is not None or theirs is not None:
                ours, theirs = _zeros(ours, theirs), _zeros(theirs, ours)
                found.append(Difference(name, relative_error(ours, theirs, 1e-3 * scale), "gradient", theirs.numel()))
        for name, value in expected.buffers.items():
            error = relative_error(self.buffers[name], value) if name in self.buffers else math.inf
            found.append(Difference(name, error, "buffer", value.numel()))
        return found

    def distances(self, other: Outcome) -> dict[tuple[str, str], float]:
        """`max|self - other|` of each of these, by `(part, name)`."""
        found = {("loss", "loss"): _distance(self.loss, other.loss)}
        for name, theirs in other.gradients.items():
            ours = self.gradients[name]
            found["gradient", name] = _distance(_zeros(ours, theirs), _zeros(theirs, ours))
        for name, value in self.buffers.items():
            if name in other.buffers:
                found["buffer", name] = _distance(value, other.buffers[name])
        return found

    def moved_by_last_bits(self, parameters: Sequence[Tensor], again: Callable[[], Outcome]) -> dict[Any, float]:
        """How far each of these is moved when the last bits of the parameters are: what rounding makes of it.

        Where large terms cancel each other, it makes much. As `distances`; what isn't finite then is left out.

        Args:
            parameters: All that it was computed with.
            again: Computes it again.
        """
        moved: dict[Any, float] = {}
        for bits in (1, 2, 3, 5, 7):
            with _bits_flipped(parameters, bits):
                outcome = again()
            for key, distance in outcome.distances(self).items():
                if math.isfinite(distance):
                    moved[key] = max(moved.get(key, 0.0), distance)
        return moved


def worst(differences: Iterable[Difference]) -> list[Difference]:
    """Each tensor's largest difference among these."""
    found: dict[tuple[str, str], Difference] = {}
    for difference in differences:
        key = difference.part, difference.name
        if key not in found or not difference.error <= found[key].error:
            found[key] = difference
    return list(found.values())


def _zeros(gradient: Tensor | None, other: Tensor | None) -> Tensor:
    return gradient if gradient is not None else torch.zeros_like(other) if other is not None else torch.zeros(())


def _distance(one: Tensor, other: Tensor) -> float:
    """`max|one - other|`; inf for another shape, or where only one of both is finite."""
    if one.shape != other.shape:
        return math.inf
    if not (one.is_complex() or other.is_complex()):
        one, other = one.double(), other.double()
    difference = (one - other)[one.isfinite() | other.isfinite()]
    return largest(difference) if difference.isfinite().all() else math.inf


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """`max|actual - expected| / max|expected|`; inf for another shape, or where only one of both is finite.

    Args:
        actual: What was computed.
        expected: What it should be.
        floor: Smallest scale to divide by, for tensors that are zero but for rounding.

    Example:
        >>> import torch
        >>> relative_error(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
        0.125
    """
    if actual.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    if actual.device != expected.device:
        actual, expected = actual.cpu(), expected.cpu()
    if not (expected.is_floating_point() or expected.is_complex()) or expected.itemsize == 1:
        actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not actual.isfinite().equal(finite):
        return math.inf
    if not finite.any():
        return 0.0
    difference = (actual - expected)[finite].abs().max().item()
    scale = max(largest(expected[finite]), floor)
    return difference / scale if scale else (math.inf if difference else 0.0)


def largest(tensor: Tensor) -> float:
    """`max|tensor|`; 0 without entries."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


class LoweredScale:
    """A GradScaler's scale, lowered where gradients overflow in it: an update is skipped then, and tried again.

    Args:
        scaler: The GradScaler, or None.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler, self.factor = scaler, 1.0
        self.factors = (1.0,) if scaler is None else (1.0, 2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
        """What may be tried, one after the other."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
        return loss if self._scaler is None else self._scaler.scale(loss) * self.factor


@contextlib.contextmanager
def _bits_flipped(parameters: Iterable[Tensor], mask: int) -> Iterator[None]:
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
