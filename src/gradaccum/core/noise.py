"""The gradient noise scale: how many rows an update can use. Floats in, floats out.

A row's gradient is the true gradient `G` plus noise of covariance `S`. The mean over n rows is off by `tr(S) / n` in
squared norm, so that

    E |g_n|^2  =  |G|^2 + tr(S) / n

Two such means of different size, the first micro-batch of a window (n rows) and the whole window (N rows), give two
equations for the two unknowns, and thus estimators without bias:

    |G|^2  =  (N |g_N|^2 - n |g_n|^2) / (N - n)          tr(S)  =  (|g_n|^2 - |g_N|^2) / (1/n - 1/N)

The simple noise scale is `B = tr(S) / |G|^2`, in rows. Both are averaged over windows before they are divided, as the
ratio of two averages has a bias that vanishes with their number, where the average of ratios keeps its own.

Where rows weigh differently, a mean `sum_i w_i g_i / sum_i w_i` over micro-batches of `b_i` rows has the noise of
`(sum_i w_i)^2 / sum_i (w_i^2 / b_i)` rows, which takes the place of n and N.

Sources: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018 (appendix A.1: the noise
scale). Goyal et al., "Accurate, Large Minibatch SGD", 2017 (the linear rule). Malladi et al., "On the SDEs and Scaling
Rules for Adaptive Gradient Algorithms", 2022 (the square root, with the betas).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOWS = 500
"""How many windows are looked back on: the noise scale drifts."""


class Norms(NamedTuple):
    """The measurements of one window: `|g_n|^2` of one micro-batch of n rows, and `|g_N|^2` of the window's N rows."""

    small: float
    small_size: float
    large: float
    large_size: float

    @property
    def usable(self) -> bool:
        """Whether the two differ in size and both norms are finite."""
        return self.large_size > self.small_size > 0 and math.isfinite(self.small) and math.isfinite(self.large)

    @property
    def information(self) -> float:
        """Its weight among other windows: `(1 - n / N)^2`, the inverse of its variance but for a common factor."""
        return (1 - self.small_size / self.large_size) ** 2

    @property
    def squared_gradient(self) -> float:
        """This window's estimate of `|G|^2`, without bias; can be negative."""
        return (self.large_size * self.large - self.small_size * self.small) / (self.large_size - self.small_size)

    @property
    def trace(self) -> float:
        """This window's estimate of `tr(S)`, without bias; can be negative."""
        return (self.small - self.large) / (1 / self.small_size - 1 / self.large_size)


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale, measured over some updates.

    Args:
        value: `tr(S) / |G|^2` in rows; inf where no gradient is visible in the noise, NaN before two updates.
        interval: Confidence interval in rows; the upper end is inf where the gradient may be 0. It assumes that updates
            are independent, so it is too narrow where the scale drifts.
        batch_size: Rows of a window, on average.
        updates: Windows that were measured.
        squared_gradient: `|G|^2`, the estimate.
        trace: `tr(S)`, the estimate, per row.
        unit: What sizes count: `"rows"`, or `"micro-batches"` if the optimizer doesn't know rows.

    Example:
        >>> scale = estimate([Norms(5.0, 1, 2.0, 4), Norms(4.9, 1, 2.1, 4), Norms(5.2, 1, 1.9, 4)])
        >>> round(scale.value, 2), scale.batch_size
        (4.09, 4.0)
        >>> print(scale)
        noise scale 4.1 rows (95 %: 2.4 to 8.2), measured over 3 updates of 4 rows
    """

    value: float
    interval: tuple[float, float]
    batch_size: float
    updates: int
    squared_gradient: float
    trace: float
    unit: str = "rows"
    confidence: float = 0.95
    measured: tuple[Norms, ...] = field(default=(), repr=False, compare=False)
    """What it was estimated from, the last update last."""

    def last(self, updates: int, confidence: float | None = None) -> NoiseScale:
        """The noise scale of the last `updates` updates alone, because it drifts during training.

        Example:
            >>> scale = estimate([Norms(9.0 - i, 1, 8.0 - i, 4) for i in range(6)])
            >>> scale.last(3).updates, scale.last(3).value > scale.value
            (3, True)
        """
        confidence = self.confidence if confidence is None else confidence
        return estimate(self.measured[-updates:], confidence=confidence, unit=self.unit)

    def advice(self) -> str:
        """What this means for the batch size, in three points: where it stands, what to do, how far to trust it.

        An update from B rows makes `1 / (1 + noise scale / B)` of the progress of one from all rows there are. Far
        below the noise scale, twice the rows nearly halve the updates; far above it, they are wasted.
        """
        if math.isnan(self.value):
            return "Not measured yet. It takes at least two updates, from windows of at least two micro-batches each."
        low, high = self.interval
        rows, unit, update = self.batch_size, self.unit, f"the {_number(self.batch_size)} of one update"
        stands = f"which doesn't decide yet whether {update} are too many or too few."
        advised = "Measure over more updates."
        if low > 2 * rows:
            target = low if math.isinf(self.value) else self.value
            stands = f"above {update}: a larger batch pays."
            advised = f"Twice the {unit} nearly halve the updates needed, up to about {_number(target)} {unit}. "
            advised += _scaling(target / rows)
        elif high < rows / 2:
            target = max(self.value, 1.0)  # no update is smaller than a row
            counted = unit if target > 1 else {"rows": "row"}.get(unit, "micro-batch")
            stands = f"below {update}: rows beyond it average out noise that is small already."
            advised = f"Stop accumulating, and take more, smaller updates of about {_number(target)} {counted}. "
            advised += _scaling(target / rows)
        elif rows / 2 <= low and high <= 2 * rows:
            stands, advised = f"about {update}: a good trade between updates and rows.", "Keep it."
        if unit != "rows":
            advised += " To measure it in rows, use `batches(loader)`, or `weight=len(x)`."
        measured = f"The noise scale is {_number(self.value)} {unit} ({_interval(self.interval, self.confidence)})"
        return f"- {measured}, {stands}\n- {advised}\n- {_CAVEAT}"

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "noise scale not measured yet"
        return (
            f"noise scale {_number(self.value)} {self.unit} ({_interval(self.interval, self.confidence)}), "
            f"measured over {self.updates} updates of {_number(self.batch_size)} {self.unit}"
        )


def estimate(windows: Sequence[Norms], *, confidence: float = 0.95, unit: str = "rows") -> NoiseScale:
    """The noise scale from the measurements of some windows.

    Its interval is Fieller's, for the ratio of two means with correlated errors: all B for which the mean of
    `tr(S) - B |G|^2` over the windows is within its error of 0. It is unbounded where `|G|^2` may be 0.

    Args:
        windows: One record per window; unusable ones (one micro-batch, a NaN) are left out.
        confidence: Of the interval, between 0 and 1.
        unit: What the sizes in `windows` count.

    Raises:
        ValueError: `confidence` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1. Received: confidence={confidence!r}.")
    usable = [norms for norms in windows if norms.usable]
    count = len(usable)
    rows = sum(norms.large_size for norms in usable) / count if count else math.nan
    if count < 2:
        return NoiseScale(math.nan, (0.0, math.inf), rows, count, math.nan, math.nan, unit, confidence, tuple(usable))
    total = sum(norms.information for norms in usable)
    shares = [norms.information / total for norms in usable]
    traces, gradients = [norms.trace for norms in usable], [norms.squared_gradient for norms in usable]
    trace = sum(share * each for share, each in zip(shares, traces))
    gradient = sum(share * each for share, each in zip(shares, gradients))
    value = max(trace, 0.0) / gradient if gradient > 0 else math.inf

    def covariance_of_means(a: list[float], mean_a: float, b: list[float], mean_b: float) -> float:
        products = (share**2 * (x - mean_a) * (y - mean_b) for share, x, y in zip(shares, a, b))
        return sum(products) * count / (count - 1)

    squared_quantile = _t_quantile(0.5 + confidence / 2, count - 1) ** 2
    # All B with (trace - B gradient)^2 <= t^2 Var(trace - B gradient), the quadratic a B^2 - 2 b B + c <= 0.
    a = gradient**2 - squared_quantile * covariance_of_means(gradients, gradient, gradients, gradient)
    b = trace * gradient - squared_quantile * covariance_of_means(traces, trace, gradients, gradient)
    c = trace**2 - squared_quantile * covariance_of_means(traces, trace, traces, trace)
    interval = _solutions(a, b, c, gradient > 0, trace > 0)
    return NoiseScale(value, interval, rows, count, gradient, trace, unit, confidence, tuple(usable))


