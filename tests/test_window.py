"""What micro-batches weigh in a window. When it closes, and how it goes on from a file, the random programs tell."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.core.window import Window, checked_reduction, checked_weight


def fill(window, weights):
    """Weigh and add these micro-batches. Returns the factors with which their gradients join the sum."""
    factors = []
    for weight in weights:
        factors.append(window.weigh(weight))
        window.add()
    return factors


@given(st.integers(1, 300), st.integers(1, 8192) | st.floats(1e-3, 1e6))
def test_equal_weights_cost_no_multiplication(steps, weight):
    window = Window(steps=steps)
    assert fill(window, [weight] * steps) == [1.0] * steps
    assert window.divisor == (steps if isinstance(weight, int) else pytest.approx(steps, rel=1e-12))


SUMS = [  # the weights of each micro-batch's losses, and the divisor
    ([[None], [None]], 1.0), ([[30], [15]], 45.0), ([[30], [None]], 45.0), ([[None], [30]], 45.0),
    *(([losses, [None]], 45.0) for losses in ([None, 30, None], [30, None, None], [None, None, 30])),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "divisor"), SUMS)
def test_sums_are_divided_by_the_total_of_weights_where_any_loss_of_a_micro_batch_says_one(weights, divisor):
    window = Window(steps=2, reduction="sum")
    for losses in weights:
        window.expect(15)
        assert [window.weigh(weight) for weight in losses] == [1.0] * len(losses)
        if given := [weight for weight in losses if weight]:
            with pytest.raises(ValueError, match="must have one weight"):
                window.weigh(given[0] + 1)
        window.add()
    assert window.divisor == divisor


def test_several_losses_in_a_micro_batch_count_it_once_and_different_weights_point_to_train_step():
    window = Window(steps=2)
    assert [window.weigh(8), window.weigh(8), window.weigh()] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"Received: weight=9 after 8\..*use gradaccum.torch.TrainStep"):
        window.weigh(9)
    assert window.micro_batch.weight == 8.0, "the refused weight left a trace"
    window.add()
    assert (window.micro_batches, window.weight) == (1, 8.0)
    window.expect(8)
    window.weigh()
    assert window.weigh(8) == 1.0
    with pytest.raises(ValueError, match="must have one weight"):  # after an unweighed loss it must be the default
        window.weigh(3)


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
    assert window.divisor == pytest.approx(sum(weight / weights[0] for weight in weights), rel=1e-12)
    assert 0 < window.weight < math.inf


def test_a_refused_weight_leaves_the_window_as_it_was_and_a_window_shows_itself():
    window = Window(steps=3)
    fill(window, [5])
    before = window.state_dict()
    for weight in (-1, math.nan, "8"):
        with pytest.raises((TypeError, ValueError)):
            window.weigh(weight)
        assert window.state_dict() == before
        assert window.micro_batch.weight is None
    assert repr(window) == "Window(1 of 3 micro-batches, weight=5)"


def test_a_reduction_is_mean_or_sum():
    assert [checked_reduction("mean"), checked_reduction("sum")] == ["mean", "sum"]
    for wrong in ("none", "Mean", None, 1, ["mean"]):
        with pytest.raises(ValueError, match=r'`reduction` must be "mean" or "sum". Received: reduction='):
            checked_reduction(wrong)
