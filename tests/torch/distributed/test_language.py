"""TrainStep's `head` and `pack` on several ranks: the update of all ranks' rows, whichever way the model is spread."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference import FLOAT64
from tests.torch.distributed import language_cases as cases
from tests.torch.distributed.processes import Processes

SHARDED = "at once", "the head with the rest", "the head by itself"


@pytest.mark.parametrize(
    ("engine", "own_loss"),
    [
        ("DDP", True),
        ("at once", False),
        ("the head by itself", True),
        *(pytest.param(engine, True, marks=pytest.mark.slow) for engine in SHARDED[:2]),
        *(pytest.param(engine, False, marks=pytest.mark.slow) for engine in ("DDP", *SHARDED[1:])),
    ],
)
def test_a_head_in_tiles_makes_the_clipped_update_of_all_ranks_rows(
    ranks: Processes, engine: str, own_loss: bool
) -> None:
    results = ranks.run(cases.updates, engine, own_loss, 0.05, head="head", max_tokens=24)
    for error, of_losses, tiles, _ in results:
        assert error <= FLOAT64
        assert of_losses <= FLOAT64
        assert tiles > 20


def test_a_rank_that_runs_passes_for_the_others_sake_runs_them_in_tiles_too(ranks: Processes) -> None:
    lengths = [cases.LENGTHS[0], [9]]
    (error, _, _, seen), (other, _, tiles, own) = ranks.run(
        cases.updates, "the head by itself", lengths=lengths, head="head", micro_batch_size=2
    )
    assert max(error, other) <= FLOAT64
    assert len(own) == len(seen) == 4
    assert tiles > 4 * 2


def test_where_sharded_modules_cast_their_outputs_logits_are_computed_whole(ranks: Processes) -> None:
    for error, _, tiles, _ in ranks.run(cases.updates, "outputs cast", head="head", micro_batch_size=3):
        assert error <= FLOAT64
        assert tiles == 0


@pytest.mark.parametrize(
    ("engine", "head"),
    [
        ("DDP", None),
        (SHARDED[0], "head"),
        *(pytest.param(engine, None, marks=pytest.mark.slow) for engine in (SHARDED[0], SHARDED[2])),
        *(pytest.param(engine, "head", marks=pytest.mark.slow) for engine in ("DDP", SHARDED[2])),
    ],
)
def test_packed_rows_make_the_update_of_all_ranks_rows(ranks: Processes, engine: str, head: Any) -> None:
    (error, _, tiles, seen), (other, _, _, own) = ranks.run(
        cases.updates, engine, clip=0.05, head=head, pack=True, max_tokens=24
    )
    assert max(error, other) <= FLOAT64
    assert (tiles > 0) == (head is not None)
    assert sum(seen) <= 1.1 * sum(cases.LENGTHS[0])
    assert engine == "DDP" or len(seen) == len(own)
