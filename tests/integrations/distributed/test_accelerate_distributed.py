"""Accelerate on two real processes: a window's update is that of all ranks' rows."""

import pytest

from tests.integrations.distributed import accelerate_cases as cases
from tests.reference import FLOAT64

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("steps", "clip"),
    [(2, 0.05), (3, None), *(pytest.param(*one, marks=SLOW) for one in ((1, None), (1, 0.05), (2, None), (3, 0.05)))],
)
def test_ragged_and_short_windows_make_the_update_of_all_ranks_rows(ranks, steps, clip):
    for error, updates in ranks.run(cases.train, steps, clip):
        assert error <= FLOAT64
        assert updates == 2 * -(-5 // steps)


def test_a_model_that_is_prepared_after_the_optimizer_is_refused(ranks):
    for said in ranks.run(cases.prepare_too_early):
        assert "in no model that this Accelerator has prepared. Prepare the model first" in said


def test_saving_inside_a_window_of_several_ranks_is_refused(ranks, tmp_path):
    for index, said in ranks.run(cases.save, str(tmp_path)):
        assert index == 0
        assert "inside a window, 1 of 2 micro-batches, and writes one rank's optimizer" in said


@pytest.mark.parametrize("clip", [pytest.param(None, marks=SLOW), 0.05])
def test_under_an_fsdp2_plugin_windows_make_the_update_of_all_ranks_rows(ranks, clip):
    for error, updates in ranks.run(cases.train_sharded, 2, clip):
        assert error <= FLOAT64
        assert updates == 6


@pytest.mark.parametrize("after", [*(pytest.param(n, marks=SLOW) for n in (1, 2, 3)), 4])
def test_under_an_fsdp2_plugin_files_hold_the_open_window_and_go_on_there(ranks, tmp_path, after):
    for error, opened in ranks.run(cases.save_sharded, str(tmp_path / "state"), after):
        assert error <= FLOAT64
        assert opened == [after % 3, after % 3]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("wrapped", "belong to a sharded model (fully_shard) that the optimizer does not know"),
        ("alone", "in no model that this Accelerator has sharded. FSDP2 makes parameters anew: prepare both"),
        ("FSDP1", "Use FSDP2: FullyShardedDataParallelPlugin(fsdp_version=2)"),
    ],
)
def test_other_ways_under_fsdp_are_refused_by_name(ranks, how, message):
    assert all(message in said for said in ranks.run(cases.refused_when_sharded, how))
