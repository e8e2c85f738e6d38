"""The window: which micro-batches make an update, and what each of them weighs. Plain numbers, no tensors.

A window's gradient is `sum_i w_i g_i / sum_i w_i`. Summing `w_i g_i` as it stands would overflow half precision when
the weights are token counts, and would cost a multiplication per micro-batch even where all weights are the same. So
the sum is kept in multiples of a `unit`, the weight of the window's first micro-batch:

    sum_i (w_i / unit) g_i      and, at the end,      divided by  sum_i w_i / unit

With equal weights every factor is exactly 1, and the divisor is the number of micro-batches.

A compiled step can't keep a `Window` in Python: there its numbers travel as a named tuple, perhaps of traced scalars,
and `counted` and `is_full` count it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, Literal, get_args

from gradaccum.errors import WindowError

LEAST_WEIGHT, LARGEST_WEIGHT = 1e-150, 1e150
"""What a weight lies between that is not 0: sums and quotients of such numbers neither overflow nor lose digits."""

Reduction = Literal["mean", "sum"]
"""What the user's losses are: means over their micro-batch, or sums over it."""


@dataclasses.dataclass(slots=True)
class MicroBatch:
    """The micro-batch in progress, or the next one."""

    default: float = 1.0  # what it weighs where no loss says so: under `batches()` its rows, or `weight(batch)`
    default_given: bool = False  # by the user
    in_batches: bool = False
    announced: bool = False  # `batches()` has handed out its batch, and it is not counted yet
    last: bool = False  # of its epoch, so that it closes the window however short that is
    weight: float | None = None  # None until a loss, or its end, says so
    given: bool = False  # by the user
    factor: float = 1.0  # what its gradient is multiplied by when it joins the sum
    weighed: int = 0  # gradients that arrived multiplied by the factor

    def restart(self) -> None:
        self.weight, self.given, self.factor, self.weighed = None, False, 1.0, 0


