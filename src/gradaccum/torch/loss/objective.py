"""The objective: from a model and a micro-batch to its share of the large batch's loss.

    large batch's loss = sum_i loss_i * w_i / W

where `loss_i` is the mean loss of micro-batch i, `w_i` what that mean is over, and `W` the same for the large batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.window import checked_reduction
from gradaccum.on_torch.arguments import checked_scalar
from gradaccum.on_torch.batch import Batch, BatchDims
from gradaccum.on_torch.reach import Holder, Reach
from gradaccum.torch.loss.named import (
    Terms,
    Totals,
    Weight,
    added,
    plain_weight,
    terms_of,
    times,
    totals_of,
)

_HAS_AUX = "What is returned beside a loss and its weight needs TrainStep(..., has_aux=True)."

STARTS = 16
"""Factors that are kept from one window to the next."""


class Found:
    """What the first forward pass has shown of a loss; shared by all that compute it."""

    terms: bool | None = None  # whether there are several; None before
    needs_gradients = False  # whether it can't be computed without gradients
    empty = False  # whether a device's micro-batch has weighed nothing: all weights are read since


class Objective:
    """How a model's loss on a batch is computed, and what it divides by. The keywords are those of `TrainStep`.

    Example:
        >>> objective = Objective(nn.Linear(3, 2), loss_fn=nn.CrossEntropyLoss())
        >>> batch = objective.batch((torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 0, 1])))
        >>> loss, weight = objective.forward(batch)
        >>> loss.shape, weight, objective.total(batch)
        (torch.Size([]), None, 6.0)
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
        _check_functions(loss_fn=loss_fn, compute_loss=compute_loss, weight=weight)
        if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
            raise TypeError(
                f"`autocast` must be a dtype such as torch.bfloat16, or None. Received: autocast={autocast!r}."
            )
        self.model = model
        self.loss_fn = with_known_divisor(loss_fn) if loss_fn is not None else None
        self._by_targets = divides_by_targets(self.loss_fn)
        self.summed_loss: Any = None
        """A loss that divides by what its targets say, as a sum."""
        self.starts: dict[Any, tuple[Weight, Tensor]] = {}  # where backward passes start, by factor
        self.found = Found()
        self.compute_loss = compute_loss
        self.weight = weight
        self.batch_dims = batch_dims
        self.autocast = autocast
        self.reduction = checked_reduction(reduction)
        own = reduction_of(self.loss_fn) if self.loss_fn is not None else None
        if own == "mean" and self.reduction == "sum":
            raise ValueError(f"reduction='sum' contradicts loss_fn={loss_fn!r}, which returns a mean.")
        if own is not None:
            self.reduction = checked_reduction(own)
        module: Any = self.loss_fn if isinstance(self.loss_fn, nn.Module) else None
        self._own = None if own is None else getattr(module, "reduction", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A TrainStep can't be pickled: it holds functions and hooks of this process. Save the state_dict() of the "
            "step, the model and the optimizer, and rebuild it from them."
        )

    def __copy__(self) -> Objective:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Objective:
        new = memo[id(self)] = object.__new__(type(self))
        vars(new).update((name, copy.deepcopy(value, memo)) for name, value in vars(self).items())
        return new

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The model, and what the loss has of modules, by the prefix of their names."""
        given = {"": self.model, "loss": self.loss_fn, "compute_loss": self.compute_loss}
        found = {prefix: module for prefix, module in given.items() if isinstance(module, nn.Module)}
        functions = [function for function in given.values() if not isinstance(function, nn.Module)]
        return {**found, **held_modules(self.model, *functions)}

    def holders(self) -> list[Holder]:
        """What the functions reach at the moment beside modules that holds values which a pass may replace."""
        return Reach(self.loss_fn, self.compute_loss, self.weight).holders

    def on(self, model: nn.Module) -> Objective:
        new = copy.copy(self)
        new.model = model  # type: ignore[assignment]  # callable
        vars(new).pop("modules", None)
        return new

    def batch(self, batch: Any) -> Batch:
        """The arguments that follow the model: a tuple or list is unpacked, anything else is one argument.

        Example:
            >>> Objective(nn.Identity(), compute_loss=lambda model, batch: batch["x"].mean()).batch({"x": 1}).tree
            ({'x': 1},)
        """
        if self._own is not None and self.loss_fn.reduction != self._own:  # type: ignore[union-attr]  # a module
            raise ValueError(
                f"The reduction of loss_fn={self.loss_fn!r} was {self._own!r} and is "
                f"{self.loss_fn.reduction!r} now, which divides by something else. "  # type: ignore[union-attr]
                "Make another TrainStep with it."
            )
        plain = isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields")
        if plain and self.loss_fn is not None and len(batch) == 1 and isinstance(batch[0], (tuple, list)):
            return self.batch(batch[0])
        arguments = tuple(batch) if plain else (batch,)
        # `batch_dims` may describe the one argument rather than the tuple of arguments around it.
        one = isinstance(self.batch_dims, dict) and len(arguments) == 1
        return Batch(arguments, (self.batch_dims,) if one else self.batch_dims)

    @property
    def divides_by_rows(self) -> bool:
        """Whether every loss is a mean over rows, unless its forward pass says otherwise."""
        return self.weight is None and self.reduction == "mean" and not self._by_targets

    def _targets(self, batch: Batch) -> Tensor | None:
        if len(batch.tree) != 2:
            return None
        targets = batch.tree[1]
        if type(targets) is tuple and len(targets) == 1:
            targets = targets[0]
        return targets if isinstance(targets, Tensor) else None

    def whole(self, batch: Batch) -> Tensor:
        """The large batch's loss in one forward pass, as the user's own loop has it."""
        loss, weight = self.forward(batch)
        if isinstance(weight, dict):
            totals = None if self.weight is None else self.total(batch)
            return added(weight, totals if isinstance(totals, dict) else None, self.reduction == "sum")
        if self.reduction == "sum":
            total = one_weight(self.total(batch)) if weight is None else weight
            loss = loss if total is None else loss / total
        return loss

    def forget(self) -> None:
        """What was kept of the loss is another one's."""
        self.starts, self.summed_loss = {}, None

    def renew(self, batch: Batch) -> bool:
        """A window begins: take over what has been changed in the loss since, and forget factors of long ago.

        Returns whether sums of it are what adds up, as it divides by a number that its targets say.
        """
        if len(self.starts) > STARTS:
            self.starts = {}
        if not self._by_targets:
            return False
        assert self.loss_fn is not None
        self.summed_loss, targets = summed(self.loss_fn, self.summed_loss), self._targets(batch)
        # Floating-point targets are class probabilities, over which the mean is one over rows.
        return targets is None or not targets.is_floating_point()

    def start(self, loss: Tensor, factor: Weight) -> Tensor:
        """Where the backward pass of a loss begins that counts so many times: costs nothing, as it is in place of 1."""
        key = factor if type(factor) is float else id(factor), loss.dtype, loss.device
        found = self.starts.get(key)
        if found is None or found[1]._version:  # with the factor, so that its id stays its own
            found = self.starts[key] = factor, times(torch.ones_like(loss, requires_grad=False), factor)
        return found[1]

    def total(self, batch: Batch) -> Weight | Totals | None:
        """What the loss on this batch divides by, as far as the batch tells: a number, or a tensor on its device.

        For terms, one for each. None for sums that nothing divides, and where only the forward pass tells. Rows, where
        nothing says otherwise; a `compute_loss` that returns `(loss, weight)` overrules that later.
        """
        if self.weight is not None:
            weight = self.weight(*batch.tree)
            totals = totals_of(weight)
            return plain_weight(weight) if totals is None else totals
        if self.reduction == "sum":
            return None
        if self.divides_by_rows:
            return float(batch.rows)
        targets = self._targets(batch)
        if targets is not None and targets.is_floating_point():
            return float(batch.rows)
        return None if targets is None else divisor(self.loss_fn, targets, batch)

    def forward(self, batch: Batch, summed: bool = False) -> tuple[Tensor, Weight | Terms | None]:
        """The loss of a batch and, where only the forward pass tells, its weight."""
        loss, weight = self.evaluate(batch, summed)
        return (added(weight), weight) if isinstance(weight, dict) else (loss, weight)

    def evaluate(self, batch: Batch, summed: bool = False) -> tuple[Tensor, Weight | Terms | None]:
        """What `forward` returns, where the terms need not be added up: one of them stands for their sum."""
        try:
            if self.autocast is None:
                result = self._result(batch.tree, summed)
            else:
                with torch.autocast(self.device.type, self.autocast):
                    result = self._result(batch.tree, summed)
        except (TypeError, AttributeError) as error:
            _check_arrays(batch, error)
            raise
        if type(result) is Tensor and not result.ndim:  # as most are
            self.found.terms = False
            return result, None
        terms = terms_of(result, self.weight is not None)
        self.found.terms = terms is not None
        if terms is not None:
            return next(iter(terms.values())).loss, terms
        weight = None
        if isinstance(result, tuple) and not hasattr(result, "_fields"):
            if len(result) != 2:
                raise TypeError(
                    f"The loss must be a tensor or (loss, weight). Received: a tuple of {len(result)}. {_HAS_AUX}"
                )
            if self.weight is not None:
                raise ValueError("`compute_loss` returns (loss, weight), and `weight` is given too. Use one of them.")
            try:
                result, weight = result[0], plain_weight(result[1])
            except (TypeError, ValueError) as error:
                scalar = isinstance(result[1], (int, float)) or getattr(result[1], "ndim", None) == 0
                raise error if scalar else TypeError(f"{error} {_HAS_AUX}") from None
        loss = result if isinstance(result, Tensor) else getattr(result, "loss", result)
        return checked_scalar(loss), weight

    def losses(self, batch: Batch) -> list[Tensor]:
        """Each of several losses, or the one."""
        loss, weight = self.evaluate(batch)
        return [term.loss for term in weight.values()] if isinstance(weight, dict) else [loss]

    def _result(self, batch: tuple[Any, ...], summed: bool) -> Any:
        if self.compute_loss is not None:
            return self.compute_loss(self.model, *batch)
        if not 1 <= len(batch) <= 2:
            raise ValueError(
                f"`loss_fn` takes batches of (x, y). Received: {len(batch)} arguments. Nest several inputs or targets "
                "in tuples, or use compute_loss(model, *batch)."
            )
        outputs, targets = self.model(batch[0]), batch[1:]
        loss_fn: Any = self.summed_loss if summed else self.loss_fn
        if summed and isinstance(outputs, Tensor) and outputs.dtype is torch.float16:
            outputs = outputs.float()  # a sum of losses soon passes 65504
        try:
            if type(outputs) is Tensor and targets and type(targets[0]) is Tensor:  # as mostly
                return loss_fn(outputs, targets[0])
            targets = _unpacked(targets[0]) if targets else ()
            values = (*_unpacked(outputs), *targets)
            loss = loss_fn(*values)
        except (RuntimeError, ValueError, TypeError) as error:
            check_row_weights(self.loss_fn, outputs)
            if isinstance(error, TypeError) and len(batch) == 1:
                raise TypeError(
                    f"The batch has no targets, and loss_fn(model(x)) raises: {error}. Call step(x, y), or give "
                    "compute_loss(model, x)."
                ) from error
            raise
        # With other than one target in the batch, which of the values it is shows only now.
        return (loss, divisor(self.loss_fn, values[1])) if summed and len(targets) != 1 else loss

    @property
    def device(self) -> torch.device:
        parameters = getattr(self.model, "parameters", lambda: iter(()))()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _check_arrays(batch: Batch, error: Exception) -> None:
    """Say that NumPy arrays in the batch may be why the model or the loss raised `error`."""
    if any(type(leaf).__module__ == "numpy" for _, leaf, _ in batch.leaves):
        raise TypeError(
            f"A model of torch takes tensors. Received: a NumPy array in the batch, on which it raised: {error}. Pass "
            "torch.from_numpy(x)."
        ) from error


