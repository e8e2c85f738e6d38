"""Warn where an optimizer steps inside of another one's `batches()`, and would weigh the micro-batches otherwise."""

from __future__ import annotations

import warnings
import weakref
from typing import ClassVar

from gradaccum.core.window import Window

__all__ = ["OtherLoops"]


class OtherLoops:
    """The loops of `batches()` that fill other optimizers' windows, as one optimizer sees them."""

    running: ClassVar[dict[int, weakref.ref[Window]]] = {}
    """Windows that such a loop fills, of all optimizers."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._before: dict[int, float] = {}
        self._warned = False

    def note(self, filled: bool) -> None:
        """Whether a loop of `batches()` fills this optimizer's window from now on."""
        number = id(self._window)
        if filled:
            self.running[number] = weakref.ref(self._window, lambda _: self.running.pop(number, None))
        else:
            self.running.pop(number, None)

    def look(self) -> None:
        """Warn, once, if this window counts another one's batches equally, and they differ."""
        window, before = self._window, self._before
        if self._warned or window.weights_given or window.reduction == "sum":
            return
        others = [other for one in [*self.running.values()] if (other := one()) is not None and other is not window]
        self._before = {id(other): other.micro_batch.default for other in others}
        for number, rows in self._before.items():
            if window.micro_batches > 1 and rows != before.get(number, rows):
                self._warned = True
                warnings.warn(
                    "This optimizer steps inside of another one's batches(), which weigh differently (the last two "
                    f"{before[number]:g} and {rows:g}), and counts its micro-batches equally. Let both share the "
                    "batches, a.batches(b.batches(loader)), or use backward(loss, weight=...).",
                    stacklevel=4,
                )
                break
