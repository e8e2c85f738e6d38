"""Notices what happens to the sum of an open window behind the wrapper's back."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradaccum.errors import WindowError
from gradaccum.on_torch.gradients import all_require_grad
from gradaccum.on_torch.private import current_backward, queue_callback

__all__ = [
    "Guard",
    "failed_error",
    "tampering_error",
    "untouched_error",
]

logger = logging.getLogger("gradaccum")

_UNKNOWN = -1
_COMPARED = 4
"""In windows that are watched whole, this many micro-batches are compared by value, too; in the first one, all."""

Tampering = Literal["cleared", "edited", "left"]


class Guard:
    """Watches gradients of a window: autograd adds to them in place and raises their version by exactly one.

    Anything else (clipping, `model.zero_grad()`, another loss's gradient) shows as another tensor, another version, or
    an arrival at the wrong time. In windows 1, 2, 4, 8, ... every parameter is watched; in between the first, the
    middle and the last of those that received most gradients, for some microseconds per micro-batch whatever their
    number. A window in which none of the three receives one is watched whole.

    What raises no version, as `p.grad.data.clamp_()`, or raises it and changes nothing, as reading a norm with
    `clip_grad_norm_(parameters, inf)`, shows where values are compared: a sum and a norm of each gradient, in the first
    window, and in the first micro-batches of others that are watched whole. After an edit that changed nothing it is
    all gradients, always.

    A backward pass that has brought a gradient and never came to its end has failed.

    Args:
        parameters: Called whenever the parameters are needed.
        whole: Whether to watch every parameter at times. Else it is the last one.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]], whole: bool = True) -> None:
        self._parameters = parameters
        self._whole = whole
        self._windows = 0
        self._watched: list[_Watched] = []
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
        self._watched = [before.pop(id(p)) if id(p) in before else _Watched(p, self) for p in parameters]
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
        self._counted = 0
        self._settle()
        self._tampering: Tampering | None = None
        self._pass: int | None = None
        self._unfinished.clear()
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
            watched.arrivals = 0
            watched.finish()

    def counted(self) -> None:
        """A micro-batch is in, which weighs something."""
        if not self.arrivals and not self._watches_all and all(w.parameter.grad is None for w in self._watched):
            self.watch_all()
            self.accept()
        self.arrivals = 0
        if self.compares:
            self._counted += 1
            self._settle()

    def window_begins(self) -> None:
        """The parameters are as all micro-batches of the window are to see them."""
        for watched in self._watched:
            watched.parameter_version = watched.parameter._version

    @property
    def parameters_changed(self) -> bool:
        """Whether a parameter was written since the window began."""
        return any(w.parameter_version not in (_UNKNOWN, w.parameter._version) for w in self._watched)

    @property
    def idle(self) -> bool:
        """Whether no gradient whatsoever has come since the last micro-batch was counted; False where unknown."""
        if self.arrivals or not self._watches_all or len(self._watched) < len(self._parameters()):
            return False
        return all(watched.tampering() is None for watched in self._watched)

    def _settle(self) -> None:
        first = self._windows == 0 or self._counted < _COMPARED
        self.compares = self._watches_all and (self._reads_norms or first)
        """Whether gradients are compared by value."""

    @property
    def failed(self) -> bool:
        """Whether a backward pass has brought a gradient, and never came to its end."""
        return bool(self._unfinished) and current_backward() in (None, -1)

    def accept(self) -> None:
        """The sum was changed on purpose, by the wrapper itself."""
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
        if self._tampering is None:
            compared = []
            for watched in self._watched:
                if watched.gradient is None:
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

    def _compare(self, watched: list[_Watched]) -> Tampering | None:
        """Whether these gradients have other values than when they were last looked at."""
        if _differ(*zip(*((one.digest, one.gradient) for one in watched), strict=True)):
            return "edited"
        if any(one.tampering() for one in watched):
            if not self._reads_norms:
                self._reads_norms = True
                self._settle()
                logger.warning(_NOTHING_CHANGED)
            self.accept()
        return None

    def arrived(self, tampering: Tampering | None) -> None:
        """A gradient has arrived."""
        self.arrivals += 1
        self._tampering = self._tampering or tampering
        number = current_backward()
        # FSDP2 calls hooks outside of backward passes, too.
        if number != self._pass and number not in (None, -1) and not torch.compiler.is_compiling():
            assert number is not None
            self._pass = number
            self._unfinished.add(number)
            queue_callback(functools.partial(self._unfinished.discard, number))


