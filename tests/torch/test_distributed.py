"""One window over all ranks: the update of one process that sees all rows, with one reduction per window."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reference import FLOAT64
from tests.torch import distributed_cases as cases
from tests.torch.processes import Processes


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


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
