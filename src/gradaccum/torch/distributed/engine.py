"""How the gradients of a data-parallel model become their mean over the ranks; on a single device, they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn


def weakly(method: Any) -> Callable[..., Any]:
    """A hook that calls this method as long as its owner is alive; None afterwards."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def hook(*args: Any) -> Any:
        alive = owner()
        return None if alive is None else function(alive, *args)

    return hook


class Engine:
    """Holds a model's own reduction back to the window's end, lets it happen, or brings it about: here, there is none.

    `parameters` returns the optimizer's, whose gradients are reduced. An engine of several ranks also has `reduce`,
    which brings the sums to their mean outside of a backward pass; `settle(source)`, which ends a window, of which the
    rank `source` had rows; `trained`, the parameters in the same order on every rank; and `unused`, the places of those
    that have had no gradient on this rank in this window.
    """

    sharded = False  # all ranks must run the same forward and backward passes
    always = False  # every micro-batch is reduced
    manual_reduce = False  # no backward pass reduces
    bucket_views = False  # a reduction leaves views of its buckets in `p.grad`
    stuck = False  # a backward pass that reduced has failed, perhaps
    passes = 0  # a number for the order in which sharded parts ran in this window
    group: Any = None
    members: Sequence[int] = (0,)
    owners: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]] = weakref.WeakKeyDictionary()
    """Which engine has taken a module last."""

    def __init__(self, modules: Sequence[nn.Module] = (), parameters: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self.modules: list[Any] = list(modules)
        self.parameters = parameters
        self._hooks: list[Any] = []

    def attach(self, ranks: Any) -> None:
        """Take the modules, and call these `Ranks` when their passes begin and end. They are not kept alive."""
        self._ranks = weakref.ref(ranks)
        for module in self.modules:
            self.owners[module] = weakref.ref(self)

    def remove(self) -> bool:
        """Remove the hooks. Returns whether nobody else has taken the modules since."""
        for hook in self._hooks:
            hook.remove()
        return any(module in self.owners and self.owners[module]() in (self, None) for module in self.modules)

    def hold(self, closes: bool) -> None:
        """Whether the next micro-batch's backward pass closes the window, and reduces it."""

    def check_finished(self, whose: str) -> None:
        """Raise a WindowError if a reduction that a backward pass began is not over, of this or an earlier window."""

    def clear(self) -> None:
        """Drop what an open window has added up beside `p.grad`; `pending` returns that."""

    def pending(self) -> list[Tensor]:
        return []

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks, in place."""
        return tensor
