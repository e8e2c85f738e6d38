"""Whether a loss is the weighted mean, or the sum, of what its micro-batches give: judged by what it computes.

The loss is traced for two numbers of rows (those of a micro-batch and of the whole batch), and nothing is evaluated. An
axis whose length differs between both traces has the rows. Walking both traces side by side, each array is described by
a `Value`:

- `place`: the axis of its rows, or None.
- `terms`: what it is the sum of. A term is each row's `own` number (a function of that row and of what all rows share,
  such as parameters), or the same for any rows. Without an axis of rows, an own term is a *sum over the rows*.
- Each term has a `factor`: powers of symbols. A symbol is a number that takes all rows to know: their COUNT, a "sum"
  over them, a "position", what is "random" for them, or any other function of several rows ("mixed").

So `((x @ p) ** 2 * mask).sum() / mask.sum()` comes to one term, own / S, with the symbol S for the sum of the mask. A
mean over rows is own / COUNT; and a loss of terms own / W, with W the sum that `weight` returns, and of terms that are
the same for any rows is the weighted mean of its micro-batches. Everything else is wrong, and its symbols say why.

Sums join terms, products multiply their factors, powers raise them; a function of anything else than plain rows is a
new symbol, "mixed". So is what an operation across the rows gives (sorting, sums over a part, pairs of rows), and what
one gives that is "unknown". Tags of the array say what may still take the mixing back. What can't cancel out any more
is refused; where it may (the diagonal of pairs, rows in another order, a shift by the largest), or where an operation
is unknown, the judgement says that it can't tell.

Most primitives need no rule: what has no axis of rows is any function, and what has one is followed where `vmap` over
the rows of the operation on one row is the operation itself, as it is for all that work entry by entry. To add another
one, ask what it does to each row, and add a line to the table at the end of `rules`:

- Across some axes, and entry by entry on the others: `_across(axes)`, or `_across(axes, linear=True)` for sums, and for
  entries that change places. `"cumsum": _across(_named, linear=True)` works across the axis in its parameter, so rows
  in that axis are mixed, and rows in another one are not.
- Holding a jaxpr: a rule in `HOLD_JAXPRS` that gives it to `walk.run`.
- Anything else: a rule `(equation, inputs) -> output`; `_split` is a short one. `equation.made` describes an output.
- A test in tests/jax/loss: a loss with it that passes in silence, and one across the rows that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from gradaccum.jax.loss.rules import RULES
from gradaccum.jax.loss.walk import (
    COUNT,
    ONE,
    ROWS,
    CannotTell,
    Factor,
    Place,
    Source,
    Symbol,
    Tag,
    Term,
    Value,
    Walk,
    as_factor,
    exponent,
    is_integral,
    is_number,
    line,
    opened,
    power,
)

_ROWS = 6
"""The smaller number of rows that a loss is traced for where no sizes are known; the other one is twice that."""


class LossSpec(NamedTuple):
    """A loss, and the roles that its inputs play."""

    function: Callable[[list[Any]], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
    """From the inputs to losses by name, their weights by name (none: rows), and a dict with the new `state` by name,
    the `statistics` that move, and the `aux` by how they are put together, and their paths."""
    kinds: Callable[[int], list[Any]]
    """The inputs' types for so many rows."""
    axes: list[int | None]
    """Of each input, the axis of its rows, or None."""
    tags: list[frozenset[str]]
    """Of each input, whether it is DIFFERENTIATED or FRESH, as of `Tag`; and its name, if it is one of the state."""
    reduction: str
    unit: int = 1
    """What a number of rows must be a multiple of."""
    sizes: tuple[int, ...] = ()
    """The rows of the batch and of its micro-batches."""


class Verdict(NamedTuple):
    """What was found: "exact", "unknown", or why not, in the words of `check_equivalence`; `certain`: surely."""

    kind: str
    message: str = ""
    certain: bool = False


EXACT = Verdict("exact")


