"""Accelerate on two real processes: a window's update is that of all ranks' rows."""

import pytest

from tests.integrations.distributed import accelerate_cases as cases
from tests.reference import FLOAT64

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def reset(ranks):
    """An Accelerator's state is its process's."""
    yield
    if ranks.alive:
        ranks.run(cases.reset)


@pytest.mark.parametrize(
    ("what", "steps"),
    [("norm", 2), ("value hook", 1), *(pytest.param(w, 3, marks=SLOW) for w in ("norm hook", "value"))],
)
def test_what_the_loops_body_asks_for_is_done_on_ranks_whose_loop_is_over(ranks, what, steps):
    """Clipping, and schedules in a hook."""
    for found in ranks.run(cases.train_counts, what, steps):
        for error, rate in found:
            assert error <= FLOAT64
            assert rate <= FLOAT64


@pytest.mark.parametrize(
    ("what", "message", "updates"),
    [
        (
            "clip",
            "Ranks clip the gradient in different ways: [('clip_grad_norm_', [0, 1, 2, 3], [0.1], {})] on rank 0",
            0,
        ),
        ("no batch", "different ways: [('clip_grad_norm_', [0, 1, 2, 3], [0.1], {})] on rank 0, none on rank 1", 0),
        ("schedule", "Ranks have different hyperparameters: lr is 0.0125 on rank 0, 0.025 on rank 1", 3),
        (
            "prepared schedule",
            "Ranks have different hyperparameters: lr is 0.0015625 on rank 0, 0.00625 on rank 1",
            3,
        ),
        ("empty", "The loader yielded no batch. Received: loader of type list", 0),
    ],
)
def test_ranks_whose_loops_ask_for_different_things_are_refused_by_name(ranks, what, message, updates):
    for said in ranks.run(cases.apart, what):
        assert message in said
        assert said.endswith(f" {updates}")


def test_in_batches_each_row_is_gathered_once_and_a_plain_loop_closes_its_last_window(ranks):
    for gathered, rows, updates, batches, opened in ranks.run(cases.gather):
        assert gathered == [*range(rows)]
        assert (updates, opened) == (-(-batches // 4), 0)
        assert rows % 6
        assert batches % 4


def test_a_window_that_the_main_process_alone_has_saved_is_refused_on_all(ranks, tmp_path):
    """Missing, or of another micro-batch of the same window."""
    for folder, after, again, why in (("one", 2, None, "missing"), ("two", 4, 5, "from another save")):
        on = (0,) if again is None else (0, 1)
        for said in ranks.run(cases.save, str(tmp_path / folder), after, False, on, again):
            assert f"a process's part of it can't be used: {tmp_path}" in said
            assert f"optimizer_0_window_1.bin is {why}. Call accelerator.save_state() on all processes" in said


def test_parts_that_are_cut_off_or_another_optimizers_or_another_runs_are_refused_on_all(ranks, tmp_path):
    why = {
        "cut off": "optimizer_1_window_1.bin is incomplete (",
        "exchanged": "optimizer_0_window_1.bin is from another save.",
        "of another run": "optimizer_1_window_1.bin is from another save.",
    }
    for said in ranks.run(cases.load_other_parts, str(tmp_path)):
        assert said["as saved"] == [1, 1]
        assert all(expected in said[how] for how, expected in why.items())


@pytest.mark.parametrize(
    ("steps", "clip", "sharded"),
    [
        (2, 0.05, False),
        (2, 0.05, True),
        *(pytest.param(steps, clip, False, marks=SLOW) for steps in (1, 2, 3) for clip in (None, 0.05)),
        pytest.param(2, None, True, marks=SLOW),
    ],
)
def test_ragged_and_short_windows_make_the_update_of_all_ranks_rows(ranks, steps, clip, sharded):
    for error, updates in ranks.run(cases.train, steps, clip, sharded):
        assert error <= FLOAT64
        assert updates == 2 * -(-5 // steps)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("after", [4, *(pytest.param(n, marks=SLOW) for n in (1, 2, 3, 8))])
def test_files_hold_each_ranks_part_of_the_open_window_and_go_on_there(ranks, tmp_path, after, sharded):
    """Bit for bit, if each rank saves its own."""
    for difference, opened in ranks.run(cases.save, str(tmp_path / "state"), after, sharded):
        assert difference <= (FLOAT64 if sharded else 0)
        assert opened == [after % 3, after % 3]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("too early", "in no model that this Accelerator has prepared. Prepare the model first"),
        ("wrapped", "belong to a sharded model (fully_shard) that the optimizer does not know"),
        ("alone", "in no model that this Accelerator has sharded. FSDP2 replaces parameters, so prepare both"),
        ("FSDP1", "Use FSDP2: FullyShardedDataParallelPlugin(fsdp_version=2)"),
    ],
)
def test_other_ways_are_refused_by_name(ranks, how, message):
    assert all(message in said for said in ranks.run(cases.refused, how))
