"""The search for a micro-batch size, with costs that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.core.sizes.plans import packed
from gradaccum.core.sizes.search import FixedSize, MemoryLine, SizeSearch, even_size, even_sizes


def search(
    climb: SizeSearch | FixedSize,
    rows: int,
    seconds: Callable[[int], float],
    peak: Callable[[int], float] | None = None,
    fits: int | None = None,
    windows: int = 2,
) -> list[list[int]]:
    """Run windows of so many rows; returns the sizes of each window's micro-batches."""
    seen = []
    for _ in range(windows):
        sizes, left = [], rows
        while left:
            size = climb.next_size(left)
            assert 1 <= size <= left
            if fits is not None and size > fits:
                climb.failed(size)
                continue
            climb.record(size, seconds(size), 0.0 if peak else None, peak(size) if peak else None)
            sizes.append(size)
            left -= size
        climb.close()
        seen.append(sizes)
    return seen


def overhead(best: int) -> Callable[[int], float]:
    """Seconds of a micro-batch: launching costs as much as computing `best` rows, and caches overflow beyond it."""
    return lambda size: best + size + 0.5 * max(size - best, 0) ** 1.5


def test_the_first_window_climbs_by_doubling() -> None:
    climb = SizeSearch()
    sizes = search(climb, 64, lambda size: 1 + 0.01 * size, windows=1)[0]
    assert sizes[:6] == [1, 2, 4, 8, 16, 32]
    assert sum(sizes) == 64


@pytest.mark.parametrize("best", [8, 64, 256])
@pytest.mark.parametrize("rows", [1024, 1000])
def test_it_settles_on_the_fastest_size_within_two_windows(best: int, rows: int) -> None:
    climb = SizeSearch()
    search(climb, rows, overhead(best))
    assert climb.settled
    seconds = overhead(best)
    fastest = min(seconds(size) / size for size in range(1, rows + 1))
    assert seconds(climb.size) / climb.size <= 1.05 * fastest


def test_the_whole_batch_is_tried_where_larger_is_faster() -> None:
    climb = SizeSearch()
    search(climb, 64, lambda size: 10 + 0.1 * size)
    assert climb.settled
    assert climb.size == 64


def test_a_slow_first_run_does_not_decide() -> None:
    climb, runs = SizeSearch(), {}

    def warming(size: int) -> float:
        runs[size] = runs.get(size, 0) + 1
        return overhead(64)(size) * (1.4 if runs[size] == 1 and size == 64 else 1.0)

    search(climb, 1024, warming)
    assert climb.size == 64


def test_it_stops_before_the_limit() -> None:
    climb = SizeSearch(limit=1000.0)
    sizes = search(climb, 256, lambda size: 10 + 0.01 * size, peak=lambda size: 100 + 20 * size)
    assert max(max(window) for window in sizes) * 20 + 100 <= 900
    assert climb.settled
    assert 32 <= climb.size <= 40  # what the line allows, not only the last power of two


def test_memory_is_predicted_by_a_line_above_a_knee() -> None:
    line = MemoryLine(base=100)
    for size in (1, 2, 4, 8, 16):
        line.add(size, max(500, 100 + 50 * size))
    assert line.predict(32) == 100 + 50 * 32
    assert line.largest(2000) == 38


@pytest.mark.parametrize("fits", [1, 3, 20, 40])
def test_sizes_that_fail_are_not_tried_again(fits: int) -> None:
    climb = SizeSearch()
    sizes = search(climb, 128, lambda size: 10 + 0.1 * size, fits=fits, windows=3)
    assert climb.settled
    assert climb.size <= fits
    assert climb.size > fits // 2 or fits == 1
    assert max(sizes[-1]) <= fits


def test_a_size_that_fails_after_settling_is_lowered() -> None:
    climb = SizeSearch()
    search(climb, 128, overhead(32))
    assert climb.size == 32
    climb.failed(32)
    assert climb.size == 16
    assert climb.settled


@given(st.integers(1, 300), st.integers(1, 8))
def test_no_micro_batch_is_below_the_minimum(rows: int, minimum: int) -> None:
    climb = SizeSearch(minimum=minimum)
    for window in search(climb, rows, overhead(16), windows=3):
        assert sum(window) == rows
        assert min(window) >= min(minimum, rows)


@given(st.integers(1, 500), st.integers(1, 500))
def test_even_sizes_come_one_by_one_too(rows: int, size: int) -> None:
    one_by_one, left = [], rows
    while left:
        one_by_one.append(even_size(left, size))
        left -= one_by_one[-1]
    assert one_by_one == even_sizes(rows, size)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=40), st.integers(1, 60))
def test_packs_hold_every_row_once_within_the_budget(extents: list[list[int]], max_tokens: int) -> None:
    packs = packed([(first, last) for first, last in extents], max_tokens)
    assert sorted(row for rows, _, _ in packs for row in rows) == list(range(len(extents)))
    for rows, start, stop in packs:
        assert len(rows) == 1 or len(rows) * (stop - start) <= max_tokens
        assert all(start <= extents[row][0] and extents[row][1] <= stop for row in rows)
