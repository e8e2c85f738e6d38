"""Random losses: what passes in silence is the large batch's, and what is right passes in silence.

What is refused may be the large batch's by its numbers (a loss that is constant): nothing is evaluated.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import gradaccum.jax
from gradaccum.core.sizes import even_sizes
from tests.fuzzing import failed, for_a_while, listening
from tests.jax.fuzz.pieces import ENDINGS, MIXING, ROW_WISE, data, parameters
from tests.reference import ragged

ROUNDING = 1e-8
PARAMETERS = parameters()


class Program(NamedTuple):
    """A loss."""

    pieces: tuple[str, ...]
    ending: str
    rows: int
    most: int

    def loss(self, p: Any, b: Any) -> Any:
        h = b["x"]
        for name in self.pieces:
            h = (ROW_WISE | MIXING)[name](p, b, h)
        return ENDINGS[self.ending][0](p, b, h)

    @property
    def is_right(self) -> bool:
        return ENDINGS[self.ending][2] and not set(self.pieces) & set(MIXING)


@st.composite
def programs(draw: Any) -> Program:
    pieces = draw(st.lists(st.sampled_from(list(ROW_WISE)), max_size=4))
    if draw(st.integers(0, 2)):
        pieces.insert(draw(st.integers(0, len(pieces))), draw(st.sampled_from(list(MIXING))))
    right = [name for name, (*_, right) in ENDINGS.items() if right]
    ending = draw(st.sampled_from(right if draw(st.integers(0, 2)) else list(ENDINGS)))
    return Program(tuple(pieces), ending, *draw(st.sampled_from([(8, 4), (7, 4)])))


def said(program: Program) -> tuple[str, str]:
    """("", ""), or "line" or "refused", and what."""
    with listening() as lines:
        try:
            options = ENDINGS[program.ending][1]
            grad_fn = gradaccum.jax.value_and_grad(program.loss, micro_batch_size=program.most, **options)
            jax.eval_shape(grad_fn, PARAMETERS, data(program.rows, 1))
        except ValueError as error:
            return "refused", str(error)
    return ("line", lines[0].getMessage()) if lines else ("", "")


def _graded(program: Program, batch: Any) -> dict[str, tuple[Any, float]]:
    """Of each loss by name, itself and its gradient in one vector, and what it is a mean over."""
    options = ENDINGS[program.ending][1]

    def named(p: Any) -> Any:
        found = program.loss(p, batch)
        rows = options["weight"](batch) if "weight" in options else len(batch["y"])
        return found if isinstance(found, dict) else {"": (found, 1.0 if "reduction" in options else rows)}

    graded = {}
    for name, (_, weight) in named(PARAMETERS).items():
        found = jax.value_and_grad(lambda p: named(p)[name][0])(PARAMETERS)  # noqa: B023  # used at once
        graded[name] = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)]), float(weight)
    return graded


def is_exact(program: Program) -> bool | None:
    """Whether micro-batches, one after the other in a loop by hand, are the large batch; None where it isn't finite."""
    known, sizes = False, even_sizes(program.rows, program.most)
    for number in (0, 1, 2):
        batch = data(program.rows, number)
        parts = [
            _graded(program, jax.tree.map(lambda leaf: leaf[part], batch))  # noqa: B023  # used at once
            for part in ragged(program.rows, sizes)
        ]
        for name, (expected, _) in _graded(program, batch).items():
            kept = [part[name] for part in parts if part[name][1]]
            vectors = [expected, *(vector for vector, _ in kept)]
            if not kept or not np.isfinite(vectors).all():
                continue
            known = True
            total = 1.0 if "reduction" in ENDINGS[program.ending][1] else sum(weight for _, weight in kept)
            found = sum(vector * weight for vector, weight in kept) / total
            if np.abs(found - expected).max() > ROUNDING * np.abs(vectors).max():
                return False
    return True if known else None


def check(program: Program, counts: Counter[str]) -> None:
    how, what = said(program)
    exact = is_exact(program)
    counts[f"{how or 'silent'}, {'exact' if exact else 'not exact'}"] += 1
    if exact is None:
        return
    assert exact or how, f"{program} passes in silence, and is not the large batch's"
    assert not (program.is_right and how), f"{program} is right, and: {what}"


QUIET = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink]
)


def run(first: int, count: int, counts: Counter[str]) -> None:
    @seed(first)
    @settings(QUIET, max_examples=count)
    @given(programs())
    def losses(program: Program) -> None:
        check(program, counts)

    losses()


@pytest.mark.slow
def test_some_random_losses_are_exact_or_refused() -> None:
    run(0, 20, Counter())


ALONE = [
    *((Program(("linear", name), "a mean", 8, 4), name in ROW_WISE) for name in ROW_WISE | MIXING),
    *((Program(("linear",), name, 7, 4), right) for name, (*_, right) in ENDINGS.items()),
]


def test_each_piece_alone_is_silent_or_named_when_it_is_traced() -> None:
    assert not [(program, how) for program, right in ALONE if bool(how := said(program)[0]) == right]


@pytest.mark.slow
def test_each_piece_alone_is_exact_or_refused() -> None:
    assert not [wrong for program, _ in ALONE if (wrong := failed(check, program, Counter()))]


@pytest.mark.fuzz
def test_random_losses_are_exact_or_refused() -> None:
    counts = Counter[str]()
    for_a_while(lambda number: failed(run, number, 10, counts), counts)


def test_the_fuzzer_sees_what_is_wrong() -> None:
    assert is_exact(Program(("tanh",), "a mean", 8, 4))
    assert is_exact(Program((), "a root", 8, 4)) is False
