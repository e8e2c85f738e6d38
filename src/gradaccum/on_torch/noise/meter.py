"""Measures the gradient noise scale while training, from norms of gradients that accumulation has anyway."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.core.noise import WINDOWS, NoiseScale, Norms, estimate
from gradaccum.on_torch.foreach import clip_norm_

__all__ = ["Measured", "NoiseMeter", "inside_step"]


@contextlib.contextmanager
def inside_step(optimizer: Any, around: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Have an optimizer's step run inside of a context, and its hooks outside of it: they see its own hyperparameters.

    Example:
        >>> from types import SimpleNamespace
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        >>> told = optimizer.register_step_post_hook(lambda *_: print("a hook"))
        >>> with inside_step(optimizer, contextlib.closing(SimpleNamespace(close=lambda: print("the end")))):
        ...     optimizer.step()
        the end
        a hook
    """
    if not getattr(type(optimizer).step, "hooked", None):  # no optimizer of torch's kind
        with around:
            yield
        return
    with contextlib.ExitStack() as entered, contextlib.ExitStack() as hooks:
        depth = 0  # torch calls the hooks of a class whose step() calls super().step() once for each of the two

        def begins(*_: Any) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:
                entered.enter_context(around)

        def ends(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                entered.close()

        after = optimizer.register_step_post_hook(ends)
        hooks.callback(after.remove)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
        before = optimizer.register_step_pre_hook(begins)
        hooks.callback(before.remove)
        yield


class NoiseMeter:
    """Two squared norms per window: of its first micro-batch's gradient, and of the finished mean.

    Autograd adds into `p.grad`, so only the first micro-batch's gradient is ever there by itself. Its norm and the
    window's give unbiased estimates of `|G|^2` and `tr(S)` (see `gradaccum.core.noise`). The norm of every micro-batch
    would sharpen `tr(S)` at the cost of a pass over all gradients each; but for windows up to the noise scale, where
    the answer matters, the error is that of `|G|^2`, which only more windows lower. The norms stay on the device until
    `estimate` is called, so the host never waits.

    The first micro-batch must be a random sample of the window's rows: where rows are sorted, by length say, the
    spread that the order adds counts as noise.
    """

    def __init__(self, keep: int = WINDOWS) -> None:
        self.unit, self.counts_rows = "rows", False
        """What sizes count, and whether that is certainly rows."""
        self._records: deque[tuple[Measured, Measured]] = deque(maxlen=keep)
        self.restart()

    def restart(self) -> None:
        """Begin a window; measurements of an unfinished one are dropped."""
        self._first: Measured | None = None

    @property
    def waiting(self) -> bool:
        """Whether `micro_batch` is to be called for the next micro-batch."""
        return self._first is None

    def micro_batch(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor) -> None:
        """Measure the window's first micro-batch of nonzero weight."""
        if self._first is None and gradients and not (isinstance(multiple, float) and multiple == 0.0):
            self._first = Measured(_norms(gradients), multiple, float(size))

    def window(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor = 1.0) -> None:
        """Measure the finished gradient, before clipping."""
        # All ranks take part in the norm of a sharded gradient, those that have nothing to compare it with as well.
        sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
        norm = clip_norm_(list(gradients), None).reshape(1) if sharded else None
        if self._first is not None and gradients and size > self._first.size:
            found = _norms(gradients) if norm is None else norm
            self._records.append((self._first, Measured(found, multiple, float(size))))
        self.restart()

    def estimate(self) -> NoiseScale:
        """The noise scale over the kept windows. Waits for the device."""
        return estimate(self.windows(), unit=self.unit)

    def windows(self) -> list[Norms]:
        """What was measured, as numbers. Waits for the device."""
        smalls = _squares([small for small, _ in self._records])
        larges = _squares([large for _, large in self._records])
        return [
            Norms(s, small.size, n, large.size)
            for s, n, (small, large) in zip(smalls, larges, self._records, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and the first micro-batch of the open window, as numbers."""
        first = None if self._first is None else (*_squares([self._first]), self._first.size)
        return {"windows": [tuple(norms) for norms in self.windows()], "first": first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` wrote."""
        self._records.clear()
        for small, small_size, large, large_size in state["windows"]:
            self._records.append((_measured(small, small_size), _measured(large, large_size)))
        self._first = None if state["first"] is None else _measured(*state["first"])


class Measured(NamedTuple):
    """Norms of gradients, on the device: the arithmetic is done in `estimate`."""

    norms: Tensor
    multiple: float | Tensor
    size: float


def _measured(square: float, size: float) -> Measured:
    """A squared norm that was read before."""
    return Measured(torch.tensor([square], dtype=torch.float64).sqrt(), 1.0, size)


def _squares(measured: Sequence[Measured]) -> list[float]:
    """`|gradients / multiple|^2` of each."""
    squares = [
        (m.norms.double() / (m.multiple.detach().to(m.norms.device) if isinstance(m.multiple, Tensor) else m.multiple))
        .square()
        .sum()
        for m in measured
    ]
    return torch.stack([square.to(squares[0].device) for square in squares]).tolist() if squares else []


@torch.no_grad()
def _norms(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in one vector on the first one's device; half precision is summed in float32."""
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in dense)
    found = torch._foreach_norm(dense, 2, dtype=torch.float32 if narrow else None)
    device = dense[0].device
    return torch.stack([norm if norm.device == device else norm.to(device) for norm in found])
