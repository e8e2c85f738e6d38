"""Cutting rows never cuts a group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradaccum.core.sizes import FixedSize, Groups, Rows, TokenBudget, Tokens

runs = st.lists(st.integers(1, 6), min_size=1, max_size=12)


def groups_of(sizes: list[int]) -> Groups:
    return Groups([group for group, size in enumerate(sizes) for _ in range(size)])


def whole(groups: Groups, rows: list[int]) -> bool:
    """Whether these are whole groups."""
    found = {groups.ids[row] for row in rows}
    return sorted(rows) == [row for row, group in enumerate(groups.ids) if group in found]


@given(runs, st.integers(1, 40))
def test_cut_gives_whole_groups_of_at_most_the_size(sizes: list[int], size: int) -> None:
    groups = groups_of(sizes)
    parts = groups.cut(range(sum(sizes)), size)
    assert [row for part in parts for row in part] == list(range(sum(sizes)))
    for part in parts:
        assert whole(groups, part)
        assert len(part) <= size or groups.alone(part) is not None
    if size < sum(sizes) and len(sizes) > 1:
        assert len(parts) > 1


@given(runs, st.integers(0, 20))
def test_the_plan_of_rows_takes_whole_groups_in_order(sizes: list[int], more: int) -> None:
    groups, size = groups_of(sizes), max(sizes) + more
    pieces = list(Rows(FixedSize(size), sum(sizes), groups))
    assert [row for piece in pieces for row in range(*piece.rows.indices(99))] == list(range(sum(sizes)))
    assert all(whole(groups, list(range(*piece.rows.indices(99)))) and piece.size <= size for piece in pieces)


@given(runs, st.integers(0, 30), st.data())
def test_the_plan_of_tokens_takes_whole_groups(sizes: list[int], more: int, data: st.DataObject) -> None:
    groups = groups_of(sizes)
    extents = [(0, data.draw(st.integers(1, 5))) for _ in range(sum(sizes))]
    budget = TokenBudget(5 * max(sizes) + more)
    pieces = list(Tokens(budget, extents, None, groups))
    assert sorted(row for piece in pieces for row in piece.rows) == list(range(sum(sizes)))
    assert all(whole(groups, piece.rows) and piece.tokens <= budget.max_tokens for piece in pieces)
    divisible = [piece.tokens for piece in pieces if len(set(map(groups.ids.__getitem__, piece.rows))) > 1]
    if divisible:
        smaller = Tokens(budget, extents, None, groups).too_large(max(divisible))
        assert smaller is not None
        assert smaller.size < max(divisible)
        assert all(whole(groups, piece.rows) for piece in smaller)