def one_weight(weight: Any) -> Any:
    if isinstance(weight, dict):
        raise ValueError(
            f"`weight` names the loss terms {list(weight)}, and the loss is one number. Return {{name: loss}} from "
            "`compute_loss`, or a number from `weight`."
        )
    return weight


def _unpacked(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) and not hasattr(values, "_fields") else (values,)


def held_modules(model: Any, *functions: Any) -> dict[str, nn.Module]:
    """The modules that functions reach, by what they call them, without the model and its parts."""
    parts = set(map(id, model.modules())) if isinstance(model, nn.Module) else set()
    return {name: module for name, module in Reach(*functions).modules.items() if id(module) not in parts}


# What each `torch.nn` loss divides by.
#
# Most are means over rows (or over the elements of rows of one size, which is the same). Cross entropy and negative
# log-likelihood are not: with class indices as targets they divide by the sum of the class weights of the targets that
# are not ignored. Their micro-batches are exact as sums, divided by that number for the whole batch; so a micro-batch
# with nothing but ignored targets is a plain zero, where its mean would be 0 / 0.

_BY_TARGETS: tuple[type[nn.Module], ...] = tuple(
    getattr(nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "NLLLoss2d", "LinearCrossEntropyLoss")
    if hasattr(nn, name)
)
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    nn.functional.cross_entropy: nn.CrossEntropyLoss,
    nn.functional.nll_loss: nn.NLLLoss,
}


