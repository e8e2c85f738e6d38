"""Processes that are started once for all tests of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.torch.distributed.problems")

from tests.torch.distributed.processes import Processes  # noqa: E402  # nor may it be imported by anything before


def _several(ranks: int, started_by: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A fixture that starts ranks, and one that has them: new ones where the test before left them in pieces."""

    @pytest.fixture(scope="session")
    def start() -> Iterator[Processes]:
        started = Processes(ranks)
        yield started
        started.close()

    @pytest.fixture
    def whole(request: pytest.FixtureRequest) -> Processes:
        return request.getfixturevalue(started_by).whole()

    return start, whole


started_ranks, ranks = _several(2, "started_ranks")
started_new_ranks, new_ranks = _several(2, "started_new_ranks")
started_three_ranks, three_ranks = _several(3, "started_three_ranks")
started_four_ranks, four_ranks = _several(4, "started_four_ranks")


@pytest.fixture
def fragile_ranks(new_ranks: Processes) -> Iterator[Processes]:
    """Ranks whose process group may go to pieces."""
    yield new_ranks
    new_ranks.regroup()
