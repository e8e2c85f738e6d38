"""What a window has seen, what it weighs, and when it closes."""

import copy
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum import WindowError
from gradaccum.core.window import Window, checked_reduction, checked_weight

WEIGHTS = st.integers(0, 10**6).map(float)


def fill(window, weights):
    """Weigh and add these micro-batches. Returns the factors with which their gradients join the sum."""
    factors = []
    for weight in weights:
        factors.append(window.weigh(weight))
        window.add()
    return factors


# The mean of a window.


@given(st.lists(st.tuples(WEIGHTS, st.integers(-1000, 1000)), min_size=1, max_size=12))
def test_factors_and_divisor_give_the_weighted_mean_of_any_window(micro_batches):
    window = Window(steps=len(micro_batches))
    factors = fill(window, [weight for weight, _ in micro_batches])
    total = sum(Fraction(weight) for weight, _ in micro_batches)
    if total == 0:
        assert window.weight == window.divisor == 0
        return
    expected = sum(Fraction(weight) * gradient for weight, gradient in micro_batches) / total
    actual = math.fsum(f * gradient for f, (_, gradient) in zip(factors, micro_batches, strict=True)) / window.divisor
    assert actual == pytest.approx(float(expected), rel=1e-12, abs=1e-9)


@given(st.integers(1, 300), st.floats(1e-3, 1e6))
def test_equal_weights_cost_no_multiplication(steps, weight):
    window = Window(steps=steps)
    assert fill(window, [weight] * steps) == [1.0] * steps
    assert window.divisor == pytest.approx(steps, rel=1e-12)


def test_whole_numbers_of_rows_give_the_number_of_micro_batches_exactly():
    for rows in (1, 3, 7, 16, 731, 8192):
        window = Window(steps=256)
        fill(window, [rows] * 256)
        assert window.divisor == 256.0


@pytest.mark.parametrize(
    ("weights", "factors", "divisor"),
    [
        ([0, 10, 5], [0.0, 1.0, 0.5], 1.5),  # weight zero leaves the unit to the next
        ([0, 0], [0.0, 0.0], 0.0),  # nothing to divide by, visibly
        ([130_000, 131_072, 65_000], [1.0, 131_072 / 130_000, 0.5], 326_072 / 130_000),  # token counts stay near one
    ],
)
def test_factors_are_relative_to_the_first_weight(weights, factors, divisor):
    window = Window(steps=len(weights))
    assert fill(window, weights) == factors
    assert (window.divisor, window.micro_batches) == (divisor, len(weights))


@pytest.mark.parametrize(("defaults", "divisor"), [([None] * 3, 3.0), ([16, 8], 1.5)])
def test_what_nobody_weighed_weighs_the_same_or_as_its_batch(defaults, divisor):
    window = Window(steps=len(defaults))
    for rows in defaults:
        if rows is not None:
            window.expect(rows)
        window.add()
    assert window.divisor == divisor


# Sums.


@pytest.mark.parametrize(
    ("weights", "divisor"), [([None, None], 1.0), ([30, 15], 45.0), ([30, None], 45.0), ([None, 30], 45.0)]
)
def test_sums_are_divided_by_the_total_of_weights_where_any_micro_batch_has_one(weights, divisor):
    window = Window(steps=2, reduction="sum")
    for weight in weights:
        window.expect(15)
        assert window.weigh(weight) == 1.0
        window.add()
    assert window.divisor == divisor


def test_of_several_sums_in_a_micro_batch_one_says_the_weight():
    for weights in ([None, 30, None], [30, None, None], [None, None, 30]):
        window = Window(steps=1, reduction="sum")
        for weight in weights:
            assert window.weigh(weight) == 1.0
        assert window.add()
        assert window.divisor == 30.0
        window.weigh(30)
        with pytest.raises(ValueError, match="must have one weight"):
            window.weigh(20)


# Several losses over the same rows.


def test_several_losses_in_a_micro_batch_count_it_once_and_different_weights_point_to_losses_by_name():
    window = Window(steps=2)
    assert [window.weigh(8), window.weigh(8), window.weigh()] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"Received: weight=9 after 8\..*need names"):
        window.weigh(9)
    assert window.micro_batch.weight == 8.0, "the refused weight left a trace"
    window.add()
    assert (window.micro_batches, window.weight) == (1, 8.0)


def test_a_weight_after_an_unweighed_loss_must_be_the_default():
    window = Window(steps=2)
    window.expect(8)
    window.weigh()
    assert window.weigh(8) == 1.0
    with pytest.raises(ValueError, match="must have one weight"):
        window.weigh(3)


# Closing.


@given(st.integers(1, 20), st.integers(1, 60))
def test_a_window_closes_with_its_last_step_and_never_earlier(steps, micro_batches):
    window, closed = Window(steps=steps), 0
    for index in range(1, micro_batches + 1):
        expected = index % steps == 0
        assert window.closes_next == expected
        assert window.add() == expected
        if expected:
            window.close()
            closed += 1
            assert not window.is_open
    assert closed == micro_batches // steps
    assert window.micro_batches == micro_batches % steps


def test_the_epochs_last_micro_batch_closes_a_short_window():
    window = Window(steps=4)
    window.weigh(4)
    assert not window.add()
    window.expect(1, last=True)
    assert window.closes_next
    window.weigh(2)
    assert window.add()
    assert window.divisor == 1.5
    window.close()
    assert not window.micro_batch.last
    assert not window.closes_next


