"""Contrastive losses over three ranks that differ in rows, against one process with all of them."""

import pytest

from tests.reference import FLOAT32, FLOAT64
from tests.torch.distributed import contrastive_cases as cases
from tests.torch.distributed.processes import Raised

HOW = ["row i and row i", "ids of the pairs", "ids of both", "false negatives", "functions"]


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        *(("symmetric", how) for how in HOW),
        ("one way", "row i and row i"),
        ("one way", "false negatives"),
        *(("sigmoid", how) for how in ("row i and row i", "ids of both", "functions")),
        *(pytest.param("one way", how, marks=pytest.mark.slow) for how in HOW[1:3] + HOW[4:]),
        *(pytest.param("sigmoid", how, marks=pytest.mark.slow) for how in (HOW[1], HOW[3])),
    ],
)
def test_every_rank_has_the_loss_of_all_rows_and_the_gradients_of_its_own(how, loss, three_ranks):
    for errors in three_ranks.run(cases.every_pair, how, loss):
        assert max(errors) <= FLOAT64


@pytest.mark.parametrize("chunked", [True, False])
def test_the_mean_of_ddp_is_the_update_of_one_process_with_all_rows(chunked, three_ranks):
    assert max(three_ranks.run(cases.update_under_ddp, chunked)) <= FLOAT64


def test_half_precision_travels_as_it_is_and_is_summed_in_float32(three_ranks):
    assert max(three_ranks.run(cases.half_precision)) <= FLOAT32


def test_the_ranks_of_a_group_compare_their_rows_alone(three_ranks):
    assert max(three_ranks.run(cases.gradients_of_a_subgroup)) <= FLOAT64


def test_no_rank_ever_holds_all_ranks_rows(three_ranks):
    assert set(three_ranks.run(cases.largest_block)) == {50 * 8 * 8}  # its own rows, or one other rank's


@pytest.mark.parametrize(
    ("what", "received"),
    [
        ("`temperature`", "0.1, 0.2, 0.1"),
        ("`symmetric`", "True, False, True"),
        ("whether `a` needs a gradient", "a gradient needed, no gradient needed, a gradient needed"),
        ("the size of a row", "4, 3, 4"),
        ("the dtype of `b`", "torch.float64, torch.float32, torch.float64"),
        ("the kind of `positives`", "None, ids, None"),
        ("an error", ""),
    ],
)
def test_ranks_that_differ_are_an_error_on_all_of_them(what, received, three_ranks):
    results = three_ranks.try_run(cases.differing, what)
    assert all(isinstance(result, Raised) for result in results)
    for rank, result in enumerate(results):
        if what != "an error":
            expected = f"The ranks call info_nce differently: {what} must be the same. Received, by rank: {received}."
        elif rank == 1:
            expected = "Row i of a and row i of b are a pair"
        else:
            expected = "info_nce was called with wrong arguments on rank 1"
        assert result.message.startswith(expected)


def test_second_derivatives_over_ranks_are_refused(three_ranks):
    for result in three_ranks.try_run(cases.second_derivatives):
        assert "Second derivatives of a contrastive loss over ranks are not implemented" in result.message
