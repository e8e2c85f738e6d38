"""The judgement of proofs in all shells: what rounding decides is no difference, and it hides none."""

import contextlib
import copy

import numpy as np
import pytest

from gradaccum.core.numpy_arrays import ArrayRunner
from gradaccum.core.proof import Comparison, Outcome
from gradaccum.core.ways import even_ways, interleaved_ways, telling_order

ROWS = 8
X = np.random.default_rng(0).normal(size=(ROWS, 3))


class Least(ArrayRunner):
    """The gradient of a mean over rows, in float64, by a function of the weights and rows."""

    rows, precision = ROWS, "float64"

    def __init__(self, gradient):
        self.gradient, self.weights = gradient, np.array([0.5, -1.0, 2.0])

    def run(self, way):
        rows, sizes = way or (range(ROWS), [ROWS])
        parts = np.split(X[np.asarray(rows)], np.cumsum(sizes)[:-1])
        total = sum(len(part) * self.gradient(self.weights, part) for part in parts) / ROWS
        return Outcome({"loss": np.array(1.0)}, {"w": total, "other": np.ones(1)})

    @contextlib.contextmanager
    def moved(self, seed, *, far=False):
        there = copy.copy(self)
        there.weights = self.weights * self.factors(seed, far=far)((3,))
        yield there


def plain(weights, x):
    return x.mean(0) * weights


def noise(x):
    """What kernels for few rows round otherwise."""
    return 1e-15 if len(x) < 5 else -1e-15


def kinked(weights, x):
    """A unit whose sign is decided by rounding at these weights: one row's gradient, or none."""
    return plain(weights, x) + (weights[0] - 0.5 + noise(x) > 0)


def tied(weights, x):
    """A tie that each rounding breaks otherwise, and no rows."""
    return plain(weights, x) + np.array([weights[1] + 2 * weights[0] == 0, 0.0, 0.0])


def cancelling(weights, x):
    """Large terms, of which little is left beside their rounding, at any weights."""
    return (1e9 * weights + x).mean(0) - 1e9 * weights


def coupled(weights, x):
    return x.std(0) * weights


FOUND = {
    "a mean": (plain, False),
    "a sign at an edge": (kinked, False),
    "a tie": (tied, False),
    "terms that cancel": (cancelling, False),
    "rows that look at each other": (coupled, True),
    "such rows at an edge": (lambda w, x: kinked(w, x) + 1e-6 * coupled(w, x), True),
    "such rows at a tie": (lambda w, x: tied(w, x) + 1e-6 * coupled(w, x), True),
    "such rows beside terms that cancel": (lambda w, x: cancelling(w, x) + 0.1 * coupled(w, x), True),
    "an edge between rows": (lambda w, x: plain(w, x) + (x.mean() * w[0] > 0), True),
}


@pytest.mark.parametrize("name", FOUND)
def test_rounding_is_no_difference_and_hides_none(name):
    gradient, wrong = FOUND[name]
    runner = Least(gradient)
    comparison = Comparison(runner, even_ways(ROWS))
    found = [d.name for d in comparison.judged() if not d.error <= runner.tolerance]
    assert found == (["w"] if wrong else [])
    assert bool(comparison.failing(runner.tolerance)) == wrong


@pytest.mark.parametrize("count", range(6, 17))
def test_what_is_cut_in_two_has_all_neighbours_apart_in_one_of_two_ways_and_unequal_ends_in_both(count):
    apart = set()
    for rows, sizes in interleaved_ways([[n] for n in range(count)])[2:]:
        few, many = sorted((rows[: sizes[0]], rows[sizes[0] :]), key=len)
        assert sorted(rows) == list(range(count))
        assert 2 <= len(few) < len(many)
        apart |= {n for n in range(count - 1) if (n in few) != (n + 1 in few)}
        assert np.mean(few) < np.mean(many) - 0.5 or np.mean(few) > np.mean(many) + 0.5
    assert apart == set(range(count - 1))


WRONG = {
    "rows": len,
    "one": lambda marks: 1,
    "one if any counts": np.any,
    "rows if any counts": lambda marks: len(marks) * np.any(marks),
    "their square": lambda marks: marks.sum() ** 2,
    "their root": lambda marks: marks.sum() ** 0.5,
    "one more": lambda marks: marks.sum() + 1,
}


@pytest.mark.parametrize("sizes", [(2, 2, 4), (3, 3, 2), (5, 4, 7)])
@pytest.mark.parametrize("eighths", [3, 4, 5])
def test_parts_of_rows_tell_wrong_weights_from_how_many_count(sizes, eighths):
    marks = np.arange(sum(sizes)) < sum(sizes) * eighths // 8
    parts = np.split(marks[telling_order(sizes, [marks.tolist()])], np.cumsum(sizes)[:-1])
    counts = np.array([part.sum() for part in parts])
    for name, weigh in WRONG.items():
        weights = np.array([weigh(part) for part in parts])
        assert not np.allclose(weights * counts.sum(), counts * weights.sum()), name


@pytest.mark.parametrize("rows", range(3, 17))
def test_a_check_has_parts_of_several_rows_and_an_uneven_or_a_single_one(rows):
    sizes = [sizes for _, sizes in even_ways(rows)]
    assert all(sum(some) == rows for some in sizes)
    assert max(map(max, sizes)) > 1
    assert any(len({*some}) > 1 or max(some) == 1 for some in sizes)
