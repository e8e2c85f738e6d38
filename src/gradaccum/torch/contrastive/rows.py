"""The rows that a contrastive loss compares: one process's or all ranks', which pairs belong together, and the checks.

Every rank keeps its own rows of `a`. The ranks' rows of `b` are broadcast one rank's at a time, while the next ones are
under way: but for a few numbers per row, memory does not grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.random_state import RandomState, all_generators, kept
from gradaccum.schedule import checked_count

__all__ = ["AllRanks", "Answers", "Inputs", "Pairs", "PairsOf", "SingleProcess"]


class SingleProcess:
    """One process: its rows of `b` are all there are.

    Attributes:
        rank: This process's number.
        rows: Rows of `a` of each rank.
        columns: Rows of `b` of each rank.
        starts: The numbers of each rank's first row of `b` among all ranks'.
        device: Where the rows are.
    """

    rank = 0

    def __init__(self, rows: Sequence[int], columns: Sequence[int], device: torch.device) -> None:
        self.rows, self.columns, self.device = list(rows), list(columns), device
        self.starts = [0, *itertools.accumulate(columns)][:-1]

    def blocks(self, b: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank's rows of `b`, with its number."""
        yield 0, b

    def gathered(self, column: Tensor) -> Tensor:
        """All ranks' numbers, one per row of `b`."""
        return column

    def maximum(self, tensor: Tensor) -> Tensor:
        """Elementwise over ranks."""
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""
        return tensor

    def send_back(self, gradient: Tensor, owner: int) -> Tensor | None:
        """The gradient of a rank's rows of `b`, added up over ranks; None on all other ranks."""
        return gradient


