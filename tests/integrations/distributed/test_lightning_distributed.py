"""Lightning's Trainer on two real processes: a window's update is that of all ranks' rows."""

import pytest

from tests.integrations.distributed import lightning_cases as cases
from tests.reference import FLOAT64


@pytest.mark.parametrize("steps", [2, 3, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 5))])
def test_ragged_and_short_windows_make_the_update_of_all_ranks_rows(ranks, steps):
    for error, updates in ranks.run(cases.train, steps):
        assert error <= FLOAT64
        assert updates == 2 * -(-5 // steps)


def test_gradient_clip_val_clips_the_gradient_of_all_ranks_rows(ranks):
    assert all(error <= FLOAT64 for error, _ in ranks.run(cases.train, 2, gradient_clip_val=0.05))


@pytest.mark.parametrize("ddp", [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_ddps_own_options_change_nothing(ranks, ddp):
    assert all(error <= FLOAT64 for error, _ in ranks.run(cases.train, 2, ddp=ddp))


@pytest.mark.parametrize(
    "silent",  # (rank, micro-batch)
    [
        *([(0, 1), (1, 2)], [(1, 4)], [(0, 0), (1, 0)]),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ([(0, 0)], [(0, 4)])),
    ],
    ids=str,
)
def test_a_batch_of_weight_zero_on_one_rank_is_left_out(ranks, silent):
    assert all(error <= FLOAT64 for error in ranks.run(cases.weigh_nothing, 2, silent))


def test_training_that_is_stopped_inside_a_window_makes_its_update(ranks):
    for error, updates in ranks.run(cases.stop, 3):
        assert error <= FLOAT64
        assert updates == 2


@pytest.mark.parametrize("index", [1, 2])
def test_resumed_inside_a_window_training_is_the_same(ranks, tmp_path, index):
    for error, updates in ranks.run(cases.resume, 3, index, str(tmp_path)):
        assert error <= FLOAT64
        assert updates == 6
