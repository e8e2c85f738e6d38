"""The objective: from a model and a micro-batch to its share of the large batch's loss.

    large batch's loss = sum_i part_i,      part_i = loss_i * w_i / W

where `loss_i` is the mean loss of micro-batch i, `w_i` what that mean is over, and `W` the same for the large batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.torch import weights
from gradaccum.torch.batch import BatchDims, cutter, number_of_rows, take
from gradaccum.window import checked_reduction, checked_weight

__all__ = ["Objective", "Part", "Tally"]

Weight = float | Tensor


class Objective:
    """How a model's loss on a batch is computed, and what it divides by. The keywords are those of `TrainStep`.

    Args:
        model: The model.
        loss_fn: `loss_fn(model(x), y)` on an `(x, y)` batch; tuples of outputs and of targets are unpacked. What a
            `torch.nn` loss divides by is known; any other callable is taken to be a mean over rows.
        compute_loss: In its place: `compute_loss(model, *batch) -> loss` or `(loss, weight)`.
        weight: `weight(*micro_batch) -> number`, what the loss is a mean over, where that isn't rows. Additive: the
            weight of a batch is the sum of its parts' weights.
        reduction: `"mean"`, or `"sum"` for losses that are sums; those are divided by the weight, if one is given.
        batch_dims: Where the rows are, like `in_dims` of `torch.vmap`.
        autocast: A dtype in which the forward pass runs under `torch.autocast`, or None.

    Raises:
        TypeError, ValueError: Not exactly one of `loss_fn` and `compute_loss`, or one of the wrong kind.

    Example:
        >>> objective = Objective(nn.Linear(3, 2), loss_fn=nn.CrossEntropyLoss())
        >>> batch = torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 0, 1])
        >>> tally = objective.tally(batch)
        >>> for rows in (slice(0, 4), slice(4, 6)):
        ...     part = tally.part(objective.take(batch, rows))
        ...     tally.backward(part, part.loss)
        ...     tally.add(part)
        >>> torch.testing.assert_close(tally.loss, objective.whole(batch).detach())
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: Callable[..., Any] | None = None,
        compute_loss: Callable[..., Any] | None = None,
        weight: Callable[..., Any] | None = None,
        reduction: str = "mean",
        batch_dims: BatchDims = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        if not callable(model):
            raise TypeError(f"`model` must be a torch.nn.Module. Received: {model!r} of type {type(model).__name__}.")
        if (loss_fn is None) == (compute_loss is None):
            raise ValueError(
                "Give exactly one of `loss_fn`, as in loss_fn(model(x), y), and `compute_loss`, as in "
                f"compute_loss(model, *batch). Received: loss_fn={loss_fn!r}, compute_loss={compute_loss!r}."
            )
        for name, function in (("loss_fn", loss_fn), ("compute_loss", compute_loss), ("weight", weight)):
            if function is not None and not callable(function):
                raise TypeError(
                    f"`{name}` must be callable. Received: {name}={function!r} of type {type(function).__name__}."
                )
        if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
            raise TypeError(
                f"`autocast` must be a dtype such as torch.bfloat16, or None. Received: autocast={autocast!r}."
            )
        self.model = model
        self.loss_fn = weights.with_known_divisor(loss_fn) if loss_fn is not None else None
        self._summed: Any = None
        self.compute_loss = compute_loss
        self.weight = weight
        self.batch_dims = batch_dims
        self.autocast = autocast
        self.reduction = checked_reduction(reduction)
        told = weights.reduction_of(self.loss_fn) if self.loss_fn is not None else None
        if told == "mean" and self.reduction == "sum":
            raise ValueError(f"reduction='sum' contradicts loss_fn={loss_fn!r}, which returns a mean.")
        if told is not None:
            self.reduction = checked_reduction(told)

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """`batch` as the arguments that follow the model: a tuple or list is unpacked, anything else is one argument.

        Example:
            >>> Objective(nn.Identity(), compute_loss=lambda model, batch: batch["x"].mean()).arguments({"x": 1})
            ({'x': 1},)
        """
        plain = isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields")
        if plain and self.loss_fn is not None and len(batch) == 1 and isinstance(batch[0], (tuple, list)):
            return self.arguments(batch[0])
        return tuple(batch) if plain else (batch,)

    def by_targets(self, batch: tuple[Any, ...]) -> bool:
        """Whether the loss divides by a number that its targets say, so that sums of it are what adds up."""
        return self.loss_fn is not None and len(batch) == 2 and weights.divides_by(self.loss_fn, batch[1])

    def rows(self, batch: tuple[Any, ...]) -> int:
        """The rows of a batch; a ValueError that lists every path and shape where they disagree."""
        return number_of_rows(batch, self.dims(batch))

    def take(self, batch: tuple[Any, ...], rows: slice | Tensor) -> tuple[Any, ...]:
        """The micro-batch that holds these rows."""
        return take(batch, rows, self.dims(batch))

    def cutter(self, batch: tuple[Any, ...]) -> Callable[[slice | Tensor], tuple[Any, ...]]:
        """`take` for this batch, as often as it takes."""
        return cutter(batch, self.dims(batch))

    def whole(self, batch: tuple[Any, ...]) -> Tensor:
        """The large batch's loss in one forward pass, as the user's own loop has it."""
        loss, weight = self.forward(batch)
        if self.reduction == "sum":
            weight = self.total(batch) if weight is None else weight
            if weight is not None:
                loss = loss / weight
        return loss

    def tally(self, batch: tuple[Any, ...], total: Weight | None = None, unit: Weight | None = None) -> Tally:
        """A window over this batch, to which its micro-batches are added one by one.

        Args:
            batch: The large batch.
            total: What it weighs, where others share it: summed over the ranks, say. None: what `total(batch)` says.
            unit: What weights that only the forward pass tells are multiples of. None: the first of them.
        """
        by_targets = self.by_targets(batch)
        if by_targets:
            assert self.loss_fn is not None
            self._summed = weights.summed(self.loss_fn)
        return Tally(self, self.total(batch) if total is None else total, by_targets, unit)

    def total(self, batch: tuple[Any, ...], rows: int | None = None) -> Weight | None:
        """What the loss on this batch divides by, as far as the batch tells: a number, or a tensor on its device.

        None for sums that nothing divides. Rows, where nothing says otherwise; a `compute_loss` that returns
        `(loss, weight)` overrules that later.
        """
        if self.weight is not None:
            return plain_weight(self.weight(*batch))
        if self.reduction == "sum":
            return None
        if self.by_targets(batch):
            return plain_weight(weights.divisor(self.loss_fn, batch[1]))
        return float(self.rows(batch) if rows is None else rows)

    def forward(self, batch: tuple[Any, ...], summed: bool = False) -> tuple[Tensor, Weight | None]:
        """The loss of a batch and, where `compute_loss` returns one, its weight.

        Args:
            batch: The arguments after the model.
            summed: Take a `torch.nn` loss as a sum, whatever its own reduction.

        Raises:
            TypeError, ValueError: The loss is not one number that depends on the model.
        """
        if self.autocast is not None:
            with torch.autocast(self.device.type, self.autocast):
                result = self._result(batch, summed)
        else:
            result = self._result(batch, summed)
        if type(result) is Tensor and result.dim() == 0:  # as most are
            return result, None
        weight = None
        if isinstance(result, tuple) and not hasattr(result, "_fields"):
            if len(result) != 2:
                raise TypeError(f"The loss must be a tensor or (loss, weight). Received: a tuple of {len(result)}.")
            result, weight = result
            if self.weight is not None:
                raise ValueError("`compute_loss` returns (loss, weight), and `weight` is given too. Use one of them.")
            weight = plain_weight(weight)
        loss = result if isinstance(result, Tensor) else getattr(result, "loss", result)
        if not isinstance(loss, Tensor):
            raise TypeError(f"The loss must be a tensor. Received: {loss!r} of type {type(loss).__name__}.")
        if loss.numel() != 1:
            raise ValueError(
                f"The loss must be one number, the mean or the sum over its rows. Received: shape {tuple(loss.shape)}."
            )
        return loss.reshape(()) if loss.dim() else loss, weight

    def _result(self, batch: tuple[Any, ...], summed: bool) -> Any:
        if self.compute_loss is not None:
            return self.compute_loss(self.model, *batch)
        assert self.loss_fn is not None
        if not 1 <= len(batch) <= 2:
            raise ValueError(
                f"`loss_fn` takes batches of (x, y). Received: {len(batch)} arguments. Nest several inputs or targets "
                "in tuples, or use compute_loss(model, *batch)."
            )
        outputs = self.model(batch[0])
        if summed and isinstance(outputs, Tensor) and outputs.dtype == torch.float16:
            outputs = outputs.float()  # a sum of losses soon passes 65504
        arguments = [*_unpacked(outputs), *(_unpacked(batch[1]) if len(batch) == 2 else ())]
        return (self._summed if summed else self.loss_fn)(*arguments)

    @property
    def device(self) -> torch.device:
        """Where the model is, by its first parameter."""
        parameters = getattr(self.model, "parameters", lambda: iter(()))()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def dims(self, batch: tuple[Any, ...]) -> BatchDims:
        """`batch_dims` for this tuple of arguments."""
        # `batch_dims` may describe the one argument rather than the tuple of arguments around it.
        return (self.batch_dims,) if isinstance(self.batch_dims, dict) and len(batch) == 1 else self.batch_dims


