"""Processes that are started once for all tests of several ranks."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.torch.distributed.problems")

from tests.torch.distributed.processes import Processes  # noqa: E402  # nor may it be imported by anything before

COUNTS = {"ranks": 2, "new_ranks": 2, "three_ranks": 3, "four_ranks": 4}


@pytest.fixture(scope="session")
def started():
    """By the name of the fixture that has them."""
    found: dict[str, Processes] = {}
    yield found
    for processes in found.values():
        processes.kill()


def _ranks(request, started):
    """Ranks; new ones where the test before left them in pieces."""
    name = request.fixturename
    if name not in started:
        started[name] = Processes(COUNTS[name])
    return started[name].whole()


ranks, new_ranks, three_ranks, four_ranks = (pytest.fixture(_ranks, name=name) for name in COUNTS)


@pytest.fixture
def fragile_ranks(new_ranks):
    """Ranks whose process group may go to pieces."""
    yield new_ranks
    new_ranks.regroup()
