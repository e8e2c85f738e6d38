"""How long the next window is: a number, a table of epochs, or a function."""

from __future__ import annotations

import functools
import inspect
import logging
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any, Union

logger = logging.getLogger("gradaccum")

Steps = Union[int, Mapping[int, int], Callable[[int, int], int], "Schedule"]
"""What users may pass as `steps`."""


class Schedule:
    """The number of steps of each window.

    Args:
        steps: An int >= 1, the length of every window; or `{epoch: steps}`, where each entry holds from its epoch on
            and epoch 0 must be among them; or a callable `(epoch, update) -> steps`, called when a window opens.
            `epoch` and `update` count from 0; `update` is the number of updates since the start of training.

    Raises:
        TypeError: `steps`, an epoch or an entry is not of these types (bool, float and str are not).
        ValueError: A number below 1, a negative epoch, an empty table or one without epoch 0.

    Example:
        >>> schedule = Schedule({0: 8, 4: 2})
        >>> [schedule(epoch, 0) for epoch in (0, 3, 4, 9)]
        [8, 8, 2, 2]
        >>> Schedule(lambda epoch, update: 1 if update < 100 else 4)(0, 100)
        4
    """

    def __init__(self, steps: Steps) -> None:
        self._table: dict[int, int] | None = None
        self._function: Callable[[int, int], int] | None = None
        if isinstance(steps, Schedule):
            self._table, self._function = steps._table, steps._function
        elif isinstance(steps, Mapping):
            self._table = _checked_table(steps)
        elif callable(steps):
            self._function = steps
        else:
            self._table = {0: _checked_steps(steps, f"steps={steps!r}")}

    def __call__(self, epoch: int = 0, update: int = 0) -> int:
        """The steps of the window that opens in this epoch, after so many updates."""
        if self._table is not None:
            return self._table[max(start for start in self._table if start <= epoch)]
        assert self._function is not None
        steps = self._function(epoch, update)
        return _checked_steps(steps, f"{steps!r} from the callable at epoch={epoch}, update={update}")

    @functools.cached_property
    def constant(self) -> int | None:
        """The length of every window, or None if it varies."""
        return self._table[0] if self._table is not None and len(set(self._table.values())) == 1 else None

    @property
    def largest(self) -> int | None:
        """The length of the longest window, or None for a callable."""
        return max(self._table.values()) if self._table is not None else None

    @property
    def function(self) -> Callable[[int, int], int] | None:
        """The callable, or None for a number or a table."""
        return self._function

    def to_pairs(self) -> list[list[int]]:
        """`[[epoch, steps], ...]`, which survives JSON (JSON would turn the epochs of a dict into strings).

        Raises:
            TypeError: The schedule is a callable.

        Example:
            >>> Schedule.from_pairs(Schedule({0: 8, 4: 2}).to_pairs()) == Schedule({0: 8, 4: 2})
            True
        """
        if self._table is None:
            raise TypeError("A callable `steps` cannot be written to a file. Use an int or {epoch: steps} for that.")
        return [[epoch, steps] for epoch, steps in sorted(self._table.items())]

    @classmethod
    def from_pairs(cls, pairs: list[list[int]]) -> Schedule:
        """The schedule that `to_pairs` wrote."""
        return cls({epoch: steps for epoch, steps in pairs})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._table == other._table and self._function == other._function

    def __hash__(self) -> int:
        return hash((frozenset((self._table or {}).items()), self._function))

    def __str__(self) -> str:
        if self._table is not None:
            return str(self._table[0] if len(self._table) == 1 else dict(sorted(self._table.items())))
        return getattr(self._function, "__name__", repr(self._function))

    def __repr__(self) -> str:
        return f"Schedule({self})"


def steps_for(desired_batch_size: int, maximum_batch_size: int, *, ranks: int = 1) -> int:
    """Steps that reach the desired rows with micro-batches of at most `maximum_batch_size` rows on each rank.

    Rounds up, so the effective batch size is at least the desired one if every micro-batch is full. If the desired rows
    fit at once, the result is 1 and a log line says so, as the arguments may have been swapped.

    Args:
        desired_batch_size: Rows of one update, over all ranks.
        maximum_batch_size: Rows that fit into memory at once, on one rank.
        ranks: Devices or processes that train together.

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument is below 1.

    Example:
        >>> steps_for(256, 64), steps_for(100, 48), steps_for(256, 64, ranks=2)
        (4, 3, 2)
    """
    arguments = {"desired_batch_size": desired_batch_size, "maximum_batch_size": maximum_batch_size, "ranks": ranks}
    for name, value in arguments.items():
        checked_count(value, name)
    if desired_batch_size < maximum_batch_size:
        logger.warning(
            "steps_for: %d desired rows fit at once, as %d do, so windows have 1 step. If the two were swapped: "
            "steps_for(desired_batch_size=%d, maximum_batch_size=%d).",
            *(desired_batch_size, maximum_batch_size, maximum_batch_size, desired_batch_size),
        )
    return -(-desired_batch_size // (maximum_batch_size * ranks))


def checked_count(value: Any, name: str, least: int = 1) -> int:
    """`value` as an int >= `least`, for any argument that counts something."""
    must = f"`{name}` must be an int >= {least}. Received: {name}={value!r}"
    if not _is_int(value):
        raise TypeError(f"{must} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{must}.")
    return operator.index(value)


_MUST = (
    "`steps` must be an int >= 1, or map epochs (0 among them) to such ints, or be a callable (epoch, update) -> int."
)


def _checked_steps(steps: Any, received: str) -> int:
    if not _is_int(steps):
        raise TypeError(f"{_MUST} Received: {received} of type {type(steps).__name__}.")
    if steps < 1:
        raise ValueError(f"{_MUST} Received: {received}.")
    return operator.index(steps)


def _checked_table(table: Mapping[int, int]) -> dict[int, int]:
    received = f"steps={dict(table)!r}"
    checked = {}
    for epoch, steps in table.items():
        if not _is_int(epoch):
            raise TypeError(f"{_MUST} Received: {received}, where the epoch {epoch!r} is a {type(epoch).__name__}.")
        if epoch < 0:
            raise ValueError(f"{_MUST} Received: {received}, where the epoch {epoch!r} is negative.")
        checked[operator.index(epoch)] = _checked_steps(steps, received)
    if 0 not in checked:
        raise ValueError(f"{_MUST} Received: {received}. Add the first epoch: { ({0: 1} | checked)!r}.")
    return checked


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def signature_with_steps(inner: Callable[..., Any], keywords: Mapping[str, inspect.Parameter]) -> inspect.Signature:
    """The signature of an optimizer that is wrapped by name: `inner`'s, with `steps` and the wrapper's keywords.

    Example:
        >>> str(signature_with_steps(lambda lr=0.1, **kwargs: None, {}))
        '(lr=0.1, *, steps: Steps, **kwargs)'
    """
    own = inspect.signature(inner).parameters
    steps = inspect.Parameter("steps", inspect.Parameter.KEYWORD_ONLY, annotation=_Name("Steps"))
    added = [steps, *(p for name, p in keywords.items() if name not in own)]
    rest = [p for p in own.values() if p.kind is p.VAR_KEYWORD]
    return inspect.Signature([p for p in own.values() if p.kind is not p.VAR_KEYWORD] + added + rest)


class _Name(str):
    """An annotation that is shown without quotes."""

    __repr__ = str.__str__
