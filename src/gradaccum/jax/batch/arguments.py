"""Which arguments of a function play a part, by their numbers."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["argument_numbers", "axes_of_each"]


def argument_numbers(name: str, given: Any, *, from_end: bool = False) -> tuple[int, ...]:
    """An argument's number, or those of several, as a tuple.

    Raises:
        TypeError: Not ints.
        ValueError: One is there twice, or negative where it must not be.

    Example:
        >>> argument_numbers("argnums", 1), argument_numbers("argnums", (0, 2))
        ((1,), (0, 2))
    """
    several = name.endswith("argnums")
    numbers = given if several and isinstance(given, tuple | list) else (given,)
    one = "an int" if from_end else "an int >= 0"
    kind = f"{one}, or a tuple of such ints" if several else f"{one}, or None"
    if not numbers or any(isinstance(number, bool) for number in numbers):
        raise TypeError(f"`{name}` must be {kind}. Received: {name}={given!r}.")
    try:
        found = tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise TypeError(f"`{name}` must be {kind}. Received: {name}={given!r}.") from None
    if (min(found) < 0 and not from_end) or len(set(found)) < len(found):
        raise ValueError(f"`{name}` must be {kind}, each once. Received: {name}={given!r}.")
    return found


def axes_of_each(in_axes: Any, batch_argnums: Any) -> tuple[Any, ...]:
    """`in_axes` for each batch argument.

    Raises:
        ValueError: There are several, and `in_axes` is a tuple of another length.

    Example:
        >>> axes_of_each(0, (1, 2)), axes_of_each((0, None), 1), axes_of_each((0, None), (1, 2))
        ((0, 0), ((0, None),), (0, None))
    """
    if not isinstance(batch_argnums, tuple | list):
        return (in_axes,)
    if isinstance(in_axes, tuple | list):
        if len(in_axes) != len(batch_argnums):
            raise ValueError(
                "`in_axes` must be one for all, or one for each of `batch_argnums`. Received: "
                f"in_axes={in_axes!r}, batch_argnums={batch_argnums}."
            )
        return tuple(in_axes)
    return (in_axes,) * len(batch_argnums)
