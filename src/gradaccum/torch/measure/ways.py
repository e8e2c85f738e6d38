"""Which ways of training fit into a memory limit: the peak of each, predicted on fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Slice, format_bytes, largest_size
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import MemoryMeter
from gradaccum.torch.layers import Blocks, Layers, parameters_by_block
from gradaccum.torch.loss import Objective
from gradaccum.torch.measure.fake_memory import LiveBytes, bytes_of, micro_batch_peak, on_fakes

__all__ = ["Way", "Ways", "find_ways"]


@dataclass(frozen=True)
class Way:
    """A way of making the large batch's update, and its memory.

    Attributes:
        name: Its name.
        arguments: What to pass to `TrainStep` for it.
        micro_batch_size: The largest that fits, in rows; 1 where none does.
        peak: Bytes with that size.
        fits: Whether it fits.
    """

    name: str
    arguments: str
    micro_batch_size: int
    peak: int
    fits: bool


@dataclass(frozen=True)
class Ways:
    """The ways of making one large batch's update, the cheapest in time first.

    Attributes:
        ways: Each way.
        rows: Of the large batch.
        limit: Bytes there are.
        margin: The part of them to leave free.
        gradient_bytes: Of the whole model's gradients.
        note: Why some ways are missing.

    Example:
        >>> plain = Way("plain", "", 64, 90 * 2**30, False)
        >>> accumulated = Way("accumulated", "micro_batch_size=4", 4, 60 * 2**30, True)
        >>> print(Ways((plain, accumulated), 64, 80 * 2**30, 0.1))
        Accumulated, 4 rows at a time: pass micro_batch_size=4 to TrainStep.
        Its peak is 60.0 GiB of the 72.0 GiB that a margin of 10 % leaves of 80.0 GiB.
        <BLANKLINE>
        update of 64 rows   micro-batch       peak   TrainStep(...)
        plain                   64 rows   90.0 GiB   does not fit
        accumulated              4 rows   60.0 GiB   micro_batch_size=4
    """

    ways: tuple[Way, ...]
    rows: int
    limit: float
    margin: float
    gradient_bytes: int = 0
    note: str = ""

    @property
    def best(self) -> Way | None:
        """The first that fits: the one that takes the least time."""
        return next((way for way in self.ways if way.fits), None)

    def __str__(self) -> str:
        return "\n".join([*self._verdict(), "", *self._table(), *(["", self.note] if self.note else [])])

    def _verdict(self) -> list[str]:
        best, allowed = self.best, f"{format_bytes((1 - self.margin) * self.limit)}"
        left = f"the {allowed} that a margin of {100 * self.margin:.0f} % leaves of {format_bytes(self.limit)}"
        if best is None:
            least = min(self.ways, key=lambda way: way.peak)
            return [
                f"Not even a micro-batch of one row fits: {least.name} needs {format_bytes(least.peak)} of {left}.",
                "Make the model smaller, shard it, or use gradient checkpointing or autocast=torch.bfloat16.",
            ]
        peak = f"Its peak is {format_bytes(best.peak)} of {left}."
        if not best.arguments:
            return [f"The whole batch of {self.rows} rows fits into an ordinary step.", peak]
        reason = ""
        if "in_backward" in best.arguments:
            reason = f"Whole gradients, {format_bytes(self.gradient_bytes)}, don't fit beside the rest. "
        how = f"{reason}{best.name.capitalize()}, {_rows(best.micro_batch_size)} at a time"
        return [f"{how}: pass {best.arguments} to TrainStep.", peak]

    def _table(self) -> list[str]:
        head = (f"update of {self.rows} rows", "micro-batch", "peak", "TrainStep(...)")
        lines = [head]
        for way in self.ways:
            arguments = way.arguments or "an ordinary step"
            last = arguments if way.fits else "does not fit"
            lines.append((way.name, _rows(way.micro_batch_size), format_bytes(way.peak), last))
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        return [f"{a:{widths[0]}}   {b:>{widths[1]}}   {c:>{widths[2]}}   {d}" for a, b, c, d in lines]


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def find_ways(
    objective: Objective,
    batch: Batch,
    blocks: Any,
    constant: int,
    limit: float,
    margin: float,
    trained: list[Tensor],
    state_bytes: Callable[[list[Tensor]], int],
) -> Ways:
    """What each way takes, and the largest micro-batch that it fits with."""
    rows, allowed = batch.rows, (1 - margin) * limit
    found: dict[str, tuple[str, Callable[[int], int], int]] = {
        "accumulated": ("", lambda size: micro_batch_peak(objective, batch, size, 1 if size == rows else 2), 0)
    }
    whole = constant + micro_batch_peak(objective, batch, rows, 1)
    ways = [Way("plain", "", rows, whole, whole <= allowed)]
    if blocks is not None:
        blocks = blocks if isinstance(blocks, Blocks) else Blocks(blocks)
        named = f'"{blocks.modules}"' if isinstance(blocks.modules, str) else "..."
        phases = functools.cache(functools.partial(_phases, objective, batch, blocks, trained))
        backward = f'blocks=Blocks({named}, update="in_backward")'
        for name, arguments, freed, offloaded in (
            ("layer by layer", f"blocks={named}", False, False),
            ("updated in backward", backward, True, False),
            ("updated in backward, offloaded", f"{backward}, offload=True", True, True),
        ):
            found[name] = arguments, functools.partial(_peak, phases, rows, freed=freed, offloaded=offloaded), 0
        spared = _bytes_on_host(objective.model, blocks, trained, state_bytes)
        if spared is not None:
            arguments = f'blocks=Blocks({named}, update="in_backward", on="cpu"), offload=True'
            found["parameters on the host"] = arguments, found["updated in backward, offloaded"][1], spared
    for name, (arguments, peak, away) in found.items():
        here = constant - away
        size, needed = largest_size(peak, rows, allowed - here)
        pasted = ", ".join(filter(None, [f"micro_batch_size={size}", arguments]))
        ways.append(Way(name, pasted, size, here + needed, here + needed <= allowed))
    return Ways(tuple(ways), rows, limit, margin, bytes_of(trained))


def _bytes_on_host(
    model: nn.Module, blocks: Any, trained: list[Tensor], state_bytes: Callable[[list[Tensor]], int]
) -> int | None:
    """What the device is spared where blocks live on the host, but two that visit it; None where they can't."""
    listed = Layers(model, blocks).blocks
    found = [list(block.module.parameters()) for block in listed]
    inside = {id(p) for parameters in found for p in parameters}
    modules = {id(module) for block in listed for module in block.module.modules()}
    outside = [p for module in model.modules() if id(module) not in modules for p in module.parameters(recurse=False)]
    if any(id(p) in inside for p in outside):  # tied weights would have to be in two places
        return None
    guests = sorted(bytes_of(parameters) for parameters in found)[-2:]  # one computes, one is on its way
    every = list({id(p): p for parameters in found for p in parameters}.values())
    return bytes_of(every) + state_bytes([p for p in trained if id(p) in inside]) - sum(guests)


