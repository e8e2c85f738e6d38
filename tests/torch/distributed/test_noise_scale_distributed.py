"""The noise scale over several ranks: what one process finds that sees the same windows."""

from __future__ import annotations

import pytest

from tests.torch.distributed import noise_cases as cases
from tests.torch.distributed.processes import Processes

SLOW = pytest.mark.slow
EXACT = 1e-11
"""The estimates are differences of squared norms, each as exact as a gradient: 1e-12."""


def same(here: cases.Found, there: cases.Found) -> bool:
    value, interval, rows = here
    return (value, *interval, rows) == pytest.approx((there[0], *there[1], there[2]), rel=EXACT)


@pytest.mark.parametrize(
    ("engine", "scaled"),
    [("ddp", True), ("fsdp2", False), *(pytest.param(*one, marks=SLOW) for one in (("ddp", False), ("fsdp2", True)))],
)
def test_each_rank_finds_what_one_process_finds_whose_windows_begin_with_its_micro_batch(
    ranks: Processes, engine: str, scaled: bool
) -> None:
    first, second = ranks.run(cases.wrapped, engine, scaled)
    assert same(*first)
    assert same(*second)
    assert not same(first[0], second[0])  # each is an estimate of its own


def test_normalization_layers_tell_each_rank_what_they_tell_one_process(ranks: Processes) -> None:
    for here, there in ranks.run(cases.wrapped, "ddp", True, "layer_norm"):
        assert same(here, there)


@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=SLOW), "fsdp2"])
def test_train_step_finds_what_one_process_finds(ranks: Processes, engine: str) -> None:
    first, second = ranks.run(cases.train_step, engine)
    assert same(*first)
    assert same(*second)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=SLOW)])
def test_ranks_agree_on_the_length_of_windows_that_follow_it(ranks: Processes, engine: str) -> None:
    """Each measures with its own first micro-batch; a majority decides."""
    first, second = ranks.run(cases.followed, engine)
    assert first == second
    assert max(first[0]) == 8
