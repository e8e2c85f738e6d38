"""Losses by name of a wrapped optimizer over several ranks: each is divided by its own total over all ranks' rows."""

from __future__ import annotations

import pytest

from tests.reference import FLOAT64
from tests.torch.distributed import named_cases as cases
from tests.torch.distributed.processes import Processes

SIZES = {
    "even": [[4, 4, 4], [4, 4, 4]],
    "ragged": [[4, 2, 5, 1, 3, 7], [3, 3, 1, 6, 2, 4]],
    "uneven": [[4, 4, 4, 4, 3], [4, 2]],
}


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_loss_is_divided_by_its_total_over_all_ranks(ranks: Processes, sizes: list[list[int]], steps: int) -> None:
    for error, updates, losses in ranks.run(cases.train, sizes, steps):
        assert error <= FLOAT64
        assert updates == 2 * max(-(-len(own) // steps) for own in sizes)
        assert len(losses) == 2 or not losses
