"""A parameter that is watched: its gradient as autograd left it, and what has been done to it since."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from gradaccum.on_torch.private import current_backward, queue_callback

__all__ = ["UNKNOWN", "Tally", "Tampering", "Watched", "all_require_grad", "differ"]

UNKNOWN = -2
"""No version, nor one that a version is raised to by one."""

Tampering = Literal["cleared", "edited", "left"]


class Tally:
    """What the hooks on watched parameters have seen. It is all that they hold: parameters keep no optimizer alive."""

    __slots__ = ("arrivals", "compares", "current_pass", "noticed", "unfinished")

    def __init__(self) -> None:
        self.compares = False
        """Whether gradients are compared by value."""
        self.unfinished: set[int] = set()
        """Backward passes that have brought a gradient, and are not over."""
        self.restart()

    def restart(self) -> None:
        """Nothing has arrived."""
        self.arrivals = 0
        """Gradients that have arrived since the last micro-batch was counted."""
        self.current_pass: int | None = None
        """The backward pass that brought the last gradient."""
        self.noticed: Tampering | None = None
        """The first thing that was done to a gradient before the next one arrived."""
        self.unfinished.clear()

    def pass_begins(self, number: int) -> None:
        """The first gradient of a backward pass has arrived."""
        # FSDP2 calls hooks outside of backward passes, too.
        if number != -1 and not torch.compiler.is_compiling():
            self.current_pass = number
            self.unfinished.add(number)
            queue_callback(functools.partial(self.unfinished.discard, number))


class Watched:
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
        "tally",
        "version",
    )

    def __init__(self, parameter: Tensor, tally: Tally) -> None:
        self.parameter, self.tally = parameter, tally
        self.arrivals = 0
        self.gradient: Tensor | None = None  # kept, so that no other tensor can have its id
        self.finished: tuple[Tensor, int] | None = None
        self.version, self.parameter_version = 0, UNKNOWN
        self.digest: Tensor | None = None  # of its values, where they are compared
        this = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            watched = this()
            if watched is None:
                return
            gradient, tally = parameter.grad, watched.tally
            watched.arrivals += 1
            tally.arrivals += 1
            number = current_backward()
            if number != tally.current_pass and number is not None:
                tally.pass_begins(number)
            if gradient is watched.gradient and gradient is not None and not tally.compares:
                version = watched.version + 1
                if gradient._version == version:
                    watched.version, watched.digest = version, None  # next to always
                    return
            watched.look_closer(gradient)

        with all_require_grad([parameter]):
            self._handle = parameter.register_post_accumulate_grad_hook(arrived)

    def remove(self) -> None:
        self._handle.remove()

    def look_closer(self, gradient: Tensor | None) -> None:
        """A gradient has arrived where there was none, or not in the way autograd adds one."""
        tally, before = self.tally, self.gradient
        if gradient is not None:
            if before is not None:
                tally.noticed = tally.noticed or self.tampering_before(gradient)
            elif self.finished is not None:
                tally.noticed = tally.noticed or self.left_before(gradient)
        self.gradient = gradient
        if gradient is not None:  # else another hook has taken it
            # Compiled autograd adds later, in its own way.
            self.version = UNKNOWN if torch.compiler.is_compiling() else gradient._version
            self.digest = _digest(gradient) if tally.compares else None

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
        if gradient is None or self.version in (gradient._version, UNKNOWN) or not _counts_versions(gradient):
            return None
        return "edited"

    def tampering_before(self, gradient: Tensor) -> Tampering | None:
        """What was done to the gradient before this one arrived."""
        if gradient is self.gradient and self.version in (gradient._version - 1, UNKNOWN):
            return None
        # With create_graph=True, and for sparse gradients, autograd adds out of place.
        if torch.is_grad_enabled() or gradient.is_sparse or not _counts_versions(gradient):
            return None
        return "cleared" if gradient is not self.gradient else "edited"


@torch.no_grad()
def _digest(gradient: Tensor) -> Tensor | None:
    """A sum and a 2-norm, on the gradient's device: other values show in one of them. None where it can't be told."""
    if gradient.is_sparse or gradient.device.type == "mps" or not _counts_versions(gradient):
        return None
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    wide = torch.float64
    return torch.stack([numbers.sum(dtype=wide), torch.linalg.vector_norm(numbers, dtype=wide)])


@torch.no_grad()
def differ(digests: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
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
