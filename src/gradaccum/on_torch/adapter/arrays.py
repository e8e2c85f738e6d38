"""A proof's arithmetic in PyTorch: how far tensors are from each other, and what rounding makes of them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.proof import Measured, Runner
from gradaccum.on_torch.adapter.rng import RowwiseRng
from gradaccum.on_torch.memory import is_out_of_memory

ENTRIES = 1 << 18
"""Entries of a gradient that are compared, at most, and of a parameter that are moved at a time."""


@torch.no_grad()
def measure(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Measured]:
    """How far each first tensor is from its second one: `max|a - b|`, with `max|b|`. None stands for zeros.

    The ends of all are read in one go. What isn't finite counts where the other one is.

    Example:
        >>> measure([(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))])
        [Measured(distance=0.5, scale=4.0, entries=2, finite=True)]
    """
    found = [_comparable(actual, expected) for actual, expected in pairs]
    both = [pair for pair in found if not isinstance(pair, Measured)]
    read = iter(_read([tensor for ours, theirs in both for tensor in (ours - theirs, theirs)]))
    return [one if isinstance(one, Measured) else _measured(*one, next(read), next(read)) for one in found]


_KIND = operator.attrgetter("__class__", "dtype", "device", "shape")


def _comparable(actual: Any, expected: Any) -> Measured | tuple[Tensor, Tensor]:
    """Both in one place and a dtype to subtract in; or what is known without looking at numbers."""
    if type(actual) is type(expected) is Tensor and _KIND(actual) == _KIND(expected) and expected.numel():
        return _wide(actual), _wide(expected)  # as mostly
    actual, expected = _tensor(actual), _tensor(expected)
    one = actual if expected is None else expected
    same_shape = actual is None or expected is None or actual.shape == expected.shape
    if one is None or not one.numel():
        return Measured(0.0 if same_shape else math.inf, 0.0, 0)
    if not same_shape:
        return Measured(math.inf, _largest(one), one.numel())
    ours, theirs = (one.new_zeros(()).expand(one.shape) if t is None else t for t in (actual, expected))
    if ours.device != theirs.device:
        ours, theirs = ours.cpu(), theirs.cpu()
    return _wide(ours), _wide(theirs)


def _tensor(value: Any) -> Tensor | None:
    return torch.tensor(float(value), dtype=torch.float64) if type(value) in (int, float) else value


_PLACE = operator.attrgetter("device", "dtype")


def _measured(ours: Tensor, theirs: Tensor, distance: float, scale: float) -> Measured:
    finite = math.isfinite(scale)
    if not (finite and math.isfinite(distance)):
        there = theirs.isfinite()
        same = ours.isfinite().equal(there)
        distance, scale = _largest((ours - theirs)[there]) if same else math.inf, _largest(theirs[there])
    return Measured(distance, scale, theirs.numel(), finite)


def _wide(tensor: Tensor) -> Tensor:
    """Whole numbers in float64, narrow floats in float32."""
    if tensor.dtype is torch.float32 or tensor.is_complex():  # as most are
        return tensor
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        return tensor.double()
    return tensor.float() if tensor.itemsize < 4 else tensor


def _read(tensors: Sequence[Tensor]) -> list[float]:
    """The largest absolute values, NaN where there is one, each device waited for once."""
    # A norm takes ten times as long on a CPU as both ends.
    ends = [end for t in tensors for end in torch.aminmax(t.abs() if t.is_complex() else t)]
    kinds = [*map(_PLACE, ends)]
    own: dict[Any, list[Tensor]] = {kind: [] for kind in kinds}
    for kind, end in zip(kinds, ends):
        own[kind].append(end)
    values = {kind: iter(torch.stack(ends).double().abs().tolist()) for kind, ends in own.items()}
    numbers = [next(values[kind]) for kind in kinds]
    return [*map(max, numbers[::2], numbers[1::2])]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return measure([(actual, expected)])[0].error()


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def sample(gradient: Tensor) -> Tensor:
    """Some entries from all over a large gradient, so that no second copy of it is needed."""
    stride = -(-gradient.numel() // ENTRIES)
    return gradient if stride <= 1 else gradient.flatten()[::stride]


@contextlib.contextmanager
def bits_flipped(parameters: Iterable[Tensor], seed: int, *, half: bool = False) -> Iterator[None]:
    """Some of the last three bits of every number in these tensors are the others meanwhile, drawn with this seed.

    `half`: some of the latter half of its bits, so that it moves by far more than rounding does, and yet by little.
    """
    numbers = []
    for parameter in {id(p): p.data for p in parameters}.values():
        whole = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        if whole.layout is torch.strided and whole.itemsize in _INTEGERS and whole.is_floating_point():
            digits = max(round(-math.log2(torch.finfo(whole.dtype).eps)) // 2, 1) if half else 3
            bits = whole.view(_INTEGERS[whole.itemsize])
            pieces = bits.view(-1).split(ENTRIES) if bits.is_contiguous() else [bits]  # a mask takes little memory
            numbers += [(piece, digits) for piece in pieces]

    def masks() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for piece, digits in numbers:
            mask = torch.randint(1 << digits, piece.shape, generator=generator, dtype=piece.dtype, device="cpu")
            yield piece, mask.to(piece.device)

    flipped = 0
    try:
        for piece, mask in masks():
            piece.bitwise_xor_(mask)
            flipped += 1
        yield
    finally:
        for piece, mask in itertools.islice(masks(), flipped):
            piece.bitwise_xor_(mask)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchRunner(Runner):
    """Arithmetic, rounding, random numbers and memory of a proof in PyTorch."""

    def __init__(self, rng: RowwiseRng, device: torch.device, rows: int) -> None:
        self.rng, self.device, self.rows = rng, str(device), rows

    @property
    def precision(self) -> str:  # type: ignore[override]  # it follows what is computed
        return str(self.rng.precision).removeprefix("torch.")

    def tensors(self) -> list[Tensor]:
        """What is moved: parameters, and inputs that have gradients."""
        raise NotImplementedError

    def again(self) -> Runner:
        """The same, from the values that parameters have now."""
        return copy.copy(self)

    @contextlib.contextmanager
    def moved(self, seed: int, *, far: bool = False) -> Iterator[Runner]:
        with bits_flipped(self.tensors(), seed, half=far):
            yield self.again()

    def measure(self, pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Measured]:
        return measure(pairs)

    def is_finite(self, arrays: Sequence[Tensor]) -> bool:
        floating = [t.detach() for t in arrays if (t.is_floating_point() or t.is_complex()) and t.numel()]
        if len(floating) == 1 and floating[0].numel() == 1:
            return math.isfinite(abs(floating[0].item()))  # of a loss
        return all(map(math.isfinite, _read([_wide(tensor) for tensor in floating])))

    def replace_noise(self) -> bool:
        return self.rng.replace_noise()

    def is_out_of_memory(self, error: Exception) -> bool:
        return is_out_of_memory(error)
