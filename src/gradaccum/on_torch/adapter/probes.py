"""Which rows a module's output depends on: fingerprints of every module's inputs and outputs, row by row."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.causes import innermost
from gradaccum.on_torch.adapter.rng import row_dimension, rows_in
from gradaccum.on_torch.batch import leaves

_TOLERANCE = 1e-8
"""Relative difference between fingerprints that counts as rounding, in float64; narrower dtypes get more."""


class _Fingerprint(NamedTuple):
    """A tensor, projected on one number per index, for each of its first dimensions."""

    shape: torch.Size
    along: tuple[Tensor, ...]
    precision: float

    @classmethod
    def of(cls, tensor: Tensor) -> _Fingerprint:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_nested:
            tensor = tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor.to_dense()
        precision = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
        # Numbers that no honest value takes, so that a NaN is a change like any other.
        values = values.nan_to_num(nan=1234.5678, posinf=4321.8765, neginf=-4321.8765)
        along = []
        for dim in range(min(tensor.dim(), 3)):
            moved = values.movedim(dim, 0).flatten(1) if values.dim() > 1 else values.unsqueeze(1)
            direction = torch.cos(1.0 + 12.9898 * torch.arange(moved.shape[1], dtype=values.dtype)).to(values.device)
            along.append(moved @ direction)
        return cls(tensor.shape, tuple(along) or (values.reshape(1),), precision)


def _fingerprints(tree: Any) -> list[_Fingerprint]:
    found = []
    for _, leaf in leaves(tree):
        inside = [leaf]
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__") and not callable(leaf):
            inside = [value for _, value in leaves(dict(vars(leaf)))]  # a container of the user's own
        found += [_Fingerprint.of(value) for value in inside if isinstance(value, Tensor) and value.numel()]
    return found


def _differs(ours: Tensor, theirs: Tensor, precision: float) -> bool:
    scale = max(ours.abs().max().item(), theirs.abs().max().item()) if ours.numel() else 0.0
    return bool(((ours - theirs).abs() > max(_TOLERANCE, 1e3 * precision) * scale).any()) if scale else False


Differ = Callable[[_Fingerprint, _Fingerprint], "bool | None"]
"""Whether a tensor is another one in a second pass; None where that can't be told."""


def part_differs(rows: int, taken: Tensor) -> Differ:
    """Whether a micro-batch's tensor is another than its rows of the large batch's."""

    def differ(whole: _Fingerprint, part: _Fingerprint) -> bool | None:
        precision = max(whole.precision, part.precision)
        if whole.shape == part.shape:  # shared by all micro-batches
            return _differs(whole.along[0], part.along[0], precision)
        dim = row_dimension(whole.shape, part.shape, rows, taken)
        if dim is None or dim >= len(whole.along):
            return None
        return _differs(part.along[dim], rows_in(whole.along[dim], 0, rows, taken), precision)

    return differ


def tokens_differ(last: slice) -> Differ:
    """Whether these tokens of a packed row differ."""

    def differ(alone: _Fingerprint, behind: _Fingerprint) -> bool | None:
        if len(alone.shape) != 3 or alone.shape[0] != 1 or len(behind.shape) != 3:
            return None
        return _differs(alone.along[1][last], behind.along[1][last], max(alone.precision, behind.precision))

    return differ


def any_differs(one: _Fingerprint, other: _Fingerprint) -> bool:
    return one.shape != other.shape or _differs(one.along[0], other.along[0], max(one.precision, other.precision))


class Trace:
    """Fingerprints of what goes into and comes out of every call of every module, in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[tuple[str, int], tuple[list[_Fingerprint], list[_Fingerprint]]] = {}
        self.kinds = dict(model.named_modules())
        self.failed: tuple[str, Exception] | None = None
        self._inputs: list[tuple[str, list[_Fingerprint]]] = []
        self._count: Counter[str] = Counter()
        self._handles: list[Any] = []
        for path, module in self.kinds.items():
            before, after = (functools.partial(noting, path) for noting in (self._before, self._after))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append((path, _fingerprints((args, kwargs))))

    def _after(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while self._inputs and self._inputs[-1][0] != path:  # a call inside failed, and its failure was caught
            self._inputs.pop()
        self.calls[path, self._count[path]] = self._inputs.pop()[1], _fingerprints(output)
        self._count[path] += 1

    def run(self, forward: Callable[[], Any]) -> Trace:
        """Run the forward pass. Notes which module was running if it raises."""
        try:
            forward()
        except Exception as error:
            self.failed = (self._inputs[-1][0] if self._inputs else "loss", error)
        finally:
            for handle in self._handles:
                handle.remove()
        return self


def mixing(large: Trace, other: Trace, differ: Differ = any_differs, *, sums: bool = True) -> list[str]:
    """The innermost modules whose inputs agree and whose outputs don't; `sums`: also where outputs have no rows."""

    def inputs_agree(key: tuple[str, int]) -> bool:
        (inputs, outputs), (theirs, their_outputs) = large.calls[key], other.calls.get(key, ([], []))
        if len(inputs) != len(theirs) or len(outputs) != len(their_outputs) or not inputs:
            return False
        verdicts = [differ(a, b) for a, b in zip(inputs, theirs)]
        # An input of no rows (a mask, a number) that can't be compared is no reason to suspect the module.
        return not any(verdicts) and not all(verdict is None for verdict in verdicts)

    def outputs_differ(key: tuple[str, int]) -> bool:
        pairs = zip(large.calls[key][1], other.calls[key][1])
        # An output without rows is a reduction over the batch, a loss say: whether that adds up is not asked here.
        return any(differ(a, b) for a, b in pairs if sums or a.shape != b.shape)

    def is_inside(inner: tuple[str, int], outer: tuple[str, int]) -> bool:
        return inner[0] != outer[0] and (not outer[0] or inner[0].startswith(f"{outer[0]}."))

    found = innermost(large.calls, inputs_agree, outputs_differ, is_inside)
    return list(dict.fromkeys(path for path, _ in found))