def test_closing_and_loading_forget_the_micro_batch_in_progress():
    window = Window(steps=2)
    state = window.state_dict()
    for forget in (window.close, lambda: window.load_state_dict(state)):
        fill(window, [5, 3])
        window.weigh(7)
        window.expect(1, last=True)
        forget()
        assert window.state_dict() == state
        assert window.micro_batch.weight is None
        assert not window.micro_batch.given
    assert not window.micro_batch.last
    fill(window, [5])
    window.weigh(7)
    window.micro_batch.restart()  # keeps the window
    window.weigh(10)
    window.add()
    assert (window.weight, window.divisor) == (15.0, 3.0)


# Its length.


def test_the_length_changes_between_windows():
    window = Window(steps=4)
    window.resize(2)
    assert window.steps == 2
    window.add()
    with pytest.raises(WindowError, match=r"holds 1 of its 2 micro-batches. Received: steps=3"):
        window.resize(3)
    assert window.steps == 2
    window.resize(2)  # nothing changes
    window.close()
    window.resize(3)
    assert window.steps == 3


# Saving.


@given(
    st.lists(st.just(0.0) | st.floats(1e-150, 1e6), min_size=1, max_size=8),
    st.integers(0, 8),
    st.sampled_from(["mean", "sum"]),
)
def test_a_window_goes_on_from_its_state_bit_for_bit(weights, cut, reduction):
    whole = Window(steps=len(weights), reduction=reduction)
    factors = fill(whole, weights)
    first, second = Window(len(weights), reduction), Window(1, reduction)
    resumed = fill(first, weights[:cut])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed += fill(second, weights[cut:])
    assert resumed == factors
    assert second.state_dict() == whole.state_dict()
    assert second.divisor == whole.divisor
    assert all(type(value) in (int, float, bool, str, type(None)) for value in second.state_dict().values())


# Another unit.


@given(st.lists(st.integers(1, 1000).map(float), min_size=2, max_size=8), st.floats(1e-3, 1e5))
def test_another_unit_changes_the_sum_and_the_divisor_alike(weights, unit):
    window = Window(steps=len(weights))
    total = 0.0
    for index, weight in enumerate(weights):
        if index == 1:
            total *= window.rescale(unit)
        total += window.weigh(weight) * (index + 1)  # this number serves as a gradient
        window.add()
    expected = sum(weight * (index + 1) for index, weight in enumerate(weights)) / sum(weights)
    assert total / window.divisor == pytest.approx(expected, rel=1e-12)


def test_another_unit_for_an_empty_window_is_free():
    window = Window(steps=2)
    assert window.rescale(64.0) == 1.0
    assert window.weigh(32) == 0.5


# What users pass.


class Scalar:
    """As a tensor of one element behaves."""

    def __init__(self, value):
        self._value = value

    def item(self):
        return self._value

    def __float__(self):
        return float(self._value)


@pytest.mark.parametrize("weight", [0, 7, 2.5, np.float32(2.5), np.int64(3), np.array(4.0), Fraction(1, 2), Scalar(3)])
def test_a_weight_is_a_number_of_any_kind(weight):
    assert checked_weight(weight) == float(weight)
    assert type(checked_weight(weight)) is float


NUMBERS = (np.float32("nan"), Scalar(math.nan), math.nan, math.inf, -math.inf, -1, -1e-9)
OTHERS = ("8", True, False, None, [8], (8,), {8}, 1j, object(), np.arange(3), np.array([]))
FINITE = "A weight must be a finite number >= 0. Received: weight="
REFUSED = [
    *((weight, ValueError, FINITE) for weight in NUMBERS),
    *((weight, ValueError, f"{FINITE}more than any float") for weight in (10**400, 10**10_000, Fraction(10**400))),
    *((weight, ValueError, "between 1e-150 and 1e+150") for weight in (5e-324, 1e-320, 9e-151, 2e150, 9e307, 1e308)),
    *((weight, TypeError, FINITE) for weight in OTHERS),
]


@pytest.mark.parametrize(("weight", "error", "says"), REFUSED, ids=range(len(REFUSED)))
def test_a_weight_is_refused_that_is_no_number_or_whose_total_would_overflow_or_lose_digits(weight, error, says):
    with pytest.raises(error, match=re.escape(says)) as raised:
        checked_weight(weight)
    assert "Received: weight=" in str(raised.value)


@pytest.mark.parametrize("weights", [[1e150] * 4, [1e-150] * 4, [1e-150, 1e150, 1e150]])
def test_weights_at_the_ends_of_the_range_have_a_finite_total(weights):
    window = Window(steps=len(weights))
    fill(window, weights)
    largest = sum(weight / weights[0] for weight in weights)
    assert window.divisor == pytest.approx(largest, rel=1e-12)
    assert 0 < window.weight < math.inf


@pytest.mark.parametrize("weight", [-1, math.nan, "8"])
def test_a_refused_weight_leaves_the_window_as_it_was(weight):
    window = Window(steps=3)
    fill(window, [5])
    before = window.state_dict()
    with pytest.raises((TypeError, ValueError)):
        window.weigh(weight)
    assert window.state_dict() == before
    assert window.micro_batch.weight is None


def test_a_reduction_is_mean_or_sum():
    assert [checked_reduction("mean"), checked_reduction("sum")] == ["mean", "sum"]
    for wrong in ("none", "Mean", None, 1, ["mean"]):
        with pytest.raises(ValueError, match=r'`reduction` must be "mean" or "sum". Received: reduction='):
            checked_reduction(wrong)


def test_a_window_shows_itself():
    window = Window(steps=4)
    fill(window, [8, 8])
    assert repr(window) == "Window(2 of 4 micro-batches, weight=16)"
