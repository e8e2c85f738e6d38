"""Layer by layer on several ranks."""

from __future__ import annotations

from tests.reference import FLOAT64
from tests.torch.distributed import layers_cases as cases
from tests.torch.distributed.processes import Processes


def test_under_ddp_blocks_make_the_update_of_all_ranks_rows(ranks: Processes) -> None:
    for error, said in ranks.run(cases.under_ddp, [5, 4]):
        assert error <= FLOAT64
        assert "several ranks reduce their gradients when all are there" in said


def test_sharded_blocks_are_refused_by_name(ranks: Processes) -> None:
    for said in ranks.run(cases.sharded):
        assert "'1.0' is sharded, and `blocks` doesn't know how to gather" in said
