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

    __slots__ = ("_all_ended", "_outside", "arrivals", "began", "on_end", "ordinary", "unfinished")

    def __init__(self, outside: bool) -> None:
        self._outside = outside  # FSDP2 calls hooks outside of backward passes, too
        self.arrivals = 0  # since the last micro-batch was counted
        self.unfinished: list[bool] = []  # the pass that runs, or that failed; what runs inside of it is part of it
        self._all_ended = self.unfinished.clear
        self.began: list[int] = []  # operations recorded when the micro-batch began, and when each of its passes did
        self.on_end: Callable[[], None] | None = None  # called when a pass is over, in windows that look
        self.ordinary = False  # a micro-batch that comes through one pass is counted, and nothing else is looked at

    def begin(self) -> None:
        """The first gradient of a backward pass has arrived."""
        if torch.compiler.is_dynamo_compiling() or (self._outside and current_backward() == -1):
            return
        self.unfinished.append(True)
        queue_callback(self._all_ended)
        if self.on_end is not None:
            queue_callback(self.on_end)
            self.began.append(recorded_operations())


class _Watched:
    """Some parameters, and their gradients as autograd alone leaves them. Hooks hold the lists, and no optimizer."""

    def __init__(self, parameters: list[Tensor], passes: Passes, before: _Watched | None = None) -> None:
        self.parameters = parameters
        self.nothing, self.none = [None] * len(parameters), [0] * len(parameters)
        self.gradients: list[Tensor | None] = [*self.nothing]  # of this window: while kept, their ids stay theirs
        self.bases = [*self.none]  # their versions before anything had arrived
        self.arrivals = [*self.none]  # in this window,
        self.seen = [*self.none]  # ... at the last look,
        self.counted = [*self.none]  # ... when the last micro-batch was counted
        self.comparable: list[bool | None] = [*self.nothing]  # whether values tell more than versions do
        self.left: tuple[list[Tensor | None], list[int]] | None = None
        """The gradients that the last update was made with, not to join the next sum, and their versions."""
        with all_require_grad(parameters):
            self.hooks = [p.register_post_accumulate_grad_hook(self._hook(i, passes)) for i, p in enumerate(parameters)]
        known = {id(p): i for i, p in enumerate(before.parameters)} if before is not None else {}
        for i, parameter in enumerate(parameters):
            if before is None or (j := known.get(id(parameter))) is None:
                self.look(i, parameter.grad)
            else:
                for name in ("gradients", "bases", "arrivals", "seen", "counted"):
                    getattr(self, name)[i] = getattr(before, name)[j]

    def _hook(self, i: int, passes: Passes) -> Callable[[Tensor], None]:
        gradients, bases, arrivals, seen = self.gradients, self.bases, self.arrivals, self.seen

        def arrived(parameter: Tensor) -> None:
            passes.arrivals += 1
            arrivals[i] += 1
            if gradients[i] is None and (gradient := parameter.grad) is not None:  # the first one: it is the sum now
                gradients[i], bases[i], seen[i] = gradient, gradient._version - arrivals[i], arrivals[i]
            if not passes.unfinished:
                passes.begin()

        return arrived

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def restart(self, closed: bool = False) -> None:
        """Nothing has arrived. If the window `closed`, its gradients are still there."""
        self.left = None
        if closed:
            finished = [*map(_GRADIENT, self.parameters)]
            self.left = finished, _versions(finished)
        self.gradients[:], self.arrivals[:], self.seen[:] = self.nothing, self.none, self.none

    def look(self, i: int, gradient: Tensor | None) -> None:
        """This is how the gradient should be."""
        self.seen[i] = self.arrivals[i]
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
            if gradient is left and self.bases[i] == version:
                return "left" if _counts_versions(gradient) else None
            edited = gradient._version != self.bases[i] + self.arrivals[i]
            return "edited" if edited and _counts_versions(gradient) else None
        if gradient is None or not arrived:
            return "cleared"
        # With create_graph=True, for sparse gradients and when compiled, autograd adds out of place.
        out_of_place = gradient.requires_grad or gradient.is_sparse or not _counts_versions(gradient)
        return None if out_of_place else "cleared"


