"""A window whose bits are the same on any number of ranks.

Micro-batches are those of the global batch, each on one rank. The gradient of each is taken alone, weighed in its
backward pass, and rounded to its tensor's grid, on which the sum is exact (`grid`). Grids follow from the update
before. Where a gradient has outgrown one, all ranks see so, and the window starts over with a grid from its
largest entry. Losses and weights are few: all ranks learn each of them, and add them up with one rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.sizes import Slice
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.grad_buffer import WindowTotal
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.random_state import RandomState
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.stages import run_stages
from gradaccum.on_torch.state import Snapshot
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.loss import BatchLosses
from gradaccum.torch.loss.batch_losses import ROUNDING
from gradaccum.torch.loss.counting import CountingPasses
from gradaccum.torch.reproducible.determinism import deterministic, held_back
from gradaccum.torch.reproducible.exchange import Exchange
from gradaccum.torch.reproducible.grid import LIMIT, GridSums, exponent, holds
from gradaccum.torch.reproducible.moved import MovedBuffers, Moves, ordered
from gradaccum.torch.reproducible.opening import Opening, opened
from gradaccum.torch.reproducible.options import check_reproducible
from gradaccum.torch.reproducible.sampler import check_micro_batch_size
from gradaccum.torch.reproducible.seeds import derived_seed, every_generator, plant
from gradaccum.torch.train_step.options import Options
from gradaccum.torch.train_step.window import Finished, WindowRunner

__all__ = ["ReproducibleWindow", "check_reproducible"]

_ATTEMPTS = 4
"""Runs of a window: one finds infinities, one the largest finite entries, one adds up; and the first one of all."""
_FADING = 1 / 16
"""A tensor's size falls by no more from update to update, so that a grid outlives an update without a gradient."""
_DTYPES = (None, torch.float32, torch.float64, torch.float16, torch.bfloat16)


_RANDOM_WEIGHTS = (
    "The weights of loss terms are other ones in the pass that counts them than in the micro-batches themselves. If "
    "the batch determines them, give weight=lambda *batch: {name: number}."
)


@dataclasses.dataclass
class Closing:
    """What all ranks' passes have come to."""

    largest: list[float]  # of each tensor
    counts: list[int]  # in how many micro-batches each tensor has a gradient
    contributions: list[list[float]]  # of each micro-batch, to each loss
    told: float | None  # what the losses divide by, where only forward passes tell
    dtype: torch.dtype | None  # of the losses
    moves: list[Moves] | None  # of each micro-batch; None where nothing moved