class _Watched:
    """A parameter, and its gradient as it was when autograd or the wrapper had last changed it."""

    __slots__ = (
        "__weakref__",
        "_handle",
        "arrivals",
        "digest",
        "finished",
        "gradient",
        "parameter",
        "parameter_version",
        "version",
    )

    def __init__(self, parameter: Tensor, guard: Guard) -> None:
        self.parameter = parameter
        self.arrivals = 0
        self.gradient: Tensor | None = None  # kept, so that no other tensor can have its id
        self.finished: tuple[Tensor, int] | None = None
        self.version, self.parameter_version = 0, _UNKNOWN
        self.digest: Tensor | None = None  # of its values, where they are compared
        this, guard_of = weakref.ref(self), weakref.ref(guard)  # the parameter shall not keep the optimizer alive

        def arrived(parameter: Tensor) -> None:
            watched, guard = this(), guard_of()
            if watched is None or guard is None:
                return
            watched.arrivals += 1
            gradient, before = parameter.grad, watched.gradient
            tampering: Tampering | None = None
            if before is not None and gradient is not None:
                tampering = watched.tampering_before(gradient)
            elif watched.finished is not None and gradient is not None:
                tampering = watched.left_before(gradient)
            watched.gradient = gradient
            if gradient is not None:  # else another hook has taken it
                # Compiled autograd adds later, in its own way.
                watched.version = _UNKNOWN if torch.compiler.is_compiling() else gradient._version
                watched.digest = _digest(gradient) if guard.compares else None
            guard.arrived(tampering)

        with all_require_grad([parameter]):
            self._handle = parameter.register_post_accumulate_grad_hook(arrived)

    def remove(self) -> None:
        self._handle.remove()

    def look(self, compares: bool) -> None:
        self.gradient = gradient = self.parameter.grad
        if gradient is not None:
            self.version = gradient._version
            self.digest = _digest(gradient) if compares else None

    def finish(self) -> None:
        """The update of a window is made with this gradient, which is not to join the next sum."""
        gradient = self.parameter.grad
        self.finished = None if gradient is None else (gradient, gradient._version)

    def left_before(self, gradient: Tensor) -> Tampering | None:
        """Whether the last window's gradient was still there when this one arrived."""
        finished, self.finished = self.finished, None
        assert finished is not None
        same = gradient is finished[0] and gradient._version == finished[1] + 1 and _counts_versions(gradient)
        return "left" if same else None

    def tampering(self) -> Tampering | None:
        """What was done to the gradient since it was last looked at."""
        gradient = self.parameter.grad
        if gradient is not self.gradient:
            return "cleared"
        if gradient is None or self.version in (gradient._version, _UNKNOWN) or not _counts_versions(gradient):
            return None
        return "edited"

    def tampering_before(self, gradient: Tensor) -> Tampering | None:
        """What was done to the gradient before this one arrived."""
        if gradient is self.gradient and self.version in (gradient._version - 1, _UNKNOWN):
            return None
        # With create_graph=True, and for sparse gradients, autograd adds out of place.
        if torch.is_grad_enabled() or gradient.is_sparse or not _counts_versions(gradient):
            return None
        return "cleared" if gradient is not self.gradient else "edited"


def _leaves(parameters: Callable[[], list[Tensor]]) -> list[Tensor]:
    return [p for p in parameters() if p.is_leaf and not is_lazy(p) and (p.is_floating_point() or p.is_complex())]


@torch.no_grad()
def _digest(gradient: Tensor) -> Tensor | None:
    """A sum and a 2-norm, on the gradient's device: other values show in one of them. None where it can't be told."""
    if gradient.is_sparse or gradient.device.type == "mps" or not _counts_versions(gradient):
        return None
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    wide = torch.float64
    return torch.stack([numbers.sum(dtype=wide), torch.linalg.vector_norm(numbers, dtype=wide)])


