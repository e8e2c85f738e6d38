"""Notices what happens to the sum of an open window behind the wrapper's back."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradaccum.on_torch.private import current_backward, queue_callback
from gradaccum.torch.guard.messages import NOTHING_CHANGED
from gradaccum.torch.guard.watched import UNKNOWN, Tampering, Watched, differ

__all__ = ["Guard"]

logger = logging.getLogger("gradaccum")

_COMPARED = 4
"""In windows that are watched whole, the first so many micro-batches are compared by value, too, and the last one."""


class Guard:
    """Watches gradients of a window: autograd adds to them in place and raises their version by exactly one.

    Anything else (clipping, `model.zero_grad()`, another loss's gradient) shows as another tensor, another version, or
    an arrival at the wrong time. In windows 1, 2, 4, 8, ... every parameter is watched; in between the first, the
    middle and the last of those that received most gradients, for some microseconds per micro-batch whatever their
    number. A window in which none of the three receives one is watched whole.

    What raises no version, as `p.grad.data.clamp_()`, or raises it and changes nothing, as reading a norm with
    `clip_grad_norm_(parameters, inf)`, shows where values are compared: a sum and a norm of each gradient, in the first
    micro-batches of windows that are watched whole, and in the last one. After an edit that changed nothing it is all
    gradients, always.

    A backward pass that has brought a gradient and never came to its end has failed.

    Args:
        parameters: Called whenever the parameters are needed.
        whole: Whether to watch every parameter at times. Else it is the last one.
        pending: What has been added up beside the parameters, where that may be.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        whole: bool = True,
        pending: Callable[[], list[Tensor]] = list,
    ) -> None:
        self._parameters, self._pending = parameters, pending
        self._whole = whole
        self._windows = 0
        self._watched: list[Watched] = []
        self._watches_all = False
        self._reads_norms = False
        """Whether an edit was seen that changed nothing."""
        self._unfinished: set[int] = set()
        """Backward passes that have brought a gradient, and are not over."""
        self.restart()
        if whole:
            self.watch_all()
        else:
            self._watch(_leaves(parameters)[-1:])

    def _watch(self, parameters: Iterable[Tensor]) -> None:
        before = {id(watched.parameter): watched for watched in self._watched}
        self._watched = [before.pop(id(p)) if id(p) in before else Watched(p, self) for p in parameters]
        for watched in before.values():
            watched.remove()

    def watch_all(self) -> None:
        """Watch every parameter until the window closes."""
        if self._whole:
            self._watch(_leaves(self._parameters))
            self._watches_all = True
            self._settle()

    def remove(self) -> None:
        """Stop watching: leave the parameters without hooks."""
        self._watch([])

    def restart(self) -> None:
        """The sum is empty: whatever comes next begins a new one."""
        self.arrivals = 0
        """Gradients that have arrived at watched parameters since the last micro-batch was counted."""
        self._counted, self._last_next = 0, False
        self._settle()
        self._tampering: Tampering | None = None
        self.current_pass: int | None = None
        """The backward pass that brought the last gradient."""
        self._unfinished.clear()
        self._kept: list[tuple[Tensor, int]] = []
        for watched in self._watched:
            watched.gradient = watched.finished = watched.digest = None

    def close(self) -> None:
        """A window is over: choose what to watch in the next one."""
        self.restart()
        self._windows += 1
        if not self._whole:
            return
        if self._reads_norms or (self._windows + 1) & self._windows == 0:
            self.watch_all()
        elif self._watches_all:
            most = max((watched.arrivals for watched in self._watched), default=0)
            likely = [watched.parameter for watched in self._watched if watched.arrivals == most > 0]
            if likely:
                self._watch(likely[i] for i in sorted({0, len(likely) // 2, len(likely) - 1}))
                self._watches_all = False
                self._settle()
        for watched in self._watched:
            # The update is made with this gradient, which is not to join the next sum.
            gradient, watched.arrivals = watched.parameter.grad, 0
            watched.finished = None if gradient is None else (gradient, gradient._version)

    def counted(self, last_next: bool) -> None:
        """A micro-batch is in, which weighs something; `last_next` if the next one closes the window."""
        if not self.arrivals and not self._watches_all and all(w.parameter.grad is None for w in self._watched):
            self.watch_all()
            self.accept()
        self.arrivals = 0
        if self._watches_all:
            self._counted += 1
            self._last_next = last_next
            self._settle()
            if not self.compares:
                self.forget_values()

    def window_begins(self) -> None:
        """The parameters are as all micro-batches of the window are to see them."""
        for watched in self._watched:
            watched.parameter_version = watched.parameter._version

    @property
    def parameters_changed(self) -> bool:
        """Whether a parameter was written since the window began."""
        for watched in self._watched:
            version = watched.parameter_version
            if version != watched.parameter._version and version != UNKNOWN:
                return True
        return False

    @property
    def untouched(self) -> bool:
        """Whether one look shows that autograd alone has written the sum, and nobody the parameters: next to always."""
        if self._unfinished or self._kept or self._tampering is not None:
            return False
        for watched in self._watched:
            parameter, gradient = watched.parameter, watched.gradient
            if parameter._version != watched.parameter_version:
                return False
            if gradient is not None and (
                gradient is not parameter.grad or gradient._version != watched.version or watched.digest is not None
            ):
                return False
        return True

    @property
    def idle(self) -> bool:
        """Whether no gradient whatsoever has come since the last micro-batch was counted; False where unknown."""
        if self.arrivals or not self._watches_all or len(self._watched) < len(self._parameters()):
            return False
        return all(watched.tampering() is None for watched in self._watched)

    def _settle(self) -> None:
        telling = self._counted < _COMPARED or self._last_next
        self.compares = self._watches_all and (self._reads_norms or telling)
        """Whether gradients are compared by value."""

    @property
    def failed(self) -> bool:
        """Whether a backward pass has brought a gradient, and never came to its end."""
        return bool(self._unfinished) and current_backward() in (None, -1)

    def accept(self) -> None:
        """The sum was changed on purpose, by the wrapper itself."""
        if self._kept:
            self.keep()
        for watched in self._watched:
            watched.look(self.compares)

    def forget_values(self) -> None:
        """Compare nothing by value until the next gradient arrives."""
        for watched in self._watched:
            watched.digest = None

    @contextlib.contextmanager
    def accepting(self) -> Iterator[None]:
        """The wrapper itself changes the sum; what was done to it before is not forgotten."""
        self.tampering()
        yield
        self.accept()

    def tampering(self) -> Tampering | None:
        """What was done to the sum; None if autograd alone touched it."""
        if self._kept:
            self._look_at_kept()
        if self._tampering is None:
            compared = []
            for watched in self._watched:
                gradient = watched.gradient
                if gradient is None:
                    continue
                same = gradient is watched.parameter.grad and gradient._version == watched.version
                if same and watched.digest is None:  # next to always
                    continue
                found = watched.tampering()
                if watched.digest is not None and found != "cleared":
                    compared.append(watched)
                elif found is not None:
                    self._tampering = found
                    return found
            if compared:
                self._tampering = self._compare(compared)
        return self._tampering

    def _compare(self, watched: list[Watched]) -> Tampering | None:
        """Whether these gradients have other values than when they were last looked at."""
        if differ(*zip(*((one.digest, one.gradient) for one in watched), strict=True)):
            return "edited"
        if any(one.tampering() for one in watched):
            if not self._reads_norms:
                self._reads_norms = True
                self._settle()
                logger.warning(NOTHING_CHANGED)
            self.accept()
        return None

    def pass_begins(self, number: int) -> None:
        """The first gradient of a backward pass has arrived."""
        # FSDP2 calls hooks outside of backward passes, too.
        if number == -1 or torch.compiler.is_compiling():
            return
        self.current_pass = number
        self._unfinished.add(number)
        queue_callback(functools.partial(self._unfinished.discard, number))

    def keep(self) -> None:
        """Where all ranks run the same passes, remember the sum as it is: it changes in backward passes alone."""
        if not self._whole:
            held = [parameter.grad for parameter in self._parameters()] + self._pending()
            self._kept = [(tensor, tensor._version) for tensor in held if tensor is not None]

    def keep_after_pass(self) -> None:
        """A backward pass has started: look at the sum when it is over, behind what others do at its end."""
        self._look_at_kept()
        self._kept = []
        if not self._whole and not torch.compiler.is_compiling():
            queue_callback(functools.partial(queue_callback, self.keep))

    def _look_at_kept(self) -> None:
        if any(tensor._version != version for tensor, version in self._kept):
            self.noticed("edited")

    def noticed(self, tampering: Tampering | None) -> None:
        """What was done to a gradient before the next one arrived."""
        self._tampering = self._tampering or tampering


def _leaves(parameters: Callable[[], list[Tensor]]) -> list[Tensor]:
    return [p for p in parameters() if p.is_leaf and not is_lazy(p) and (p.is_floating_point() or p.is_complex())]