def judge(spec: LossSpec) -> Verdict:
    """Whether the loss of a batch follows from those of its micro-batches."""
    try:
        rows, (one, names), (other, _) = _traces(spec)
    except Exception as error:  # it is written for other numbers of rows
        return Verdict("unknown", f"It can't be traced for other rows: {str(error).strip().partition(chr(10))[0]}")
    walk = Walk(rows, RULES)
    inputs = [
        Value(
            frozenset([Term(axis is not None)]), None if axis is None else Place(axis), walk.number("input", n),
            tags=tags, integral=is_integral(kind.dtype), positive=str(kind.dtype) == "bool",
        )
        for n, (kind, axis, tags) in enumerate(zip(one.in_avals, spec.axes, spec.tags))
    ]  # fmt: skip
    try:
        found = walk.run(one, other, inputs)
    except CannotTell:
        return Verdict("unknown", f"It does other things for {rows[0]} rows than for {rows[1]}.")
    except Exception as error:  # what looks at a loss must not keep it from training
        return Verdict("unknown", f"It can't be followed: {type(error).__name__}: {error}")
    losses, weights, more = jax.tree.unflatten(names, found)
    statistics = frozenset(source.number for value in more["statistics"] for source in value.sums)
    verdicts = []
    for name, loss in losses.items():
        verdict = _of_loss(loss, weights.get(name), spec.reduction, statistics)
        about = f"As to the loss {name!r}: " if name else ""
        verdicts.append(verdict._replace(message=f"{about}{verdict.message}"))
    wrong = [verdict for verdict in verdicts if verdict.kind not in ("exact", "unknown")]
    if wrong:
        return max(wrong, key=lambda verdict: verdict.certain)
    verdicts.append(_of_state(spec, inputs, [*losses.values(), *weights.values()], more["state"]))
    verdicts.append(_of_sizes(spec, rows, one, other))
    weight = weights.get("")
    verdicts += [_of_aux(how, path, value, weight, spec.reduction) for (how, path), value in more["aux"].items()]
    return next((verdict for verdict in verdicts if verdict.kind != "exact"), EXACT)


def _traces(spec: LossSpec) -> tuple[tuple[int, int], Any, Any]:
    """Two numbers of rows, and the loss for each: those of a micro-batch and of the batch, if these tell rows apart."""
    sizes, few = sorted({size for size in spec.sizes if size > 1}), _ROWS * spec.unit
    failed: Exception | None = None
    for rows in ([(sizes[-2], sizes[-1])] if len(sizes) > 1 else []) + [(few, 2 * few)]:
        try:
            return rows, _traced(spec, rows[0]), _traced(spec, rows[1])
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _traced(spec: LossSpec, rows: int) -> tuple[Any, Any]:
    closed, shape = jax.make_jaxpr(spec.function, return_shape=True)(spec.kinds(rows))
    return closed, jax.tree.structure(shape)


def _of_state(spec: LossSpec, inputs: list[Value], losses: list[Value], state: dict[str, Value]) -> Verdict:
    """Whether a loss is computed from state that moves."""
    still = {tag for value in inputs for tag in value.tags if tag in state and state[tag].number == value.number}
    read = sorted(frozenset().union(*(loss.tags for loss in losses)) & state.keys() - still)
    if not read:
        return EXACT
    return Verdict(
        "state",
        f"The loss is computed from state that each micro-batch moves: {read[0]}. So later micro-batches are computed "
        "with another one than the large batch. Move it once per update, outside of loss_fn.",
    )


def _of_sizes(spec: LossSpec, rows: tuple[int, int], one: Any, other: Any) -> Verdict:
    """Whether the loss does for the rows that it is really given what it does for those that it was followed for."""
    for size in sorted({*spec.sizes} - {*rows}):
        try:
            closed, _ = _traced(spec, size)
        except Exception:  # the same error comes when it is traced in earnest
            return EXACT
        if not _does_alike(one, other, closed, (*rows, size)):
            return Verdict("unknown", f"It does other things for {rows[0]} rows than for {size}.")
    return EXACT


_LAYOUT = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"}
"""What a single row needs none of."""


def _does_alike(first: Any, second: Any, third: Any, rows: tuple[int, int, int]) -> bool:
    """Whether a loss does the same for the third number of rows: the same operations, and the same numbers, or they go
    with the power of the rows that they go with from the first to the second."""
    traces = [list(_done(closed)) for closed in (first, second, third)]

    def goes_on(one: Any, two: Any, three: Any) -> bool:
        if isinstance(one, str) or isinstance(three, str):
            return bool(one == three)
        degree = exponent(one, two, rows[1] / rows[0])
        expected = three if degree is None else one * (rows[2] / rows[0]) ** float(degree)
        return bool(abs(three - expected) <= 1e-5 * abs(expected))

    return len({len(trace) for trace in traces}) == 1 and all(map(goes_on, *traces))