class ReproducibleWindow(WindowRunner):
    """Runs large batches so that parameters, losses and buffers are the same, bit for bit, on any number of ranks."""

    def __init__(self, *arguments: Any, options: Options, **keywords: Any) -> None:
        super().__init__(*arguments, **{**keywords, "always": True})
        objective, self._size = self.objective, options.micro_batch_size
        self._options = {
            "micro_batch_size": self._size,
            "batch_norm": options.batch_norm.replace("warn", "micro"),
            "reduction": objective.reduction,
            "weight": objective.weight and "given",
            "autocast": objective.autocast,
            **options.gradients,
        }
        self._exchange = Exchange(self.roots[0], self.objective.device)
        self._seed: int | None = None
        self._windows = 0
        """How many have run: what random numbers follow from beside the seed."""
        self._gradients: dict[int, float] = {}
        """Of each tensor, about the largest entry of a micro-batch's mean gradient."""
        self._several: bool | None = None  # whether there are several losses
        self._told = False  # whether only forward passes tell weights: then as they are, multiplied by these
        self._tensors: list[Tensor] = []
        self._kinds: list[Any] = []
        self._numbers: list[int] = []
        self._sums: GridSums | None = None
        self._held: list[Any] = []
        self._ordered = ordered(self.batch_norm)

    def state_dict(self) -> dict[str, Any]:
        state = {"seed": self._seed, "windows": self._windows, "gradients": dict(self._gradients), "told": self._told}
        return {"reproducible": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (saved := state.get("reproducible")) is not None:
            self._seed, self._windows, self._told = saved["seed"], saved["windows"], saved["told"]
            self._gradients = dict(saved["gradients"])

    # Before the passes.

    def run(self, batch: Batch, sizes: Sequence[int] | None = None) -> Finished:
        if self._seed is None:
            self._seed = torch.initial_seed()
        if self._sums is None or not self._windows & (self._windows - 1):
            self._held = held_generators(self.objective.evaluate, *self.roots)
            self._ordered = ordered(self.batch_norm)
        self._find_tensors()
        pieces = [slice(i, min(i + self._size, batch.rows)) for i in range(0, batch.rows, self._size)]
        generators = every_generator(self._held)
        found = RandomState(generators)
        try:
            with deterministic(self.objective.device), held_back(self._exchange.replicas):
                opening = self._open(batch, pieces, generators)
                finished = self._run_until_it_fits(batch, pieces, opening, generators)
        finally:
            found.put_back()
        self._windows += 1
        return finished

    def _find_tensors(self) -> None:
        parameters = {id(p): p for p in self.buffer.parameters()}
        parameters.update((id(p), p) for root in self.roots for p in root.parameters())
        tensors = [*parameters.values()]
        trained = [number for number, p in enumerate(tensors) if p.requires_grad]
        kinds = [(number, id(tensors[number]), tensors[number].dtype, tensors[number].device) for number in trained]
        if self._sums is None or kinds != self._kinds:
            self._kinds, self._numbers = kinds, trained
            self._tensors = [tensors[number] for number in trained]
            self._sums = GridSums(self._tensors)

    def _open(self, batch: Batch, pieces: Sequence[slice], generators: Sequence[Any]) -> Opening:
        check_micro_batch_size(self._size)
        objective, found = self.objective, self.objective.found
        named: bool | None = False if objective.compute_loss is None else found.terms
        weights: Any = None
        # As all ranks know it; a proof may have shown it to some of them.
        if objective.weight is None and objective.compute_loss is not None and self._several is not False:
            weights = self._counted(batch, pieces, generators)
            named = found.terms
        self._counts = weights
        if weights is None and (objective.weight is not None or not named):
            weights = [objective.total(_taken(batch, piece)) for piece in pieces]
            weights = None if any(weight is None for weight in weights) else [_read(weight) for weight in weights]
            if weights:
                named = isinstance(weights[0], dict)
        settings = {
            "the seed, torch.initial_seed()": self._seed,
            "the options of TrainStep": self._options,
            "the number of windows before": self._windows,
            "the sizes of the gradients before": self._gradients,
            "the scale of the GradScaler": None if self.scaler is None else self.scaler.get_scale(),
        }

        def agrees(several: bool) -> None:
            self._several = found.terms = several

        return opened(
            self._exchange, batch.rows, self._size, weights, settings,
            named=named, needs_two_rows=self._ordered is not None and bool(batch_norms(self.roots[0])), agrees=agrees,
        )  # fmt: skip

    def _counted(self, batch: Batch, pieces: Sequence[slice], generators: Sequence[Any]) -> list[Any] | None:
        """What each micro-batch's loss terms weigh; None where there is one loss."""
        counting, counted = CountingPasses(self, batch), []
        rows = self._exchange.numbers([batch.rows])  # random numbers depend on where this rank's micro-batches stand
        first = sum(-(-int(number) // self._size) for (number,) in rows[: self._exchange.rank])
        for number, piece in enumerate(pieces):
            self._plant(first + number, generators)
            buffers = Snapshot.of(self.modules())
            try:
                terms = counting.forward(Slice([*range(piece.start, piece.stop)]))
            finally:
                buffers.put_back()
            if terms is None:
                return None
            counted.append({name: float(term.weight) for name, term in terms.items()})
        return counted

    def _plant(self, place: int, generators: Sequence[Any]) -> None:
        assert self._seed is not None
        plant(derived_seed(self._seed, self._windows, place), generators)

    # The passes.

    def _run_until_it_fits(
        self, batch: Batch, pieces: Sequence[slice], opening: Opening, generators: Sequence[Any]
    ) -> Finished:
        sums, count = self._sums, opening.micro_batches
        assert sums is not None
        share = 1 if self._told else count
        exponents = [
            exponent(LIMIT * self._gradients[number] / share, count) if number in self._gradients else None
            for number in self._numbers
        ]
        special: set[int] = set()
        for _ in range(_ATTEMPTS):
            self.clear()
            sums.open(exponents, sorted(special))
            losses = self._losses(batch, opening)
            closing = self._close(opening, losses, *self._passes(batch, pieces, opening, losses, generators))
            infinite = {i for i, size in enumerate(closing.largest) if math.isinf(size)} - special
            outgrown = [
                closing.counts[i] > 0 and (e is None or not holds(closing.largest[i], e, count))
                for i, e in enumerate(exponents)
            ]
            if not infinite and not any(outgrown):
                return self._finish(batch, opening, losses, closing)
            special |= infinite
            for i in range(len(exponents)):
                if i in infinite:
                    exponents[i] = None
                elif outgrown[i]:
                    exponents[i] = exponent(closing.largest[i], count)
            self.state.restart()
        raise WindowError(
            "reproducible=True: the gradients of a window that started over were other ones, so its passes don't "
            "repeat their bits. Look for operations without a deterministic algorithm, or for what depends on time."
        )

    def clear(self) -> None:
        self.buffer.clear()
        for tensor in self._tensors:
            tensor.grad = None

    def _losses(self, batch: Batch, opening: Opening) -> BatchLosses:
        if isinstance(opening.total, dict):
            losses = BatchLosses(self.objective, batch, opening.total, named=True, rows=float(opening.rows))
        else:
            losses = BatchLosses(self.objective, batch, opening.total, unit=1.0)
        losses.waits = True
        return losses

    def _passes(
        self, batch: Batch, pieces: Sequence[slice], opening: Opening, losses: BatchLosses, generators: Sequence[Any]
    ) -> tuple[list[dict[Hashable, Any]], list[float], MovedBuffers]:
        """Run this rank's micro-batches. Returns their losses, what they weigh, if they tell, and what they move."""
        sums, scale = self._sums, None if self.scaler is None else self.scaler.scale
        assert sums is not None
        policy = self.batch_norm if self._ordered is None else self._ordered
        contributions: list[dict[Hashable, Any]] = []
        told: list[float] = []
        moved = MovedBuffers(self.roots, self.state, self._ordered)
        quick = scale is None and not losses.named and self._ordered is None
        with policy.window(looks=self.state.looks):
            for number, piece in enumerate(pieces):
                self._plant(opening.first + number, generators)
                micro_batch = _taken(batch, piece)
                before = {name: len(each.losses) for name, each in losses.sums.items()}
                try:
                    with policy.micro_batch():
                        weighted = losses.run(micro_batch) if quick else losses.forward(micro_batch)
                    if weighted is not None:
                        losses.backward(weighted, scale)
                        told += [] if weighted.told is None else [float(weighted.told)]
                except Exception as error:
                    if is_out_of_memory(error):
                        raise torch.OutOfMemoryError(
                            f"Out of memory with a micro-batch of {piece.stop - piece.start} rows: {error}\nWith "
                            "reproducible=True micro-batches aren't split further. Give a smaller `micro_batch_size`."
                        ) from error
                    raise
                sums.add([(i, p.grad) for i, p in enumerate(self._tensors) if p.grad is not None])
                for parameter in self._tensors:
                    parameter.grad = None
                contributions.append(
                    {
                        name: each.losses[-1]
                        for name, each in losses.sums.items()
                        if len(each.losses) > before.get(name, 0)
                    }
                )
                moved.micro_batch()
        losses.check()
        return contributions, told, moved

    def _close(
        self,
        opening: Opening,
        losses: BatchLosses,
        contributions: Sequence[Mapping[Hashable, Any]],
        told: Sequence[float],
        moved: MovedBuffers,
    ) -> Closing:
        sums = self._sums
        assert sums is not None
        sums.close()
        names: list[Hashable] = [*opening.total] if losses.named else [None]
        dtype = _dtype_of(contributions)
        flags = [
            float(bool(told)),
            float(dtype),
            float(any(moved.moves)),
            float(self._counted_others(losses, len(contributions))),
        ]
        width, tensors = 1 + len(names), len(self._tensors)
        filled = [0.0] * (max(opening.counts) * width)
        for i, each in enumerate(contributions):
            weight = told[i] if told else 0.0
            filled[i * width : (i + 1) * width] = [weight, *(_contribution(each.get(name)) for name in names)]
        everybody = self._exchange.numbers([*flags, *sums.largest(), *map(float, sums.counts), *filled])
        tells, dtypes, moves, others = zip(*(numbers[: len(flags)] for numbers in everybody))
        if any(others):
            raise ValueError(_RANDOM_WEIGHTS)
        start = len(flags) + 2 * tensors
        rows = [row for n, numbers in zip(opening.counts, everybody) for row in _cut(numbers[start:], n, width)]
        of_tensors = [*zip(*(numbers[len(flags) : start] for numbers in everybody))]
        self._moved = moved
        return Closing(
            largest=[*map(max, of_tensors[:tensors])],
            counts=[int(sum(counts)) for counts in of_tensors[tensors:]],
            contributions=[row[1:] for row in rows],
            told=math.fsum(row[0] for row in rows) if any(tells) else None,
            dtype=_DTYPES[int(max(dtypes))],
            moves=[*itertools.chain(*self._exchange.objects(moved.moves))] if any(moves) else None,
        )

    def _counted_others(self, losses: BatchLosses, micro_batches: int) -> bool:
        """Whether loss terms weigh something else than the counting pass has found."""
        if not losses.named or self._counts is None:
            return False
        return any(
            not math.isclose(float(each.weights.get(number + 1, 0.0)), counted[name], rel_tol=ROUNDING)
            for name, each in losses.sums.items()
            for number, counted in enumerate(self._counts[:micro_batches])
            if name in counted
        )

    # After the passes.

    def _finish(self, batch: Batch, opening: Opening, losses: BatchLosses, closing: Closing) -> Finished:
        sums, count = self._sums, opening.micro_batches
        assert sums is not None
        self._exchange.add_up(sums.parts())
        if closing.moves is not None:
            self._moved.move(closing.moves, opening.sizes)
        finished = self._summed(opening, losses, closing)
        self._told = closing.told is not None
        for i, number in enumerate(self._numbers):
            if closing.counts[i]:
                size = closing.largest[i] * (1 if self._told else count)
                self._gradients[number] = max(size, self._gradients.get(number, 0.0) * _FADING)
            elif number in self._gradients:
                self._gradients[number] *= _FADING
        if not finished.weighs:
            return finished
        divisor = 1.0 if closing.told is None else closing.told
        for i, parameter in enumerate(self._tensors):
            if closing.counts[i]:
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                value = sums.value(i, divisor, dtype.to_real())
                parameter.grad = torch.view_as_complex(value) if parameter.is_complex() else value
        total = WindowTotal(self.buffer, None, rows=batch.rows)
        run_stages(self.stages, total)
        finished.grad_norm = total.grad_norm
        return finished

    def _summed(self, opening: Opening, losses: BatchLosses, closing: Closing) -> Finished:
        """The loss of all rows, and of several losses the mean of each."""
        dtype, device = closing.dtype or torch.get_default_dtype(), self.objective.device
        columns = [math.fsum(column) for column in zip(*closing.contributions)]

        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        if losses.named:
            totals: dict[Hashable, float] = opening.total
            means = {name: s / w if w else math.nan for (name, w), s in zip(totals.items(), columns, strict=True)}
            weighs = any(totals.values())
            loss = math.fsum(s / w for w, s in zip(totals.values(), columns, strict=True) if w) if weighs else math.nan
            return Finished(scalar(loss), weighs, {name: scalar(mean) for name, mean in means.items()})
        divisor = opening.total if closing.told is None else closing.told
        weighs = divisor is None or divisor > 0
        return Finished(scalar(columns[0] / (1.0 if divisor is None else divisor) if weighs else math.nan), weighs, {})


def _dtype_of(contributions: Sequence[Mapping[Hashable, Any]]) -> int:
    """The losses' dtype, as a number; 0 where there are none."""
    first = next((loss.dtype for each in contributions for loss, _, _ in each.values()), None)
    return _DTYPES.index(first) if first in _DTYPES else 1


def _cut(numbers: Sequence[float], count: int, width: int) -> list[list[float]]:
    """The first `count` rows of this width."""
    return [list(numbers[i * width : (i + 1) * width]) for i in range(count)]


def _taken(batch: Batch, rows: slice) -> Batch:
    """These rows, copied: kernels round otherwise where memory begins elsewhere, as a rank's rows do in its batch."""
    return batch.take(torch.arange(rows.start, rows.stop))


def _contribution(entry: tuple[Tensor, Any, int] | None) -> float:
    return 0.0 if entry is None else float(entry[0]) * float(entry[1])


def _read(weight: Any) -> Any:
    return {name: float(w) for name, w in weight.items()} if isinstance(weight, dict) else float(weight)
