"""Processes that are started once for all tests of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.torch.distributed.processes import Processes, import_before

import_before("tests.torch.distributed.sharded_cases")


def shared(ranks: int) -> Callable[..., Iterator[Processes]]:
    @pytest.fixture(scope="session")
    def processes() -> Iterator[Processes]:
        started = Processes(ranks)
        yield started
        started.close()

    return processes


whole_ranks, new_ranks, three_ranks, four_ranks = shared(2), shared(2), shared(3), shared(4)


@pytest.fixture
def ranks(whole_ranks: Processes) -> Processes:
    """Two ranks; new ones where the test before left them in pieces."""
    if not whole_ranks.alive:
        whole_ranks.regroup(30.0)
    return whole_ranks
