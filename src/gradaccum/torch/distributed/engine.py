"""How the gradients of a data-parallel model become their mean over the ranks; on a single device, they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

__all__ = ["Engine", "weakly"]


def weakly(function: Callable[..., Any], owner: Any = None) -> Callable[..., Any]:
    """A hook that calls this method, or this function of its owner, as long as that is alive; None afterwards."""
    if owner is None:
        owner, function = function.__self__, function.__func__  # type: ignore[attr-defined]
    this = weakref.ref(owner)

    def hook(*args: Any) -> Any:
        alive = this()
        return None if alive is None else function(alive, *args)

    return hook


class Engine:
    """Holds a model's own reduction back to the window's end, lets it happen, or brings it about: here, there is none.

    `parameters` returns the optimizer's, whose gradients are reduced.
    """

    sharded = False
    """Whether all ranks must run the same forward and backward passes, as the ranks of a sharded model do."""
    always = False
    """Whether every micro-batch is reduced."""
    manual_reduce = False
    """Whether no backward pass reduces."""
    passes = 0
    """A number for the order in which sharded parts ran in this window."""
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

    # Passes.

    def hold(self, closes: bool) -> None:
        """Whether the next micro-batch's backward pass closes the window, and reduces it."""

    def starts(self) -> None:
        """That backward pass has started; more forward passes of this micro-batch do not belong to it."""

    def scale(self, factor: float, idle: bool = False) -> None:
        """Multiply what arrives on a sharded model's parameters; `idle`: it is no gradient of this rank's."""

    def abort(self) -> None:
        """An error: the window's passes will not be finished."""

    # The window's sum.

    def reduce(self) -> None:
        """Bring the sums to their mean over the ranks, outside of a backward pass. All ranks take part."""

    def settle(self, source: int = 0) -> None:
        """The window is over; the rank `source` had rows in it."""

    def clear(self) -> None:
        """Drop what an open window has added up beside `p.grad`."""

    def pending(self) -> list[Tensor]:
        """What it has added up there."""
        return []

    def restored(self, parameters: Iterable[Tensor]) -> None:
        """These parameters have a gradient in the window that came from a checkpoint."""

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks, in place."""
        return tensor

    # Parameters that no rank has used have no gradient, as on one device: an optimizer passes them over.

    def trained(self) -> list[nn.Parameter]:
        """The parameters, in the same order on every rank."""
        return []

    def unused(self) -> list[int]:
        """The parameters that have had no gradient on this rank in this window, by number."""
        return []

    def drop(self, unused: Iterable[int]) -> None:
        """These parameters had no gradient on any rank."""
        parameters = self.trained()
        for index in unused:
            parameters[index].grad = None