class Part(NamedTuple):
    """One micro-batch's share of a window: `factor * loss`."""

    loss: Tensor | None
    """The micro-batch's own loss; None where it weighs nothing, so that there is nothing to add."""
    factor: Weight = 1.0
    """What its loss and its gradient are multiplied by."""
    weight: Weight | None = None
    """What `compute_loss` said it weighs; None where the total is known beforehand."""
    share: Weight | None = None
    """Its part of that total; None where there is none."""
    idle: Tensor | None = None
    """The loss of a micro-batch that weighs nothing, if it had a forward pass."""


class Tally:
    """A window's micro-batches as they are added up.

    Where the total weight is known beforehand, the parts add up to the large batch's loss and gradient as they are.
    Where only the forward pass tells, they are kept in multiples of the first one's weight, and `divisor` is what
    the sums are to be divided by in the end.

    The factors cost nothing: each is where its backward pass starts, in place of 1, and losses are added up only when
    somebody asks for their sum.
    """

    def __init__(
        self, objective: Objective, total: Weight | None, by_targets: bool, unit: Weight | None = None
    ) -> None:
        self.objective = objective
        self.total = total
        self._summed = by_targets and objective.weight is None and objective.reduction == "mean"
        self._losses: dict[Any, tuple[Weight, list[Tensor]]] = {}
        self._starts: dict[Any, tuple[Weight, Tensor]] = {}
        self._divisor: Weight | None = None
        self._unit = unit
        # Sums, of a torch.nn loss or of the user's own, are all multiplied by the same.
        self._one = None if total is None else _ratio(1.0, total)

    @property
    def divisor(self) -> Weight | None:
        """What the summed gradients are to be divided by; None where they are complete as they are."""
        return self._divisor

    @property
    def is_mean(self) -> bool:
        """Whether the finished gradient is that of a mean, not of a sum."""
        return self.total is not None or self._divisor is not None

    def multiple(self, part: Part, rows: int) -> Weight:
        """What the gradient of the first part, which has just been added, is a multiple of its mean gradient by."""
        if self._divisor is not None:
            return self._divisor
        return float(rows) if part.share is None else part.share

    @property
    def empty(self) -> bool:
        """Whether the window weighs nothing, as far as that is known without waiting for a device."""
        return _is_zero(self.total if self._divisor is None else self._divisor)

    @property
    def loss(self) -> Tensor:
        """The large batch's loss so far, without a graph; NaN where it weighs nothing, as 0 / 0 is."""
        if not self._losses or self.empty:
            return torch.full((), float("nan"), device=self.objective.device)
        if self._divisor is not None:
            return self.sum / self._divisor
        if isinstance(self.total, Tensor):
            loss = self.sum
            return torch.where(self.total.to(loss.device) > 0, loss, float("nan"))
        return self.sum

    def told(self) -> tuple[float, float] | None:
        """For several ranks: what makes their sums add up, and what this rank's part of the sum then weighs.

        None where the total was known beforehand, so that the parts of all ranks add up as they are.
        """
        if self._divisor is None:
            return None
        unit = 1.0 if self._unit is None else float(self._unit)
        return unit, float(self._divisor) * unit

    @property
    def sum(self) -> Tensor:
        """The sum of the parts' losses so far, without a graph."""
        if not self._losses:
            parameter = next(self.objective.model.parameters(), torch.zeros(()))
            return torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        sums = [_times(torch.stack(losses).sum(), factor) for factor, losses in self._losses.values()]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def part(self, micro_batch: tuple[Any, ...], rows: int | None = None, share: bool = False) -> Part:
        """Run the forward pass of a micro-batch and weigh its loss. Changes nothing here: `add` does.

        Args:
            micro_batch: The arguments after the model.
            rows: Its rows, where they are known already.
            share: Say the part's share of the total, too, even where the loss doesn't need it.

        Raises:
            TypeError, ValueError: The loss is no number, or comes with a weight only sometimes.
        """
        objective = self.objective
        weight = None if self._summed and not share else objective.total(micro_batch, rows)
        if objective.weight is not None and _is_zero(weight):
            return Part(None)
        loss, told = objective.forward(micro_batch, self._summed)
        if told is not None:
            if _is_zero(told):
                return Part(None, weight=told, idle=loss)
            if objective.reduction == "sum":
                return Part(loss, weight=told)
            unit = self._unit if self._unit is not None else _unit(told)
            return Part(_where_any(loss, told), _ratio(told, unit), weight=told)
        if self._divisor is not None:
            raise ValueError("`compute_loss` must return (loss, weight) always or never. Received: both in one batch.")
        if self._one is None:
            return Part(loss)
        assert self.total is not None
        ratio = None if weight is None else _ratio(weight, self.total)
        if self._summed or objective.reduction == "sum":
            return Part(loss, self._one, share=ratio)
        assert weight is not None
        assert ratio is not None
        return Part(_where_any(loss, weight), ratio, share=ratio)

    def backward(self, part: Part, loss: Tensor) -> None:
        """The part's backward pass.

        Args:
            part: The part.
            loss: Its loss, or that multiplied by a GradScaler's scale.
        """
        if _is_one(part.factor):
            loss.backward()
            return
        key = _key(part.factor), loss.dtype
        if key not in self._starts:
            start = _times(torch.ones_like(loss, requires_grad=False), part.factor)
            self._starts[key] = part.factor, start  # with the factor, so that its id stays its own
        loss.backward(self._starts[key][1])

    def add(self, part: Part) -> None:
        """The gradient of this part is in."""
        if part.loss is not None:
            key = _key(part.factor)
            if key not in self._losses:
                self._losses[key] = part.factor, []
            self._losses[key][1].append(part.loss.detach())
        if part.weight is not None:
            if self.objective.reduction == "mean" and self._unit is None and not _is_zero(part.weight):
                self._unit = _unit(part.weight)
            share = part.weight if self._unit is None else _ratio(part.weight, self._unit)
            self._divisor = share if self._divisor is None else self._divisor + share


