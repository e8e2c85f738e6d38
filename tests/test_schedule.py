"""How long the next window is."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum import Schedule, steps_for

TABLES = st.dictionaries(st.integers(1, 50), st.integers(1, 100), max_size=6).flatmap(
    lambda table: st.integers(1, 100).map(lambda first: {0: first, **table})
)


@pytest.mark.parametrize("steps", [1, 4, 10**6, np.int64(4), np.uint8(4)])
def test_an_int_is_the_length_of_every_window(steps):
    schedule = Schedule(steps)
    assert [schedule(epoch, update) for epoch in (0, 7) for update in (0, 99)] == [int(steps)] * 4
    assert type(schedule()) is int
    assert schedule.constant == schedule.largest == steps


@given(TABLES, st.integers(0, 60))
def test_a_table_gives_the_entry_of_the_latest_epoch_that_has_begun(table, epoch):
    schedule, before = Schedule(table), dict(table)
    expected = table[max(start for start in table if start <= epoch)]
    assert schedule(epoch) == expected
    assert schedule.largest == max(table.values())
    assert schedule.constant == (table[0] if len({*table.values()}) == 1 else None)
    assert Schedule.from_pairs(json.loads(json.dumps(schedule.to_pairs()))) == schedule
    table.clear()
    assert schedule(epoch) == expected, "the user's table is copied"
    assert str(schedule) == (str(dict(sorted(before.items()))) if len(before) > 1 else str(before[0]))


def test_a_callable_is_asked_with_epoch_and_update_and_cannot_be_written_to_a_file():
    def steps(epoch, update):
        return 1 + 10 * epoch + update

    schedule = Schedule(steps)
    assert [schedule(0, 0), schedule(2, 5)] == [1, 26]
    assert schedule.constant is schedule.largest is None
    assert str(schedule) == "steps"
    with pytest.raises(TypeError, match="Use an int or"):
        schedule.to_pairs()


OUT_OF_RANGE = [0, -1, {}, {2: 4}, {0: 0}, {0: 4, 3: -2}, {0: 4, -1: 2}]
NO_INTS = [2.5, 4.0, True, False, "4", None, [4], {0: "4"}, {0: 2.0}, {"0": 4}, {True: 4}, {0: True}]


@pytest.mark.parametrize("steps", OUT_OF_RANGE + NO_INTS)
def test_wrong_steps_are_refused_and_shown(steps):
    error = TypeError if any(steps is one for one in NO_INTS) else ValueError
    with pytest.raises(error, match="`steps` must be an int >= 1, or map epochs") as raised:
        Schedule(steps)
    assert f"steps={steps!r}" in str(raised.value)
    assert steps != {2: 4} or "Add the first epoch: {0: 1, 2: 4}" in str(raised.value)


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (2.5, TypeError), (None, TypeError), (True, TypeError)])
def test_what_a_callable_returns_is_checked_when_it_is_asked(steps, error):
    schedule = Schedule(lambda epoch, update: steps)
    with pytest.raises(error, match="from the callable at epoch=3, update=70"):
        schedule(3, 70)
    with pytest.raises(KeyError):  # of the user's own
        Schedule(lambda epoch, update: {}[epoch])(0, 0)


@pytest.mark.parametrize("steps", [4, {0: 8, 4: 2}, max])
def test_a_schedule_is_copied_pickled_hashed_and_shown_as_a_value(steps):
    schedule = Schedule(steps)
    assert pickle.loads(pickle.dumps(schedule)) == copy.deepcopy(schedule) == Schedule(schedule) == schedule
    assert hash(copy.deepcopy(schedule)) == hash(schedule)
    assert schedule not in (Schedule(5), steps)
    assert repr(Schedule(4)) == "Schedule(4)"


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 64))
def test_steps_for_gives_the_fewest_steps_that_reach_the_desired_rows(desired, maximum, ranks):
    steps = steps_for(desired, maximum, ranks=ranks)
    assert steps >= 1
    assert (steps - 1) * maximum * ranks < desired <= steps * maximum * ranks


def test_steps_for_says_that_its_arguments_may_be_swapped(caplog):
    assert steps_for(256, 256) == 1
    assert not caplog.records
    assert steps_for(16, 256) == 1
    assert "steps_for(desired_batch_size=256, maximum_batch_size=16)" in caplog.text


@pytest.mark.parametrize("name", ["desired_batch_size", "maximum_batch_size", "ranks"])
@pytest.mark.parametrize("value", [0, -4, 2.0, True, "64"])
def test_steps_for_refuses_what_does_not_count_anything(name, value):
    arguments = {"desired_batch_size": 256, "maximum_batch_size": 64, "ranks": 1, name: value}
    error = ValueError if type(value) is int else TypeError
    with pytest.raises(error, match=rf"`{name}` must be an int >= 1. Received: {name}={value!r}"):
        steps_for(**arguments)