class Window:
    """What has been seen since the last update.

    A micro-batch may be expected (`expect`), is weighed (`weigh`, once or several times), then added (`add`), which
    tells whether the window closes after its `steps` micro-batches; `close` empties it for the next one.

    Example:
        >>> window = Window(steps=2)
        >>> window.weigh(30), window.add()       # the first micro-batch: its gradient counts 1 time
        (1.0, False)
        >>> window.weigh(15), window.add()       # half the weight: half the factor; the window closes
        (0.5, True)
        >>> window.divisor
        1.5
    """

    def __init__(self, steps: int = 1, reduction: Reduction = "mean") -> None:
        self.steps, self.reduction, self.micro_batch = steps, reduction, MicroBatch()
        self.close()

    def close(self) -> None:
        """Empty the window; the next micro-batch is the first of a new one."""
        self.weights: list[float] = []
        self.micro_batches, self.weight, self.largest = 0, 0.0, 0.0
        self.unit: float | None = None
        self.weights_given = False  # anywhere in it, by the user
        self.unsaid = False  # whether a micro-batch counts of which nobody has said what it weighs
        self.rows: bool | None = False  # whether one weighs its rows; None: unknown, of an older file
        self._alike: float | None = None  # what the last one weighed, if the next one may count as it did
        self.micro_batch.restart()

    @property
    def is_open(self) -> bool:
        return self.micro_batches > 0

    @property
    def closes_next(self) -> bool:
        """Whether the micro-batch in progress, or the next one, closes the window."""
        return self.micro_batch.last or self.micro_batches + 1 >= self.steps

    @property
    def divisor(self) -> float:
        """What the sum of gradients is to be divided by: `sum_i w_i / unit`, or 1 for sums without weights."""
        if self.reduction == "sum":
            return self.weight if self.weights_given else 1.0
        return self.weight / self.unit if self.unit else 0.0

    @property
    def equal(self) -> bool:
        """Whether its micro-batches count equally, as means of which nobody has said what they weigh."""
        unsaid = not (self.weights_given or self.micro_batch.in_batches)
        return unsaid and self.weight > 0 and self.reduction == "mean"

    def resize(self, steps: int) -> None:
        """Set the length of this window, which must be empty, or there is a WindowError."""
        if self.is_open and steps != self.steps:
            raise WindowError(
                f"`steps` changes only between windows: this one holds {self.micro_batches} of its {self.steps} "
                f"micro-batches. Received: steps={steps}. Close it first with flush(), or wait until `updated`."
            )
        self.steps = steps

    def expect(self, default: float, given: bool = False, last: bool = False) -> None:
        """A batch of `batches()` has been handed out: the next micro-batch, and its weight unless a loss has one."""
        one, self._alike = self.micro_batch, None
        one.weight, one.given, one.factor, one.weighed = None, False, 1.0, 0
        one.default, one.default_given, one.last = default, given, last
        one.in_batches = one.announced = True

    def expect_nothing(self) -> None:
        """The micro-batches that come weigh the same, unless their losses say otherwise."""
        self.micro_batch.__init__()  # type: ignore[misc]  # others hold it
        self._alike = None

    def weigh(self, weight: float | None = None) -> float:
        """Say what the micro-batch in progress weighs; None: what was said before, else the default.

        Returns:
            The factor with which its gradient joins the sum, `weight / unit`; for `reduction="sum"`, 1.

        Raises:
            TypeError, ValueError: `weight` is no such number, or another than was said for this micro-batch.
        """
        one = self.micro_batch
        if weight is None and one.weight is None and one.default_given:
            weight = one.default
        if weight is None:
            weight = one.default if one.weight is None else one.weight
        else:
            weight = checked_weight(weight)
            # For sums, a loss without a weight adds to the sum only; the loss that has one says the weight.
            comparable = one.weight is not None and (self.reduction == "mean" or one.given)
            if comparable and weight != one.weight:
                raise ValueError(
                    f"The losses of one micro-batch must have one weight. Received: weight={weight:g} after "
                    f"{one.weight:g}. A window divides by one total. For losses with a denominator each use "
                    "gradaccum.torch.TrainStep, whose compute_loss may return {name: (loss, weight)}."
                )
            one.given = True
        one.weight = weight
        if self.reduction == "mean":
            if not self.unit and weight > 0:
                self.unit = weight
            one.factor = weight / self.unit if self.unit else 0.0
        return one.factor

    def leave_out(self) -> None:
        """The micro-batch in progress has no loss: it weighs nothing."""
        self.micro_batch.weight = 0.0

    def add(self) -> bool:
        """The micro-batch in progress is in. Returns whether the window closes with it.

        Raises:
            WindowError: Some losses of the window have a weight, and others, which count as 1, have none.
        """
        one = self.micro_batch
        weight = one.weight
        if weight is None and self._alike is not None:  # nearly always
            self.micro_batches += 1
            self.weights.append(self._alike)
            self.weight += self._alike
            closes = one.last or self.micro_batches >= self.steps
            one.announced = one.last = False
            return closes
        if weight is None:
            weight, given = one.default, one.default_given
            if weight != self.unit and not self.unit and weight > 0 and self.reduction == "mean":
                self.unit = weight
        else:
            given = one.given
        said = given or one.in_batches
        if given is not self.weights_given or self.unsaid is said or (said and not self.rows):
            self._note_weighing(weight, given, said)
        self.micro_batches += 1
        self.weights.append(weight)
        self.weight += weight
        if weight > self.largest:
            self.largest = weight
        closes = one.last or self.micro_batches >= self.steps
        one.announced = one.last = False
        if one.weight is None:
            self._alike = weight
        else:
            self._alike = None
            one.weight, one.given, one.factor, one.weighed = None, False, 1.0, 0
        return closes

    def _note_weighing(self, weight: float, given: bool, said: bool) -> None:
        unsaid = self.unsaid or not (said or weight == 0)
        rows = self.rows if self.rows is None else self.rows or (said and not given)
        given = given or self.weights_given
        if unsaid and (given or rows) and any(w not in (0, 1) for w in (*self.weights, weight)):
            raise mixed_error() if given else _rows_error()
        self.weights_given, self.unsaid, self.rows = given, unsaid, rows

    def rescale(self, unit: float) -> float:
        """Keep the sum in multiples of another unit from now on. Returns the factor to multiply the sum with."""
        factor = self.unit / unit if self.unit else 1.0
        self.unit = unit
        return factor

    def state_dict(self) -> dict[str, Any]:
        names = ("steps", "reduction", "micro_batches", "weight", "unit", "largest", "weights_given", "rows")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any], weights: list[float] | None = None) -> None:
        """Go on from what `state_dict` wrote, with the weights of its micro-batches, if they are known."""
        self.close()
        self.expect_nothing()
        for name in ("steps", "unit", "largest", "weights_given"):
            setattr(self, name, state[name])
        self.restore(state["micro_batches"], state["weight"], weights)
        self.rows = state.get("rows")
        self.unsaid = self.is_open and not (self.weights_given or self.rows)

    def restore(self, micro_batches: int, weight: float, weights: list[float] | None = None) -> None:
        self.micro_batches, self.weight = micro_batches, weight
        self.weights = [weight / max(micro_batches, 1)] * micro_batches if weights is None else list(weights)

    def __repr__(self) -> str:
        return f"Window({self.micro_batches} of {self.steps} micro-batches, weight={self.weight:g})"


