"""What optimizers evaluate that are given a closure: the whole window."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Closure", "takes_closure"]


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's `step` may evaluate a closure more than once. Those of torch.optim call it at first.

    Example:
        >>> takes_closure(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))
        False
    """
    step = type(optimizer).step
    return not step.__module__.startswith("torch.optim.") and "closure" in inspect.signature(step).parameters


class Closure:
    """The closure that an optimizer evaluates: its first evaluation finds the gradients that are there.

    They are computed anew where the optimizer has moved parameters before it evaluates, as SAM does.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], *, always_check: bool = False) -> None:
        self._parameters = parameters
        self._always_check = always_check
        self._evaluates_first: bool | None = None
        self._first = False
        self._loss: Tensor | None = None
        self._window: Callable[[], Tensor] | None = None
        self._found: list[float | None] | None = None

    def begin(self, loss: Tensor, window: Callable[[], Tensor]) -> None:
        """An update begins, with the finished gradients in place."""
        self._loss, self._window, self._first = loss, window, True
        self._found = self._norms() if self._evaluates_first is None else None

    def end(self) -> None:
        """The update has been made: let go of its batch."""
        self._loss = self._window = self._found = None

    def __call__(self) -> Tensor:
        assert self._loss is not None
        assert self._window is not None
        first, self._first = self._first, False
        return self._loss if first and self._untouched() else self._window()

    def _untouched(self) -> bool:
        if self._evaluates_first is not None:
            return self._evaluates_first
        untouched = self._found == self._norms()
        if not self._always_check:
            self._evaluates_first = untouched
        return untouched

    @torch.no_grad()
    def _norms(self) -> list[float | None]:
        """Norms of parameters and gradients: whatever moves them changes these."""
        parameters = self._parameters()
        return [None if tensor is None else _norm(tensor) for p in parameters for tensor in (p, p.grad)]


def _norm(tensor: Tensor) -> float:
    norm: Tensor = torch.linalg.vector_norm(tensor.to_dense() if tensor.is_sparse else tensor)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # of a sharded one: all ranks' shards
