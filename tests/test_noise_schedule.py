"""Steps that follow the noise scale: when they change, and what the learning rate becomes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import gradaccum
from gradaccum import NoiseSchedule, Schedule
from gradaccum.core.noise import NoiseScale, Norms, estimate


def measured(value: float, rows: float, *, wobble: float = 0.01, updates: int = 100) -> NoiseScale:
    """A noise scale of so many rows, measured in windows of two micro-batches."""
    trace, n = value, rows / 2
    factors = [1 + wobble * sign for sign in (-1, 1)] * (updates // 2)
    return estimate([Norms(1 + trace / n * f, n, 1 + trace / rows / f, rows) for f in factors])


class Measuring:
    """A problem of one noise scale, in windows of so many rows a step."""

    def __init__(self, schedule: NoiseSchedule, value: float, rows: int = 16) -> None:
        self.schedule, self.value, self.rows = schedule, value, rows
        self.asked = 0

    @property
    def noise_scale(self) -> NoiseScale:
        self.asked += 1
        return measured(self.value, self.rows * self.schedule.steps)


def followed(schedule: NoiseSchedule, measuring: Any, updates: int) -> list[int]:
    """The steps after each change."""
    found = []
    for _ in range(updates):
        before = schedule.steps
        if schedule._due():
            scale = measuring.noise_scale
            schedule._move(scale, schedule._vote(scale))
        if schedule.steps != before:
            found.append(schedule.steps)
    return found


def test_windows_grow_to_the_noise_scale_and_stay_there() -> None:
    schedule = NoiseSchedule(2, 64, every=10)
    measuring = Measuring(schedule, value=16 * 11)
    assert followed(schedule, measuring, 100) == [4, 8]
    assert measuring.asked == 10  # it waits for the device, so not at every update
    measuring.value = 16 * 40
    assert followed(schedule, measuring, 100) == [16, 32]
    measuring.value = 16 * 24  # within a factor of the root of 2: neither
    assert followed(schedule, measuring, 100) == []
    measuring.value = 16 * 12
    assert followed(schedule, measuring, 100) == [16]


def test_bounds_hold_where_the_length_between_them_is_no_power_of_two() -> None:
    schedule = NoiseSchedule(3, 20, every=2)
    measuring = Measuring(schedule, value=1e9)
    assert followed(schedule, measuring, 20) == [6, 12, 20]
    measuring.value = 1.0
    assert followed(schedule, measuring, 20) == [12, 6, 3]


def test_what_the_interval_does_not_decide_changes_nothing() -> None:
    schedule = NoiseSchedule(2, 64)
    assert schedule._vote(measured(1000, 32, wobble=0.9)) == 0
    assert schedule._vote(NoiseScale(float("nan"), (0.0, float("inf")), 32, 1, 0, 0)) == 0


def test_no_measurement_moves_a_window_both_ways() -> None:
    for rows in range(10, 400, 7):
        for spread in (0.001, 0.1, 0.3):
            scale = measured(120, rows, wobble=spread)
            schedule = NoiseSchedule(2, 1000)
            schedule.steps, first = 64, schedule._vote(measured(120, rows / 32, wobble=spread))
            assert first in (-1, 0, 1)
            first = schedule._vote(scale)
            schedule._move(scale, first)
            again = schedule._vote(measured(120, rows * schedule.steps / 64, wobble=spread))
            assert first * again >= 0


def test_the_last_updates_decide() -> None:
    early, late = measured(4, 64, updates=300), measured(400, 64, updates=50)
    schedule = NoiseSchedule(2, 64, every=50)
    schedule.steps = 8
    assert schedule._vote(early) == -1
    assert schedule._vote(estimate([*early.measured, *late.measured])) == 1


@pytest.mark.parametrize(
    ("rule", "rate", "betas"),
    [(None, 0.1, (0.9, 0.99)), ("linear", 0.8, (0.9, 0.99)), ("sqrt", 0.1 * 8**0.5, (0.9**8, 0.99**8))],
)
def test_hyperparameters_of_an_update_and_theirs_again(rule: Any, rate: float, betas: tuple[float, float]) -> None:
    schedule = NoiseSchedule(2, 64, scale_learning_rate=rule)
    schedule.steps = 16
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    before = dict(group)
    with schedule._scaled([group]):
        assert group["lr"] == pytest.approx(rate)
        assert group["betas"] == pytest.approx(betas)
    assert group == before
    assert schedule.learning_rate_factor == pytest.approx(rate / 0.1)


def test_what_the_optimizer_sets_itself_stays() -> None:
    schedule = NoiseSchedule(2, 64, scale_learning_rate="linear")
    schedule.steps = 4
    group = {"lr": 0.1}
    with schedule._scaled([group]):
        group["lr"] = 7.0
    assert group["lr"] == 7.0
    for group in ({"d": 1}, {"lr": None}, {}):
        with pytest.raises(ValueError, match="no learning rate"), schedule._scaled([group]):
            pass


def test_what_cannot_be_measured_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    schedule = NoiseSchedule(2, 64, every=2)
    for _ in range(3):
        assert schedule._vote(estimate([])) == 0
    (record,) = caplog.records
    assert "could not be measured in the last 2 updates, so windows stay 2 micro-batches long" in record.message


def test_it_goes_on_where_it_was_saved() -> None:
    schedule = NoiseSchedule(2, 64, every=10)
    measuring = Measuring(schedule, 16 * 40)
    followed(schedule, measuring, 25)
    other = NoiseSchedule(2, 64, every=10)
    other.load_state_dict(schedule.state_dict())
    assert (other.steps, other.updates) == (schedule.steps, 5)
    assert followed(other, copy.deepcopy(measuring), 20) == followed(schedule, measuring, 20) != []
    narrow = NoiseSchedule(2, 4)
    narrow.load_state_dict(schedule.state_dict())
    assert narrow.steps == 4
    with pytest.raises(ValueError, match=r"what a NoiseSchedule's state_dict\(\) wrote. Received: {}"):
        narrow.load_state_dict({})


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((1, 8), {}, "`smallest` must be an int >= 2"),
        ((4, 2), {}, "`largest` must be an int >= 4"),
        ((2, 8), {"every": 0}, "`every` must be an int >= 2"),
        ((2.0, 8), {}, "`smallest` must be an int"),
        ((2, 8), {"scale_learning_rate": "cubic"}, 'must be "sqrt", "linear" or None'),
    ],
)
def test_what_is_no_schedule_is_an_error_that_names_the_argument(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        NoiseSchedule(*arguments, **keywords)


def test_where_nothing_measures_it_is_no_schedule() -> None:
    with pytest.raises(TypeError, match="NoiseSchedule.2, 8"):
        Schedule(NoiseSchedule(2, 8))  # type: ignore[arg-type]
    assert gradaccum.NoiseSchedule is NoiseSchedule
