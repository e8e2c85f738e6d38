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
from tests.fuzzing import failed, for_a_while, listening
from tests.jax.comparisons import at_once, in_micro_batches
from tests.jax.fuzz.pieces import ENDINGS, MIXING, ROW_WISE, data, parameters

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


def is_exact(program: Program) -> bool | None:
    """Whether micro-batches make the large batch's losses and gradients; None where that has no finite ones."""

    def total(p: Any, b: Any) -> Any:
        found = program.loss(p, b)
        losses = {name: loss for name, (loss, _) in found.items()} if isinstance(found, dict) else found
        return sum(jax.tree.leaves(losses)), losses

    options = ENDINGS[program.ending][1]
    split, whole = in_micro_batches(program.loss, program.most, verify=False, **options), at_once(total, has_aux=True)
    known = False
    for number in (0, 1, 2, 3):
        batch = data(program.rows, number)
        (_, losses), gradients = whole(PARAMETERS, batch)
        each = split(PARAMETERS, batch), (losses, gradients)
        found, expected = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(one)]) for one in each)
        if np.isfinite(expected).all():
            known = True
            if not np.abs(found - expected).max() <= ROUNDING * np.abs(expected).max():
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
    (Program(("merged", "leaky", "two axes"), "tokens over rows", 8, 4), True),
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