def _done(closed: Any) -> Iterator[Any]:
    """The names of all operations of a jaxpr, and the numbers that are written down in it."""
    jaxpr, consts = opened(closed)
    yield from _finite_numbers(consts)
    for equation in jaxpr.eqns:
        if equation.primitive.name in _LAYOUT:
            continue
        yield equation.primitive.name
        yield from _finite_numbers(v.val for v in equation.invars if isinstance(v, Literal))
        for name, value in sorted(equation.params.items()):
            if name in ("y", "k", "reverse", "exponent"):
                yield float(value) if isinstance(value, int | float) else str(value)
            for each in value if isinstance(value, tuple | list) else [value]:
                if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                    yield from _done(each)


def _finite_numbers(values: Any) -> Iterator[float]:
    for value in values:
        if not isinstance(value, jax.core.Tracer) and np.size(value) == 1 and is_number(value):
            number = float(np.asarray(value).item())
            if np.isfinite(number):
                yield number


_AUX = {
    "mean": "aux='mean' is the mean of micro-batches, and aux{} is no mean over {}: {}",
    "sum": "aux='sum' is the sum of micro-batches, and aux{} is no sum over rows: {}",
    "concat": "aux='concat' joins rows, and those of aux{} look at other rows of their micro-batch: {}",
}


def _of_aux(how: str, path: str, value: Value, weight: Value | None, reduction: str) -> Verdict:
    """Whether a leaf of the aux is what the option `aux` says of it."""
    if (weight is not None and weight.is_lost) or value.unknown is not None:
        return EXACT
    if how == "concat":
        symbols = value.symbols
        if not symbols and (value.place == Place(0) or not value.own):
            return EXACT
        why = f"{_at(symbols[0].source if symbols else None)}."
    else:
        found = _of_loss(value, weight if how == "mean" else None, how if reduction == "mean" else "sum", frozenset())
        if found.kind in ("exact", "unknown"):
            return EXACT
        why = found.message.partition(" If this is the loss")[0]
    over = ["what the loss is a mean over" if weight is not None else "rows"] if how == "mean" else []
    return Verdict("aux", _AUX[how].format(path, *over, why))


def _of_loss(loss: Value, weight: Value | None, reduction: str, statistics: frozenset[Any]) -> Verdict:
    if (unknown := loss.unknown) is not None:
        return Verdict("unknown", f"{_at(unknown)} is not followed{unknown.why and f' ({unknown.why})'}.")
    if loss.place is not None:
        return Verdict("unknown", "Its rows are not followed to the end.")
    if weight is not None and weight.unknown is not None:
        return Verdict("unknown", f"What `weight` computes is not followed: {_at(weight.unknown)}.")
    return _of_terms(loss, weight, reduction, statistics)


def _of_terms(loss: Value, weight: Value | None, reduction: str, statistics: frozenset[Any]) -> Verdict:
    divisor = ONE if reduction == "sum" else ROWS if weight is None else as_factor(weight, Source("weight"))
    shared = ONE if reduction == "mean" else ROWS  # of a mean it comes out as it is, of a sum what goes with the rows
    right = Term(True, power(divisor, -1)), Term(False, shared)
    wrong = [term for term in loss.terms if term not in right]
    if wrong:
        verdict = _why(wrong, loss, None if weight is None else divisor, reduction, statistics)
        same_for_all = weight is not None and divisor == ONE  # right where micro-batches have as many rows
        unsure = loss.tags & Tag.MAY_CANCEL or same_for_all or verdict.kind == "unknown"
        return verdict._replace(certain=verdict.kind == "randomness" or not unsure)
    if weight is not None and not weight.terms <= {Term(True), Term(False), Term(False, ROWS)}:
        why = "what it returns for the batch is not the sum of what it returns for micro-batches"
        return Verdict("unknown", f"`weight` must be a sum over the rows: {why}.")
    doubt = min(filter(lambda tag: tag.startswith("It "), loss.tags), default="")
    return Verdict("unknown", doubt) if doubt else EXACT


def _why(wrong: list[Term], loss: Value, divisor: Factor | None, reduction: str, statistics: frozenset[Any]) -> Verdict:
    """Why it is not exact, by the symbols of the terms that are wrong; `divisor` is what `weight` returns."""
    symbols = [symbol for term in wrong for symbol, _ in term.factor if symbol != COUNT]
    if (mixing := _mixing(wrong)) is not None:
        return _random(mixing) if mixing.kind == "random" else _mixes(mixing.source, statistics)
    divisors = {power(term.factor, -1) for term in loss.terms if term.own}
    if max(map(len, divisors), default=0) > 1 or (len(divisors) > 1 and ONE in divisors):
        return _mixes(symbols[0].source if symbols else Source("sum"), statistics)
    named = " and ".join(_divisor(each) for each in sorted(divisors, key=str))
    if len(divisors) > 1:
        each = "{name: (loss, weight)}, each with what it is a mean over"
        return Verdict("weight", f"It is a sum of means over {named}. Return them as {each}.")
    if not symbols:
        return _by_count(wrong, loss, reduction)
    if divisor is not None and COUNT not in dict(divisor):
        return Verdict("unknown", f"It divides by {named}. `weight` may be that or not.")
    weighed, asked = ("rows", "") if reduction == "mean" else ("nothing, as sums", 'reduction="mean" and ')
    return Verdict(
        "weight",
        f"It divides by {named}, a sum over the batch, and its micro-batches are weighed by {weighed}. Pass {asked}"
        "weight=, a function of the batch that returns this sum.",
    )