def plain_weight(weight: Any) -> Weight:
    """A weight as a float, or as a tensor where reading it would wait for its device.

    Raises:
        TypeError, ValueError: No finite number >= 0, as far as that can be told without waiting.
    """
    if isinstance(weight, Tensor) and weight.device.type != "cpu" and weight.numel() == 1:
        return weight.detach().reshape(())
    return checked_weight(weight.detach() if isinstance(weight, Tensor) else weight)


def _unpacked(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) and not hasattr(values, "_fields") else (values,)


def _is_zero(weight: Weight | None) -> bool:
    return isinstance(weight, float) and weight == 0


def _unit(weight: Weight) -> Weight:
    return torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else weight


def _ratio(weight: Weight, total: Weight) -> Weight:
    """`weight / total`, in float64; 0 where nothing weighs anything."""
    if isinstance(weight, Tensor) or isinstance(total, Tensor):
        weight, total = torch.as_tensor(weight).double(), torch.as_tensor(total).double()
        weight, total = (x.to(weight.device if total.device.type == "cpu" else total.device) for x in (weight, total))
        return torch.where(total > 0, weight / total, 0.0)
    return weight / total if total else 0.0


def _where_any(loss: Tensor, weight: Weight) -> Tensor:
    """The loss; 0 where it is a mean over nothing, which is NaN."""
    return torch.where(weight.to(loss.device) > 0, loss, 0.0) if isinstance(weight, Tensor) else loss


def _key(factor: Weight) -> Any:
    """What tells factors apart without waiting for a device."""
    return id(factor) if isinstance(factor, Tensor) else factor


def _is_one(factor: Weight) -> bool:
    return isinstance(factor, float) and factor == 1.0


def _times(value: Tensor, factor: Weight) -> Tensor:
    if isinstance(factor, Tensor):
        return value * factor.to(value.device, value.dtype)
    return value if factor == 1 else value * factor
