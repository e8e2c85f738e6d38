"""How a large batch is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.core.sizes import even_sizes


@given(st.integers(0, 10**4), st.integers(1, 10**4))
def test_even_sizes_hold_all_rows_in_the_fewest_micro_batches_of_two_shapes(rows, micro_batch_size):
    sizes = even_sizes(rows, micro_batch_size)
    assert sum(sizes) == rows
    assert len(sizes) == -(-rows // micro_batch_size)
    assert all(1 <= size <= micro_batch_size for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("rows", "micro_batch_size", "sizes"),
    [
        (0, 4, []),
        (1, 4, [1]),
        (4, 4, [4]),
        (5, 4, [3, 2]),
        (64, 16, [16] * 4),
        (100, 48, [34, 33, 33]),
        (3, 1, [1] * 3),
    ],
)
def test_even_sizes_by_hand(rows, micro_batch_size, sizes):
    assert even_sizes(rows, micro_batch_size) == sizes


@pytest.mark.parametrize(
    ("micro_batch_size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("16", TypeError)]
)
@pytest.mark.parametrize("rows", [0, 64])
def test_a_micro_batch_has_at_least_one_row(rows, micro_batch_size, error):
    with pytest.raises(error, match=r"`micro_batch_size` must be an int >= 1. Received: micro_batch_size="):
        even_sizes(rows, micro_batch_size)


@pytest.mark.parametrize(("rows", "error"), [(-1, ValueError), (-10, ValueError), (2.5, TypeError), (True, TypeError)])
def test_rows_are_counted(rows, error):
    with pytest.raises(error, match=r"`rows` must be an int >= 0. Received: rows="):
        even_sizes(rows, 4)