def _solutions(a: float, b: float, c: float, has_gradient: bool, has_noise: bool) -> tuple[float, float]:
    """The B >= 0 with a B^2 - 2 b B + c <= 0."""
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and has_gradient:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    if a < 0 and c > 0 and has_noise:  # the noise is not 0, the gradient may be: bounded from below only
        return max((b - root) / a, (b + root) / a), math.inf
    return 0.0, math.inf


_CAVEAT = (
    "It is a first guess of the order of magnitude: it assumes that the loss is equally curved in all directions, and "
    "it grows during training (McCandlish et al. 2018). For language models the largest useful batch was found to "
    "follow the amount of data rather than the size of the model (Zhang et al. 2024), and far smaller batches were "
    "found to train as well per row, without accumulation, if the learning rate and Adam's betas are scaled (Marek et "
    "al. 2025)."
)


def _scaling(factor: float) -> str:
    """How the hyperparameters follow the batch."""
    beta = 0.999**factor
    digits = max(4, 1 - math.floor(math.log10(-math.expm1(factor * math.log(0.999)))))  # two of what it lacks to 1
    return (
        f"For {_number(factor)} times the rows scale the learning rate by {_number(factor)} for SGD, by "
        f"{_number(math.sqrt(factor))} for Adam, and take Adam's betas to the power of {_number(factor)} (beta2 = "
        f"0.999 becomes {beta:.{digits}g}), which keeps their memory the same in rows."
    )


def _interval(interval: tuple[float, float], confidence: float) -> str:
    low, high = interval
    return f"{100 * confidence:g} %: {_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    """Two significant digits; all digits of larger whole numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if not value >= 10 else f"{value:.0f}"


def _t_quantile(probability: float, freedom: int) -> float:
    """Student's quantile: the normal one with Fisher's correction in powers of 1 / freedom."""
    from statistics import NormalDist  # it takes as long to import as all of the centre

    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
