"""The sizes of micro-batches of one step: the one that the user chose, or those that are searched for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from gradaccum.core.sizes.fixed import FixedSize, Sizer
from gradaccum.schedule import checked_count

logger = logging.getLogger("gradaccum")


class BatchSizeFinder:
    """The micro-batch sizes of a training step.

    Shapes are distinguished by the kinds of their tensors, and by the elements of a row rounded to a power of two:
    text that every batch pads to another length must not start a search in every batch. Rows longer than those a size
    was found with get proportionally smaller micro-batches.
    """

    def __init__(self, micro_batch_size: int | str, limit: Callable[[], float | None], minimum: int = 1) -> None:
        if isinstance(micro_batch_size, str) and micro_batch_size != "auto":
            raise ValueError(f'`micro_batch_size` must be an int >= 1 or "auto". Received: {micro_batch_size!r}.')
        self.given = None if micro_batch_size == "auto" else checked_count(micro_batch_size, "micro_batch_size")
        """The size that was asked for; None where it is searched for."""
        self._limit, self.minimum = limit, minimum
        self._known: dict[str, tuple[Sizer, float]] = {}
        self._last: Sizer | None = None
        self._seen: list[Any] = []
        self._logged: dict[int, int] = {}

    @property
    def size(self) -> int | None:
        return self.given if self._last is None else self._last.size

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
            elif sizer.searched and sizer.settled:
                sizer.size = max(int(sizer.size * measured / elements), 1)
            self._known[key] = sizer, elements
        self._last = sizer
        return sizer

    def close(self, sizer: Sizer, rows: int) -> None:
        before = self._logged.get(id(sizer))
        if not sizer.searched:
            return
        sizer.close()
        if sizer.settled and before != sizer.size:
            self._logged[id(sizer)] = sizer.size
            logger.info("micro_batch_size='auto': %d of %d rows. %s", sizer.size, rows, sizer.summary)

    def _new(self, elements: float, predict: Callable[[], int] | None) -> Sizer:
        if self.given is not None:
            return FixedSize(self.given)
        if predict is not None:
            return FixedSize(max(predict(), self.minimum))
        start = 1
        settled = [(sizer.size, measured) for sizer, measured in self._known.values() if sizer.settled]
        if settled:  # begin a little below what the nearest shape suggests
            size, measured = min(settled, key=lambda known: abs(math.log(known[1] / elements)))
            start = 1 << max(int(math.log2(max(size * min(measured / elements, 1.0) / 4, 1.0))), 0)
        return self._search(start)

    def _search(self, start: int) -> Sizer:
        from gradaccum.core.sizes.search import SizeSearch

        return SizeSearch(start, self._limit(), self.minimum)

    def state_dict(self) -> dict[str, Any]:
        return {
            key: {"size": sizer.size, "elements": elements, "settled": sizer.settled}
            for key, (sizer, elements) in self._known.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sizes of `state_dict`; a smaller size that the user has chosen since is kept."""
        for key, found in state.items():
            sizer: Sizer
            if self.given is not None:
                sizer = FixedSize(min(found["size"], self.given))
                sizer.ceiling = sizer.size if sizer.size < self.given else None  # it ran out of memory
            elif found["settled"]:
                sizer = self._search(found["size"])
                sizer.settled = True
            else:
                continue
            self._known[key] = sizer, found["elements"]
            self._last, self._seen = sizer, []
