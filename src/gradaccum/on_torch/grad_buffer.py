"""The gradient buffer: the sum of a window's gradients, in `p.grad` or beside it, in the parameters' dtype or wider."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.on_torch.foreach import scale_

Sums = list[Tensor | None]
"""One for each parameter, None where nothing has arrived."""


class GradientBuffer:
    """The sum that autograd adds up in `p.grad`: no second copy of the gradients, no operation per micro-batch."""

    def __init__(self, parameters: Callable[[], list[Tensor]], dtype: torch.dtype | None = None) -> None:
        self.parameters, self.dtype = parameters, dtype
        self.restored: Sums | None = None
        """A checkpoint's sum, until the next micro-batch is in: frameworks clear `p.grad` before they train on."""
        self.pending: Callable[[], list[Tensor]] | None = None
        self.in_views = False
        self._claim = object()
        self.prepare()

    def attach(self, pending: Callable[[], list[Tensor]], in_views: bool = False) -> None:
        """Count these tensors in: the part of the sum that a sharded model keeps to itself until it is reduced.

        With `in_views`, a reduction leaves views of its buckets in `p.grad`, whose versions say nothing of each.
        """
        self.pending, self.in_views = pending, in_views

    def prepare(self) -> None:
        """Have autograd add up in the wider dtype from now on."""
        narrow = self._narrow()
        if narrow and not _SUMS_WIDE:
            raise ValueError(
                f"Gradients cannot be summed in {self.dtype}: torch {torch.__version__} has no `grad_dtype`, which "
                "autograd needs to add them up in another dtype than the parameter's. Use torch 2.10 or later."
            )
        for parameter in narrow:
            _claims[parameter] = self._claim
            _give(parameter, self.dtype)
        if self.restored is not None:  # parameters that were added come last
            self.restored += [None] * (len(self.parameters()) - len(self.restored))

    def release(self) -> None:
        """Leave the parameters' `grad_dtype` as it was found, unless another sum has taken them over."""
        for parameter in self._narrow():
            if _claims.get(parameter) is self._claim:
                del _claims[parameter]
                _give(parameter, parameter.dtype)

    def _narrow(self) -> list[Tensor]:
        if self.dtype is None:
            return []
        wide = torch.finfo(self.dtype).bits
        return [p for p in self.parameters() if p.is_floating_point() and torch.finfo(p.dtype).bits < wide]

    def gradients(self) -> list[Tensor]:
        found = [g for p in self.parameters() if (g := p.grad) is not None]
        return found if self.pending is None else found + self.pending()

    def get(self) -> Sums:
        return [p.grad for p in self.parameters()]

    def set(self, sums: Iterable[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters(), sums, strict=True):
            parameter.grad = gradient

    def copies(self, scale: Tensor | None) -> dict[int, Tensor]:
        """The sum by the parameters' numbers, copied and divided by its scale: a power of two, which rounds nothing."""
        sums = self.get()
        if self.restored is not None:
            scale, sums = None, joined([s if s is None else s.clone() for s in self.restored], sums)
        return {
            index: (s.clone() if scale is None else s * scale.reciprocal().to(s.device, s.dtype)).detach()
            for index, s in enumerate(sums)
            if s is not None
        }

    def restore(self, sums: dict[int, Tensor]) -> None:
        """Go on from `copies`, as soon as the next micro-batch is in."""
        self.restored = [
            sums[index].detach().to(parameter.device, copy=True) if index in sums else None
            for index, parameter in enumerate(self.parameters())
        ]

    def everything(self) -> list[Tensor]:
        """All parts of the sum, wherever they are."""
        return self.gradients() + [s for s in self.restored or () if s is not None]

    def scale_(self, factor: float | Tensor) -> None:
        scale_(self.everything(), factor)

    @torch.no_grad()
    def join_restored(self, scale: Tensor | None = None) -> None:
        """Add a checkpoint's sum, if there is one, times the scale of what has arrived since."""
        if self.restored is None:
            return
        restored, self.restored = self.restored, None
        if scale is not None:
            scale_([s for s in restored if s is not None], scale)
        self.set(joined(self.get(), restored))

    def cast(self) -> None:
        """Give the finished gradients their parameter's own dtype, which is all that optimizers accept."""
        for parameter in self._narrow():
            if parameter.grad is not None:
                _give(parameter, parameter.dtype)

    def clear(self, set_to_none: bool = True) -> None:
        """Empty the sum, by assignment: nothing that was in it survives."""
        for parameter in self.parameters():
            if (gradient := parameter.grad) is not None:
                if set_to_none:
                    parameter.grad = None
                elif self.in_views and gradient._is_view():
                    parameter.grad = torch.zeros_like(gradient)
                else:
                    parameter.grad = gradient.detach().zero_()
        for parameter in self._narrow():
            _give(parameter, self.dtype)
        self.restored = None

    def close(self) -> None:
        """The window is over; `p.grad` stays as it is for whoever wants to read it."""
        self.restored = None


@dataclasses.dataclass(slots=True)
class WindowTotal:
    """What a window's micro-batches have added up to, on its way to the finished gradient."""

    buffer: GradientBuffer
    divisor: float | Tensor | None  # what the sum is still to be divided by; None: nothing
    weight: float | None = None  # what the window weighs: 0 makes no update. None: not known, or not asked
    micro_batches: int = 1
    scale: float | Tensor | None = None  # the GradScaler's, which the sum is still multiplied by
    overflow: bool | Tensor = False  # a gradient has overflowed that scale
    rows: float = 0.0  # what the noise scale counts: rows, or weight
    multiple: float | Tensor = 1.0  # ratio of the finished gradient to the mean over those
    outside: Sequence[Tensor] = ()  # gradients of parameters that no optimizer here has: they are divided, too
    grad_norm: Tensor | None = None  # the finished gradient's 2-norm before clipping

    @property
    def gradients(self) -> list[Tensor]:
        return self.buffer.gradients()


class ArrivalScale:
    """Multiplies gradients as they arrive, before they join the sum; by 0, none arrives. Nothing runs while it is 1.

    Those that `torch.autograd.grad` returns don't arrive, so the hooks are those of the nodes that add to the sum.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]]) -> None:
        self._parameters, self._hooks = parameters, list[Any]()
        self._nodes = list[Any]()  # no longer than they are kept are they the ones that later passes find
        self.factor = 1.0
        self.muted = False  # while a loss that is multiplied itself goes backward

    def set(self, factor: float) -> None:
        if factor == self.factor:
            return
        self.factor = factor
        for hook in self._hooks:
            hook.remove()

        def times(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            if self.muted:
                return None
            return tuple(None if g is None or not factor else g * factor for g in gradients)

        leaves = [p for p in self._parameters() if factor != 1.0 and (p.is_floating_point() or p.is_complex())]
        with all_require_grad(leaves):
            self._nodes = [get_gradient_edge(p).node for p in leaves]
        self._hooks = [node.register_prehook(times) for node in self._nodes]


@contextlib.contextmanager
def all_require_grad(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Frozen leaves require gradients meanwhile: torch hooks no others, and they may be unfrozen later."""
    frozen = [leaf for leaf in leaves if not leaf.requires_grad]
    for leaf in frozen:
        leaf.requires_grad_(True)
    try:
        yield
    finally:
        for leaf in frozen:
            leaf.requires_grad_(False)


_SUMS_WIDE = hasattr(Tensor, "grad_dtype")
_claims: Any = WeakIdKeyDictionary()
"""Which sum has widened a parameter's `grad_dtype`: the last one to do so."""


def _give(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Have the parameter's gradient, if there is one, in this dtype, as those that will arrive."""
    gradient = parameter.grad
    if gradient is None or gradient.dtype == dtype:
        parameter.grad_dtype = dtype
        return
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = gradient.to(dtype)


@torch.no_grad()
def joined(sums: Sums, more: Sums) -> Sums:
    """Both added up, in the first one's tensors where that can be."""
    pairs = zip(sums, more, strict=True)
    return [m if s is None else s if m is None else added(s, m) for s, m in pairs]


def added(one: Tensor, other: Tensor) -> Tensor:
    """Both added up, in the first one if that can be."""
    if not (one.is_sparse or other.is_sparse):
        return one.add_(other.to(one.dtype))
    return other + one if one.is_sparse else one + other  # torch adds a sparse one to a dense one, and not the reverse


@torch.no_grad()
def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient that comes from no backward pass, in the dtype in which autograd would."""
    dtype, held = getattr(parameter, "grad_dtype", None) or parameter.dtype, parameter.grad
    parameter.grad = gradient.to(dtype) if held is None else added(held, gradient.to(dtype))
