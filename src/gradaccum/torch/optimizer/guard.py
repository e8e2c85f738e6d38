"""Notices what happens to the sum of an open window behind the wrapper's back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Guard"]


class Guard:
    """Watches the gradient of one parameter: autograd adds to it in place and raises its version by exactly one.

    Anything else (clipping, `model.zero_grad()`, another loss's gradient) shows as another tensor, another version, or
    an arrival at the wrong time. Watching one parameter costs a microsecond per backward pass, whatever their number.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # The last parameter: it is nearest to the loss, so hardly ever unused, and hardly ever a sparse embedding.
        watched = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._parameter = watched[-1] if watched else None
        self._handle = None
        self.restart()
        if self._parameter is not None:
            this = weakref.ref(self)  # the parameter shall not keep the optimizer alive

            def arrived(parameter: Tensor) -> None:
                guard = this()
                if guard is None:
                    return
                guard.arrivals += 1
                gradient = parameter.grad
                if gradient is None:  # another hook has taken it
                    return
                before, guard._seen = guard._seen, (id(gradient), gradient._version)
                if before is not None and before != (id(gradient), gradient._version - 1):
                    guard._look_at(before, gradient)

            self._handle = self._parameter.register_post_accumulate_grad_hook(arrived)

    def remove(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()

    def restart(self) -> None:
        """The sum is empty: whatever comes next begins a new one."""
        self.arrivals = 0
        """Backward passes since the last micro-batch was counted."""
        self._seen: tuple[int, int] | None = None
        self._trouble: str | None = None

    def accept(self) -> None:
        """The sum was changed on purpose, by the wrapper itself."""
        self._seen = self._now()

    def trouble(self) -> str | None:
        """What was done to the sum, in words; None if autograd alone touched it."""
        seen = self._seen
        if seen is not None and self._trouble is None:
            now = self._now()
            if now == seen:
                return None
            if now is None or now[0] != seen[0]:
                self._trouble = "cleared"
            elif self._counts_versions():
                self._trouble = "edited"
        return self._trouble

    def _now(self) -> tuple[int, int] | None:
        gradient = None if self._parameter is None else self._parameter.grad
        return None if gradient is None else (id(gradient), gradient._version)

    def _look_at(self, before: tuple[int, int], gradient: Tensor) -> None:
        """This gradient is not the one from before with something added in place."""
        # With create_graph=True, and for sparse gradients, autograd adds out of place.
        if torch.is_grad_enabled() or gradient.is_sparse or not self._counts_versions():
            return
        self._trouble = "cleared" if before[0] != id(gradient) else "edited"

    def _counts_versions(self) -> bool:
        """Whether the gradient's version rises when it is edited, and only then. Asked only where something differs.

        Views, such as those of DDP's buckets, share theirs with others, as do parts of a larger tensor, after
        torch.cat of parameters; a DTensor's shard has its own.
        """
        gradient = None if self._parameter is None else self._parameter.grad
        if gradient is None or gradient._is_view() or hasattr(gradient, "to_local"):
            return False
        return gradient.is_sparse or gradient.untyped_storage().nbytes() <= gradient.nbytes