class _Phase(NamedTuple):
    """Part of an update: all forward passes, a block's turn, or what stands before the blocks."""

    peak: int
    """Bytes, if a block's gradients are freed after its turn."""
    freed: int
    """Bytes of gradients that have been freed before."""


def _peak(phases: Callable[[int], Any], rows: int, size: int, *, freed: bool, offloaded: bool) -> int:
    """The peak of an update of so many rows in micro-batches of this size.

    What is kept grows by the same bytes with each micro-batch, so two counts of them tell about any.
    """
    two, three = phases(size)
    count = 1.0 if offloaded else rows / size
    return max(
        round(a.peak + (count - 2.0) * (b.peak - a.peak)) + (0 if freed else a.freed)
        for a, b in zip(two, three, strict=True)
    )


def _phases(objective: Objective, batch: Batch, blocks: Any, trained: list[Tensor], size: int) -> Any:
    """The phases of two micro-batches of this size, and of three."""
    wanted = {name for name, p in objective.model.named_parameters() if any(p is one for one in trained)}

    def run(micro_batch: Batch) -> Any:
        return [_updated(objective, micro_batch, blocks, wanted, count) for count in (2, 3)]

    return on_fakes(objective, batch, size, run)


def _updated(objective: Objective, micro_batch: Batch, blocks: Any, wanted: set[str], count: int) -> list[_Phase]:
    """The phases of an update, layer by layer, in this many micro-batches that are alike."""
    model = objective.model
    layers, plan = Layers(model, blocks), _Plan([Slice(slice(0, micro_batch.rows))] * count)
    parameters = [p for name, p in model.named_parameters() if name in wanted]

    def forward_and_loss(piece: Slice) -> None:
        with layers.micro_batch(lambda: micro_batch, objective.evaluate):
            loss, _ = objective.forward(micro_batch)
        loss.backward(retain_graph=True)
        layers.commit(piece)

    with LiveBytes() as live, torch.enable_grad():
        turn = layers.listener = _Freeing(live, parameters, layers)
        window: Any = None
        layers.run(plan, forward_and_loss, MemoryMeter(objective.device), window, proving=False)  # type: ignore[arg-type]
    for parameter in parameters:
        parameter.grad = None
    return turn.phases


class _Plan(list[Slice]):
    measuring = False


class _Freeing:
    """Frees gradients as updates in backward do, and notes the peak of each phase."""

    def __init__(self, live: LiveBytes, parameters: Sequence[Tensor], layers: Layers) -> None:
        self._live, self._parameters, self._layers = live, parameters, layers
        self.made: bool | None = None
        self.phases: list[_Phase] = []
        self._freed = 0
        self._due: dict[int, list[Tensor]] = {}

    def open(self) -> None:
        """A window begins."""

    def explained(self, error: BaseException) -> BaseException:
        """The error itself."""
        return error

    def begin(self, window: Any, reached: Mapping[int, int], *, rehearsal: bool = False) -> None:
        """All forward passes have run."""
        self._due = parameters_by_block(self._parameters, self._layers.blocks, self._layers.model, reached)
        self._note()

    def finished(self, place: int) -> None:
        """So has a block, on all micro-batches."""
        self._note()
        for parameter in self._due.pop(place, []):
            if parameter.grad is not None:
                self._freed += parameter.grad.nbytes
                parameter.grad = None

    def _note(self) -> None:
        self.phases.append(_Phase(self._live.peak, self._freed))
        self._live.peak = self._live.bytes
