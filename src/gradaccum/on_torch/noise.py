"""Measures the gradient noise scale while training, by gradients of two sizes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.core.noise import WINDOWS, NoiseScale, Norms, estimate
from gradaccum.on_torch.foreach import clip_norm_


@contextlib.contextmanager
def inside_step(optimizer: Any, around: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Have an optimizer's step run inside of a context, and its hooks outside of it: they see its own hyperparameters.

    Example:
        >>> from types import SimpleNamespace
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        >>> handle = optimizer.register_step_post_hook(lambda *_: print("a hook"))
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


class _Measured(NamedTuple):
    """Norms of gradients, on the device: the arithmetic is done in `estimate`."""

    norms: Tensor
    multiple: float | Tensor
    size: float

    @classmethod
    def read(cls, square: float, size: float) -> _Measured:
        """A squared norm that was read before."""
        return cls(torch.tensor([square], dtype=torch.float64).sqrt(), 1.0, size)

    def square(self) -> Tensor:
        """`|gradients / multiple|^2`."""
        multiple = self.multiple
        if isinstance(multiple, Tensor):
            multiple = multiple.detach().to(self.norms.device)
        return (self.norms.double() / multiple).square().sum()


class NoiseMeter:
    """Two squared norms per window: of its first micro-batch's gradient, and of the finished mean.

    Autograd adds into `p.grad`, so only the first micro-batch's gradient is ever there by itself. Those of the others
    would sharpen `tr(S)`, where the answer hangs on `|G|^2`. The norms stay on the device until `estimate` is called.

    The first micro-batch must be a random sample of the window's rows: where rows are sorted, by length say, the
    spread that the order adds counts as noise.
    """

    def __init__(self, keep: int = WINDOWS) -> None:
        self.unit, self.counts_rows = "rows", False
        """What sizes count, and whether that is certainly rows."""
        self._records: deque[tuple[_Measured, _Measured]] = deque(maxlen=keep)
        self.restart()

    def restart(self) -> None:
        """Begin a window; measurements of an unfinished one are dropped."""
        self._first: _Measured | None = None

    @property
    def waiting(self) -> bool:
        """Whether `micro_batch` is to be called for the next micro-batch."""
        return self._first is None

    def micro_batch(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor) -> None:
        """Measure the window's first micro-batch of nonzero weight."""
        if self._first is None and gradients and not (isinstance(multiple, float) and multiple == 0.0):
            self._first = _Measured(_norms(gradients), multiple, float(size))

    def window(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor = 1.0) -> None:
        """Measure the finished gradient, before clipping."""
        # All ranks take part in the norm of a sharded gradient, those that have nothing to compare it with as well.
        sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
        norm = clip_norm_(list(gradients), None).reshape(1) if sharded else None
        if self._first is not None and gradients and size > self._first.size:
            found = _norms(gradients) if norm is None else norm
            self._records.append((self._first, _Measured(found, multiple, float(size))))
        self.restart()

    def estimate(self) -> NoiseScale:
        """The noise scale over the kept windows. Waits for the device."""
        return estimate(self.windows(), unit=self.unit)

    def windows(self) -> list[Norms]:
        """What was measured, as numbers. Waits for the device."""
        found = [one.square() for pair in self._records for one in pair]
        squares = torch.stack([square.to(found[0].device) for square in found]).tolist() if found else []
        sizes = [(small.size, large.size) for small, large in self._records]
        return [Norms(s, n, g, m) for s, g, (n, m) in zip(squares[::2], squares[1::2], sizes)]

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and the first micro-batch of the open window, as numbers."""
        first = None if self._first is None else (self._first.square().item(), self._first.size)
        return {"windows": [tuple(norms) for norms in self.windows()], "first": first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._records.clear()
        for small, small_size, large, large_size in state["windows"]:
            self._records.append((_Measured.read(small, small_size), _Measured.read(large, large_size)))
        self._first = None if state["first"] is None else _Measured.read(*state["first"])


@torch.no_grad()
def _norms(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in one vector on the first one's device; half precision is summed in float32."""
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in dense)
    found = torch._foreach_norm(dense, 2, dtype=torch.float32 if narrow else None)
    device = dense[0].device
    return torch.stack([norm if norm.device == device else norm.to(device) for norm in found])
