"""A parameter that is watched: its gradient as autograd left it, and what has been done to it since."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from gradaccum.on_torch.private import current_backward

__all__ = ["UNKNOWN", "Tampering", "Watched", "all_require_grad", "differ"]

UNKNOWN = -2
"""No version, nor one that a version is raised to by one."""

Tampering = Literal["cleared", "edited", "left"]


class Listener(Protocol):
    """What hears of the gradients that arrive."""

    arrivals: int
    compares: bool
    """Whether gradients are compared by value."""
    current_pass: int | None
    """The backward pass that brought the last gradient."""

    def pass_begins(self, number: int) -> None:
        """The first gradient of this backward pass has arrived."""

    def noticed(self, tampering: Tampering | None) -> None:
        """What was done to a gradient before the next one arrived."""


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
        "version",
    )

    def __init__(self, parameter: Tensor, listener: Listener) -> None:
        self.parameter = parameter
        self.arrivals = 0
        self.gradient: Tensor | None = None  # kept, so that no other tensor can have its id
        self.finished: tuple[Tensor, int] | None = None  # what an update was made with
        self.version, self.parameter_version = 0, UNKNOWN
        self.digest: Tensor | None = None  # of its values, where they are compared
        this, listener_of = weakref.ref(self), weakref.ref(listener)  # the parameter shall not keep the optimizer alive

        def arrived(parameter: Tensor) -> None:
            watched, listener = this(), listener_of()
            if watched is None or listener is None:
                return
            watched.arrivals += 1
            listener.arrivals += 1
            number = current_backward()
            if number != listener.current_pass and number is not None:
                listener.pass_begins(number)
            gradient, before, version = parameter.grad, watched.gradient, watched.version + 1
            if gradient is before and gradient is not None and gradient._version == version and not listener.compares:
                watched.version, watched.digest = version, None  # next to always
                return
            if before is not None and gradient is not None:
                listener.noticed(watched.tampering_before(gradient))
            elif watched.finished is not None and gradient is not None:
                listener.noticed(watched.left_before(gradient))
            watched.gradient = gradient
            if gradient is not None:  # else another hook has taken it
                # Compiled autograd adds later, in its own way.
                watched.version = UNKNOWN if torch.compiler.is_compiling() else gradient._version
                watched.digest = _digest(gradient) if listener.compares else None

        with all_require_grad([parameter]):
            self._handle = parameter.register_post_accumulate_grad_hook(arrived)

    def remove(self) -> None:
        self._handle.remove()

    def look(self, compares: bool) -> None:
        self.gradient = gradient = self.parameter.grad
        if gradient is not None:
            self.version = gradient._version
            self.digest = _digest(gradient) if compares else None

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
