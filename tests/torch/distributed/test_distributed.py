"""One window over all ranks: the update of one process that sees all rows, with one reduction per window."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import FLOAT64
from tests.torch.distributed import ddp_cases as cases
from tests.torch.distributed.processes import Processes, Raised

EVEN = [[4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4]]
RAGGED = [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]]
UNEVEN = [[4, 4, 4, 4, 4, 4, 4, 4, 3], [4, 4, 4, 2]]


@pytest.mark.parametrize("way", ["batches", "batches, backward", "plain"])
@pytest.mark.parametrize("sizes", [EVEN, RAGGED, UNEVEN], ids=["even", "ragged", "uneven"])
def test_all_ranks_rows_make_one_update_with_one_reduction(ranks: Processes, sizes: list[list[int]], way: str) -> None:
    for error, reductions, updates in ranks.run(cases.train, sizes, 4, way):
        assert error <= FLOAT64
        assert updates == 2 * max(-(-len(own) // 4) for own in sizes)
        assert reductions == updates


@pytest.mark.parametrize(
    "keywords",
    [
        {"optimizer": "adam"},
        {"clip": 0.1},
        {"hook_first": False},
        {"ddp": {"gradient_as_bucket_view": True}},
        {"ddp": {"find_unused_parameters": True}},
        {"ddp": {"static_graph": True}},
        {"ddp": {"gradient_as_bucket_view": True, "static_graph": True}, "way": "plain"},
    ],
    ids=str,
)
def test_ddp_as_users_configure_it(ranks: Processes, keywords: dict[str, object]) -> None:
    for error, reductions, updates in ranks.run(cases.train, UNEVEN, 4, **keywords):
        assert error <= FLOAT64
        assert reductions == updates == 6


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_two_optimizers_that_share_batches_close_their_windows_in_turns(ranks: Processes, steps: int) -> None:
    for errors, updates in ranks.run(cases.train_two, RAGGED, steps):
        assert max(errors) <= FLOAT64
        assert updates == [2 * -(-6 // steps)] * 2


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("sizes", [UNEVEN, [[], [4, 2, 3]]], ids=["uneven", "empty"])
def test_two_optimizers_that_share_batches_need_as_many_on_every_rank(
    ranks: Processes, sizes: list[list[int]], steps: int
) -> None:
    for result in ranks.try_run(cases.train_two, sizes, steps, limit=25.0):
        assert isinstance(result, Raised)
        assert result.kind == "WindowError"
        assert "came to the end of an epoch while other ranks went on" in result.message


@pytest.mark.parametrize("way", cases.WAYS)
def test_a_window_makes_one_reduction_and_sends_one_message_that_travels_during_the_backward_pass(
    ranks: Processes, way: str
) -> None:
    """A GradScaler finds overflows after the pass, so a second message says it; windows 2, 4, 8, ... compare."""
    first = 4 if way == "TrainStep" else 2 + ("batches" in way)  # what losses are and weigh; that an epoch begins
    expected = [3 if way == "GradScaler" else 2 + (n & (n - 1) == 0) for n in range(2, 21)]
    for found, events in ranks.run(cases.collectives, way):
        assert found == [first, *([2] * 39 if way == "TrainStep" else expected)]
        if way not in ("TrainStep", "GradScaler"):
            assert events == ["first gradient", "send", "first gradient", "receive", "reduction"]


def test_one_micro_batch_per_window_is_plain_ddp_and_ragged_rows_are_exact(ranks: Processes) -> None:
    for error, reductions, updates in ranks.run(cases.train, RAGGED, 1):
        assert error <= FLOAT64
        assert reductions == updates == 12


def test_several_buckets_are_reduced_once_each(ranks: Processes) -> None:
    for error, reductions, updates in ranks.run(cases.train, UNEVEN, 4, ddp={"bucket_cap_mb": 1e-4}):
        assert error <= FLOAT64
        assert reductions == updates


def test_token_weights_are_summed_over_ranks_and_weight_0_hangs_nobody(ranks: Processes) -> None:
    assert max(ranks.run(cases.tokens)) <= FLOAT64


def test_an_empty_last_batch_on_one_rank_counts_nothing(ranks: Processes) -> None:
    assert max(ranks.run(cases.empty_batch)) <= FLOAT64


def test_micro_batches_that_a_rank_passes_over_count_nothing(ranks: Processes) -> None:
    assert max(ranks.run(cases.continued)) <= FLOAT64


@pytest.mark.parametrize(("mode", "expected"), [("skip_micro_batch", 3), ("skip_window", 1)])
def test_one_rank_that_skips_what_is_not_finite_keeps_the_others_exact(
    ranks: Processes, mode: str, expected: int
) -> None:
    for error, updates in ranks.run(cases.nonfinite, mode):
        assert error <= FLOAT64
        assert updates == expected


@pytest.mark.parametrize("overflow_at", [None, (1, 4), (0, 5), (1, 3)])
def test_an_overflow_on_one_rank_costs_all_ranks_one_window_and_one_halving(
    ranks: Processes, overflow_at: tuple[int, int] | None
) -> None:
    for error, scales, updates in ranks.run(cases.scaler, overflow_at, 1000):
        assert error <= FLOAT64
        assert updates == (4 if overflow_at is None else 3)
        assert scales == ([1024.0] * 4 if overflow_at is None else [1024.0, 512.0, 512.0, 512.0])


@pytest.mark.parametrize("overflow_at", [None, (1, 4)])
def test_scales_that_grow_at_different_times_are_brought_together(
    ranks: Processes, overflow_at: tuple[int, int] | None
) -> None:
    for error, _, updates in ranks.run(cases.scaler, overflow_at, 4):
        assert error <= FLOAT64
        assert updates == (4 if overflow_at is None else 3)


def test_a_layer_that_one_rank_uses_once_is_exact_and_one_that_none_uses_stays_without_gradient(
    ranks: Processes,
) -> None:
    for error, without in ranks.run(cases.unused):
        assert error <= FLOAT64
        assert without


def test_static_graph_with_unused_parameters_falls_back(ranks: Processes) -> None:
    for error, without in ranks.run(cases.unused, True):
        assert error <= FLOAT64
        assert without


def test_static_graph_is_named_in_one_line(ranks: Processes) -> None:
    for lines in ranks.run(cases.static_graph):
        assert len([line for line in lines if "reduced by step()" in line]) == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("allreduce_hook", FLOAT64),
        ("fp16_compress_hook", 2**-10),
        ("powerSGD_hook", 2**-10),  # of full rank: exact but for its projections
    ],
)
def test_communication_hooks_see_every_reduction(ranks: Processes, name: str, error: float) -> None:
    assert max(ranks.run(cases.communication_hook, name)) <= error


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("weight", [131072.0, 1e-6])
@pytest.mark.parametrize("way", ["plain", "batches", "micro_batch", "TrainStep", "TrainStep of sums"])
def test_what_is_reduced_in_float16_is_of_the_gradients_size_whatever_the_weights_are(
    ranks: Processes, way: str, weight: float, engine: str
) -> None:
    assert max(ranks.run(cases.half_reduction, engine, weight, way)) <= 2**-9


def test_several_forward_passes_per_micro_batch_are_reduced_once(ranks: Processes) -> None:
    for error, counts in ranks.run(cases.several_passes, False):
        assert error <= FLOAT64
        assert counts == [1, 1, 1]


def test_several_backward_passes_per_micro_batch_are_exact_and_soon_reduced_once(ranks: Processes) -> None:
    for error, counts in ranks.run(cases.several_passes, True):
        assert error <= FLOAT64
        assert counts == [1, 2, 1]  # the first window is reduced by step(): its unit is not agreed on before


def test_a_penalty_on_the_weights_in_a_backward_pass_of_its_own_is_exact(ranks: Processes) -> None:
    assert max(ranks.run(cases.unreached_penalty)) <= FLOAT64


def test_a_second_backward_pass_that_comes_only_later_on_is_exact(ranks: Processes) -> None:
    for error, messages in ranks.run(cases.penalty_later, (0, 1)):
        assert error <= FLOAT64
        assert messages == [2, 2, 2, 1, 1]  # an epoch begins with one; after the third window step() reduces


def test_a_second_backward_pass_on_one_rank_in_a_window_that_is_not_compared_is_an_error_on_all(
    ranks: Processes,
) -> None:
    for result in ranks.try_run(cases.penalty_later, (1,), limit=20.0):
        assert isinstance(result, Raised)
        assert result.kind == "WindowError"
        assert "Rank 1 changed a window's gradient or weight after its reduction had begun" in result.message


def test_buffers_are_the_same_on_all_ranks_after_an_uneven_epoch(ranks: Processes) -> None:
    assert all(ranks.run(cases.batch_norm))


def test_buffers_are_those_of_a_rank_that_still_had_micro_batches(ranks: Processes) -> None:
    assert ranks.run(cases.buffers_after_an_epochs_end, [[4] * 2, [4] * 7]) == [[7, 14]] * 2
    assert ranks.run(cases.buffers_after_an_epochs_end, [[4] * 5, [4] * 3]) == [[5, 10]] * 2


@pytest.mark.parametrize("outside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_models(ranks: Processes, outside: bool) -> None:
    for error, reductions in ranks.run(cases.compiled, outside):
        assert error <= FLOAT64
        assert reductions == 2


def test_bfloat16_gradients_are_reduced_in_the_dtype_they_are_summed_in(ranks: Processes) -> None:
    assert max(ranks.run(cases.wide)) <= 2**-8  # one rounding to bfloat16, at the update


@pytest.mark.parametrize("weighed", [True, False])
def test_sums_add_up_over_all_ranks(ranks: Processes, weighed: bool) -> None:
    assert max(ranks.run(cases.summed, weighed)) <= FLOAT64


@pytest.mark.parametrize("unused_too", [True, False])
@pytest.mark.parametrize("bucket_views", [True, False])
def test_every_rank_resumes_its_part_of_an_open_window(ranks: Processes, bucket_views: bool, unused_too: bool) -> None:
    assert max(ranks.run(cases.resumed, bucket_views, unused_too)) <= FLOAT64


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_distributed_checkpoint_that_loses_an_open_window_says_so(
    ranks: Processes, tmp_path: Path, micro_batches: int
) -> None:
    for error, warnings in ranks.run(cases.distributed_checkpoint, str(tmp_path), micro_batches):
        assert error <= FLOAT64
        assert any("1 of 2 micro-batches are lost" in warning for warning in warnings) == (micro_batches == 3)


@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("steps", [(1, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("which", [("a", "b"), ("ab", "ab")])
def test_optimizers_on_parts_of_one_model_are_exact(
    ranks: Processes, which: tuple[str, str], steps: tuple[int, int], unused: bool
) -> None:
    for errors in ranks.run(cases.optimizers_of_parts, steps, which, unused):
        assert max(errors) <= FLOAT64


@pytest.mark.parametrize("part", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_loop_that_runs_in_the_models_forward_pass_is_exact(ranks: Processes, steps: int, part: bool) -> None:
    """Lightning's, whose module has the optimizer's model as a part of it, or is it."""
    assert max(ranks.run(cases.loop_in_forward, steps, part)) <= FLOAT64


def test_several_models_share_a_window(ranks: Processes) -> None:
    assert max(ranks.run(cases.towers)) <= FLOAT64


def test_all_ranks_may_break_off_at_once(ranks: Processes) -> None:
    for error, updates in ranks.run(cases.broken_off):
        assert error <= FLOAT64
        assert updates == 2 + 1 + 3


def test_sync_micro_batch_reduces_every_micro_batch(ranks: Processes) -> None:
    for error, reductions, updates in ranks.run(cases.train, RAGGED, 4, sync="micro_batch"):
        assert error <= FLOAT64
        assert reductions == 9  # all of the first window's at once
        assert updates == 4


def test_optimizers_that_come_one_after_the_other_use_one_process_group(ranks: Processes) -> None:
    for error, groups in ranks.run(cases.one_after_the_other):
        assert error <= FLOAT64
        assert groups == 0


def test_a_process_group_in_which_ranks_have_not_met_is_not_used_again(ranks: Processes) -> None:
    for arrives, groups in ranks.run(cases.unheard):
        assert arrives
        assert groups == 3
