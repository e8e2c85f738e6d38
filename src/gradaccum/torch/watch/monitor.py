"""Detect gradients that are cleared, clipped, assigned or left over inside an open window of gradient accumulation.

Autograd adds to a gradient in place, and each pass that reaches it raises its version by one. So a gradient that only
autograd has written is the tensor in which its sum began, at the version `base + arrivals`: one comparison at a
window's end shows what happened in any of its micro-batches. Three parameters are counted and compared so, those that
received the most gradients. Windows 1, 2, 4, 8, ... count and compare all of them, at each pass's end, `step()` and
`zero_grad()`; there values are compared, too, by `_foreach` operators.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradaccum.on_torch.foreach import values_of
from gradaccum.on_torch.grad_buffer import all_require_grad
from gradaccum.on_torch.private import current_backward, queue_callback, recorded_operations
from gradaccum.torch.watch.messages import SEVERAL_PASSES, several_passes_warning

logger = logging.getLogger("gradaccum")

Modification = Literal["cleared", "edited", "left", "assigned"]

_GRADIENT, _VERSION = operator.attrgetter("grad"), operator.attrgetter("_version")
_COMPARED = 4
"""In windows that look at everything, values are compared in so many micro-batches, and in the last one."""


class Passes:
    """What the hooks of one optimizer share: the gradients that arrived, and the passes that brought them."""

    __slots__ = ("_all_ended", "arrivals", "began", "on_end", "open", "ordinary", "unfinished")

    def __init__(self) -> None:
        self.arrivals = 0  # since the last micro-batch was counted
        self.unfinished: list[bool] = []  # the pass that runs, or that failed; what runs inside of it is part of it
        self._all_ended = self.unfinished.clear
        self.began: list[int] = []  # operations recorded when the micro-batch began, and when each of its passes did
        self.on_end: Callable[[], None] | None = None  # called when a pass is over, in windows that look
        self.ordinary = False  # a micro-batch that comes now is counted without a look
        self.open = False  # ... and is not its window's first

    def begin(self) -> None:
        """The first gradient of a backward pass has arrived."""
        # FSDP2 calls hooks outside of backward passes, too.
        if current_backward() == -1:
            return
        self.unfinished.append(True)
        queue_callback(self._all_ended)
        if self.on_end is not None:
            queue_callback(self.on_end)
            self.began.append(recorded_operations())


class _Watched:
    """Some parameters, and their gradients as autograd alone leaves them. Hooks hold the lists, and no optimizer."""

    def __init__(self, parameters: list[Tensor], passes: Passes, in_views: bool, looking: bool = True) -> None:
        self.parameters, self.in_views, self.looking = parameters, in_views, looking
        self.nothing, self.none = [None] * len(parameters), [0] * len(parameters)
        self.gradients: list[Tensor | None] = [*self.nothing]  # of this window: while kept, their ids stay theirs
        self.bases = [*self.none]  # their versions before anything had arrived
        self.arrivals = [*self.none]  # in this window,
        self.seen = [*self.none]  # ... at the last look,
        self.counted = [*self.none]  # ... when the last micro-batch was counted
        self.comparable: list[bool | None] = [*self.nothing]  # whether values can be compared
        self.left: tuple[list[Tensor | None], list[int]] | None = None
        """The gradients that the last update was made with, not to join the next sum, and their versions."""
        with all_require_grad(parameters):
            self.hooks = [p.register_post_accumulate_grad_hook(self._hook(i, passes)) for i, p in enumerate(parameters)]
        self.look()

    def _hook(self, i: int, passes: Passes) -> Callable[[Tensor], None]:
        gradients, bases, arrivals, seen = self.gradients, self.bases, self.arrivals, self.seen
        looking, in_views = self.looking, self.in_views

        def arrived(parameter: Tensor) -> None:
            known = gradients[i]
            # A function may return None for what a pass doesn't reach, as DDP's does with `find_unused_parameters`.
            if looking and known is not None and known is parameter.grad and known._version == bases[i] + arrivals[i]:
                return
            gradient = parameter.grad if known is None else known
            if gradient is None:
                return
            passes.arrivals += 1
            arrivals[i] += 1
            if known is None:  # the first one: it is the sum now
                gradients[i], bases[i] = gradient, gradient._version - arrivals[i]
                seen[i] = arrivals[i] - in_views  # DDP is about to put its view in the place
            if not passes.unfinished:
                passes.begin()

        return arrived

    def restart(self, closed: bool = False) -> None:
        """Nothing has arrived. If the window `closed`, gradients are still there that are no part of the next one."""
        self.left = None
        if closed:
            finished = [*map(_GRADIENT, self.parameters)]
            self.left = finished, _versions(finished)
        self.gradients[:], self.arrivals[:], self.seen[:] = self.nothing, self.none, self.none

    def look(self) -> None:
        """This is how the gradients should be."""
        self.seen[:] = self.arrivals
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not self.gradients[i]:
                self.gradients[i], self.comparable[i] = gradient, None
            if gradient is not None:
                self.bases[i] = gradient._version - self.arrivals[i]

    @property
    def untouched(self) -> bool:
        """Whether autograd alone wrote to them, as far as tensors and their versions show at once."""
        gradients = [*map(_GRADIENT, self.parameters)]
        if self.left is not None or not all(map(operator.is_, gradients, self.gradients)):
            return False
        return _versions(gradients) == [*map(operator.add, self.bases, self.arrivals)]

    def modification(self, i: int) -> Modification | None:
        """What was done to a gradient since the last look, as far as the tensor and its version show."""
        gradient, before, arrived = self.parameters[i].grad, self.gradients[i], self.arrivals[i] > self.seen[i]
        left, version = (None, 0) if self.left is None else (self.left[0][i], self.left[1][i])
        if before is None:
            return None if gradient is None or gradient is left or arrived else "assigned"
        if gradient is before:
            if gradient is left and self.bases[i] == version:  # of views, this is the first that a gradient reached
                return "left" if self.in_views or counts_versions(gradient) else None
            edited = gradient._version > self.bases[i] + self.arrivals[i]  # fewer may have arrived than were counted
            return "edited" if edited and counts_versions(gradient) else None
        if gradient is None or not arrived:
            return "cleared"
        # With create_graph=True, to sparse gradients and when compiled, autograd adds out of place.
        out_of_place = gradient.requires_grad or before.is_sparse or not counts_versions(gradient)
        return None if out_of_place else "cleared"

    def values(self) -> Values | None:
        found = []
        for i, gradient in enumerate(self.gradients):
            if gradient is not None and self.comparable[i] is None:
                self.comparable[i] = Values.has(gradient)
            if gradient is not None and self.comparable[i]:
                found.append(gradient)
        return Values.of(found)


class GradientMonitor:
    """Watches the gradients of windows, one window after the other.

    A backward pass that has brought a gradient and never came to its end has failed. With `in_views`, gradients may be
    views of DDP's buckets: the version of all of them rises with that of any.
    """

    reduces = False
    """Whether DDP writes to the sum in the pass that runs: with a reentrant checkpoint it may do so before its end."""

    def __init__(self, parameters: Callable[[], list[Tensor]], in_views: bool = False) -> None:
        self._parameters, self._in_views = parameters, in_views
        self._windows, self._next_look = 0, 1  # windows that are over; before the next one that looks
        self.looking = False  # at every parameter, in this window
        self.passes = Passes()
        self._watched = _Watched([], self.passes, in_views)
        self._passes_noted = self._passes_warned = False
        self._on_end = functools.partial(_pass_over, weakref.ref(self))
        self._values: Values | None = None  # of the gradients, at the last look
        self.watch_all()
        self.restart(closed=True)

    def _watch(self, parameters: list[Tensor], looking: bool = True) -> None:
        for hook in self._watched.hooks:
            hook.remove()
        self._watched = _Watched(parameters, self.passes, self._in_views, looking)

    def watch_all(self) -> None:
        self._watch(_leaves(self._parameters()))
        self.looking, self.passes.on_end, self.passes.ordinary = True, self._on_end, False
        self._values = None  # of other parameters, perhaps

    def remove(self) -> None:
        self._watch([])

    def forget_update(self) -> None:
        """The gradients of the last update have been cleared, and nothing has arrived since."""
        self._watched.left = None

    # A window, from its first backward pass to its update.

    def restart(self, closed: bool = False) -> None:
        """The sum is empty, or the window `closed`: whatever comes next begins a new one."""
        self._modification: Modification | None = None
        self.reduces = False
        self.passes.unfinished.clear()
        self._watched.restart(closed)
        if self.looking:
            self._counted, self._last_next, self._values = 0, False, None
            self._watched.comparable[:] = self._watched.nothing
        self.forget_arrivals()

    def counted(self, last_next: bool = False) -> None:
        """A micro-batch is in, which weighs something; `last_next` if the next one closes the window."""
        if not self.passes.arrivals and all(p.grad is None for p in self._watched.parameters):
            self.watch_all()
        seen = self.looking and self.passes.arrivals == self._seen
        self.forget_arrivals()
        if self.looking:
            self._counted += 1
            self._last_next = last_next
        if not seen or (self._values is None) == self._compares:
            self.resync()

    def close(self) -> None:
        """A window is over: choose what to watch in the next one."""
        self._windows += 1
        if self._windows < self._next_look and not self.looking:  # nearly always
            self._modification, self.passes.arrivals = None, 0
            self._watched.restart(closed=True)
            return
        if self._windows >= self._next_look:
            self._next_look = 2 * self._windows + 1
            self.watch_all()
        else:
            arrivals = self._watched.arrivals
            most = max(arrivals, default=0)
            likely = [p for p, count in zip(self._watched.parameters, arrivals) if count == most > 0]
            if likely:
                self._watch([likely[i] for i in sorted({0, len(likely) // 2, len(likely) - 1})], looking=False)
                self.looking, self.passes.on_end, self._values = False, None, None
        self.restart(closed=True)

    # What has arrived.

    def forget_arrivals(self) -> None:
        self._seen = self.passes.arrivals = 0
        if self.looking:
            self.passes.began = [recorded_operations()]
            self._watched.counted[:] = self._watched.arrivals

    def arrived(self) -> None:
        """Gradients have been added by the wrapper itself, as a backward pass would."""
        for i, parameter in enumerate(self._watched.parameters):
            if parameter.grad is not None:
                self._watched.arrivals[i] += 1
                self.passes.arrivals += 1
        self.resync()

    @property
    def left(self) -> bool:
        """Whether the gradients of the last update are all there, before any has come."""
        if self._watched.left is None:
            return False
        left = [(p.grad is g, g, version) for p, g, version in zip(self._watched.parameters, *self._watched.left)]
        held = [(same, g, version) for same, g, version in left if g is not None]
        counts = self._watched.in_views or all(counts_versions(g) for _, g, _ in held)
        return bool(held) and counts and all(same and g._version == version for same, g, version in held)

    @property
    def idle(self) -> bool:
        """Whether no gradient whatsoever has come since the last micro-batch was counted; False where unknown."""
        watched = self._watched
        if not self.looking or self.passes.arrivals or len(watched.parameters) < len(self._parameters()):
            return False
        return all(watched.modification(i) is None for i, _ in enumerate(watched.parameters))

    @property
    def failed(self) -> bool:
        """Whether a backward pass has brought a gradient, and never came to its end."""
        return bool(self.passes.unfinished) and current_backward() in (None, -1)

    @property
    def passes_of_each(self) -> set[int]:
        """How many backward passes have brought gradients to parameters since the last micro-batch was counted."""
        return {*map(operator.sub, self._watched.arrivals, self._watched.counted)} - {0}

    def warn_of_several_passes(self, steps: int) -> None:
        """Name a loop that still accumulates by hand: several backward passes reached one `step()`."""
        counts = self.passes_of_each
        passes = max(counts, default=0)
        if passes < 2 or self._passes_warned:
            return
        # Several losses share a forward pass, or have one each that differs. By hand each pass has one of its own, and
        # all are alike, as many as a window has steps. Before the very first, something else may have run.
        operations = [after - before for before, after in itertools.pairwise(self.passes.began)]
        alike = counts == {steps} and len(operations) == steps
        repeats = alike and operations[-1] > 1 and len({*operations[1:]}) == 1
        if repeats and operations[0] == operations[-1]:
            self._passes_warned = True
            logger.warning(several_passes_warning(passes))
        elif not self._passes_noted and (not repeats or self._counted):
            self._passes_noted = True
            logger.info(SEVERAL_PASSES, passes)

    # Modifications.

    @property
    def untouched(self) -> bool:
        """Whether, in an ordinary window, nothing was done to the sum."""
        return self._watched.untouched and self._modification is None

    def modification(self) -> Modification | None:
        """What was done to the sum; None if autograd alone touched it."""
        if self._modification is None and not (self._values is None and self._watched.untouched):
            self._modification = self._found()
        return self._modification

    def _found(self) -> Modification | None:
        for i, parameter in enumerate(self._watched.parameters):
            found = self._watched.modification(i)
            if found == "assigned" and not (self.looking and values_of(parameter.grad).count_nonzero()):  # type: ignore[arg-type]  # it has one
                continue
            if found is not None:
                return found
        if self._values is None or self.passes.arrivals != self._seen:
            return None
        return "edited" if self._values.differ(self._watched.values()) else None  # waits for the device

    def resync(self) -> None:
        """The sum is as it should be, perhaps changed on purpose, by the wrapper itself."""
        self._watched.look()
        self._seen = self.passes.arrivals
        self._values = self._watched.values() if self._compares else None

    @contextlib.contextmanager
    def resyncing(self) -> Iterator[None]:
        """The wrapper itself changes the sum; what was done to it before is not forgotten."""
        self.modification()
        yield
        self.resync()

    def forget_values(self) -> None:
        self._values = None

    @property
    def _compares(self) -> bool:
        return self.looking and (self._counted < _COMPARED or self._last_next)


class ShardedMonitor(GradientMonitor):
    """Watches a model of whose gradients each rank has a part, some of it beside `p.grad`.

    All ranks run the same passes, outside of which nobody writes: what is there when a pass is over stays as it is.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], pending: Callable[[], list[Tensor]]) -> None:
        self._pending = pending
        self._kept: list[tuple[Tensor, int]] = []
        super().__init__(parameters)

    def watch_all(self) -> None:
        """Watch the last parameter: it tells that gradients arrive."""
        if not self._watched.parameters:
            self._watch(_leaves(self._parameters())[-1:])

    def restart(self, closed: bool = False) -> None:
        super().restart(closed)
        self._kept = []

    def counted(self, last_next: bool = False) -> None:
        self.forget_arrivals()
        self.keep()

    def keep(self) -> None:
        """Remember the sum as it is: it changes in backward passes alone."""
        held = [parameter.grad for parameter in self._parameters()] + self._pending()
        self._kept = [(tensor, tensor._version) for tensor in held if tensor is not None]

    def pass_begins(self) -> None:
        """A backward pass has started: look at the sum when it is over, behind what others do at its end."""
        self._look_at_kept()
        self._kept = []
        queue_callback(functools.partial(queue_callback, self.keep))

    def resync(self) -> None:
        if self._kept:
            self.keep()
        super().resync()

    @property
    def untouched(self) -> bool:
        return False  # as far as can be told at once

    def modification(self) -> Modification | None:
        self._look_at_kept()
        return super().modification()

    def _look_at_kept(self) -> None:
        if any(tensor._version != version for tensor, version in self._kept):
            self._modification = self._modification or "edited"