def with_known_divisor(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`loss_fn`, or the loss module that does the same where it is a function with a divisor of its own.

    Example:
        >>> with_known_divisor(functools.partial(nn.functional.cross_entropy, ignore_index=0))
        CrossEntropyLoss()
    """
    function, keywords = loss_fn, {}
    if isinstance(loss_fn, functools.partial) and not loss_fn.args:
        function, keywords = loss_fn.func, loss_fn.keywords
    module = _FUNCTIONS.get(function) if callable(getattr(function, "__hash__", None)) else None
    return module(**keywords) if module is not None else loss_fn


def reduction_of(loss_fn: Callable[..., Any]) -> str | None:
    """`"mean"` or `"sum"` where `loss_fn` tells; None where it doesn't."""
    reduction = None
    if isinstance(loss_fn, nn.Module):
        reduction = getattr(loss_fn, "reduction", None)
    elif isinstance(loss_fn, functools.partial):
        reduction = loss_fn.keywords.get("reduction")
    if reduction == "none":
        raise ValueError(
            f"`loss_fn` must return one number. Received: {loss_fn!r} with reduction='none', which returns one per "
            "row. Use 'mean' or 'sum', or reduce it yourself in `compute_loss`."
        )
    return {"mean": "mean", "batchmean": "mean", "elementwise_mean": "mean", "sum": "sum"}.get(str(reduction))


def divides_by_targets(loss_fn: Any) -> bool:
    """Whether this loss, where its targets are class indices, divides by a number that depends on them, not by rows."""
    # A subclass with a forward of its own may divide by anything.
    return isinstance(loss_fn, _BY_TARGETS) and any(type(loss_fn).forward is loss.forward for loss in _BY_TARGETS)


def check_row_weights(loss_fn: Any, outputs: Any) -> None:
    """After a loss has failed: raise if it holds a number for each row of the batch."""
    rows = len(outputs) if isinstance(outputs, Tensor) and outputs.dim() else 0
    module = not isinstance(loss_fn, functools.partial)
    held = {**vars(loss_fn), **dict(loss_fn.named_buffers())} if isinstance(loss_fn, nn.Module) else {}
    for name in ("weight", "pos_weight"):
        value = (held if module else loss_fn.keywords).get(name)
        if rows and isinstance(value, Tensor) and value.dim() and len(value) > rows and len(value) not in outputs.shape:
            function = (type(loss_fn) if module else loss_fn.func).__name__
            raise ValueError(
                f"{function}({name}=...) holds a {name} for each of {len(value)} rows, and was given {rows} rows: "
                "the batch is cut into micro-batches, and the loss's own tensors are not. Make it part of the batch: "
                f"compute_loss=lambda model, x, y, w: loss_fn(model(x), y, {name}=w) with a function of "
                "torch.nn.functional as loss_fn, and step(x, y, w)."
            )


def divisor(loss_fn: Any, targets: Tensor, batch: Batch | None = None) -> Weight:
    """What such a loss divides by on these targets, a tensor where that spares waiting for their device.

        sum of weight[t]  over the class indices t that are not ignore_index      (weight is 1 without class weights)
        their number      where targets are class probabilities

    Example:
        >>> loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), ignore_index=-1)
        >>> divisor(loss_fn, torch.tensor([0, 1, 1, -1]))
        7.0
    """
    if targets.is_floating_point():
        return float(targets.numel() // max(targets.shape[min(1, targets.ndim - 1)], 1))
    ignored = -100 if loss_fn.ignore_index is None else loss_fn.ignore_index
    if loss_fn.weight is not None:
        valid = targets != ignored
        class_weights = loss_fn.weight.detach().to(targets.device)
        return plain_weight(torch.where(valid, class_weights[torch.where(valid, targets, 0)], 0.0).sum())
    if targets.is_cpu and targets.numel() and ignored < 0 <= (batch or Batch(())).ends(targets)[0]:
        return float(targets.numel())  # one look in place of two: nothing is ignored, as mostly
    return plain_weight((targets != ignored).sum())


def summed(loss_fn: Callable[..., Any], before: Any = None) -> Callable[..., Any]:
    new: Any = object.__new__(type(loss_fn)) if before is None else before
    new.__dict__.update(loss_fn.__dict__, reduction="sum")
    return new


def _check_functions(**functions: Any) -> None:
    """Raise for a loss given in none or both of its ways, and for what can't be called."""
    loss_fn, compute_loss = functions["loss_fn"], functions["compute_loss"]
    if (loss_fn is None) == (compute_loss is None):
        raise ValueError(
            "Give exactly one of `loss_fn`, as in loss_fn(model(x), y), and `compute_loss`, as in "
            f"compute_loss(model, *batch). Received: loss_fn={loss_fn!r}, compute_loss={compute_loss!r}."
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"`{name}` must be callable. Received: {name}={function!r} of type {type(function).__name__}."
            )
    if isinstance(loss_fn, type):
        raise TypeError(
            f"`loss_fn` must be a function or a module. Received: the class {loss_fn.__name__}. Call it: "
            f"loss_fn={loss_fn.__name__}()."
        )
