"""What ranks tell each other about a window, and numbers of all ranks in between."""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradaccum.errors import WindowError
from gradaccum.torch.distributed.channel import LENGTH, Channel
from gradaccum.torch.distributed.settings import by_rank


class Kind(enum.IntEnum):
    """What a message is about."""

    WINDOW = 1  # this rank comes to the reduction of a window, or has nothing to reduce; what it weighs, if known
    TOTAL = 2  # what the window weighs, after its reduction: where that was not known before
    NUMBER = 3  # numbers of all ranks in between


class Total(NamedTuple):
    """What a window weighs: on one rank, or over all of them."""

    weight: float
    given: bool = False  # whether a weight was given anywhere
    largest: float = 0.0  # the largest weight of a micro-batch
    scale: float = 0.0  # the GradScaler's, that the sum is multiplied by; 0 without one, negative if unknown
    next_scale: float = 0.0  # the one that this rank's GradScaler would go on with
    overflow: bool = False  # whether a gradient has overflowed that scale
    equal: bool = False  # whether micro-batches count equally, since nobody has said what they weigh
    idle: bool = False  # whether no micro-batch has run


class Report(NamedTuple):
    """A rank's message about its window."""

    kind: Kind
    steps: float = 0
    last: float = False
    known: float = False  # whether the total and the settings are what they will be at the update
    manual: float = False  # whether windows are reduced when their sums are finished from now on
    fills: float = False  # whether a parameter has no gradient on this rank
    passes: float = 0
    settings: float = 0.0
    total: Total = Total(0.0)


_NUMBERS = len(Report._fields) - 1 + len(Total._fields)
"""Of a report's message. What comes behind them is to be added up over the ranks."""
ROOM = LENGTH - 1 - _NUMBERS
"""So many numbers at most come behind a report."""


class Reports:
    """The messages of all ranks about a window, and what they come to."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows, columns = rows, [*zip(*rows)]
        _, steps, last, known, manual, fills, passes, settings = columns[:8]
        self.lengths, self.lasts = [*map(int, steps)], [*map(bool, last)]
        weights, given, largest, scales, next_scales, overflow, equal, idle = columns[8:_NUMBERS]
        used = {*scales} - {0.0}
        lost, self.scales = any(overflow), scales if len(used) > 1 else ()
        shared = sum(weights), any(given), max(largest), min(used, default=0.0)
        self.total = Total(*shared, overflow=lost)
        self.loss_scale = (min if lost else max)(filter(None, next_scales), default=0.0)
        self.source = min(range(len(idle)), key=idle.__getitem__)
        self.partly_idle, self.closes = len({*idle}) > 1, any(steps)
        self.last, self.known, self.fills = all(last), all(known), any(fills)
        self.manual, self.all_manual = any(manual), all(manual)
        ways = ["without a weight" if one else "weighed" if weight else "none" for one, weight in zip(equal, weights)]
        self.ways = by_rank(ways) if {"without a weight", "weighed"} <= {*ways} else ""
        self.same_passes, self.same_settings = len({*passes}) == 1, len({*settings}) == 1


class Messages:
    """Reports about windows, and numbers, over a channel. All ranks take part in each."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.sent: Any = None
        """A report that waits for the other ranks'; None drops it, of a micro-batch that was never counted."""
        self._last: Reports | None = None  # to which the next ones are mostly equal

    def meet(self, report: Report) -> Reports:
        """Send a report, and wait for every rank's."""
        self.send(report)
        return self.read()[0]

    def send(self, report: Report, sums: Sequence[float] = ()) -> None:
        """Begin to send a report, and numbers to be added up over the ranks; `ROOM` of them go with it."""
        rides = sums if len(sums) <= ROOM else ()
        self.sent = report.kind, sums, self.channel.send(*report[:-1], *report.total, *rides)

    def read(self) -> tuple[Reports, Sequence[float]]:
        """Wait for every rank's report. Returns also what the numbers add up to."""
        (kind, sums, sent), self.sent = self.sent, None
        messages = self.channel.receive(sent)
        self._check_kinds(messages, kind)
        if len(sums) > ROOM:
            sums = self.channel.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        elif sums:
            beside = [*zip(*messages)][_NUMBERS : _NUMBERS + len(sums)]
            messages, sums = [numbers[:_NUMBERS] for numbers in messages], [*map(sum, beside)]
        if self._last is None or messages != self._last.rows:
            self._last = Reports(messages)
        return self._last, sums

    def exchange(self, *numbers: float) -> list[list[float]]:
        """Every rank's numbers, which zeros follow."""
        messages = self.channel.exchange(Kind.NUMBER, *numbers)
        self._check_kinds(messages, Kind.NUMBER)
        return [message[1:] for message in messages]

    def numbers(self, mine: float) -> list[float]:
        """Every rank's number."""
        return [numbers[0] for numbers in self.exchange(mine)]

    def sum_by_name(self, mine: Mapping[Any, float]) -> dict[Any, float]:
        """Numbers summed over the ranks, each by its name; some ranks may lack some names."""
        names, numbers = [*mine], [*mine.values()]
        rides = numbers if len(numbers) <= LENGTH - 3 else []
        messages = self.exchange(zlib.crc32(repr(names).encode()), *rides)
        if len({message[0] for message in messages}) > 1:
            by_text = {name if isinstance(name, str) else repr(name): name for name in names}
            everybody = [json.loads(text) for text in self.channel.texts(json.dumps([*by_text]))]
            names = [by_text.get(text, text) for text in dict.fromkeys(text for texts in everybody for text in texts)]
            numbers, rides = [mine.get(name, 0.0) for name in names], []
        if rides:
            return {name: sum(message[1 + i] for message in messages) for i, name in enumerate(names)}
        return dict(zip(names, self.channel.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()))

    def check_same(self, options: Mapping[str, Any]) -> None:
        """A ValueError if these differ between ranks."""
        mine = json.dumps({name: repr(value) for name, value in options.items()})
        everybody: list[dict[str, str]] = [*map(json.loads, self.channel.texts(mine))]
        for name in dict.fromkeys(name for theirs in everybody for name in theirs):
            values = [theirs.get(name, "none") for theirs in everybody]
            if len({*values}) > 1:
                raise ValueError(f"`{name}` must be the same on every rank. Received: {by_rank(values)}.")

    def _check_kinds(self, messages: Sequence[Sequence[float]], expected: Kind) -> None:
        """Raise if a rank is not where this one is."""
        if [message for message in messages if message[0] != expected]:
            kinds = [Kind(int(message[0])).name for message in messages]
            raise WindowError(
                f"The ranks are at different places: {by_rank(kinds)}. Nothing was updated. Call step(), flush() and "
                "batches() in the same order on every rank."
            )
