"""What to do about BatchNorm during a window.

BatchNorm looks across rows, so micro-batches change what it computes. One word says what is to be done about it, for
the optimizer, `TrainStep` and `chunked` alike:

| | normalises with | running statistics |
|---|---|---|
| `"warn"` | the micro-batch's statistics, and says so once, naming the modules | as without a policy |
| `"micro"` | the micro-batch's statistics, silently | moved by every micro-batch |
| `"pooled"` | the micro-batch's statistics | moved once per update, with the window's pooled mean and variance |
| `"frozen"` | the running statistics, as in eval mode | not moved |
| `"exact"` | the large batch's statistics | moved once per update, as by the large batch |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.arguments import checked_choice
from gradaccum.torch.batch_norm.layers import frozen, warn_of_batch_norm
from gradaccum.torch.batch_norm.statistics import PooledStatistics

__all__ = ["BatchNormChoice", "BatchNormPolicy", "checked_batch_norm"]

BatchNormChoice = Literal["warn", "micro", "pooled", "frozen", "exact"]


def checked_batch_norm(batch_norm: Any) -> BatchNormChoice:
    """`batch_norm`, if it is one of the five words."""
    return checked_choice("batch_norm", batch_norm, get_args(BatchNormChoice))


_NO_CONTEXT = contextlib.nullcontext()


class BatchNormPolicy:
    """One of the five words, applied to a module."""

    def __init__(self, batch_norm: Any, module: nn.Module, *, moved_once: bool = False, remedy: str = "") -> None:
        self.choice = checked_batch_norm(batch_norm)
        self.module = module
        self.remedy = remedy
        self.warned = False
        self._has_layers: bool | None = None
        self.idle = False
        """Whether there is nothing to do in this window's micro-batches."""
        self.micro_batches = 0
        self.pooled = self.choice == "pooled" or (self.choice == "warn" and moved_once)
        self.statistics: PooledStatistics | None = None

    def window(self) -> contextlib.AbstractContextManager[Any]:
        """Around all of a window's forward and backward passes."""
        self.micro_batches = 0
        self.idle = not self.pooled and (self.choice != "warn" or self.warned or self._has_layers is False)
        if self.choice == "frozen":
            return frozen(self.module)
        return self._pooling() if self.pooled else _NO_CONTEXT

    @contextlib.contextmanager
    def _pooling(self) -> Iterator[None]:
        self.statistics = PooledStatistics(self.module)
        try:
            with self.statistics.window():
                yield
        finally:
            self.statistics = None

    def micro_batch(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward pass of each micro-batch of a window."""
        self.micro_batches += 1
        if self.choice == "warn" and self.micro_batches == 2 and not self.warned:  # one alone is the large batch
            if self._has_layers is None:
                self._has_layers = any(isinstance(layer, _BatchNorm) for layer in self.module.modules())
            self.warned = self._has_layers and warn_of_batch_norm(self.module, self.remedy)
        return _NO_CONTEXT if self.statistics is None else self.statistics.micro_batch()

    def commit(self) -> None:
        """The last micro-batch is in."""
        if self.statistics is not None:
            self.statistics.commit()

    def recomputation(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward pass that repeats one made before, outside the window."""
        return frozen(self.module) if self.choice == "frozen" else _NO_CONTEXT


BatchNormPolicy.__module__ = "gradaccum.torch.batch_norm"  # where pickles look for it, wherever it lives