class AllRanks(SingleProcess):
    """The ranks of a process group."""

    def __init__(
        self, group: dist.ProcessGroup, rows: Sequence[int], columns: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(rows, columns, device)
        self.group, self.rank = group, dist.get_rank(group)
        self._global = [dist.get_global_rank(group, number) for number in range(len(rows))]

    def blocks(self, b: Tensor) -> Iterator[tuple[int, Tensor]]:
        sent = self._send(b, 0)
        for owner in range(len(self.columns)):
            block, work = sent
            if owner + 1 < len(self.columns):
                sent = self._send(b, owner + 1)
            if work is not None:
                work.wait()
            yield owner, block

    def _send(self, tensor: Tensor, owner: int) -> tuple[Tensor, dist.Work | None]:
        if owner == self.rank:
            block = tensor.detach().contiguous()
        else:
            block = tensor.new_empty(self.columns[owner], *tensor.shape[1:])
        if not block.numel():
            return block, None
        # As bytes, since not every backend knows every type of numbers.
        return block, dist.broadcast(block.view(torch.uint8), self._global[owner], group=self.group, async_op=True)

    def gathered(self, column: Tensor) -> Tensor:
        return torch.cat([block for _, block in self.blocks(column)])

    def maximum(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def total(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def send_back(self, gradient: Tensor, owner: int) -> Tensor | None:
        if gradient.numel():
            dist.reduce(gradient, self._global[owner], group=self.group)
        return gradient if owner == self.rank else None


PairsOf = Tensor | tuple[Tensor, Tensor] | Callable[[Tensor, Tensor], Tensor]
"""What users give: ids of the rows, ids of `a`'s and of `b`'s rows, or a function of numbers of rows."""

NO_ID = torch.iinfo(torch.int64).min


class Pairs:
    """Rows of `a` and of `b` that have the same number on the same rank."""

    def __init__(self, exchange: SingleProcess) -> None:
        self.exchange = exchange

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        """Of each pair of a tile whether it is meant; None where none is."""
        first = self.exchange.starts[self.exchange.rank]
        begin, end = max(first + rows.start, columns.start), min(first + rows.stop, columns.stop)
        if begin >= end:
            return None
        device = self.exchange.device
        numbers = torch.arange(first + rows.start, first + rows.stop, device=device)
        return numbers[:, None] == torch.arange(columns.start, columns.stop, device=device)


class SameIds(Pairs):
    """Rows with the same id."""

    def __init__(self, exchange: SingleProcess, of_a: Tensor, of_b: Tensor) -> None:
        super().__init__(exchange)
        # A copy, as backward looks at them again, whatever has become of the user's tensor.
        self.of_a = of_a.to(exchange.device, torch.int64, copy=True)
        extra = exchange.columns[exchange.rank] - len(of_b)  # negatives of every row
        of_b = of_b.to(exchange.device, torch.int64)
        self.of_b = exchange.gathered(torch.cat([of_b, of_b.new_full((extra,), NO_ID)]))

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        return self.of_a[rows, None] == self.of_b[columns]


class ByFunction(Pairs):
    """Pairs for which a function of their numbers is true."""

    def __init__(self, exchange: SingleProcess, function: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
        super().__init__(exchange)
        self.function, self.name = function, name
        self.before = sum(exchange.rows[: exchange.rank])
        self.digest = torch.zeros(exchange.rows[exchange.rank], dtype=torch.float32, device=exchange.device)
        """Of each row a number that its answers make, over all tiles of a pass."""

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        device = self.exchange.device
        numbers = torch.arange(rows.start, rows.stop, device=device) + self.before
        with torch.no_grad():
            found = self.function(numbers, torch.arange(columns.start, columns.stop, device=device))
        expected = (rows.stop - rows.start, columns.stop - columns.start)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or tuple(found.shape) != expected:
            received = f"{found.dtype}, shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(
                f"`{self.name}(rows, columns)` must return a bool tensor of shape (len(rows), len(columns)), here "
                f"{expected}. Received: {received}."
            )
        found = found.to(device)
        self._digest(rows, columns, found)
        return found

    @torch.no_grad()
    def _digest(self, rows: slice, columns: slice, found: Tensor) -> None:
        number = torch.arange(columns.start, columns.stop, device=found.device)
        weights = (number * 2654435761 // 128 % 2039 + 1).to(self.digest.dtype)
        with torch.autocast(found.device.type, enabled=False):
            self.digest[rows] += found.to(self.digest.dtype) @ weights


class Answers:
    """What functions answer in the first pass over the tiles: backward, which asks again, has to get the same.

    Random numbers of PyTorch's, Python's and NumPy's generators are those of the first pass in every other one.
    """

    def __init__(self, *asked: Pairs | None) -> None:
        self.functions = [pairs for pairs in asked if isinstance(pairs, ByFunction)]
        self._random: RandomState | None = None
        self._first: list[Tensor] = []

    @contextlib.contextmanager
    def the_same(self) -> Iterator[None]:
        """Around each pass over all tiles."""
        if not self.functions:
            yield
            return
        for pairs in self.functions:
            pairs.digest = torch.zeros_like(pairs.digest)
        if self._random is None:
            before = RandomState(all_generators([self.functions[0].exchange.device]))
            yield
            self._random = before.only(before.moved())
            self._first = [pairs.digest for pairs in self.functions]
            return
        with kept(self._random.states):
            self._random.put_back()
            yield
        for pairs, first in zip(self.functions, self._first, strict=True):
            if not torch.equal(pairs.digest, first):
                raise NotEquivalentError(
                    f"`{pairs.name}(rows, columns)` answers otherwise when backward asks it again, so the gradient "
                    "would be that of another loss. Does it read something that has changed since, or draw from a "
                    "generator of its own? Draw, or copy what it reads, before the loss is called."
                )


def _checked_pairs(given: Any, name: str, rows: int, columns: int) -> int:
    """Check what `positives` or `ignore` was given as; returns a number for its kind."""
    if given is None:
        return 0
    if callable(given):
        return 1
    both = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(both[0], Tensor) or not (both[1] is None or isinstance(both[1], Tensor)):
        raise TypeError(
            f"`{name}` must be a tensor of ids, a tuple of two (of a's rows, of b's), or a function (rows, columns) -> "
            f"bool tensor. Received: {name}={given!r} of type {type(given).__name__}."
        )
    of_a, of_b = both
    _check_ids(of_a, of_b, name, rows, columns)
    return 2


def _check_ids(of_a: Tensor, of_b: Tensor | None, name: str, rows: int, columns: int) -> None:
    for ids in (of_a,) if of_b is None else (of_a, of_b):
        if ids.dtype in (torch.bool, torch.uint64) or ids.is_floating_point() or ids.is_complex() or ids.dim() != 1:
            raise ValueError(
                f"`{name}` as a tensor holds an id (an int) for each row. Received: {ids.dtype}, shape "
                f"{tuple(ids.shape)}. A matrix of pairs takes memory that is quadratic in the rows; one that is at "
                f"hand is given as {name}=lambda rows, columns: matrix[rows][:, columns]."
            )
    if of_b is None and columns < rows:
        raise ValueError(
            f"`{name}` as one tensor holds ids of the pairs, of which b has fewer rows than a ({columns} and {rows}). "
            f"Give the ids of both: {name}=(ids_of_a, ids_of_b)."
        )
    if len(of_a) != rows or (of_b is not None and len(of_b) != columns):
        lengths = len(of_a) if of_b is None else (len(of_a), len(of_b))
        raise ValueError(f"`{name}` must have an id for each row, {(rows, columns)} of a and b. Received: {lengths}.")


def _pairs_of(given: PairsOf, name: str, exchange: SingleProcess) -> Pairs:
    """The pairs that were given, checked."""
    if isinstance(given, tuple):
        return SameIds(exchange, *given)
    if isinstance(given, Tensor):
        return SameIds(exchange, given, given)
    return ByFunction(exchange, given, name)


_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Inputs(NamedTuple):
    """The arguments of a contrastive loss."""

    name: str
    a: Any
    b: Any
    temperature: Any
    bias: Any
    tile: Any
    symmetric: bool
    positives: PairsOf | None
    ignore: PairsOf | None
    group: Any

    def pairs(self, exchange: SingleProcess) -> tuple[Pairs, Pairs | None]:
        """The pairs that belong together, and those that count as neither."""
        positives = Pairs(exchange) if self.positives is None else _pairs_of(self.positives, "positives", exchange)
        return positives, None if self.ignore is None else _pairs_of(self.ignore, "ignore", exchange)

    def numbers(self) -> tuple[Tensor, Tensor | None]:
        """The temperature and the bias, as tensors."""
        temperature = _scalar(self.temperature, self.a.device, self.dtype)
        return temperature, None if self.bias is None else _scalar(self.bias, self.a.device, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in: half precision is summed in float32."""
        return torch.promote_types(torch.promote_types(self.a.dtype, self.b.dtype), torch.float32)

    def exchange(self) -> SingleProcess:
        """Whose rows there are, once all arguments have been checked, on all ranks."""
        if self.group is None:
            self._check()
            return SingleProcess([len(self.a)], [len(self.b)], self.a.device)
        if not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(
                "`group` must be a process group, as torch.distributed.group.WORLD is once init_process_group() was "
                f"called; or None: this process's rows alone. Received: group={self.group!r}."
            )
        problem: Exception | None = None
        try:
            self._check()
            mine = self._summary()
        except (TypeError, ValueError) as error:
            problem, mine = error, dict.fromkeys(SUMMARY, 0.0)
        device = self.a.device if isinstance(self.a, Tensor) else torch.device("cpu")
        ranks = _all(self.group, [float(problem is None), *mine.values()], device)
        if problem is not None:
            raise problem
        wrong = [rank for rank, (is_right, *_) in enumerate(ranks) if not is_right]
        if wrong:
            raise ValueError(f"{self.name} was called with arguments that it refuses on rank {wrong[0]}: see there.")
        theirs = {name: [numbers[index] for _, *numbers in ranks] for index, name in enumerate(mine)}
        rows, columns = ([int(value) for value in theirs.pop(name)] for name in ("rows", "columns"))
        self._check_agreement(theirs)
        if len(ranks) == 1:
            return SingleProcess(rows, columns, self.a.device)
        return AllRanks(self.group, rows, columns, self.a.device)

    def _check_agreement(self, theirs: dict[str, list[float]]) -> None:
        for name, values in theirs.items():
            if len(set(map(str, values))) > 1:  # NaN is equal to NaN here
                words = SUMMARY[name]
                received = ", ".join(str(words[int(value)]) if words else f"{value:g}" for value in values)
                raise ValueError(
                    f"The ranks call {self.name} differently: {name} must be the same. Received, by rank: {received}."
                )

    def _summary(self) -> dict[str, float]:
        learned = [isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled() for t in self[1:5]]
        values = [
            len(self.a), len(self.b), self.a.shape[1],
            _DTYPES.index(self.a.dtype), _DTYPES.index(self.b.dtype), *learned,
            _number(self.temperature), 0.0 if self.bias is None else _number(self.bias), self.symmetric,
            _checked_pairs(self.positives, "positives", len(self.a), len(self.b)),
            _checked_pairs(self.ignore, "ignore", len(self.a), len(self.b)),
        ]  # fmt: skip
        return dict(zip(SUMMARY, map(float, values), strict=True))

    def _check(self) -> None:
        for name, rows in (("a", self.a), ("b", self.b)):
            if not isinstance(rows, Tensor):
                raise TypeError(f"`{name}` must be a tensor. Received: {rows!r} of type {type(rows).__name__}.")
            if rows.dim() != 2 or rows.dtype not in _DTYPES or rows.layout is not torch.strided:
                raise ValueError(
                    f"`{name}` must be a dense floating-point tensor of shape (rows, size). Received: {rows.dtype} of "
                    f"shape {tuple(rows.shape)}, {rows.layout}."
                )
        if self.a.shape[1] != self.b.shape[1] or self.a.device != self.b.device:
            raise ValueError(
                "`a` and `b` must have rows of the same size, on the same device. Received: "
                f"{tuple(self.a.shape)} on {self.a.device}, {tuple(self.b.shape)} on {self.b.device}."
            )
        checked_count(self.tile, "tile")
        kind = _checked_pairs(self.positives, "positives", len(self.a), len(self.b))
        if kind == 0 and len(self.b) < len(self.a):
            raise ValueError(
                "Without `positives` row i of a and row i of b are a pair, so b has as many rows as a, or more: "
                f"negatives. Received: {len(self.a)} rows of a, {len(self.b)} of b. Swap them, or pass `positives`."
            )
        _checked_pairs(self.ignore, "ignore", len(self.a), len(self.b))
        _check_scalar(self.temperature, "temperature", positive=True)
        if self.bias is not None:
            _check_scalar(self.bias, "bias", positive=False)


_NEEDS = ("no gradient needed", "a gradient needed")
_PAIRS = ("None", "a function", "ids")
SUMMARY: dict[str, Sequence[Any]] = {
    "rows": (), "columns": (),
    "the size of a row": (),
    "the dtype of `a`": _DTYPES, "the dtype of `b`": _DTYPES,
    "whether `a` needs a gradient": _NEEDS, "whether `b` needs a gradient": _NEEDS,
    "whether `temperature` needs a gradient": _NEEDS, "whether `bias` needs a gradient": _NEEDS,
    "`temperature`": (), "`bias`": (),
    "`symmetric`": (False, True),
    "the kind of `positives`": _PAIRS, "the kind of `ignore`": _PAIRS,
}  # fmt: skip
"""What ranks tell each other, as numbers, and what the numbers stand for where they stand for something."""


def _all(group: dist.ProcessGroup, numbers: list[float], device: torch.device) -> list[list[float]]:
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, mine, group=group)
    return torch.stack(received).tolist()


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device)
    return torch.tensor(float(value), dtype=dtype, device=device)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _check_scalar(value: Any, name: str, *, positive: bool) -> None:
    must = f"`{name}` must be a{' positive' if positive else ''} number, or a tensor that holds one"
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(f"{must}. Received: {value.dtype} of shape {tuple(value.shape)}.")
        if value.device.type != "cpu":  # reading it would make the host wait
            return
        number = _number(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    else:
        raise TypeError(f"{must}. Received: {name}={value!r} of type {type(value).__name__}.")
    # A tensor's NaN passes, as a loss that is NaN: it may have been learned.
    if (positive and number <= 0) or (number != number and not isinstance(value, Tensor)):
        raise ValueError(f"{must}. Received: {name}={number!r}.")
