"""What ranks find out before a reproducible window: where each one's micro-batches stand, and what all rows weigh."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from gradaccum.torch.reproducible.exchange import Exchange, by_rank

Weights = list[float] | list[dict[Hashable, float]] | None
"""What each micro-batch of this rank weighs; None where only the forward passes tell, or nothing divides."""


@dataclasses.dataclass
class Opening:
    """A window, as every rank knows it before its first micro-batch."""

    first: int
    """The place of this rank's first micro-batch among all of them."""
    counts: list[int]
    """How many micro-batches each rank has."""
    rows: int
    """Of all ranks."""
    sizes: list[int]
    """The rows of each micro-batch, in their order over all ranks."""
    total: Any = None
    """What the loss divides by, where that is known: a number, or one for each loss term."""

    @property
    def micro_batches(self) -> int:
        return sum(self.counts)


def digest(*values: Any) -> float:
    """A number of 52 bits that differs where one of these values does, by their `repr`."""
    return float(int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little") >> 12)


def opened(
    exchange: Exchange,
    rows: int,
    size: int,
    weights: Weights,
    settings: Mapping[str, Any],
    *,
    named: bool | None,
    needs_two_rows: bool,
    agrees: Callable[[bool], None],
) -> Opening:
    """Tell the other ranks of this one's rows, and put the window together. Raises the same error on all of them.

    `named`: whether there are several losses, None where this rank doesn't know. `agrees` is called with what the
    others know.
    """
    single = [] if weights is None or named else weights
    whole = all(float(w).is_integer() for w in single)  # type: ignore[arg-type]  # numbers
    unknown = weights is None and rows > 0
    own = [rows, math.fsum(single), whole, unknown, -1 if named is None else named]  # type: ignore[arg-type]  # numbers
    everybody = exchange.numbers([*map(float, own), *map(digest, settings.values())])
    _check_same(exchange, settings, [numbers[len(own) :] for numbers in everybody])
    places, sums, wholes, unknowns, several = [*zip(*everybody)][: len(own)]
    opening = _placed(exchange, [int(number) for number in places], size, needs_two_rows)
    agrees(max(several) == 1)
    if max(several) == 1:
        opening.total = _by_name(exchange, weights or [])  # type: ignore[arg-type]  # by name
    elif not any(unknowns):
        opening.total = math.fsum(sums)  # whole numbers add up without rounding; others with one, in the end
        if not all(wholes):
            opening.total = math.fsum(w for (w,) in exchange.lists([[w] for w in single], opening.counts, 1))  # type: ignore[list-item]  # numbers
    return opening


def _check_same(exchange: Exchange, settings: Mapping[str, Any], digests: Sequence[Sequence[float]]) -> None:
    for name, value, found in zip(settings, settings.values(), zip(*digests), strict=True):
        if len({*found}) > 1:
            raise ValueError(
                f"With reproducible=True, {name} must be the same on every rank. Received: "
                f"{by_rank(exchange.objects(repr(value)))}."
            )


def _by_name(exchange: Exchange, weights: Sequence[Mapping[Hashable, float]]) -> dict[Hashable, float]:
    """The totals of several losses, in the order in which they come first."""
    found: dict[Hashable, list[float]] = {}
    for terms in (terms for listed in exchange.objects(weights) for terms in listed):
        for name, weight in terms.items():
            found.setdefault(name, []).append(weight)
    return {name: math.fsum(each) for name, each in found.items()}


def _placed(exchange: Exchange, rows: Sequence[int], size: int, needs_two_rows: bool) -> Opening:
    last = max((rank for rank, number in enumerate(rows) if number), default=-1)
    if last < 0:
        raise ValueError("A batch must have at least one row. Received: 0 rows on all ranks.")
    for rank in range(last):
        if rows[rank] % size:
            raise ValueError(
                f"With reproducible=True each rank needs whole micro-batches of micro_batch_size={size} rows; only the "
                f"last rank with rows may end in a shorter one. Received: {by_rank([f'{n} rows' for n in rows])}. "
                "GlobalBatchSampler shares them out so, with the same `micro_batch_size`."
            )
    if needs_two_rows and rows[last] % size == 1:
        raise ValueError(
            "BatchNorm can't normalise the last micro-batch, which has one row. Use drop_last=True, another batch "
            'size, or batch_norm="frozen".'
        )
    counts = [-(-number // size) for number in rows]
    sizes = [size] * sum(counts)
    sizes[-1] = sum(rows) - size * (len(sizes) - 1)
    return Opening(sum(counts[: exchange.rank]), counts, sum(rows), sizes)
