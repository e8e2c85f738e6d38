"""A trainer of another library: what is used of it, what it is refused with, what stands in the place of its own.

Each integration states as data which names of the library it uses (`Library`), and as a generator of sentences which
settings contradict exact updates: `refuse` raises the first one. It puts functions of its own between the trainer's for
as long as a context is open (`replaced`), and leaves windows, weights and updates to `gradaccum.torch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gradaccum.errors import WindowError
from gradaccum.extras import PrivateName
from gradaccum.torch.distributed import by_rank

__all__ = ["Library", "accumulates", "check_same", "fsdp1", "refuse", "replaced"]


class Library(NamedTuple):
    """A library's version, and what is used of it beyond its public API."""

    name: str
    version: str
    remedy: str
    """What to do where it lacks a name."""
    names: tuple[PrivateName, ...]

    def lacks(self, owner: object) -> Iterator[str]:
        """A sentence for each name that `owner` lacks."""
        for name in self.names:
            if missing := name.missing_from(owner, f"{self.name} {self.version}"):
                yield f"{missing} {self.remedy}"


def refuse(problems: Iterator[str], error: type[Exception] = ValueError) -> None:
    """Raise this error for the first problem, if there is one."""
    if problem := next(problems, None):
        raise error(problem)


def accumulates(optimizer: Any) -> bool:
    """Whether an optimizer counts windows by itself."""
    return hasattr(optimizer, "micro_batches") and hasattr(optimizer, "inner")


def fsdp1(remedy: str) -> str:
    return f"FSDP1 reduces in every backward pass, and takes the mean of the ranks' means. Use FSDP2: {remedy}."


def check_same(values: Sequence[Any], message: str, shown: Sequence[Any] | None = None) -> None:
    """Raise a WindowError on all ranks where this differs between them; `message` has a place for what each has."""
    if any(value != values[0] for value in values):
        raise WindowError(message.format(by_rank(values if shown is None else shown)))


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """While this is open, these are attributes of one object; then it has its own again, or its class'.

    Example:
        >>> class Trainer:
        ...     def step(self):
        ...         return "theirs"
        >>> trainer = Trainer()
        >>> with replaced(trainer, step=lambda: "ours"):
        ...     trainer.step()
        'ours'
        >>> trainer.step()
        'theirs'
    """
    held = vars(owner)
    own = {name: held[name] for name in attributes if name in held}
    held.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            held.pop(name, None)
        held.update(own)