@torch.no_grad()
def _differ(digests: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether one of these gradients has other values than at its digest. Waits for the device."""
    device = digests[0].device
    was = torch.stack([digest.to(device) for digest in digests])
    now = torch.stack(
        [torch.full_like(was[0], torch.nan) if d is None else d.to(device) for d in map(_digest, gradients)]
    )
    rounding = [
        4 * torch.finfo(was.dtype).eps * gradient.numel() ** 0.5 for gradient in gradients
    ]  # threads may differ
    same = (was - now).abs() <= torch.tensor(rounding, dtype=was.dtype, device=device)[:, None] * was[:, 1:]
    return not bool((same | (was == now) | (was.isnan() & now.isnan())).all())


def _counts_versions(gradient: Tensor) -> bool:
    """Whether the gradient's version rises when it is edited, and only then. Asked only where something differs.

    Views, such as those of DDP's buckets, share theirs with others, as do parts of a larger tensor, after torch.cat of
    parameters; a DTensor's shard has its own.
    """
    if gradient._is_view() or hasattr(gradient, "to_local") or torch.compiler.is_compiling():
        return False
    return gradient.is_sparse or gradient.untyped_storage().nbytes() <= gradient.nbytes


# What users are told.

_NOTHING_CHANGED = (
    "The gradients were written inside an open window and kept their values, as clip_grad_norm_(parameters, inf) does "
    "to read a norm. From now on they are compared on every micro-batch; torch.nn.utils.get_total_norm reads a norm "
    "without that. Clipping that has an effect is an error there: pass clip_grad_norm= to the wrapper."
)


def tampering_error(tampering: Tampering) -> WindowError:
    """Somebody else has changed the sum."""
    trainer = _inside_the_trainer()
    if trainer is not None:
        return WindowError(trainer)
    advice = {
        "cleared": "cleared or replaced inside an open window, by model.zero_grad() perhaps. Use "
        "optimizer.zero_grad(), which waits for the window's end.",
        "edited": "edited inside an open window, by clipping perhaps. Until step() closes the window p.grad holds "
        "an undivided sum. Pass clip_grad_norm= to the wrapper, or edit the finished gradient in a hook: "
        "register_step_pre_hook. To read a norm without editing use torch.nn.utils.get_total_norm.",
        "left": "left from the last window: the finished mean gradient would join this window's sum. Call "
        "optimizer.zero_grad() on every micro-batch, which waits for the window's end.",
    }[tampering]
    return WindowError(f"The gradients were {advice} discard() drops the window.")


def untouched_error() -> WindowError:
    """A gradient has arrived that no micro-batch counts."""
    return WindowError(
        "A gradient has arrived since the last step(), and belongs to no micro-batch. Call step() after the backward "
        "pass of every micro-batch: it counts them. If another loss reaches these parameters, as a GAN's generator "
        "loss reaches its discriminator, switch requires_grad_(False) on them meanwhile. To skip a micro-batch, use "
        "backward(loss, weight=0). discard() empties the window."
    )


def failed_error(failure: BaseException | None) -> WindowError:
    """A backward pass has failed."""
    kind = "" if failure is None else f" ({type(failure).__name__})"
    return WindowError(
        f"A backward pass of this window failed{kind}, and may have left part of its gradient in the sum. Call "
        "discard() to drop the window; parameters and optimizer state are as they were."
    )


def _inside_the_trainer() -> str | None:
    """What to do about transformers' Trainer, if that is the caller."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return (
                "transformers' Trainer clips p.grad and calls model.zero_grad() after every micro-batch, where an "
                "open window holds its sum. Pass the Trainer the inner optimizer, and either let it accumulate itself "
                "(TrainingArguments(gradient_accumulation_steps=...)), or write the loop with optimizer.batches(), or "
                "call gradaccum.torch.TrainStep in it, which has no open windows between its calls."
            )
        frame = frame.f_back
    return None
