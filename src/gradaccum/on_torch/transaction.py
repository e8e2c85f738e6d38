"""A micro-batch as a transaction: what it has changed by the time that memory ran out, and how to undo it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.buffers import SMALL, Held, HeldBuffer, Holders, Moving, Place, hold
from gradaccum.on_torch.held import held_generators
from gradaccum.on_torch.random_state import Draws, RandomState

__all__ = ["Transaction"]

logger = logging.getLogger("gradaccum")

_TOO_LARGE = (
    "The buffer %r moves for the first time, and is too large to be copied for that case: in this update it moves once "
    "per micro-batch."
)
_NOTHING_MOVES = Held(None, [])


class Transaction:
    """The random numbers, the buffers and the gradients that a micro-batch moves, in the update that it is part of.

    Before an update, buffers of at most 1 MiB are copied, and larger ones that move; of those that don't, a sample is,
    as what moves through `.data` shows in its value alone. Before a micro-batch those are copied that
    move, such as the statistics of a BatchNorm. A buffer moves until it has been seen to stand still. Of random numbers
    (PyTorch's, Python's, NumPy's, and those of generators that modules or functions hold) those are remembered before
    each micro-batch that were drawn from since the last update began. As to gradients: autograd runs
    each parameter's accumulation once per backward pass, and raises the version of `p.grad`; so a changed version means
    that all of this micro-batch's gradient has arrived there.

    Args:
        modules: Whose buffers and gradients to watch: the model, and a loss that has some of its own.
        parameters: Returns the optimizers' parameters.
        device: Where the model is.
        others: Returns (dict, key) locations of state that is not a registered buffer.
        functions: What else may hold generators.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Callable[[], list[Tensor]],
        device: torch.device,
        others: Callable[[], list[Place]] = list,
        functions: Iterable[Any] = (),
    ) -> None:
        self._modules, self._functions = list(modules), list(functions)
        self._find_parameters = parameters
        self._find_others = others
        self._draws, self.device = Draws(device), device
        self._still_in_micro_batches: set[tuple[int, str]] = set()
        self._still_in_updates: set[tuple[int, str]] = set()
        self._compared: set[tuple[int, str]] = set()
        self._unversioned: set[tuple[int, str]] = set()
        self.modes: list[bool] = []
        """Of each module, the model's own first: whether it is in training mode, since `open`."""
        self._places: list[Place] = []
        self._holders = Holders()
        self._parameters: list[Tensor] = []
        self._outside: list[tuple[Tensor, Tensor | None]] = []
        self._before: list[tuple[Tensor, Tensor | None, int]] = []
        self._update: Held | None = None
        self._micro_batch: Held | None = None

    def open(self) -> None:
        """An update begins: look which parameters and buffers there are, and remember how everything is."""
        found = {id(p): p for p in self._find_parameters()}
        own = len(found)
        modes, places, modules, dicts = [], self._find_others(), list(self._modules), []
        seen = set(map(id, modules))
        for module in modules:  # what nn.Module.modules tells, in a fraction of its time: this runs in every update
            modes.append(module.training)
            for p in module._parameters.values():
                if p is not None:
                    found[id(p)] = p
            buffers = module._buffers
            if not isinstance(module, _BatchNorm):  # what its layers hold is exchanged on purpose
                dicts.append(buffers)
            if buffers:
                places += [(buffers, name) for name, buffer in buffers.items() if buffer is not None]
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
        if modes != self.modes:  # other buffers may move from now on
            self.modes = modes
            self.forget()
            self._draws.own = held_generators(*modules, *self._functions)
        self._places, self._parameters, self._holders = places, list(found.values()), Holders(dicts)
        self._outside = [(p, p.grad) for p in self._parameters[own:] if p.requires_grad or p.grad is not None]
        for parameter, _ in self._outside:
            parameter.grad = None
        self._update = Held(self._draws.open(), hold(places, self._still_in_updates, smallest=SMALL))
        self._micro_batch = None

    @property
    def began(self) -> bool:
        """Whether a micro-batch of this update has begun."""
        return self._micro_batch is not None

    @property
    def outside(self) -> list[Tensor]:
        """The gradients that this update has given to parameters of no optimizer."""
        return [gradient for p, _ in self._outside if (gradient := p.grad) is not None]

    def buffers(self) -> dict[tuple[int, str], tuple[dict[str, Any], dict[str, HeldBuffer]]]:
        """By the number of a root and a module's path in it: what holds buffers, and how they were in the beginning."""
        assert self._update is not None
        held: dict[int, dict[str, HeldBuffer]] = {}
        for buffer in self._update.buffers:
            held.setdefault(id(buffer.owner), {})[buffer.name] = buffer
        found = [
            (n, path, part._buffers) for n, root in enumerate(self._modules) for path, part in root.named_modules()
        ]
        return {(number, path): (holder, held.get(id(holder), {})) for number, path, holder in found}

    def close(self) -> None:
        """The update has been made. Learns which buffers stood still."""
        assert self._update is not None
        if self._outside:
            self._add_up_outside()
        self._draws.close()
        self._update.learn(self._still_in_updates)
        new = [
            b
            for b in self._update.buffers
            if b.place not in self._compared or (b.sample is not None and b.sample.is_cpu)
        ]
        if new:  # what moves through `.data` shows in its value alone
            self._compared |= {buffer.place for buffer in new}
            self._moved_unseen(new)
        if self._unversioned:
            self._still_in_updates -= self._unversioned
            self._still_in_micro_batches -= self._unversioned
        self._update = None

    def _moved_unseen(self, buffers: Iterable[HeldBuffer]) -> bool:
        """Whether some of these have moved without a new version. They count as moving from now on."""
        unseen = {buffer.place for buffer in buffers if not buffer.moved and buffer.differs()}
        self._unversioned |= unseen
        self._still_in_updates -= unseen
        self._still_in_micro_batches -= unseen
        return bool(unseen)

    @torch.no_grad()
    def _add_up_outside(self) -> None:
        for p, old in self._outside:  # nobody clears them: they add up from update to update
            if old is not None and p.grad is not None:
                p.grad = old + p.grad if old.is_sparse or p.grad.is_sparse else old.add_(p.grad)
            elif old is not None:
                p.grad = old
        self._outside = []

    def abandon(self) -> None:
        """No update: random numbers, buffers and gradients as they were when it began. Not after `forget`."""
        if self._update is None:
            return
        for p, old in self._outside:
            p.grad = old
        self._outside = []
        self._put_back_update()

    def start_over(self) -> None:
        """The update begins once more: random numbers and buffers as they were when it began, and no gradients."""
        assert self._update is not None
        for p, _ in self._outside:
            p.grad = None
        self._put_back_update()

    def _put_back_update(self) -> None:
        assert self._update is not None
        self._holders.unmake()
        large = [buffer for buffer in self._update.buffers if buffer.copy is None]
        self._moved_unseen(large)
        moving = {buffer.place for buffer in large if buffer.moved}
        self._still_in_updates -= moving
        self._still_in_micro_batches -= moving
        self._update.put_back()

    def forget(self) -> None:
        """Leave everything as it is now, and look anew at what stands still."""
        self._update, self._outside = None, []
        self._still_in_micro_batches, self._still_in_updates = set(), set()
        self._draws.forget()
        self._compared, self._unversioned = set(), set()

    def drew(self) -> bool:
        """Whether random numbers have been drawn since the update began."""
        return bool(self._draws.moved())

    def begin(self) -> None:
        """A micro-batch begins: remember how everything is."""
        watched = self._draws.watched
        if not watched and not self._places:
            self._micro_batch = _NOTHING_MOVES
        else:
            random = RandomState(watched) if watched else None
            self._micro_batch = Held(random, hold(self._places, self._still_in_micro_batches))
        self._before = [(p, g := p.grad, -1 if g is None else g._version) for p in self._parameters]

    def moved(self) -> list[Moving]:
        """The buffers that this micro-batch has moved, or made."""
        assert self._micro_batch is not None
        assert self._update is not None
        found, copies = self._holders.made(), None
        for buffer in self._micro_batch.buffers:
            if not buffer.moved and buffer.place not in self._unversioned:
                if buffer.place in self._compared or not buffer.differs():
                    continue
                self._unversioned.add(buffer.place)
            copy = buffer.copy
            if copy is None:  # it has stood still so far
                copies = {b.place: b.copy for b in self._update.buffers} if copies is None else copies
                copy = copies.get(buffer.place)
            if copy is None:
                logger.warning(_TOO_LARGE, buffer.name)
            else:
                found.append(Moving(buffer.owner, buffer.name, buffer.tensor, copy))
        return found

    def commit(self) -> None:
        """The micro-batch is in. Learns which buffers stood still."""
        assert self._micro_batch is not None
        if self._micro_batch.buffers:
            self._micro_batch.learn(self._still_in_micro_batches)
        self._before = []  # or gradients that are freed before the next one would live as long

    def restore(self) -> bool:
        """The micro-batch failed: random numbers and buffers as they were when it began.

        Returns:
            Whether that is so of all: a buffer that moves without a new version shows only now, when nobody knows
            which of the update's micro-batches have moved it, and so does a generator that nobody drew from before.
            They are copied before each from now on.
        """
        assert self._micro_batch is not None
        assert self._update is not None
        drew = self._draws.unwatched_moved()
        self._draws.watched += drew
        held = {buffer.place for buffer in self._micro_batch.buffers if buffer.copy is not None}
        unseen = self._moved_unseen(buffer for buffer in self._update.buffers if buffer.place not in held)
        self._holders.unmake()
        self._micro_batch.put_back(self._update)
        return not (unseen or drew)

    def drew_in_micro_batch(self) -> bool:
        """Whether random numbers have been drawn since the micro-batch began, or may have been."""
        assert self._micro_batch is not None
        random = self._micro_batch.random
        return bool((random is not None and random.moved()) or self._draws.unwatched_moved())

    def not_looked_at(self) -> RandomState:
        """The generators that nobody looks at, since the first update did not draw from them."""
        return self._draws.rest()

    def drew_from(self, rest: RandomState) -> bool:
        """Whether some of these have been drawn from since. They are looked at from now on."""
        return self._draws.note(rest)

    def arrived(self) -> list[Tensor]:
        """Parameters whose `.grad` already includes this micro-batch."""
        return [
            parameter
            for parameter, gradient, version in self._before
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version)
        ]
