"""One micro-batch size for each shape of batch: a size that fits one shape need not fit another."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from gradaccum.core.sizes.even import FixedSize
from gradaccum.core.sizes.pieces import Sizer
from gradaccum.core.sizes.search import SizeSearch
from gradaccum.schedule import checked_count

__all__ = ["BatchSizeFinder"]

logger = logging.getLogger("gradaccum")


class BatchSizeFinder:
    """The micro-batch sizes of a training step.

    Shapes are distinguished by the kinds of their tensors, and by the elements of a row rounded to a power of two:
    text that every batch pads to another length must not start a search in every batch. Rows longer than those a size
    was found with get proportionally smaller micro-batches.
    """

    def __init__(self, micro_batch_size: int | str, limit: Callable[[], float | None], minimum: int = 1) -> None:
        if isinstance(micro_batch_size, str):
            if micro_batch_size != "auto":
                raise ValueError(f'`micro_batch_size` must be an int >= 1 or "auto". Received: {micro_batch_size!r}.')
        else:
            checked_count(micro_batch_size, "micro_batch_size")
        self.micro_batch_size = micro_batch_size
        self._limit = limit
        self.minimum = minimum
        self._known: dict[str, tuple[Sizer, float]] = {}
        self._last: Sizer | None = None
        self._seen: list[Any] = []
        self._logged: dict[int, int] = {}

    @property
    def size(self) -> int | None:
        """The current size in rows; None before the first batch."""
        if self._last is not None:
            return self._last.size
        return self.given

    @property
    def given(self) -> int | None:
        """The size that was asked for; None where it is searched for."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None

    def of(self, tensors: list[tuple[str, Any, int]], predict: Callable[[], int] | None = None) -> Sizer:
        """The size for a batch with these tensors."""
        seen = [(path, t.shape, t.dtype, dim) for path, t, dim in tensors]
        if seen == self._seen and self._last is not None:
            return self._last
        self._seen = seen
        elements = float(sum(math.prod(t.shape) / max(t.shape[dim], 1) for _, t, dim in tensors))
        kinds = ", ".join(f"{path} {t.dtype} {t.ndim}" for path, t, dim in tensors)
        key = f"{kinds}; 2**{math.floor(math.log2(max(elements, 1.0)))}"
        if key not in self._known:
            self._known[key] = self._new(elements, predict), elements
        sizer, measured = self._known[key]
        if elements > measured:
            if predict is not None:
                sizer.size = min(sizer.size, predict())
            elif isinstance(sizer, SizeSearch) and sizer.settled:
                sizer.size = max(int(sizer.size * measured / elements), 1)
            self._known[key] = sizer, elements
        self._last = sizer
        return sizer

    def close(self, sizer: Sizer, rows: int) -> None:
        """End a window of `rows` rows; log the size that a search has settled on."""
        before = self._logged.get(id(sizer))
        sizer.close()
        if isinstance(sizer, SizeSearch) and sizer.settled and before != sizer.size:
            self._logged[id(sizer)] = sizer.size
            logger.info("micro_batch_size='auto': %d of %d rows. %s", sizer.size, rows, sizer.summary)

    def _new(self, elements: float, predict: Callable[[], int] | None) -> Sizer:
        if isinstance(self.micro_batch_size, int):
            return FixedSize(self.micro_batch_size)
        if predict is not None:
            return FixedSize(max(predict(), self.minimum))
        start = 1
        settled = [(sizer.size, measured) for sizer, measured in self._known.values() if sizer.settled]
        if settled:  # begin a little below what the nearest shape suggests
            size, measured = min(settled, key=lambda known: abs(math.log(known[1] / elements)))
            start = 1 << max(int(math.log2(max(size * min(measured / elements, 1.0) / 4, 1.0))), 0)
        return SizeSearch(start, self._limit(), self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """The sizes found so far, as plain numbers."""
        return {
            key: {"size": sizer.size, "elements": elements, "settled": sizer.settled}
            for key, (sizer, elements) in self._known.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sizes of `state_dict`; a smaller size that the user has chosen since is kept."""
        for key, found in state.items():
            sizer: Sizer
            if isinstance(self.micro_batch_size, int):
                sizer = FixedSize(min(found["size"], self.micro_batch_size))
                sizer.ceiling = sizer.size if sizer.size < self.micro_batch_size else None  # it ran out of memory
            elif found["settled"]:
                sizer = SizeSearch(found["size"], self._limit(), self.minimum)
                sizer.settled = True
            else:
                continue
            self._known[key] = sizer, found["elements"]
            self._last, self._seen = sizer, []
