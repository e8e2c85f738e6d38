"""Which ways of making the large batch's update fit into memory, layer by layer among them, without the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import MARGIN, GivenSizes, Slice, format_bytes, largest_size
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import MemoryMeter
from gradaccum.on_torch.oom_retry import OomRetry
from gradaccum.torch.layers.backward_optimizer import parameters_by_block
from gradaccum.torch.layers.blocks import Block, BlocksChoice, find_blocks, has_blocks
from gradaccum.torch.layers.schedule import Layers
from gradaccum.torch.measure import SMALLER, Subject, subject_of
from gradaccum.torch.measure.fake_memory import LiveBytes, bytes_of, on_fakes, optimizer_bytes


class Way(NamedTuple):
    """A way of making the large batch's update, and its memory."""

    name: str
    step: str
    """The call that makes it, or "" for an ordinary step."""
    micro_batch_size: int
    """The largest that fits, in rows; 1 where none does."""
    peak: int
    """Bytes with that size."""
    fits: bool


@dataclasses.dataclass(frozen=True)
class Ways:
    """The ways of making one large batch's update, the cheapest in time first.

    Example:
        >>> plain = Way("plain", "", 64, 90 * 2**30, False)
        >>> accumulated = Way("accumulated", "TrainStep(..., micro_batch_size=4)", 4, 60 * 2**30, True)
        >>> print(Ways((plain, accumulated), 64, 80 * 2**30, 0.1))
        Accumulated, 4 rows at a time: TrainStep(..., micro_batch_size=4).
        Its peak is 60.0 GiB of the 72.0 GiB that a margin of 10 % leaves of 80.0 GiB.
        <BLANKLINE>
        update of 64 rows   micro-batch       peak   step
        plain                   64 rows   90.0 GiB   does not fit
        accumulated              4 rows   60.0 GiB   TrainStep(..., micro_batch_size=4)
    """

    ways: tuple[Way, ...]
    rows: int
    limit: float
    """Bytes there are, and the part of them to leave free."""
    margin: float
    gradient_bytes: int = 0
    """Of the whole model's gradients."""
    note: str = ""
    """Why some ways are missing."""

    @property
    def best(self) -> Way | None:
        """The first that fits: the one that takes the least time."""
        return next((way for way in self.ways if way.fits), None)

    def __str__(self) -> str:
        lines = [(f"update of {self.rows} rows", "micro-batch", "peak", "step")]
        for way in self.ways:
            size, last = _rows(way.micro_batch_size), (way.step or "an ordinary step") if way.fits else "does not fit"
            lines.append((way.name, size, format_bytes(way.peak), last))
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        table = [f"{a:{widths[0]}}   {b:>{widths[1]}}   {c:>{widths[2]}}   {d}" for a, b, c, d in lines]
        return "\n".join([*self._verdict(), "", *table, *(["", self.note] if self.note else [])])

    def _verdict(self) -> tuple[str, str]:
        best, allowed = self.best, format_bytes((1 - self.margin) * self.limit)
        left = f"the {allowed} that a margin of {100 * self.margin:.0f} % leaves of {format_bytes(self.limit)}"
        if best is None:
            least = min(self.ways, key=lambda way: way.peak)
            return (
                f"Not even a micro-batch of one row fits: {least.name} needs {format_bytes(least.peak)} of {left}.",
                SMALLER,
            )
        if not best.step:
            how = f"The whole batch of {self.rows} rows fits into an ordinary step."
        else:
            how = f"{best.name.capitalize()}, {_rows(best.micro_batch_size)} at a time: {best.step}."
        if "in_backward" in best.step:
            how = f"Whole gradients, {format_bytes(self.gradient_bytes)}, don't fit with the rest. {how}"
        return how, f"Its peak is {format_bytes(best.peak)} of {left}."


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def estimate_ways(
    model: nn.Module, batch: Any, *, blocks: BlocksChoice | None = "auto", margin: float = MARGIN, **keywords: Any
) -> Ways:
    """What each way of making the large batch's update needs, and the largest micro-batch that it fits with.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        >>> batch = torch.zeros(64, 256), torch.zeros(64, 256)
        >>> ways = estimate_ways(model, batch, loss_fn=nn.MSELoss(), memory_limit="8MiB")
        >>> [way.name for way in ways.ways if way.fits]
        ['updated in backward', 'updated in backward, offloaded', 'parameters on the host']
    """
    subject, note = subject_of(model, batch, margin, **keywords), ""
    if blocks == "auto" and not has_blocks(model):
        blocks, note = None, _NO_BLOCKS
    try:
        ways = _ways(subject, margin, blocks)
    except ValueError as error:  # such as blocks that share a module
        if blocks != "auto":
            raise
        ways, note = _ways(subject, margin, None), f"Not layer by layer: {error}"
    return Ways(tuple(ways), subject.batch.rows, subject.limit, margin, bytes_of(subject.trained), note)


_NO_BLOCKS = (
    "No list of blocks was found, so training layer by layer was not estimated. Name it: a dotted path such as "
    '"encoder.layers", or a list of modules, as `blocks`; on the command line as "blocks" in the dict that make() '
    "returns in place of loss_fn."
)


