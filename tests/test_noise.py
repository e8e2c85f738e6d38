"""The noise scale's estimators against problems whose answer is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradaccum.core.noise import Norms, estimate

GRADIENT = np.array([1.0, -0.5, 0.25, 0.0, 0.5])
NOISE = np.array([4.0, 1.0, 2.0, 3.0, 0.5])
"""True gradient, and the variances of a row's gradient: the noise scale is sum(NOISE) / |GRADIENT|^2 = 6.72 rows."""
TRUE_TRACE, TRUE_SQUARE = NOISE.sum(), GRADIENT @ GRADIENT
TRUE = TRUE_TRACE / TRUE_SQUARE


def windows(seed: int, count: int, sizes=(4, 4, 4, 4), weights=None) -> list[Norms]:
    """Windows of that problem, from micro-batches of these sizes, weighed by rows or as given."""
    rng = np.random.default_rng(seed)
    sizes, weights = np.array(sizes, float), np.array(sizes if weights is None else weights, float)
    scale = np.sqrt(NOISE / sizes[:, None])
    gradients = GRADIENT + rng.normal(size=(count, len(sizes), len(NOISE))) * scale
    large = np.einsum("wkd,k->wd", gradients, weights / weights.sum())
    large_size = weights.sum() ** 2 / (weights**2 / sizes).sum()
    squares = (np.einsum("wd,wd->w", mean, mean).tolist() for mean in (gradients[:, 0], large))
    return [Norms(small, sizes[0].item(), whole, large_size) for small, whole in zip(*squares)]


def assert_unbiased(values, truth):
    """The mean is the truth to within four of its standard errors, and these are small."""
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    assert error < 0.03 * truth
    assert abs(np.mean(values) - truth) < 4 * error


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [((4, 4, 4, 4), None), ((2, 5, 3, 1), None), ((2, 5, 3, 1), (1, 1, 1, 1)), ((2, 4, 6), (3, 5, 7))],
    ids=["even", "ragged", "ragged, equal weights", "ragged, other weights"],
)
def test_both_estimators_are_unbiased(sizes, weights):
    drawn = windows(1, 40_000, sizes, weights)
    assert_unbiased([norms.trace for norms in drawn], TRUE_TRACE)
    assert_unbiased([norms.squared_gradient for norms in drawn], TRUE_SQUARE)
    if weights == (1, 1, 1, 1):  # taking rows for effective rows would be biased
        with pytest.raises(AssertionError):
            assert_unbiased([norms._replace(large_size=11.0).squared_gradient for norms in drawn], TRUE_SQUARE)


def test_over_many_seeds_the_noise_scale_centres_on_the_truth_with_shrinking_spread():
    few = np.array([estimate(windows(seed, 100)).value for seed in range(200)])
    many = np.array([estimate(windows(seed, 1600)).value for seed in range(100)])
    assert abs(np.median(many) / TRUE - 1) < 0.02
    assert abs(np.mean(many) / TRUE - 1) < 0.02
    assert np.std(many) < min(0.1 * TRUE, 0.35 * np.std(few))  # four times less, were it linear


@pytest.mark.parametrize("count", [20, 200])
def test_the_interval_holds_the_truth_as_often_as_it_says(count):
    intervals = [estimate(windows(seed, count)).interval for seed in range(300)]
    assert 0.92 <= np.mean([low <= TRUE <= high for low, high in intervals]) <= 0.99


def test_without_a_gradient_the_scale_is_bounded_from_below_only():
    pure_noise = [Norms(a, 4, b, 16) for a, b in [(1.0, 0.26), (1.1, 0.24), (0.9, 0.25), (1.05, 0.27), (0.95, 0.23)]]
    scale = estimate(pure_noise)
    assert scale.interval[0] > 16
    assert scale.interval[1] == math.inf
    assert "larger batch pays" in scale.advice()


def test_windows_with_nan_or_of_one_micro_batch_measure_nothing_and_are_left_out():
    for nothing in ([], windows(0, 1), [Norms(1.0, 4, 1.0, 4)] * 5, [Norms(math.nan, 4, 1.0, 16)] * 5):
        scale = estimate(nothing)
        assert math.isnan(scale.value)
        assert scale.interval == (0.0, math.inf)
        assert "Not measured yet" in scale.advice()
        assert "not measured" in str(scale)
    drawn = windows(3, 50)
    assert estimate([*drawn, Norms(math.inf, 4, 1.0, 16), Norms(1.0, 16, 1.0, 16)]) == estimate(drawn)
    with pytest.raises(ValueError, match=r"between 0 and 1\. Received: confidence=95"):
        estimate(drawn, confidence=95)


def measured(value: float, rows: float, wobble: float = 0.01, updates: int = 100, small: float | None = None):
    """A noise scale of so many rows, measured in windows of so many, and of a part of them."""
    small = small or rows / 2
    factors = [1 + wobble * sign for sign in (-1, 1)] * (updates // 2)
    return estimate([Norms(1 + value / small * f, small, 1 + value / rows / f, rows) for f in factors])


@pytest.mark.parametrize(
    ("noise_scale", "says"),
    [
        (None, ["Measure over more updates"]),  # too few
        (6400.0, ["larger batch pays", "learning rate by 100 for SGD, by 10 for Adam"]),
        (640.0, [f"beta2 = 0.999 becomes {0.999**10:.4g}"]),  # Adam's betas keep their memory in rows
        (64.0, ["Keep it"]),
        (1.0, ["Stop accumulating", "learning rate by 0.016 for SGD, by 0.12 for Adam"]),
        *(
            (less_than_a_row, [
                "smaller updates of about 1 row.", "beta2 = 0.999 becomes 0.999984)",
                "For 0.016 times the rows scale the learning rate by 0.016 for SGD, by 0.12 for Adam",
            ]) for less_than_a_row in (0.0, 0.01, 0.4)
        ),
    ],
)  # fmt: skip
def test_the_advice_follows_from_where_the_batch_stands(noise_scale, says):
    few = noise_scale is None
    scale = estimate(windows(0, 6, (1, 1, 1, 1))) if few else measured(noise_scale, 64, 1e-6, updates=20, small=16)
    advice = scale.advice()
    assert [line[:2] for line in advice.splitlines()] == ["- "] * 3
    for part in (*says, "Zhang et al. 2024", "Marek et al. 2025"):
        assert part in advice