def counted(window: Any, weight: Any, **changed: Any) -> Any:
    """A window with one more micro-batch: a named tuple with `micro_batches`, `weight` and `steps`, perhaps traced.

    Example:
        >>> from collections import namedtuple
        >>> Counts = namedtuple("Counts", "micro_batches weight steps")
        >>> window = counted(Counts(1, 30, 2), 15)
        >>> window, is_full(window)
        (Counts(micro_batches=2, weight=45, steps=2), True)
    """
    return window._replace(micro_batches=window.micro_batches + 1, weight=window.weight + weight, **changed)


def is_full(window: Any) -> Any:
    """Whether a window holds its `steps` micro-batches: a bool, or a traced one."""
    return window.micro_batches >= window.steps


def checked_weight(weight: Any) -> float:
    """`weight` as a float: 0, or a number of 1e-150 to 1e150; or a tensor or array of one element that holds it.

    Raises:
        TypeError: Not a number.
        ValueError: Negative, infinite or NaN; so large or small that a window's total would overflow or lose digits; or
            a tensor that requires a gradient, which a weight cannot pass on.
    """
    if (type(weight) is int or type(weight) is float) and (LEAST_WEIGHT <= weight <= LARGEST_WEIGHT or weight == 0):
        return float(weight)  # as nearly always
    if getattr(weight, "requires_grad", False):
        raise ValueError(
            f"A weight must not require a gradient, because it counts as a constant. Received: weight={weight!r}. If "
            "it is a constant in the large batch's loss, too, pass weight.detach()."
        )
    number = _number(weight)
    if number is None or not math.isfinite(number) or number < 0:
        overflows = number == math.inf and isinstance(weight, numbers.Rational)  # its digits may be too many to print
        raise (TypeError if number is None else ValueError)(
            "A weight must be a finite number >= 0. Received: "
            f"weight={'more than any float' if overflows else repr(weight)} of type {type(weight).__name__}."
        )
    if number and not LEAST_WEIGHT <= number <= LARGEST_WEIGHT:
        raise ValueError(
            f"A weight must be 0, or between {LEAST_WEIGHT:g} and {LARGEST_WEIGHT:g}: others would overflow a window's "
            f"total, or lose digits in it. Received: weight={weight!r}. Only the ratios of weights matter, so multiply "
            "all of them by one number."
        )
    return number


def _number(weight: Any) -> float | None:
    """The number that this is, or that a tensor or an array of one element holds; None for anything else."""
    try:
        value = weight if isinstance(weight, numbers.Real) else weight.item()
        return None if isinstance(value, bool) else float(value)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # an array of several elements, or of none
        return None
    except OverflowError:  # an integer, or a fraction
        return math.inf


def checked_reduction(reduction: Any) -> Reduction:
    """`reduction`, unless it is neither "mean" nor "sum": that is a ValueError."""
    if reduction not in get_args(Reduction):
        raise ValueError(f'`reduction` must be "mean" or "sum". Received: reduction={reduction!r}.')
    return reduction


def uncounted_error() -> WindowError:
    return WindowError(
        "state_dict() was called between the backward pass of a micro-batch and its step(), so the sum holds a "
        "gradient that is not counted yet, and resumed training would add it again. Call it after step(). A signal "
        "handler can set a flag that the loop reads then."
    )


def _rows_error() -> WindowError:
    return WindowError(
        "Some micro-batches of this window weigh their rows, under batches(), and others outside of it count as 1. "
        "Continue a window in the way in which it began. discard() drops the window."
    )


def mixed_error() -> WindowError:
    return WindowError(
        "Some losses of this window came with a weight, backward(loss, weight=...), and others without one, which "
        "would count as 1. Use one of the two for all of them. discard() drops the window."
    )