def _pass_over(monitor: weakref.ref[GradientMonitor]) -> None:
    if (watching := monitor()) is not None and watching.looking and not watching.reduces:
        watching.modification()
        watching.resync()


def _versions(gradients: list[Tensor | None]) -> list[int]:
    try:
        return [*map(_VERSION, gradients)]
    except AttributeError:
        return [0 if gradient is None else gradient._version for gradient in gradients]


def _leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.is_leaf and not is_lazy(p) and (p.is_floating_point() or p.is_complex())]


class Values:
    """The 2-norm and the largest entry of each tensor, two rows: other values show in one of them."""

    def __init__(self, rows: Tensor, sizes: list[int]) -> None:
        self._rows, self._sizes = rows, sizes

    @classmethod
    @torch.no_grad()
    def of(cls, tensors: list[Tensor]) -> Values | None:
        """None of no tensors; `has` says of which it can be told."""
        found: list[Any] = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        if not found:
            return None
        kinds, device = {(t.device, t.dtype) for t in found}, found[0].device
        wide = torch.float64 if any(dtype == torch.float64 for _, dtype in kinds) else torch.float32
        plain = kinds == {(device, wide)}
        rows = [torch._foreach_norm(found, 2, dtype=None if plain else wide), torch._foreach_max(found)]
        stacked = [torch.stack(row if plain else [n.to(device, wide) for n in row]) for row in rows]
        return cls(torch.stack(stacked), [*map(Tensor.numel, tensors)])

    @staticmethod
    def has(tensor: Tensor) -> bool:
        on_mps = tensor.device.type == "mps"
        return not tensor.is_sparse and not on_mps and tensor.numel() > 0 and counts_versions(tensor)

    def differ(self, now: Values | None) -> bool:
        """Whether they are others by now. Waits for the device."""
        before = self._rows
        if now is None or now._rows.shape != before.shape:
            return True
        if torch.equal(before, now._rows):
            return False
        rounding = torch.tensor(self._sizes, dtype=before.dtype, device=before.device).sqrt()  # threads may differ
        rounding *= 4 * torch.finfo(before.dtype).eps
        same = (before - now._rows).abs() <= rounding * before[0]
        return not bool((same | (before == now._rows) | (before.isnan() & now._rows.isnan())).all())


def counts_versions(tensor: Tensor) -> bool:
    """Whether the tensor's version rises when it is edited, and only then. Asked only where something differs.

    Views, such as those of DDP's buckets, share theirs with others, as do parts of a larger tensor, after torch.cat of
    parameters; a DTensor's shard has its own.
    """
    if tensor._is_view() or hasattr(tensor, "to_local"):
        return False
    return tensor.is_sparse or tensor.untyped_storage().nbytes() <= tensor.nbytes
