"""What a contrastive loss is called with: checked, and agreed on between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.schedule import checked_count
from gradaccum.torch.contrastive.pairs import Pairs, PairsOf, checked_pairs, pairs_of
from gradaccum.torch.contrastive.ranks import AllRanks, SingleProcess
from gradaccum.torch.contrastive.tiles import Scores

__all__ = ["Inputs"]

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Inputs(NamedTuple):
    """The arguments of a contrastive loss.

    Raises:
        TypeError, ValueError: From `scores` and `numbers`: an argument is none of what it must be, or the ranks differ.
    """

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

    def scores(self) -> Scores:
        """The scores of all pairs, checked."""
        exchange = self._exchange()
        positives = Pairs(exchange) if self.positives is None else pairs_of(self.positives, "positives", exchange)
        ignored = None if self.ignore is None else pairs_of(self.ignore, "ignore", exchange)
        return Scores(exchange, positives, ignored, self.tile, self._dtype)

    def numbers(self) -> tuple[Tensor, Tensor | None]:
        """The temperature and the bias, as tensors."""
        temperature = _scalar(self.temperature, self.a.device, self._dtype)
        return temperature, None if self.bias is None else _scalar(self.bias, self.a.device, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """What is computed in: half precision is summed in float32."""
        return torch.promote_types(torch.promote_types(self.a.dtype, self.b.dtype), torch.float32)

    def _exchange(self) -> SingleProcess:
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
        for name, values in theirs.items():
            if name not in ("rows", "columns") and len(set(map(str, values))) > 1:  # NaN is equal to NaN here
                words = SUMMARY[name]
                received = ", ".join(str(words[int(value)]) if words else f"{value:g}" for value in values)
                raise ValueError(
                    f"The ranks call {self.name} differently: {name} must be the same. Received, by rank: {received}."
                )
        rows, columns = ([int(value) for value in theirs[name]] for name in ("rows", "columns"))
        if len(ranks) == 1:
            return SingleProcess(rows, columns, self.a.device)
        return AllRanks(self.group, rows, columns, self.a.device)

    def _summary(self) -> dict[str, float]:
        learned = [isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled() for t in self[1:5]]
        values = [
            len(self.a), len(self.b), self.a.shape[1], DTYPES.index(self.a.dtype), DTYPES.index(self.b.dtype), *learned,
            _number(self.temperature), 0.0 if self.bias is None else _number(self.bias), self.symmetric,
            checked_pairs(self.positives, "positives", len(self.a), len(self.b)),
            checked_pairs(self.ignore, "ignore", len(self.a), len(self.b)),
        ]  # fmt: skip
        return dict(zip(SUMMARY, map(float, values), strict=True))

    def _check(self) -> None:
        for name, rows in (("a", self.a), ("b", self.b)):
            if not isinstance(rows, Tensor):
                raise TypeError(f"`{name}` must be a tensor. Received: {rows!r} of type {type(rows).__name__}.")
            if rows.dim() != 2 or rows.dtype not in DTYPES or rows.layout is not torch.strided:
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
        kind = checked_pairs(self.positives, "positives", len(self.a), len(self.b))
        if kind == 0 and len(self.b) < len(self.a):
            raise ValueError(
                "Without `positives` row i of a and row i of b are a pair, so b has as many rows as a, or more: "
                f"negatives. Received: {len(self.a)} rows of a, {len(self.b)} of b. Swap them, or pass `positives`."
            )
        checked_pairs(self.ignore, "ignore", len(self.a), len(self.b))
        _check_scalar(self.temperature, "temperature", positive=True)
        if self.bias is not None:
            _check_scalar(self.bias, "bias", positive=False)


_NEEDS = ("no gradient needed", "a gradient needed")
_PAIRS = ("None", "a function", "ids")
SUMMARY: dict[str, Sequence[Any]] = {
    "rows": (), "columns": (),
    "the size of a row": (),
    "the dtype of `a`": DTYPES, "the dtype of `b`": DTYPES,
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
