"""Detect gradients that are cleared, clipped, assigned or left over inside an open window of gradient accumulation.

Autograd adds to a gradient in place, and raises its version by one for each backward pass that reaches it. Whatever
else happens shows as another tensor, or as another version. Windows 1, 2, 4, 8, ... look at every parameter, when a
backward pass is over and when `step()` and `zero_grad()` are called; there values are compared, too, by `_foreach`
operators. All other windows compare the tensor and the version of three parameters, those that received the most
gradients: the sentinels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradaccum.on_torch.private import current_backward, queue_callback, recorded_operations
from gradaccum.torch.watch.messages import KEPT_VALUES, SEVERAL_PASSES, several_passes_warning

__all__ = ["GradientMonitor", "Modification", "ShardedMonitor", "all_require_grad"]

logger = logging.getLogger("gradaccum")

Modification = Literal["cleared", "edited", "left", "assigned"]

_COMPARED = 4
"""In windows that look at everything, values are compared in so many micro-batches, and in the last one."""


class _Passes:
    """The backward passes that bring gradients, as far as the counting hooks see them."""

    def __init__(self) -> None:
        self.current: int | None = None
        """The pass that brought the last gradient."""
        self.unfinished: set[int] = set()
        self.began: list[int] = []
        """How many operations had been recorded when the micro-batch began, and when each of its passes did."""
        self.on_end: Callable[[], None] | None = None
        """Called when a pass is over, in windows that look at every parameter."""

    def next_micro_batch(self) -> None:
        """Passes that begin from now on belong to the next micro-batch."""
        self.began = [] if self.on_end is None else [recorded_operations()]

    def begin(self, number: int | None) -> None:
        """The first gradient of a backward pass has arrived."""
        # FSDP2 calls hooks outside of backward passes, too.
        if number is None or number == -1 or torch.compiler.is_compiling():
            return
        self.current = number
        self.unfinished.add(number)
        queue_callback(functools.partial(self.unfinished.discard, number))
        if self.on_end is not None:
            queue_callback(self.on_end)
            if len(self.unfinished) == 1:  # checkpointing runs passes inside of one
                self.began.append(recorded_operations())


class _Sum:
    """A parameter's gradient as it was when it was last looked at, or began. The parameter's hook holds only this."""

    __slots__ = ("arrivals", "gradient", "seen", "version")

    def __init__(self) -> None:
        self.arrivals = 0
        """Since the last micro-batch was counted."""
        self.seen = 0
        """How many of these came before the last look."""
        self.gradient: Tensor | None = None  # kept, so that no other tensor can have its id
        self.version = 0


class _Watched:
    """A parameter, and its gradient as it should be."""

    __slots__ = ("comparable", "finished", "handle", "in_window", "parameter", "sum")

    def __init__(self, parameter: Tensor, passes: _Passes) -> None:
        self.parameter = parameter
        self.sum = sum_ = _Sum()
        self.in_window = 0
        self.comparable: bool | None = None
        """Whether values of this gradient can be compared; None until somebody asks."""
        self.finished: tuple[Tensor, int] | None = None  # what the last update was made with

        def arrived(parameter: Tensor) -> None:
            if sum_.gradient is None and parameter.grad is not None:  # the first one: it is the sum from here on
                sum_.gradient, sum_.version = parameter.grad, parameter.grad._version
                sum_.seen = sum_.arrivals + 1
            sum_.arrivals += 1
            number = current_backward()
            if number != passes.current:
                passes.begin(number)

        with all_require_grad([parameter]):
            self.handle = parameter.register_post_accumulate_grad_hook(arrived)
        self.look()

    def look(self) -> None:
        """The gradient is as it should be."""
        sum_, gradient = self.sum, self.parameter.grad
        sum_.seen = sum_.arrivals
        if gradient is not None:
            sum_.version = gradient._version
            if self.comparable is None or gradient is not sum_.gradient:
                self.comparable = _has_digest(gradient)
        sum_.gradient = gradient

    @property
    def as_it_was(self) -> bool:
        """Whether one glance shows that nothing has happened to the gradient since the last look, as nearly always."""
        sum_, gradient = self.sum, self.sum.gradient
        same = self.finished is None and (gradient is None or gradient._version == sum_.version)
        return gradient is self.parameter.grad and same and sum_.arrivals == sum_.seen

    def modification(self) -> Modification | None:
        """What was done to the gradient since the last look, as far as the tensor and its version show."""
        gradient, before, arrived = self.parameter.grad, self.sum.gradient, self.sum.arrivals - self.sum.seen
        if self.finished is not None and gradient is self.finished[0]:
            left = self.sum.arrivals and gradient._version == self.finished[1] + self.sum.arrivals
            return "left" if left and _counts_versions(gradient) else None
        if before is None:
            return None if gradient is None or arrived else "assigned"
        if gradient is before:
            edited = gradient._version != self.sum.version + arrived
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

    def __init__(self, parameters: Callable[[], list[Tensor]]) -> None:
        self._parameters = parameters
        self._windows = 0
        self._watched: list[_Watched] = []
        self.looking = False
        """Whether this window looks at every parameter."""
        self._reads_norms = False
        """Whether an edit was seen that changed nothing: from then on values are always compared."""
        self._passes = _Passes()
        self.unfinished = self._passes.unfinished
        """Backward passes that have brought a gradient, and have not come to their end."""
        self._passes_noted = self._passes_warned = False
        self._seen = 0
        """Arrivals before the last look."""
        self._on_end = functools.partial(_pass_over, weakref.ref(self))
        self.watch_all()
        self.restart()
        self._look()

    def _watch(self, parameters: Iterable[Tensor]) -> None:
        before = {id(watched.parameter): watched for watched in self._watched}
        self._watched = [
            before.pop(id(p)) if id(p) in before else _Watched(p, self._passes) for p in _leaves(parameters)
        ]
        for watched in before.values():
            watched.handle.remove()

    def watch_all(self) -> None:
        """Look at every parameter until the window closes."""
        self._watch(self._parameters())
        self.looking, self._passes.on_end = True, self._on_end

    def remove(self) -> None:
        """Stop watching: leave the parameters without hooks."""
        self._watch([])

    # A window, from its first backward pass to its update.

    def restart(self) -> None:
        """The sum is empty: whatever comes next begins a new one."""
        self._counted, self._last_next = 0, False
        self._modification: Modification | None = None
        self._passes.current = None
        self.unfinished.clear()
        self._passes.next_micro_batch()
        self._digest: Tensor | None = None
        for watched in self._watched:
            watched.sum.arrivals = watched.sum.seen = 0
            watched.sum.gradient = watched.finished = watched.comparable = None

    def count_untouched(self) -> bool:
        """Count the micro-batch, if one look at the sentinels shows that autograd alone has written the sum."""
        if self.looking or self.unfinished or self._modification is not None:
            return False
        for watched in self._watched:
            sum_, gradient = watched.sum, watched.parameter.grad
            if gradient is None or gradient is not sum_.gradient or not sum_.arrivals:
                return False
            if gradient._version != sum_.version + sum_.arrivals - sum_.seen:
                return False
            if watched.finished is not None and gradient is watched.finished[0]:
                return False
        for watched in self._watched:
            sum_ = watched.sum
            sum_.version += sum_.arrivals - sum_.seen
            sum_.arrivals = sum_.seen = 0
        return bool(self._watched)

    def counted(self, last_next: bool = False) -> None:
        """A micro-batch is in, which weighs something; `last_next` if the next one closes the window."""
        nothing = not self.looking and all(w.parameter.grad is None for w in self._watched)
        if not self.arrivals and nothing:
            self.watch_all()
        if self.looking:
            self._counted += 1
            self._last_next = last_next
        seen = self.looking and self.arrivals == self._seen and not nothing
        self.forget_arrivals()
        if not seen or (self._digest is None) == self._compares:
            self._look()

    def close(self) -> None:
        """A window is over: choose what to watch in the next one."""
        self.forget_arrivals()
        self._windows += 1
        if self._reads_norms or (self._windows + 1) & self._windows == 0:
            self.watch_all()
        elif self.looking:
            most = max([watched.in_window for watched in self._watched], default=0)
            likely = [watched.parameter for watched in self._watched if watched.in_window == most > 0]
            if likely:
                self._watch(likely[i] for i in sorted({0, len(likely) // 2, len(likely) - 1}))
                self.looking, self._passes.on_end = False, None
        self.restart()
        for watched in self._watched:
            # The update is made with this gradient, which is not to join the next sum.
            gradient, watched.in_window = watched.parameter.grad, 0
            watched.finished = None if gradient is None else (gradient, gradient._version)

    # What has arrived.

    @property
    def arrivals(self) -> int:
        """Gradients that have arrived at watched parameters since the last micro-batch was counted."""
        total = 0
        for watched in self._watched:
            total += watched.sum.arrivals
        return total

    def forget_arrivals(self) -> None:
        """What arrives from now on belongs to the next micro-batch."""
        self._seen = 0
        self._passes.next_micro_batch()
        for watched in self._watched:
            watched.in_window += watched.sum.arrivals
            watched.sum.arrivals = watched.sum.seen = 0

    def arrived(self) -> None:
        """Gradients have been added by the wrapper itself, as a backward pass would."""
        for watched in self._watched:
            watched.sum.arrivals += watched.parameter.grad is not None
        self._look()

    @property
    def idle(self) -> bool:
        """Whether no gradient whatsoever has come since the last micro-batch was counted; False where unknown."""
        if not self.looking or self.arrivals or len(self._watched) < len(self._parameters()):
            return False
        return all(watched.modification() is None for watched in self._watched)

    @property
    def failed(self) -> bool:
        """Whether a backward pass has brought a gradient, and never came to its end."""
        return bool(self.unfinished) and current_backward() in (None, -1)

    @property
    def passes(self) -> int:
        """How many backward passes have brought a gradient since the last micro-batch was counted."""
        return max((watched.sum.arrivals for watched in self._watched), default=0)

    def warn_of_several_passes(self, steps: int) -> None:
        """Name a loop that still accumulates by hand: several backward passes reached one `step()`."""
        passes = self.passes
        if passes < 2 or self._passes_warned or not self.looking:
            return
        # Several losses share a forward pass, or have one each that differs. By hand each pass has one of its own, and
        # all are alike, as many as a window has steps. Before the very first, something else may have run.
        began = self._passes.began
        operations = [after - before for before, after in itertools.pairwise(began)]
        alike = {watched.sum.arrivals for watched in self._watched} <= {0, passes} and passes == steps
        repeats = alike and len(operations) == passes and operations[-1] > 1 and len({*operations[1:]}) == 1
        if repeats and operations[0] == operations[-1]:
            self._passes_warned = True
            logger.warning(several_passes_warning(passes))
        elif not self._passes_noted and (not repeats or self._counted):
            self._passes_noted = True
            logger.info(SEVERAL_PASSES, passes)

    # Modifications.

    def modification(self) -> Modification | None:
        """What was done to the sum; None if autograd alone touched it."""
        if self._modification is None:
            self._modification = self._found()
        return self._modification

    def _found(self) -> Modification | None:
        edited = False
        for watched in self._watched:
            found = None if watched.as_it_was else watched.modification()
            if found == "assigned" and not (self.looking and watched.parameter.grad.count_nonzero()):  # type: ignore[union-attr]  # it has one
                continue
            if found == "edited" and self._digest is not None:
                edited = True  # or only written
            elif found is not None:
                return found
        if self._digest is None or self.arrivals > self._seen:
            return "edited" if edited else None
        if self._differs(self._digest):
            return "edited"
        if edited:
            if not self._reads_norms:
                self._reads_norms = True
                logger.warning(KEPT_VALUES)
            self._look()
        return None

    def pass_over(self) -> None:
        if self.looking:
            self.record(self.modification())
            self._look()

    def record(self, modification: Modification | None) -> None:
        """What was done to the sum, unless something was before."""
        self._modification = self._modification or modification

    def resync(self) -> None:
        """The sum was changed on purpose, by the wrapper itself."""
        self._look()

    @contextlib.contextmanager
    def resyncing(self) -> Iterator[None]:
        """The wrapper itself changes the sum; what was done to it before is not forgotten."""
        self.modification()
        yield
        self.resync()

    def forget_values(self) -> None:
        self._digest = None

    def _look(self) -> None:
        for watched in self._watched:
            watched.look()
        self._seen = self.arrivals
        self._digest = _digest(self._comparable()) if self._compares else None

    @property
    def _compares(self) -> bool:
        return self.looking and (self._reads_norms or self._counted < _COMPARED or self._last_next)

    def _comparable(self) -> list[Tensor]:
        return [w.sum.gradient for w in self._watched if w.sum.gradient is not None and w.comparable]

    def _differs(self, digest: Tensor) -> bool:
        """Whether the gradients have other values than at the last look. Waits for the device."""
        gradients = self._comparable()
        now = _digest(gradients)
        if now is None or now.shape != digest.shape:
            return True
        sizes = [4 * torch.finfo(digest.dtype).eps * g.numel() ** 0.5 for g in gradients]
        rounding = torch.tensor(sizes, dtype=digest.dtype, device=digest.device)  # threads may differ
        same = (digest - now).abs() <= rounding * digest[0]
        return not bool((same | (digest == now) | (digest.isnan() & now.isnan())).all())


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
        if not self._watched:
            self._watch(_leaves(self._parameters())[-1:])

    def restart(self) -> None:
        super().restart()
        self._kept = []

    def count_untouched(self) -> bool:
        return False

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
    if (watching := monitor()) is not None:
        watching.pass_over()


def _leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.is_leaf and not is_lazy(p) and (p.is_floating_point() or p.is_complex())]


def _has_digest(gradient: Tensor) -> bool:
    """Whether its values can be compared."""
    return (
        not gradient.is_sparse and gradient.device.type != "mps" and gradient.numel() > 0 and _counts_versions(gradient)
    )


@torch.no_grad()
def _digest(gradients: list[Tensor]) -> Tensor | None:
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


@contextlib.contextmanager
def all_require_grad(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Frozen leaves require gradients meanwhile: torch hooks no others, and they may be unfrozen later."""
    frozen = [leaf for leaf in leaves if not leaf.requires_grad]
    for leaf in frozen:
        leaf.requires_grad_(True)
    try:
        yield
    finally:
        for leaf in frozen:
            leaf.requires_grad_(False)
