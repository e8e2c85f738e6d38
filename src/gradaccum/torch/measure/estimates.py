"""The largest micro-batch for a memory limit, and which ways of training fit in it, without the device that has it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import MARGIN, DoesNotFit, SizeEstimate, Slice, format_bytes, largest_size, parse_bytes
from gradaccum.on_torch.batch import Batch, leaves
from gradaccum.on_torch.memory import MemoryMeter, local_part
from gradaccum.torch.distributed import Ranks
from gradaccum.torch.layers import Blocks, BlocksChoice, Layers, has_blocks, parameters_by_block
from gradaccum.torch.loss import Objective
from gradaccum.torch.measure.fake_memory import LiveBytes, bytes_of, micro_batch_peak, on_fakes, optimizer_bytes

logger = logging.getLogger("gradaccum")

SIZE_KEYWORDS = frozenset(
    ["loss_fn", "compute_loss", "memory_limit", "optimizer", "weight", "reduction", "batch_dims", "autocast", "margin"]
)
"""What the functions below take by name."""


_SMALLER = "Make the model smaller, shard it, or use gradient checkpointing or autocast=torch.bfloat16."


def suggest_micro_batch_size(model: nn.Module, batch: Any, **keywords: Any) -> int:
    """The largest micro-batch of this batch whose peak memory stays within a limit, estimated with fake tensors.

        parameters + gradients + optimizer state + batch + activations(rows)   <=   (1 - margin) * limit

    Args:
        model: The model, on any device.
        batch: The large batch, as `TrainStep` takes it: `(x, y)` for a `loss_fn`.
        keywords: Those of `estimate_size`, which returns the estimate itself.

    Returns:
        Rows, at most those of the batch.

    Raises:
        DoesNotFit: Not even one row fits; a ValueError.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
        >>> batch = torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.long)
        >>> suggest_micro_batch_size(model, batch, loss_fn=nn.CrossEntropyLoss(), memory_limit="16MiB")
        1040
    """
    return estimate_size(model, batch, **keywords).micro_batch_size


def estimate_size(model: nn.Module, batch: Any, *, margin: float = MARGIN, **keywords: Any) -> SizeEstimate:
    """What `suggest_micro_batch_size` found, with its estimate and margin."""
    subject = _subject(model, batch, margin, **keywords)
    rows, allowed = subject.batch.rows, (1 - margin) * subject.limit
    size, needed = largest_size(lambda size: subject.constant + subject.peak(size), rows, allowed)
    if needed > allowed:
        raise DoesNotFit(
            f"Not even a micro-batch of one row fits: it needs about {format_bytes(needed)}, and "
            f"{format_bytes(int(allowed))} are available ({100 * margin:.0f} % of {format_bytes(int(subject.limit))} "
            f"left free). {_SMALLER}"
        )
    least = subject.constant + bytes_of(subject.trained)
    return SizeEstimate(size, rows, int(subject.limit), needed, least, margin)


def largest_fitting(
    objective: Objective, gauge: MemoryMeter, optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks, batch: Batch
) -> int:
    """The largest micro-batch of this batch that fits on this rank of a sharded model, estimated with fake tensors.

    Other ranks would wait if it were tried.

    in use now + optimizer state to come + gathered parameters + gradients + activations(rows)   <=   0.9 * limit
    """
    limit, shards = gauge.limit(), ranks.engine
    if limit is None:
        return batch.rows
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    to_come = sum(optimizer_bytes(o, [local_part(p) for group in o.param_groups for p in group["params"]]) for o in new)
    with shards.alone() as gathered:
        gradients = sum(p.numel() * dtype.itemsize for p, dtype in gathered.items() if p.requires_grad)
        constant = gauge.live() + to_come + shards.gathered_bytes(gradients) - gradients
        peak = functools.partial(micro_batch_peak, objective, batch, gathered=gathered)
        try:
            size, needed = largest_size(lambda rows: constant + peak(rows), batch.rows, (1 - MARGIN) * limit)
        except Exception as error:
            raise ValueError(
                "With a sharded model, micro_batch_size='auto' predicts memory on fake tensors, because other ranks "
                f"would wait for a trial. This model or loss can't run on fake tensors: {error}. Give a number of rows."
            ) from error
    logger.info(
        "micro_batch_size='auto': %d of %d rows, with a predicted peak of %s of %s.",
        size,
        batch.rows,
        format_bytes(int(needed)),
        format_bytes(int(limit)),
    )
    return size


class _Subject(NamedTuple):
    """A model, its loss and its large batch, and the bytes that are there whatever is done."""

    objective: Objective
    batch: Batch
    limit: float
    constant: int
    trained: list[Tensor]
    optimizer: torch.optim.Optimizer | None

    def peak(self, size: int) -> int:
        """Bytes of an update beyond what is there, in micro-batches of this size."""
        return micro_batch_peak(self.objective, self.batch, size, 1 if size == self.batch.rows else 2)


def _subject(
    model: nn.Module,
    batch: Any,
    margin: float,
    *,
    memory_limit: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **loss: Any,
) -> _Subject:
    """What the functions above are given; `loss`: the keywords of an objective."""
    if not 0 <= margin < 1:
        raise ValueError(f"`margin` must be a number in [0, 1). Received: margin={margin!r}.")
    objective = Objective(model, **loss)
    batch = objective.batch(batch)
    if batch.rows == 0:
        raise ValueError("A batch needs at least one row, to measure what a row takes. Received: 0 rows.")
    limit = parse_bytes(memory_limit) or MemoryMeter(objective.device).limit()
    if limit is None:
        raise ValueError('This machine does not report how much memory it has. Give `memory_limit`, such as "16GiB".')
    modules = [model, *([objective.loss_fn] if isinstance(objective.loss_fn, nn.Module) else [])]
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    trained: list[Tensor] = [p for p in parameters if p.requires_grad]
    there = [*parameters, *(buffer for module in modules for buffer in module.buffers())]
    constant = bytes_of([*there, *(leaf for _, leaf in leaves(batch.tree))]) + optimizer_bytes(optimizer, trained)
    return _Subject(objective, batch, limit, constant, trained, optimizer)


# Ways of training.


class Way(NamedTuple):
    """A way of making the large batch's update, and its memory."""

    name: str
    arguments: str
    """What to pass to `TrainStep` for it."""
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
        lines = [(f"update of {self.rows} rows", "micro-batch", "peak", "TrainStep(...)")]
        for way in self.ways:
            arguments = way.arguments or "an ordinary step"
            size, last = _rows(way.micro_batch_size), arguments if way.fits else "does not fit"
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
                _SMALLER,
            )
        if not best.arguments:
            how = f"The whole batch of {self.rows} rows fits into an ordinary step."
        else:
            how = f"{best.name.capitalize()}, {_rows(best.micro_batch_size)} at a time: "
            how += f"pass {best.arguments} to TrainStep."
        if "in_backward" in best.arguments:
            how = f"Whole gradients, {format_bytes(self.gradient_bytes)}, don't fit with the rest. {how}"
        return how, f"Its peak is {format_bytes(best.peak)} of {left}."


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def estimate_ways(
    model: nn.Module, batch: Any, *, blocks: BlocksChoice = "auto", margin: float = MARGIN, **keywords: Any
) -> Ways:
    """What each way of making the large batch's update needs, and the largest micro-batch that it fits with.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        >>> batch = torch.zeros(64, 256), torch.zeros(64, 256)
        >>> ways = estimate_ways(model, batch, loss_fn=nn.MSELoss(), memory_limit="8MiB")
        >>> [way.name for way in ways.ways if way.fits]
        ['updated in backward', 'updated in backward, offloaded', 'parameters on the host']
    """
    subject, note = _subject(model, batch, margin, **keywords), ""
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


