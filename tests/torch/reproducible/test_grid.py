"""GridSums: the same bits in any order and over any cut, near the true sum, for numbers of all sizes."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaccum.torch.reproducible.grid import LIMIT, GridSums, exponent, holds, offset

INF, NAN = math.inf, math.nan


def added_up(addends, cut=None, order=None, headroom=1.0):
    """The sum of these tensors as several ranks would make it: `cut` has the ranks' numbers of addends."""
    order = range(len(addends)) if order is None else order
    largest = max((float(a.double().abs()[a.isfinite()].max()) for a in addends if a.isfinite().any()), default=0.0)
    special = [0] if any(not a.isfinite().all() for a in addends) else []
    parts, start = [], 0
    e = exponent(headroom * largest, len(addends))
    for size in cut or [len(addends)]:
        sums = GridSums([torch.zeros_like(addends[0])])
        sums.open([e], special)
        for i in order[start : start + size]:
            sums.add([(0, addends[i])])
        sums.close()
        start += size
        parts.append(sums)
    for other in parts[1:]:
        for here, there in zip(parts[0].parts(), other.parts(), strict=True):
            here += there
    return parts[0].value(0)


def bits(tensor):
    return tensor.view(torch.int64).tolist()


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
DOUBLES = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)
WIDE = st.builds(math.ldexp, st.floats(-1, 1, width=32), st.integers(-40, 0))


@st.composite
def cases(draw, dtype=torch.float32, numbers=FLOATS):
    count, width = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    entries = st.lists(numbers, min_size=width, max_size=width)
    addends = [torch.tensor(draw(entries), dtype=torch.float64).to(dtype) for _ in range(count)]
    order = draw(st.permutations(range(count)))
    cut, left = [], count
    while left:
        cut.append(draw(st.integers(1, left)))
        left -= cut[-1]
    return addends, order, cut


@pytest.mark.parametrize(
    ("dtype", "numbers"), [(torch.float32, FLOATS), (torch.float32, WIDE), (torch.float64, DOUBLES)]
)
def test_order_and_cut_change_no_bit(dtype, numbers):
    @settings(max_examples=200, deadline=None)
    @given(cases(dtype, numbers), st.sampled_from([1.0, LIMIT]))
    def check(case, headroom):
        addends, order, cut = case
        assert bits(added_up(addends, headroom=headroom)) == bits(added_up(addends, cut, order, headroom))

    check()


@settings(max_examples=200, deadline=None)
@given(cases(torch.float32, WIDE))
def test_the_error_is_within_the_bound(case):
    addends, *_ = case
    largest = max(float(a.abs().max()) for a in addends)
    for i, value in enumerate(added_up(addends, headroom=LIMIT).tolist()):
        true = sum(Fraction(float(a[i])) for a in addends)
        assert abs(Fraction(value) - true) <= len(addends) * largest * 2.0**-46 + abs(true) * 2.0**-53


def test_entries_down_to_a_millionth_of_the_largest_come_nearer_than_in_float32():
    torch.manual_seed(0)
    scales = 10.0 ** -torch.arange(7).repeat_interleave(200).float()
    addends = [torch.randn(len(scales)) * scales for _ in range(16)]
    true = sum(a.double() for a in addends)
    ours, plain = (s.sub(true).abs() for s in (added_up(addends, headroom=LIMIT), sum(addends).double()))
    errors = torch.stack([ours, plain]).view(2, 7, 200).mean(2)
    assert (20 * errors[0] < errors[1])[:5].all()
    assert (errors[0] < errors[1]).all()


def test_infinities_and_nan_stay_where_they_are():
    addends = [torch.tensor(row) for row in ([INF, 1.0, NAN, INF, -0.0], [1.0, 2.0, 3.0, -INF, -0.0])]
    for order in ([0, 1], [1, 0]):
        found = added_up(addends, order=order)
        assert torch.equal(found, torch.tensor([INF, 3.0, NAN, NAN, 0.0]).double()) or found.isnan().tolist() == [
            False, False, True, True, False,
        ]  # fmt: skip
        assert found[[0, 1, 4]].tolist() == [INF, 3.0, 0.0]
        assert len({*bits(found[2:4])}) == 1  # NaN of one pattern
        assert not found[4].signbit()


@pytest.mark.parametrize("size", [2.0**-1074, 3 * 2.0**-1030, 2.0**-149, 1.0, 2.0**127, 1.5 * 2.0**1021])
def test_numbers_of_one_size_add_up_exactly(size):
    addends = [torch.tensor([size, -size, 0.0], dtype=torch.float64)] * 4
    assert added_up(addends).tolist() == [4 * size, -4 * size, 0.0]


def test_a_grid_holds_what_its_exponent_is_for_and_no_more():
    for largest in (1.0, 1.5, 1e-300, 2.0**1010):
        for addends in (1, 2047, 2048, 10**6):
            e = exponent(largest, addends)
            assert holds(largest, e, addends)
            assert not holds(largest * 4.1, e, addends)
    assert holds(1e-320, exponent(1e-320), 1)
    assert not holds(NAN, 1023, 1)
    assert not holds(INF, 1023, 1)
    assert offset(3) == 12.0


def test_tensors_larger_than_what_is_rounded_at_once_and_of_other_memory_formats_add_up():
    torch.manual_seed(0)
    addends = [torch.randn(3, 100_000).t() for _ in range(3)]
    sums = GridSums([torch.empty(100_000, 3), torch.empty(2, 2, dtype=torch.complex64)])
    sums.open([exponent(8.0), exponent(8.0)])
    for addend in addends:
        sums.add([(0, addend), (1, torch.ones(2, 2, dtype=torch.complex64) * (1 + 2j))])
    sums.close()
    assert (sums.value(0) - sum(a.double() for a in addends)).abs().max() < 1e-13
    assert torch.view_as_complex(sums.value(1)).flatten().tolist() == [3 + 6j] * 4
    assert sums.counts == [3, 3]


def test_without_addends_a_sum_is_zero_and_largest_entries_are_found_without_a_grid():
    sums = GridSums([torch.empty(2), torch.empty(3)])
    sums.open([0, None])
    sums.add([(1, torch.tensor([1.0, -5.0, 2.0]))])
    sums.close()
    assert sums.value(0).tolist() == [0.0, 0.0]
    assert sums.largest() == [0.0, 5.0]
