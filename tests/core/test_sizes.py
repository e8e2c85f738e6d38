"""How a large batch is cut: into even sizes, the fastest that fits, whole groups, packs of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.core.sizes import FixedSize, Groups, Rows, Slice, TokenBudget, Tokens
from gradaccum.core.sizes.fixed import even_size, even_sizes
from gradaccum.core.sizes.search import MemoryLine, SizeSearch
from gradaccum.core.sizes.tokens import packed


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_even_sizes_hold_all_rows_in_the_fewest_micro_batches_of_two_shapes(rows, micro_batch_size):
    sizes, one_by_one = even_sizes(rows, micro_batch_size), []
    while left := rows - sum(one_by_one):
        one_by_one.append(even_size(left, micro_batch_size))
    assert one_by_one == sizes
    assert sum(sizes) == rows
    assert len(sizes) == -(-rows // micro_batch_size)
    assert all(1 <= size <= micro_batch_size for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1


# Whole groups.

runs = st.lists(st.integers(1, 6), min_size=1, max_size=12)


def groups_of(sizes: list[int]) -> Groups:
    return Groups([group for group, size in enumerate(sizes) for _ in range(size)])


def whole(groups: Groups, rows: list[int]) -> bool:
    """Whether these are whole groups."""
    found = {groups.ids[row] for row in rows}
    return sorted(rows) == [row for row, group in enumerate(groups.ids) if group in found]


def rows_of(piece: Slice) -> list[int]:
    return piece.rows if isinstance(piece.rows, list) else [*range(piece.rows.start, piece.rows.stop)]


@given(runs, st.integers(0, 30), st.integers(1, 20), st.booleans(), st.data())
def test_plans_take_whole_groups_and_no_more_passes_than_ranks_need(
    sizes: list[int], more: int, count: int, tokens: bool, data: st.DataObject
) -> None:
    groups, total = groups_of(sizes), sum(sizes)
    widths = [data.draw(st.integers(1, 5)) if tokens else 1 for _ in range(total)]
    most = (5 if tokens else 1) * max(sizes) + more
    plan = (
        Tokens(TokenBudget(most), [(0, width) for width in widths], None, groups)
        if tokens
        else Rows(FixedSize(most), total, groups)
    )
    planned = list(plan)
    for pieces in (planned, plan.in_passes(count)):
        found = [row for piece in pieces for row in rows_of(piece)]
        assert (sorted(found) if tokens else found) == list(range(total))
        assert all(whole(groups, rows_of(piece)) and piece.tokens <= most for piece in pieces)
        assert len(planned) <= len(pieces) <= max(count, len(planned))
    divisible = [piece.tokens for piece in planned if groups.alone(rows_of(piece)) is None]
    if divisible:
        smaller = plan.too_large(max(divisible))
        assert smaller is not None
        assert smaller.size < max(divisible)
        assert all(whole(groups, rows_of(piece)) for piece in smaller)


# The search for a size, with costs that are made up.


def search(climb, rows, seconds, peak=None, fits=None, windows=2) -> list[list[int]]:
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


def overhead(best: int, slope: float = 1.0, cliff: float = 0.5) -> Callable[[int], float]:
    """Seconds of a micro-batch: launching costs as much as computing `best` rows, and caches overflow beyond it."""
    return lambda size: best + slope * size + cliff * max(size - best, 0) ** 1.5


LARGER_IS_FASTER = overhead(10, 0.1, 0.0)


@pytest.mark.parametrize("best", [8, 64, 256])
@pytest.mark.parametrize("rows", [1024, 1000])
def test_it_settles_on_the_fastest_size_within_two_windows(best: int, rows: int) -> None:
    climb, seconds = SizeSearch(), overhead(best)
    sizes, _ = search(climb, rows, seconds)
    assert sizes[:5] == [1, 2, 4, 8, 16]  # the first window climbs
    assert climb.settled
    fastest = min(seconds(size) / size for size in range(1, rows + 1))
    assert seconds(climb.size) / climb.size <= 1.05 * fastest


def test_a_slow_first_run_does_not_decide() -> None:
    climb, runs = SizeSearch(), set()

    def warming(size: int) -> float:
        slow = size == 64 and size not in runs
        runs.add(size)
        return overhead(64)(size) * (1.4 if slow else 1.0)

    search(climb, 1024, warming)
    assert climb.size == 64


def test_it_stops_before_the_limit_by_a_line_above_a_knee() -> None:
    climb = SizeSearch(limit=1000.0)
    sizes = search(climb, 256, LARGER_IS_FASTER, peak=lambda size: 100 + 20 * size)
    assert max(max(window) for window in sizes) * 20 + 100 <= 900
    assert climb.settled
    assert 32 <= climb.size <= 40  # what the line allows, not only the last power of two
    line = MemoryLine(base=100)
    for size in (1, 2, 4, 8, 16):
        line.add(size, max(500, 100 + 50 * size))
    assert (line.predict(32), line.largest(2000)) == (100 + 50 * 32, 38)


@pytest.mark.parametrize("fits", [1, 3, 20, 40, 128])
def test_sizes_that_fail_are_not_tried_again_and_one_that_fails_later_is_lowered(fits: int) -> None:
    climb = SizeSearch()
    *_, sizes = search(climb, 128, LARGER_IS_FASTER, fits=fits, windows=3)
    assert climb.settled
    assert fits // 2 < climb.size <= fits
    assert max(sizes) <= fits
    before = climb.size
    climb.failed(before)
    assert climb.settled
    assert climb.size < before or before == 1


@given(st.integers(1, 300), st.integers(1, 8))
def test_no_micro_batch_is_below_the_minimum(rows: int, minimum: int) -> None:
    for window in search(SizeSearch(minimum=minimum), rows, overhead(16), windows=3):
        assert sum(window) == rows
        assert min(window) >= min(minimum, rows)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=40), st.integers(1, 60))
def test_packs_hold_every_row_once_within_the_budget(extents: list[list[int]], max_tokens: int) -> None:
    packs = packed([(first, last) for first, last in extents], max_tokens)
    assert sorted(row for rows, _, _ in packs for row in rows) == list(range(len(extents)))
    for rows, start, stop in packs:
        assert len(rows) == 1 or len(rows) * (stop - start) <= max_tokens
        assert all(start <= extents[row][0] and extents[row][1] <= stop for row in rows)