def _ways(subject: Subject, margin: float, blocks: BlocksChoice | None) -> list[Way]:
    rows, constant, allowed = subject.batch.rows, subject.constant, (1 - margin) * subject.limit
    whole = constant + subject.peak(rows)
    ways = [Way("plain", "", rows, whole, whole <= allowed)]
    found: list[tuple[str, str, Callable[[int], int], int]] = [("accumulated", "TrainStep(..., {}", subject.peak, 0)]
    if blocks is not None:
        listed = find_blocks(subject.objective.model, blocks)
        named = "" if blocks == "auto" else f'blocks="{blocks}", ' if isinstance(blocks, str) else "blocks=..., "
        phases = functools.cache(functools.partial(_phases, subject, listed))
        plain = f"BlockStep(..., {named}{{}}"
        backward = f'{plain}, update="in_backward"'
        by_layer, freed, offloaded = (
            functools.partial(_peak, phases, rows, freed=frees, offloaded=offloads)
            for frees, offloads in ((False, False), (True, False), (True, True))
        )
        found += [
            ("layer by layer", plain, by_layer, 0),
            ("updated in backward", backward, freed, 0),
            ("updated in backward, offloaded", f"{backward}, offload=True", offloaded, 0),
        ]
        if (spared := _bytes_on_host(subject, listed)) is not None:
            found.append(("parameters on the host", f'{backward}, on="cpu", offload=True', offloaded, spared))
    for name, step, peak, away in found:
        here = constant - away
        size, needed = largest_size(peak, rows, allowed - here)
        pasted = step.format(f"micro_batch_size={size}") + ")"
        ways.append(Way(name, pasted, size, here + needed, here + needed <= allowed))
    return ways


def _bytes_on_host(subject: Subject, blocks: Sequence[Block]) -> int | None:
    """What the device is spared where blocks live on the host, but two that visit it; None where they can't."""
    model = subject.objective.model
    found = [list(block.module.parameters()) for block in blocks]
    inside = {id(p): p for parameters in found for p in parameters}
    modules = {id(module) for block in blocks for module in block.module.modules()}
    outside = [p for module in model.modules() if id(module) not in modules for p in module.parameters(recurse=False)]
    if any(id(p) in inside for p in outside):  # tied weights would have to be in two places
        return None
    guests = sorted(map(bytes_of, found))[-2:]  # one computes, one is on its way
    state = optimizer_bytes(subject.optimizer, [p for p in subject.trained if id(p) in inside])
    return bytes_of(inside.values()) + state - sum(guests)


_Phases = list[tuple[int, int]]
"""Of all forward passes, each block's turn, and what stands before the blocks: the peak in bytes if a block's gradients
are freed after its turn, and the bytes of gradients that have been freed before."""


def _peak(phases: Callable[[int], list[_Phases]], rows: int, size: int, *, freed: bool, offloaded: bool) -> int:
    """The peak of an update of so many rows in micro-batches of this size.

    What is kept grows by the same bytes with each micro-batch, so two counts of them tell about any.
    """
    two, three = phases(size)
    more = (1.0 if offloaded else rows / size) - 2.0
    peaks = [(at_two + more * (at_three - at_two), gone) for (at_two, gone), (at_three, _) in zip(two, three)]
    return max(round(peak) + (0 if freed else gone) for peak, gone in peaks)


def _phases(subject: Subject, blocks: Sequence[Block], size: int) -> list[_Phases]:
    """The phases of an update, layer by layer, in two micro-batches of this size, and in three."""
    objective, model = subject.objective, subject.objective.model
    wanted = {name for name, p in model.named_parameters() if any(p is one for one in subject.trained)}

    def updated(micro_batch: Batch, count: int) -> _Phases:
        layers, plan = Layers(model, blocks), GivenSizes([micro_batch.rows] * count)
        parameters = [p for name, p in model.named_parameters() if name in wanted]

        def forward_and_loss(piece: Slice) -> None:
            with layers.micro_batch(lambda: micro_batch, objective.evaluate):
                loss, _ = objective.forward(micro_batch)
            loss.backward(retain_graph=True)
            layers.commit(piece)

        with LiveBytes() as live, torch.enable_grad():
            turn = layers.listener = _Freeing(live, parameters, layers)
            layers.run(plan, forward_and_loss, OomRetry(MemoryMeter(objective.device)), None, proving=False)
        for parameter in parameters:
            parameter.grad = None
        return turn.phases

    return on_fakes(objective, subject.batch, size, lambda micro_batch: [updated(micro_batch, n) for n in (2, 3)])


class _Freeing:
    """Frees gradients as updates in backward do, and notes the peak of each phase: a listener of `Layers`."""

    made: bool | None = None

    def __init__(self, live: LiveBytes, parameters: Sequence[Tensor], layers: Layers) -> None:
        self._live, self._parameters, self._layers = live, parameters, layers
        self.phases: _Phases = []
        self._freed = 0
        self._due: dict[int, list[Tensor]] = {}

    def open(self) -> None: ...

    def explained(self, error: BaseException) -> BaseException:
        return error

    def begin(self, window: Any, reached: Mapping[int, int], *, rehearsal: bool = False) -> None:
        self._due = parameters_by_block(self._parameters, self._layers.blocks, self._layers.model, reached)
        self._note()

    def finished(self, place: int) -> None:
        self._note()
        for parameter in self._due.pop(place, []):
            if parameter.grad is not None:
                self._freed += parameter.grad.nbytes
                parameter.grad = None

    def _note(self) -> None:
        self.phases.append((self._live.peak, self._freed))
        self._live.peak = self._live.bytes
