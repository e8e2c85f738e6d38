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


@pytest.mark.parametrize("index", [0, 1])
def test_what_two_ranks_have_saved_inside_a_window_goes_on_exactly_on_one(ranks, tmp_path, index):
    ranks.run(cases.save, 3, index, path := str(tmp_path / "middle.ckpt"))
    error, updates = cases.resume_alone(3, index, path)
    assert error <= FLOAT64
    assert updates == 6


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("loader", "have different numbers of batches: 5 batches on rank 0, 3 batches on rank 1"),
        ("limit", "have different numbers of batches: 4 batches on rank 0, 3 batches on rank 1"),
        ("unsized", "have different numbers of batches: further batches on rank 0, the last batch on rank 1"),
        ("-1", "at a window's last batch on rank 0, closing a window that is short on rank 1"),
        ("schedule", "Ranks have different hyperparameters: lr is 0.1 on rank 0, 0.05 on rank 1"),
    ],
)
def test_ranks_that_are_not_in_the_same_place_are_an_error_on_all_at_once(ranks, how, message):
    assert all(message in said for said in ranks.run(cases.apart, how, limit=25))


def test_a_rank_that_fails_before_a_windows_reduction_is_an_error_on_the_others_at_once(ranks):
    first, second = ranks.run(cases.apart, "error", limit=25)
    assert "Rank 1 stopped with an error, while other ranks continued" in first
    assert second == "rank 1 failed"


@pytest.mark.parametrize(("steps", "index"), [(2, 1), (2, 2), (1, 1)])
def test_a_rank_that_stops_alone_is_an_error_on_all_at_once(ranks, tmp_path, steps, index):
    """It validates and saves first, where it waited for the others, and they for it, until the group's timeout."""
    for said in ranks.run(cases.stop_alone, steps, index, str(tmp_path), limit=25):
        assert "The ranks are at different places: before a batch on rank 0, stopping on rank 1" in said


@pytest.mark.parametrize("how", ["one", "two"])
def test_wrapped_optimizers_under_manual_optimization_are_refused_with_advice_that_can_be_followed(ranks, how):
    """Lightning makes the data-parallel model after the optimizers: `model=ddp` can't be passed there."""
    for said in ranks.run(cases.manual, how, limit=25):
        assert "DistributedDataParallel" in said
        assert "GradientAccumulation; or a loop with Fabric, where model = fabric.setup(model) comes first" in said


def test_train_step_under_manual_optimization_makes_the_update_of_all_ranks_rows(ranks):
    assert all(error <= FLOAT64 for error in ranks.run(cases.manual, "TrainStep", limit=25))