def _ways(subject: _Subject, margin: float, blocks: BlocksChoice) -> list[Way]:
    rows, constant, allowed = subject.batch.rows, subject.constant, (1 - margin) * subject.limit
    whole = constant + subject.peak(rows)
    ways = [Way("plain", "", rows, whole, whole <= allowed)]
    found: list[tuple[str, str, Callable[[int], int], int]] = [("accumulated", "", subject.peak, 0)]
    if blocks is not None:
        blocks = blocks if isinstance(blocks, Blocks) else Blocks(blocks)
        named = f'"{blocks.modules}"' if isinstance(blocks.modules, str) else "..."
        phases = functools.cache(functools.partial(_phases, subject, blocks))
        backward = f'blocks=Blocks({named}, update="in_backward"'
        by_layer, freed, offloaded = (
            functools.partial(_peak, phases, rows, freed=frees, offloaded=offloads)
            for frees, offloads in ((False, False), (True, False), (True, True))
        )
        found += [
            ("layer by layer", f"blocks={named}", by_layer, 0),
            ("updated in backward", f"{backward})", freed, 0),
            ("updated in backward, offloaded", f"{backward}), offload=True", offloaded, 0),
        ]
        if (spared := _bytes_on_host(subject, blocks)) is not None:
            found.append(("parameters on the host", f'{backward}, on="cpu"), offload=True', offloaded, spared))
    for name, arguments, peak, away in found:
        here = constant - away
        size, needed = largest_size(peak, rows, allowed - here)
        pasted = ", ".join(filter(None, [f"micro_batch_size={size}", arguments]))
        ways.append(Way(name, pasted, size, here + needed, here + needed <= allowed))
    return ways


def _bytes_on_host(subject: _Subject, blocks: Blocks) -> int | None:
    """What the device is spared where blocks live on the host, but two that visit it; None where they can't."""
    model = subject.objective.model
    listed = [block.module for block in Layers(model, blocks).blocks]
    found = [list(block.parameters()) for block in listed]
    inside = {id(p): p for parameters in found for p in parameters}
    modules = {id(module) for block in listed for module in block.modules()}
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


def _phases(subject: _Subject, blocks: Blocks, size: int) -> list[_Phases]:
    """The phases of an update, layer by layer, in two micro-batches of this size, and in three."""
    objective, model = subject.objective, subject.objective.model
    wanted = {name for name, p in model.named_parameters() if any(p is one for one in subject.trained)}

    def updated(micro_batch: Batch, count: int) -> _Phases:
        layers, plan = Layers(model, blocks), _Plan([Slice(slice(0, micro_batch.rows))] * count)
        parameters = [p for name, p in model.named_parameters() if name in wanted]

        def forward_and_loss(piece: Slice) -> None:
            with layers.micro_batch(lambda: micro_batch, objective.evaluate):
                loss, _ = objective.forward(micro_batch)
            loss.backward(retain_graph=True)
            layers.commit(piece)

        with LiveBytes() as live, torch.enable_grad():
            turn = layers.listener = _Freeing(live, parameters, layers)
            layers.run(plan, forward_and_loss, MemoryMeter(objective.device), None, proving=False)  # type: ignore[arg-type]
        for parameter in parameters:
            parameter.grad = None
        return turn.phases

    return on_fakes(objective, subject.batch, size, lambda micro_batch: [updated(micro_batch, n) for n in (2, 3)])


class _Plan(list[Slice]):
    measuring = False


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
