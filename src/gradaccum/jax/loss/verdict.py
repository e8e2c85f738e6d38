"""Whether a loss is the weighted mean, or the sum, of its micro-batches, by what it computes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax

from gradaccum.jax.loss.algebra import as_factor
from gradaccum.jax.loss.certain import differs, is_alike
from gradaccum.jax.loss.entries import ENTRY_RULES
from gradaccum.jax.loss.nested import NESTED_RULES
from gradaccum.jax.loss.structure import STRUCTURE_RULES
from gradaccum.jax.loss.values import COUNT, ONE, CannotTell, Factor, Known, Place, Source, Symbol, Term, power
from gradaccum.jax.loss.walk import Lost, Value, Walk, is_whole, line

__all__ = ["Judged", "Verdict", "judge"]

_RULES = {**ENTRY_RULES, **STRUCTURE_RULES, **NESTED_RULES}
_ROWS = 6
"""The smaller number of rows that a loss is traced for; the other one is twice that."""


class Judged(NamedTuple):
    """A loss, and the roles that its inputs play.

    Attributes:
        function: Takes the inputs; gives losses by name, their weights by name (none: rows), and what stands beside
            the loss: `statistics` in a list, the new `state` in the order of its inputs, and the leaves of an `aux` by
            how they are put together, and their paths.
        kinds: The inputs' types for so many rows.
        axes: Of each input, the axis of its rows, or None.
        fresh: Whether it is another one for each micro-batch, whatever its rows are: its key, its state.
        differentiated: Whether it is differentiated.
        reduction: "mean" or "sum".
        state: Of each input, its name if it is one of the state.
        unit: What a number of rows must be a multiple of.
        sizes: The rows of the batch and of its micro-batches.
    """

    function: Callable[[list[Any]], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
    kinds: Callable[[int], list[Any]]
    axes: list[int | None]
    fresh: list[bool]
    differentiated: list[bool]
    reduction: str
    state: list[str]
    unit: int = 1
    sizes: tuple[int, ...] = ()


class Verdict(NamedTuple):
    """What was found.

    Attributes:
        kind: "exact", "unknown", or why it is not exact, in the words of `check_equivalence`.
        message: Why, with the line, and what to do.
        certain: Whether it differs on numbers that were drawn, too.
    """

    kind: str
    message: str = ""
    certain: bool = False


EXACT = Verdict("exact")


def judge(judged: Judged) -> Verdict:
    """Whether the loss of a batch follows from those of its micro-batches."""
    rows = _ROWS * judged.unit
    try:
        first, second = (_traced(judged, count) for count in (rows, 2 * rows))
    except Exception as error:  # it is written for other numbers of rows
        reason = str(error).strip().partition("\n")[0]
        return Verdict("unknown", f"It can't be traced for {rows} and {2 * rows} rows, which are tried: {reason}")
    walk = Walk((rows, 2 * rows), _RULES)
    try:
        (one, names), (other, _) = first, second
        inputs = [
            _input(walk, kind.dtype, *roles)
            for kind, roles in zip(one.in_avals, zip(judged.axes, judged.fresh, judged.differentiated))
        ]
        inputs = [
            value.but(state=frozenset([n])) if name else value
            for n, (value, name) in enumerate(zip(inputs, judged.state))
        ]
        found = walk.run(one.jaxpr, other.jaxpr, (one.consts, other.consts), inputs)
    except CannotTell:
        return Verdict("unknown", f"It does other things for {rows} rows than for {2 * rows}.")
    except Exception as error:  # what looks at a loss must not keep it from training
        return Verdict("unknown", f"It can't be followed: {type(error).__name__}: {error}")
    losses, weights, beside = jax.tree.unflatten(names, found)
    statistics = frozenset().union(
        *({number for number, _ in value.sums} for value in beside["statistics"] if isinstance(value, Known))
    )
    verdicts = [
        _about(name, _verdict(loss, weights.get(name), judged.reduction, statistics)) for name, loss in losses.items()
    ]
    wrong = [verdict for verdict in verdicts if verdict.kind not in ("exact", "unknown")]
    if not wrong:
        verdicts += _of_state(judged, inputs, [*losses.values(), *weights.values()], beside["state"])
        verdicts += _of_sizes(judged, rows, (one, other))
        verdicts += [
            _of_aux(how, path, value, weights.get(""), judged.reduction) for (how, path), value in beside["aux"].items()
        ]
        return next((verdict for verdict in verdicts if verdict.kind != "exact"), EXACT)
    surely = wrong[0].kind == "randomness" or differs(
        one, other, names, judged.axes, judged.differentiated, judged.reduction
    )
    return wrong[0]._replace(certain=surely)


def _about(name: str, verdict: Verdict) -> Verdict:
    return verdict._replace(message=f"As to the loss {name!r}: {verdict.message}") if name else verdict


def _traced(judged: Judged, rows: int) -> tuple[Any, Any]:
    """The loss as a jaxpr, and the structure of what it gives."""
    closed, shape = jax.make_jaxpr(judged.function, return_shape=True)(judged.kinds(rows))
    return closed, jax.tree.structure(shape)


def _input(walk: Walk, dtype: Any, axis: int | None, fresh: bool, differentiated: bool) -> Known:
    number = walk.number("input", len(walk._numbers))
    place = None if axis is None else Place(axis)
    terms = frozenset([Term(axis is not None)])
    return Known(terms, place, number, fresh=fresh, free=not differentiated, whole=is_whole(dtype))


def _of_state(judged: Judged, inputs: list[Known], losses: list[Value], state: list[Value]) -> list[Verdict]:
    """Whether a loss is computed from state that moves."""
    old = [n for n, name in enumerate(judged.state) if name]
    moving = {n for n, new in zip(old, state) if isinstance(new, Lost) or new.number != inputs[n].number}
    read = moving & frozenset().union(*(loss.state for loss in losses if isinstance(loss, Known)))
    if not read:
        return []
    return [
        Verdict(
            "state",
            f"The loss is computed from state that each micro-batch moves: {judged.state[min(read)]}. So later "
            "micro-batches are computed with another one than the large batch. Move it once per update, outside of "
            "loss_fn.",
        )
    ]


def _of_sizes(judged: Judged, rows: int, known: tuple[Any, Any]) -> list[Verdict]:
    """Whether the loss does for the rows that it is really given what it does for those that it was followed for."""
    for size in sorted({*judged.sizes} - {rows, 2 * rows}):
        try:
            closed, _ = _traced(judged, size)
        except Exception:  # the same error comes when it is traced in earnest
            return []
        if not is_alike(known[0], known[1], closed, (rows, size)):
            return [Verdict("unknown", f"It does other things for {rows} rows than for {size}.")]
    return []


_ASIDE = {
    "mean": "aux='mean' is the mean of micro-batches, and aux{} is no mean over {}: {}",
    "sum": "aux='sum' is the sum of micro-batches, and aux{} is no sum over rows: {}",
    "concat": "aux='concat' joins rows, and those of aux{} look at other rows of their micro-batch: {}",
}


def _of_aux(how: str, path: str, value: Value, weight: Value | None, reduction: str) -> Verdict:
    """Whether a leaf beside the loss is what it is said to be."""
    if isinstance(weight, Lost) or (isinstance(value, Lost) and not value.mixed):
        return EXACT
    if isinstance(value, Lost):
        found = Verdict("aux", f"{_at(value.source)}.")
    elif how == "concat":
        symbols = [symbol for term in value.terms for symbol, _ in term.factor]
        rows = value.place == Place(0) or not any(term.own for term in value.terms)
        if rows and not symbols:
            return EXACT
        found = Verdict("aux", f"{_at(symbols[0].source if symbols else None)}.")
    else:
        found = _verdict(value, weight if how == "mean" else None, how if reduction == "mean" else "sum", frozenset())
        if found.kind in ("exact", "unknown"):
            return EXACT
    why = found.message.partition(" If this is the loss")[0]
    over = "what the loss is a mean over" if weight is not None else "rows"
    return Verdict("aux", f"{_ASIDE[how].format(path, *([over] if how == 'mean' else []), why)}")


def _verdict(loss: Value, weight: Value | None, reduction: str, statistics: frozenset[Any]) -> Verdict:
    if isinstance(loss, Lost):
        if not loss.mixed:
            return Verdict("unknown", f"{_at(loss.source)} is not followed{_because(loss.message)}.")
        return _mixes(loss.source, loss.origin, statistics)
    if loss.place is not None:
        return Verdict("unknown", "Its rows are not followed to the end.")
    if isinstance(weight, Lost):
        return Verdict("unknown", f"What `weight` computes is not followed: {_at(weight.source)}.")
    rows: Factor = frozenset([(COUNT, Fraction(1))])
    divisor = ONE if reduction == "sum" else rows if weight is None else as_factor(weight, Source("weight"))
    wrong = [
        term for term in loss.terms
        if not (term == Term(True, power(divisor, -1)) or (not term.own and _is_shared(term.factor, reduction)))
    ]  # fmt: skip
    if wrong:
        return _named(wrong, loss, weight, divisor, reduction, statistics)
    return Verdict("unknown", min(loss.doubts)) if loss.doubts else EXACT


def _is_shared(factor: Factor, reduction: str) -> bool:
    """Whether a term without rows comes out as it is: of a mean it does, of a sum what goes with the rows."""
    return factor == (ONE if reduction == "mean" else frozenset([(COUNT, Fraction(1))]))


def _named(
    wrong: list[Term], loss: Known, weight: Known | None, divisor: Factor, reduction: str, statistics: frozenset[Any]
) -> Verdict:
    symbols = [(symbol, degree) for term in wrong for symbol, degree in term.factor if symbol != COUNT]
    for kind in ("random", "mixed", "position"):
        for symbol, _ in symbols:
            if symbol.kind == kind:
                return _random(symbol) if kind == "random" else _mixes(symbol.source, symbol.origin, statistics)
    for symbol, degree in symbols:
        if symbol.kind == "sum" and not (symbol.free and symbol.scalar and degree == -1):
            return _mixes(symbol.source, symbol.origin, statistics)
    divisors = {power(term.factor, -1) for term in loss.terms if term.own}
    if len(divisors) > 1 or any(len(each) > 1 for each in divisors):
        named = [_divisor(each) for each in sorted(divisors, key=str)]
        if ONE in divisors or any(each != power(each, 1) or len(each) > 1 for each in divisors):
            return _mixes(symbols[0][0].source if symbols else Source("sum"), None, statistics)
        return Verdict(
            "weight",
            f"It is a sum of means over {' and '.join(named)}. Return them as {{name: (loss, weight)}}, each with "
            "what it "
            "is a mean over.",
        )
    sums = [symbol for symbol, _ in symbols if symbol.kind == "sum"]
    if sums:
        if weight is not None and reduction == "mean" and COUNT not in dict(divisor):
            return Verdict("unknown", f"It divides by {_divisor(next(iter(divisors)))}. `weight` may be that or not.")
        asked = "" if reduction == "mean" else 'reduction="mean" and '
        return Verdict(
            "weight",
            f"It divides by {_sum_of(sums[0])}, a sum over the batch, and its micro-batches are weighed by "
            f"{'rows' if reduction == 'mean' else 'nothing, as sums'}. Pass {asked}weight=, a function of the batch "
            "that "
            "returns this sum.",
        )
    return _by_count(wrong, loss, weight, reduction)


def _by_count(wrong: list[Term], loss: Known, weight: Known | None, reduction: str) -> Verdict:
    """Where nothing but the number of rows is a factor."""
    factors = {term.factor for term in wrong if term.own}
    shared = [term for term in loss.terms if not term.own]
    rows: Factor = frozenset([(COUNT, Fraction(1))])
    if any(not term.own for term in wrong) and not factors:
        return Verdict(
            "regulariser",
            "It has a term without rows (a regulariser) that is multiplied with the number of rows, or, beside a "
            "sum over "
            "them, counted once per micro-batch. Return a mean over rows plus the term.",
        )
    if factors == {power(rows, -1)}:
        if reduction == "sum":
            return Verdict("weight", 'It is a mean over rows, taken for a sum. Pass reduction="mean".')
        return Verdict("weight", "It is a mean over rows, but `weight` says otherwise. Leave `weight` out.")
    if factors == {ONE}:
        if shared:
            return Verdict(
                "regulariser",
                "It is a sum over rows and a term without rows (a regulariser), which would be counted once per "
                "micro-batch. Return a mean over rows plus the term.",
            )
        return Verdict("reduction", 'It is a sum over its rows, and was taken for a mean. Pass reduction="sum".')
    return Verdict(
        "reduction",
        "It goes with a power of the number of rows that is neither a sum's nor a mean's. Return the mean over rows.",
    )


def _mixes(source: Source, origin: Any, statistics: frozenset[Any]) -> Verdict:
    if source.primitive.startswith("custom_"):
        return Verdict(
            "loss",
            f"The derivative of its own that {_at(source)} has does not multiply each row's gradient by something of "
            "that row: it clips gradients, say, normalises them, or takes a mean over rows. What it makes of the large "
            "batch's gradient does not follow from what it makes of those of micro-batches.",
        )
    if origin is not None and origin in statistics:
        return Verdict(
            "batch_norm",
            "A row's output depends on the other rows of its micro-batch by statistics that are returned beside "
            "the loss "
            f"({_at(source)}), as BatchNorm's in training mode: each micro-batch is normalised by itself. Freeze it "
            "(use "
            "its running averages), or take GroupNorm or LayerNorm.",
        )
    return Verdict(
        "loss",
        f"It looks across the rows of the batch: {_at(source)}. If this is the loss (contrastive, Dice, a batch "
        "mean or "
        "variance), use gradaccum.jax.chunked around the model, which gives the large batch's gradient for any "
        "loss. If "
        "it is BatchNorm in training mode, freeze it, take GroupNorm or LayerNorm, or name its statistics with "
        "state_argnum and have each micro-batch normalised by itself.",
    )


def _random(symbol: Symbol) -> Verdict:
    return Verdict(
        "randomness",
        f"It draws random numbers for its rows ({_at(symbol.source)}) from a key that all micro-batches share, so "
        "that each "
        "would draw the same ones. Name the argument that is the key, rng_argnum=..., and each micro-batch gets one "
        "that "
        "is split off; or give each row a key of its own, as a part of the batch.",
    )


def _divisor(factor: Factor) -> str:
    symbols = [symbol for symbol, _ in factor]
    return "rows" if symbols == [COUNT] else _sum_of(symbols[0]) if symbols else "nothing"


def _sum_of(symbol: Symbol) -> str:
    where = line(symbol.source.info) if symbol.source else ""
    return f"what is summed at {where}" if where else "a sum"


def _at(source: Source | None) -> str:
    if source is None:
        return "somewhere"
    where = line(source.info)
    return f"`{source.primitive}` at {where}" if where else f"`{source.primitive}`"


def _because(message: str) -> str:
    return f" ({message})" if message else ""