class GradientMonitor:
    """Watches the gradients of windows, one window after the other.

    A backward pass that has brought a gradient and never came to its end has failed.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], sharded: bool = False) -> None:
        self._parameters = parameters
        self._windows, self._next_look = 0, 1  # windows that are over; before the next one that looks
        self.looking = False  # at every parameter, in this window
        self.passes = Passes(sharded)
        self._watched = _Watched([], self.passes)
        self._passes_noted = self._passes_warned = False
        self._on_end = functools.partial(_pass_over, weakref.ref(self))
        self._digest: Tensor | None = None
        self.watch_all()
        self.restart()
        self.resync()

    def _watch(self, parameters: list[Tensor]) -> None:
        self._watched.remove()
        self._watched = _Watched(parameters, self.passes, self._watched)

    def watch_all(self) -> None:
        self._watch(_leaves(self._parameters()))
        self.looking, self.passes.on_end, self.passes.ordinary = True, self._on_end, False

    def remove(self) -> None:
        self._watch([])

    # A window, from its first backward pass to its update.

    def restart(self, closed: bool = False) -> None:
        """The sum is empty, or the window `closed`: whatever comes next begins a new one."""
        self._modification: Modification | None = None
        self.passes.unfinished.clear()
        self._watched.restart(closed)
        if self.looking:
            self._counted, self._last_next, self._digest = 0, False, None
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
        if not seen or (self._digest is None) == self._compares:
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
            most = max(self._watched.arrivals, default=0)
            likely = [
                p for p, arrivals in zip(self._watched.parameters, self._watched.arrivals) if arrivals == most > 0
            ]
            if likely:
                self._watch([likely[i] for i in sorted({0, len(likely) // 2, len(likely) - 1})])
                self.looking, self.passes.on_end, self._digest = False, None, None
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
        if self._modification is None and not (self._digest is None and self._watched.untouched):
            self._modification = self._found()
        return self._modification

    def _found(self) -> Modification | None:
        for i, parameter in enumerate(self._watched.parameters):
            found = self._watched.modification(i)
            if found == "assigned" and not (self.looking and parameter.grad.count_nonzero()):  # type: ignore[union-attr]  # it has one
                continue
            if found is not None:
                return found
        compared = self._digest is not None and self.passes.arrivals == self._seen
        return "edited" if compared and self._differs() else None

    def record(self, modification: Modification) -> None:
        """What was done to the sum, unless something was before."""
        self._modification = self._modification or modification

    def resync(self) -> None:
        """The sum is as it should be, perhaps changed on purpose, by the wrapper itself."""
        for i, parameter in enumerate(self._watched.parameters):
            self._watched.look(i, parameter.grad)
        self._seen = self.passes.arrivals
        self._digest = digest(self._comparable()) if self._compares else None

    @contextlib.contextmanager
    def resyncing(self) -> Iterator[None]:
        """The wrapper itself changes the sum; what was done to it before is not forgotten."""
        self.modification()
        yield
        self.resync()

    def forget_values(self) -> None:
        self._digest = None

    @property
    def _compares(self) -> bool:
        return self.looking and (self._counted < _COMPARED or self._last_next)

    def _comparable(self) -> list[Tensor]:
        watched, found = self._watched, []
        for i, gradient in enumerate(watched.gradients):
            if gradient is not None:
                if watched.comparable[i] is None:
                    watched.comparable[i] = has_digest(gradient)
                if watched.comparable[i]:
                    found.append(gradient)
        return found

    def _differs(self) -> bool:
        """Whether the gradients have other values than at the last look. Waits for the device."""
        gradients = self._comparable()
        return digests_differ(self._digest, digest(gradients), gradients)


class ShardedMonitor(GradientMonitor):
    """Watches a model of whose gradients each rank has a part, some of it beside `p.grad`.

    All ranks run the same passes, outside of which nobody writes: what is there when a pass is over stays as it is.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], pending: Callable[[], list[Tensor]]) -> None:
        self._pending = pending
        self._kept: list[tuple[Tensor, int]] = []
        super().__init__(parameters, sharded=True)

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
        if not torch.compiler.is_compiling():
            queue_callback(functools.partial(queue_callback, self.keep))

    def resync(self) -> None:
        if self._kept:
            self.keep()
        super().resync()

    def modification(self) -> Modification | None:
        self._look_at_kept()
        return super().modification()

    def _look_at_kept(self) -> None:
        if any(tensor._version != version for tensor, version in self._kept):
            self.record("edited")


def _pass_over(monitor: weakref.ref[GradientMonitor]) -> None:
    if (watching := monitor()) is not None and watching.looking:
        watching.modification()
        watching.resync()


def _versions(gradients: list[Tensor | None]) -> list[int]:
    try:
        return [*map(_VERSION, gradients)]
    except AttributeError:
        return [0 if gradient is None else gradient._version for gradient in gradients]


def _leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.is_leaf and not is_lazy(p) and (p.is_floating_point() or p.is_complex())]


def has_digest(gradient: Tensor) -> bool:
    on_mps = gradient.device.type == "mps"
    return not gradient.is_sparse and not on_mps and gradient.numel() > 0 and _counts_versions(gradient)


def digests_differ(before: Tensor | None, now: Tensor | None, tensors: list[Tensor]) -> bool:
    if before is None or now is None or now.shape != before.shape:
        return True
    if torch.equal(before, now):
        return False
    sizes = [4 * torch.finfo(before.dtype).eps * tensor.numel() ** 0.5 for tensor in tensors]
    rounding = torch.tensor(sizes, dtype=before.dtype, device=before.device)  # threads may differ
    same = (before - now).abs() <= rounding * before[0]
    return not bool((same | (before == now) | (before.isnan() & now.isnan())).all())


@torch.no_grad()
def digest(gradients: list[Tensor]) -> Tensor | None:
    """The 2-norm and the largest entry of each gradient, two rows: other values show in one of them."""
    found: list[Any] = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    if not found:
        return None
    kinds = {(g.device, g.dtype) for g in found}
    device = found[0].device
    wide = torch.float64 if any(dtype == torch.float64 for _, dtype in kinds) else torch.float32
    plain = kinds == {(device, wide)}
    norms = torch._foreach_norm(found, 2, dtype=None if plain else wide)
    rows = [norms, torch._foreach_max(found)]
    return torch.stack([torch.stack(row if plain else [n.to(device, wide) for n in row]) for row in rows])


def _counts_versions(gradient: Tensor) -> bool:
    """Whether the gradient's version rises when it is edited, and only then. Asked only where something differs.

    Views, such as those of DDP's buckets, share theirs with others, as do parts of a larger tensor, after torch.cat of
    parameters; a DTensor's shard has its own.
    """
    if gradient._is_view() or hasattr(gradient, "to_local") or torch.compiler.is_compiling():
        return False
    return gradient.is_sparse or gradient.untyped_storage().nbytes() <= gradient.nbytes
