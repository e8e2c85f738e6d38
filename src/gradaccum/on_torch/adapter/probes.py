"""Which rows a module's output depends on: what goes into and comes out of every module, compared row by row."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.causes import innermost
from gradaccum.on_torch.adapter.arrays import measure
from gradaccum.on_torch.adapter.rng import row_dimension, rows_in
from gradaccum.on_torch.batch import leaves

_TOLERANCE = 1e-8
"""Relative difference that counts as rounding, in float64; narrower dtypes get more."""

Differ = Callable[[Tensor, Tensor], "bool | None"]
"""Whether a tensor is another one in a second pass; None where that can't be told."""


def _tensors(tree: Any) -> list[Tensor]:
    """Copies in host memory of the tensors in it, which may be edited in place later."""
    found = []
    for _, leaf in leaves(tree):
        inside = [leaf]
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__") and not callable(leaf):
            inside = [value for _, value in leaves(dict(vars(leaf)))]  # a container of the user's own
        for value in inside:
            if isinstance(value, Tensor) and value.numel():
                dense = value.detach()
                if dense.layout is not torch.strided or dense.is_nested:
                    dense = dense.to_padded_tensor(0.0) if dense.is_nested else dense.to_dense()
                found.append(dense.to("cpu", copy=True))
    return found


def _differs(ours: Tensor, theirs: Tensor) -> bool:
    precision = max(torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0 for t in (ours, theirs))
    gap, own = measure([(ours, theirs), (ours, ours)])
    return gap.error(own.scale) > max(_TOLERANCE, 1e3 * precision)


def part_differs(rows: int, taken: Tensor) -> Differ:
    """Whether a micro-batch's tensor is another than its rows of the large batch's."""

    def differ(whole: Tensor, part: Tensor) -> bool | None:
        if whole.shape == part.shape:  # shared by all micro-batches
            return _differs(whole, part)
        dim = row_dimension(whole.shape, part.shape, rows, taken)
        return None if dim is None else _differs(part, rows_in(whole, dim, rows, taken))

    return differ


def tokens_differ(last: slice) -> Differ:
    """Whether these tokens of a packed row differ."""

    def differ(alone: Tensor, behind: Tensor) -> bool | None:
        if alone.dim() != 3 or len(alone) != 1 or behind.dim() != 3:
            return None
        return _differs(alone[:, last], behind[:, last])

    return differ


def any_differs(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or _differs(one, other)


class Trace:
    """What goes into and comes out of every call of every module, in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = {}
        self.kinds = dict(model.named_modules())
        self.failed: tuple[str, Exception] | None = None
        self._inputs: list[tuple[str, list[Tensor]]] = []
        self._count: Counter[str] = Counter()
        self._handles: list[Any] = []
        for path, module in self.kinds.items():
            before, after = (functools.partial(noting, path) for noting in (self._before, self._after))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append((path, _tensors((args, kwargs))))

    def _after(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while self._inputs and self._inputs[-1][0] != path:  # a call inside failed, and its failure was caught
            self._inputs.pop()
        self.calls[path, self._count[path]] = self._inputs.pop()[1], _tensors(output)
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