def _mixing(wrong: list[Term]) -> Symbol | None:
    """The symbol that no weight can make right, if one is among them: of those of a kind, that with the first cause."""
    powers = [(symbol, degree) for term in wrong for symbol, degree in term.factor]
    kinds = [[s for s, _ in powers if s.kind == kind] for kind in ("random", "mixed", "position")]
    kinds.append([s for s, degree in powers if s.kind == "sum" and not (s.free and s.scalar and degree == -1)])
    found = next(filter(None, kinds), [])
    return min(found, key=lambda symbol: symbol.source.number or 0, default=None)


def _by_count(wrong: list[Term], loss: Value, reduction: str) -> Verdict:
    """Where nothing but the number of rows is a factor."""
    factors = {term.factor for term in wrong if term.own}
    as_mean = "counted once per micro-batch. Return a mean over rows plus the term."
    if not factors:
        how = f"that is multiplied with the number of rows, or, beside a sum over them, {as_mean}"
        return Verdict("regulariser", f"It has a term without rows (a regulariser) {how}")
    if factors == {power(ROWS, -1)} and reduction == "sum":
        return Verdict("weight", 'It is a mean over rows, taken for a sum. Pass reduction="mean".')
    if factors == {power(ROWS, -1)}:
        return Verdict("weight", "It is a mean over rows, but `weight` says otherwise. Leave `weight` out.")
    if factors != {ONE}:
        how = "a power of the number of rows that is neither a sum's nor a mean's"
        return Verdict("reduction", f"It goes with {how}. Return the mean over rows.")
    if all(term.own for term in loss.terms):
        return Verdict("reduction", 'It is a sum over its rows, and was taken for a mean. Pass reduction="sum".')
    how = f"a sum over rows and a term without rows (a regulariser), which would be {as_mean}"
    return Verdict("regulariser", f"It is {how}")


def _mixes(source: Source, statistics: frozenset[Any]) -> Verdict:
    if source.primitive.startswith(("custom_v", "custom_j")):
        return Verdict(
            "loss",
            f"The derivative of its own that {_at(source)} has does not multiply each row's gradient by something of "
            "that row: it clips gradients, say, normalises them, or takes a mean over rows. What it makes of the large "
            "batch's gradient does not follow from what it makes of those of micro-batches.",
        )
    if source.number in statistics:
        return Verdict(
            "batch_norm",
            "A row's output depends on the other rows of its micro-batch by statistics that are returned with the "
            f"loss ({_at(source)}), as BatchNorm's in training mode: each micro-batch is normalised by itself. Freeze "
            "it (use its running averages), or take GroupNorm or LayerNorm.",
        )
    return Verdict(
        "loss",
        f"It looks across the rows of the batch: {_at(source)}. If this is the loss (contrastive, Dice, a batch mean "
        "or variance), use gradaccum.jax.chunked around the model, which gives the large batch's gradient for any "
        "loss. If it is BatchNorm in training mode, freeze it, take GroupNorm or LayerNorm, or name its statistics "
        "with state_argnum and have each micro-batch normalised by itself.",
    )


def _random(symbol: Symbol) -> Verdict:
    return Verdict(
        "randomness",
        f"It draws random numbers for its rows ({_at(symbol.source)}) from a key that all micro-batches share, so that "
        "each would draw the same ones. Name the argument that is the key, rng_argnum=..., and each micro-batch gets "
        "one that is split off; or give each row a key of its own, as a part of the batch.",
    )


def _divisor(factor: Factor) -> str:
    symbols = [symbol for symbol, _ in factor]
    if symbols == [COUNT] or not symbols:
        return "rows" if symbols else "nothing"
    where = line(symbols[0].source.info)
    return f"what is summed at {where}" if where else "a sum"


def _at(source: Source | None) -> str:
    where = line(source.info) if source is not None else ""
    return "somewhere" if source is None else f"`{source.primitive}` at {where}" if where else f"`{source.primitive}`"
