"""How the gradients of a data-parallel model become their mean over the ranks; on a single device, they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["Engine", "weakly"]

_OWNERS: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Engine]]] = weakref.WeakKeyDictionary()
"""By module, the engines that have taken it, the last one at the end."""


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

    Of several engines, each takes the gradients of its optimizer's parameters.
    """

    sharded = False
    """Whether all ranks must run the same forward and backward passes, as the ranks of a sharded model do."""
    always = False
    """Whether every micro-batch is reduced."""
    manual_reduce = False
    """Whether no backward pass reduces."""
    finds_unused = False
    """Whether parameters may be left without a gradient."""
    passes = 0
    """A number for the order in which sharded parts ran in this window."""
    group: Any = None
    members: Sequence[int] = (0,)

    def __init__(self, modules: Sequence[nn.Module] = (), parameters: Iterable[Tensor] = ()) -> None:
        self.modules: list[Any] = list(modules)
        self.optimized = set(parameters)
        self._hooks: list[Any] = []
        self._used: set[Tensor] = set()  # had a gradient of this rank's own in this window

    def attach(self, ranks: Any) -> None:
        """Take the modules, and call these `Ranks` when their passes begin and end. They are not kept alive."""
        self._ranks = weakref.ref(ranks)

    def _take(self) -> list[Engine]:
        """The modules are this engine's, too. Returns those of other parameters that have taken them."""
        others = list[Engine]()
        for module in self.modules:
            found = [one for one in (ref() for ref in _OWNERS.get(module, [])) if one is not None and one is not self]
            others += [one for one in found if one not in others and one.optimized.isdisjoint(self.optimized)]
            _OWNERS[module] = [*map(weakref.ref, found), weakref.ref(self)]
        return others

    def _release(self) -> bool:
        """Give the modules back. Returns whether nobody has taken them since."""
        was_last = False
        for module in self.modules:
            found = [one for one in (ref() for ref in _OWNERS.get(module, [])) if one is not None]
            was_last |= bool(found) and found[-1] is self
            _OWNERS[module] = [weakref.ref(one) for one in found if one is not self]
        return was_last

    def remove(self) -> None:
        """Leave the model as it was found, unless another optimizer has taken it."""
        for hook in self._hooks:
            hook.remove()

    # Passes.

    def hold(self, closes: bool, reduces: bool = False) -> None:
        """Whether the next micro-batch's backward pass closes the window, or reduces it."""

    def starts(self) -> None:
        """That backward pass has started; more forward passes of this micro-batch do not belong to it."""

    def scale(self, factor: float, idle: bool = False) -> None:
        """Multiply what arrives on a sharded model's parameters; `idle`: it is no gradient of this rank's."""

    # The window's sum.

    def reduce(self) -> None:
        """Bring the sums to their mean over the ranks, outside of a backward pass. All ranks take part."""

    def prepare(self) -> None:
        """After a reduction, do what the model does in its next forward pass, which not all ranks may have."""

    def continues(self) -> None:
        """The window goes on after a reduction."""

    def settle(self, source: int = 0) -> None:
        """The window is over; the rank `source` had rows in it."""

    def clear(self) -> None:
        """Drop what an open window has added up beside `p.grad`."""

    pending: Callable[[], list[Tensor]] = list
    """Returns what it has added up there."""

    def restored(self, parameters: Iterable[Tensor]) -> None:
        """These parameters have a gradient in the window that came from a checkpoint."""

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor's sum over the ranks, in place."""
        return tensor

    # Parameters that no rank has used have no gradient, as on one device: an optimizer passes them over.

    def trained(self) -> list[nn.Parameter]:
        """The parameters, in the same order on every rank."""
        return []

    @property
    def filled(self) -> bool:
        """Whether zeros were reduced for a parameter that had no gradient on this rank in this window."""
        return False

    @property
    def will_fill(self) -> bool:
        """The same, after a `reduce` that is to come."""
        return self.filled

    def unused(self) -> list[int]:
        """The parameters that had no gradient on this rank in this window, by number."""
        return [i for i, parameter in enumerate(self.trained()) if parameter not in self._used]

    def drop(self, unused: Iterable[int]) -> None:
        """These parameters had no gradient on any rank."""
        parameters = self.trained()
        for index in unused:
            parameters[index].grad = None
