"""State that passes move beside gradients: buffers of modules and random number generators, in one snapshot per window.

What goes wrong within a window (memory runs out, a buffer moves for the first time) ends in the snapshot being put back
as a whole, and the window running again. So nothing is remembered per micro-batch.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.grad_buffer import added
from gradaccum.on_torch.random_state import RandomState, all_generators, torch_generators
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.state.snapshot import BufferSnapshot, Snapshot

logger = logging.getLogger("gradaccum")

_TOO_LARGE = (
    "The buffer %r changes for the first time. It is too large to be copied in every window, so in this update it "
    "changes once per micro-batch."
)
_LOST = (
    "These buffers changed for the first time in passes that failed. They are too large to be copied in every window, "
    "so they stay as they are now: %s."
)


class _Registrations:
    """How often a known module has been given another one: cheaper to ask than to walk through a model."""

    def __init__(self) -> None:
        self.count, self._known = 0, weakref.WeakValueDictionary[int, nn.Module]()
        self._hook: Any = None

    def know(self, modules: Iterable[nn.Module]) -> None:
        if self._hook is None:
            self._hook = nn.modules.module.register_module_module_registration_hook(self._registered)
        self._known.update((id(module), module) for module in modules)

    def _registered(self, module: nn.Module, *_: Any) -> None:
        self.count += self._known.get(id(module)) is module


_registrations = _Registrations()


class WindowState:
    """What a window moves of modules and generators, as it was when the window began.

    Windows 1, 2, 4, 8, ..., and the first one in which modules are in other modes, look at every buffer after each
    micro-batch, and so learn which of them move. The others look after micro-batches at those alone, and once at all
    versions, when the window ends: where a buffer has moved that stood still so far, the window restarts. PyTorch's
    generators are looked at in every window, in microseconds; the states of others are long, so windows that look have
    all of them, and the others those that were drawn from before.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device,
        *,
        parameters: Callable[[], list[Tensor]] = list,
        others: Callable[[], list[tuple[dict[str, Any], str]]] = list,
        functions: Iterable[Any] = (),
        always: bool = False,
    ) -> None:
        self._roots, self._functions, self.device, self.always = list(modules), list(functions), device, always
        self._find_parameters, self._find_others = parameters, others
        self.modes: list[bool] = []
        """Of each module, the model's own first: whether it is in training mode."""
        self.looks = False
        """Whether this window is to learn which buffers move, and from which generators is drawn."""
        self._closely = self._makes = False
        """Whether it looks at every buffer after each micro-batch; and whether passes make buffers."""
        self._modules: list[nn.Module] = []
        self._makers: list[nn.Module] = []
        """Those that may make buffers: all but BatchNorm's."""
        self._parameters: list[Tensor] | None = None
        self._not_optimized: list[Tensor] = []
        self._outside: list[tuple[Tensor, Tensor | None]] = []
        self._torch, self._generators, self._drawn_from = torch_generators([device]), list[Any](), list[Any]()
        self._start = Snapshot()
        self._own: list[BufferSnapshot] = []
        """Those that micro-batches find as the window did: all but BatchNorm's."""
        self._moving: list[BufferSnapshot] = []
        self._windows, self._is_open = 0, False
        self._registered = 0
        self._batch: Snapshot | None = None
        """How everything was when the batch came, where closures evaluate windows since."""

    def open(self) -> None:
        """A window begins: remember how everything is."""
        self._windows += 1
        modes, parameters = [module.training for module in self._modules], self._find_parameters()
        others = self._registered != _registrations.count or modes != self.modes
        if parameters is not self._parameters:
            others = others or not _are(parameters, self._parameters)
            self._parameters = parameters
        if others or self._start.outdated or self._windows & (self._windows - 1) == 0:
            self._find()
        self._begin()
        if self._not_optimized:
            self._outside = [(p, p.grad) for p in self._not_optimized if p.requires_grad or p.grad is not None]
            for parameter, _ in self._outside:
                parameter.grad = None

    def _find(self) -> None:
        """Look which modules, buffers and parameters there are."""
        known = {(id(buffer.owner), buffer.name): buffer for buffer in self._start.buffers}
        self._modules = [*{id(m): m for root in self._roots for m in root.modules()}.values()]
        _registrations.know(self._modules)
        self._registered = _registrations.count
        modes = [module.training for module in self._modules]
        if modes != self.modes:  # others may move from now on
            self.modes, known, self._windows, self._drawn_from = modes, {}, 1, []
            self._generators = held_generators(*self._modules, *self._functions)
        found = [BufferSnapshot(*place) for place in self._find_others()]
        owners = {id(module._buffers): module for module in self._modules}
        for module in owners.values():
            found += [BufferSnapshot(module._buffers, n, module) for n, b in module._buffers.items() if b is not None]
        self._makers = [module for module in owners.values() if not isinstance(module, _BatchNorm)]
        buffers = [known.get((id(buffer.owner), buffer.name), buffer) for buffer in found]
        self._start = Snapshot(buffers, self._makers)
        own = {id(module._buffers) for module in self._makers}
        self._moving = self._own = [buffer for buffer in buffers if id(buffer.owner) in own]
        self._find_not_optimized()
        self.looks = True

    def _find_not_optimized(self) -> None:
        own = set(map(id, self._parameters or ()))
        found = {id(p): p for module in self._modules for p in module._parameters.values() if p is not None}
        self._not_optimized = [parameter for key, parameter in found.items() if key not in own]

    def _begin(self) -> None:
        self._is_open, self.looks = True, self.always or self.looks
        self._makes = self._makes and not self.looks  # to be learned anew
        self._closely = self.looks or self._makes
        generators = [*self._torch, *self._drawn_from]
        if self.looks:
            generators = [*self._torch, *(one for one in all_generators() if one != "cpu"), *self._generators]
        self._start.random = RandomState(generators)
        if self._start.buffers:
            self.retake()

    @torch.no_grad()
    def retake(self) -> None:
        """Remember the buffers as they are now."""
        stale = [buffer for buffer in self._start.buffers if buffer.take(whole=self.looks)]
        if stale:
            torch._foreach_copy_([b.copy for b in stale], [b.tensor for b in stale])  # type: ignore[misc]  # there are

    @property
    def idle(self) -> bool:
        """Whether there is nothing to be looked at after micro-batches."""
        return not self._moving and not self._closely

    def moved(self) -> list[BufferSnapshot]:
        """The buffers that a micro-batch has moved, or made; not BatchNorm's."""
        if not self._closely:
            return [buffer for buffer in self._moving if buffer.moved]
        found = self._start.made()
        self._makes = self._makes or bool(found)
        for buffer in self._own:
            if buffer.differs():
                buffer.unversioned = buffer.unversioned or not buffer.moved
                buffer.met = True
                found.append(buffer)
        return found

    def surprised(self) -> bool:
        """Whether a buffer has moved, or was made, in a window that did not look for it: it is to restart, and look."""
        if self._closely:
            return False
        surprised = bool(self._start.made())
        self._makes = self._makes or surprised
        for buffer in self._own:
            if not buffer.moves and buffer.moved:
                buffer.moves = True
                if buffer.tensor is None or buffer.copy is not None:
                    surprised = True
                else:
                    logger.warning(_TOO_LARGE, buffer.name)
        self.looks, self._closely = self.looks or surprised, surprised
        return surprised

    def close(self) -> None:
        """The update has been made. Learns what moves."""
        if self._outside:
            self._add_up_outside()
        if self.looks:
            drawn = self._start.random.moved()
            self._drawn_from += [g for g in drawn if g not in (*self._torch, *self._drawn_from)]
            for buffer in self._start.buffers:
                buffer.moves = buffer.met or buffer.moved
            self._moving = [buffer for buffer in self._own if buffer.moves]
            self.looks = False
        self._is_open, self._batch = False, None

    @torch.no_grad()
    def _add_up_outside(self) -> None:
        for p, old in self._outside:  # nobody clears them: they add up from update to update
            if old is not None and p.grad is not None:
                p.grad = added(old, p.grad)
            elif old is not None:
                p.grad = old
        self._outside = []

    def restart(self) -> None:
        """The window begins once more: random numbers and buffers as they were when it began, and no gradients."""
        for p, _ in self._outside:
            p.grad = None
        if lost := self._start.put_back():
            logger.warning(_LOST, ", ".join(map(repr, lost)))

    def abandon(self) -> None:
        """No update: everything as it was when the batch came. Does nothing where no window is open."""
        if not self._is_open:
            return
        self.restart()
        for p, old in self._outside:
            p.grad = old
        self._outside = []
        if self._batch is not None:
            self._batch.put_back()
        if self.looks:  # nothing was learned
            self._windows = 0

    def evaluate(self) -> None:
        """A closure evaluates the window once more: it begins with what there is now; `abandon` goes back further."""
        if self._batch is None:
            self._batch, self._start = self._start, Snapshot()
            self._find()
        self._begin()

    def forget(self, *, modules: bool = True) -> None:
        """Leave everything as it is now, and look anew at what moves, and at which modules there are."""
        self._is_open, self.looks, self._outside, self._batch = False, False, [], None
        if modules:
            self.modes = []

    def rng_used(self) -> bool:
        """Whether random numbers have been drawn since the window began."""
        return bool(self._start.random.moved())

    @property
    def outside(self) -> list[Tensor]:
        """The gradients that this update has given to parameters of no optimizer."""
        return [gradient for p, _ in self._outside if (gradient := p.grad) is not None]

    def buffers(self) -> dict[tuple[int, str], tuple[dict[str, Any], dict[str, BufferSnapshot]]]:
        """By the number of a root and a module's path in it: what holds buffers, and how they were in the beginning."""
        held: dict[int, dict[str, BufferSnapshot]] = {}
        for buffer in self._start.buffers:
            if buffer.tensor is not None:
                held.setdefault(id(buffer.owner), {})[buffer.name] = buffer
        found = [(n, path, part._buffers) for n, root in enumerate(self._roots) for path, part in root.named_modules()]
        return {(number, path): (holder, held.get(id(holder), {})) for number, path, holder in found}


def _are(found: list[Tensor], known: list[Tensor] | None) -> bool:
    """Whether these are the same tensors."""
    return known is not None and len(found) == len(known) and all(map(is_, found, known))
