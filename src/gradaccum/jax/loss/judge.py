"""Whether a loss is the weighted mean, or the sum, of what its micro-batches give: judged by what it computes.

The loss is traced for the numbers of rows that it will be given, and nothing is evaluated. An axis whose length differs
between the traces has the rows. `walk` follows all traces side by side, equation by equation, and describes each array
by a `Value` (`algebra`):

- `place`: the axis of its rows, or None.
- `terms`: what it is the sum of. A term is each row's `own` number (a function of that row, and of what all rows share,
  such as parameters), or the same for any rows. Without an axis of rows, an own term is a *sum over the rows*.
- Each term has a `scale`, for what takes all rows to know: the number of rows, or sums over them. It is known in a few
  imagined batches, in which each sum is another number, and once 0. () is 1 in all of them.
- `flaw`: that neither is true, and why. What follows from a flaw has it.

So `((x @ p) ** 2 * mask).sum() / mask.sum()` comes to one term, own times what 1 / S is for the sum S of the mask. A
mean over rows is own / rows. A loss of terms own / W, with W the sum that `weight` returns, and of terms that are the
same for any rows, is the weighted mean of its micro-batches: own terms times W are the same in all imagined batches,
but for those with W = 0, which weigh nothing. Where a term is NaN in another one, as S / S is where S = 0, one such
micro-batch makes the whole gradient NaN, which is logged. Everything else is wrong, and its terms or its flaw say why.

The algebra: sums join terms, products multiply scales, and any other function is one of plain rows (all of its terms
are own or shared, of scale 1), or else a flaw. A sum over the batch that meets rows becomes a scale. What is computed
from such sums alone (`max(sum, 1)`, `sum > 0`) is computed in the imagined batches, and a choice by it counts in those
in which it is made. A custom derivative is judged by the gradient that it makes, which is traced with the loss.
A flaw is certain, and the loss is refused, unless it is `soft`: picking the diagonal of pairs of rows, or adding up
rows in another order, may take it back (`PAIRS`, `MOVED`, `FREE`). Then the judgement says that it can't tell.

To add a primitive, ask two things of it, and add it to the table at the end of `rules`: which terms its output has, and
where that has its rows. Without an axis of rows it is a sum over them.

- Entry by entry: to the list of these.
- On the entries of each row: `_rule(terms, where, across)`. Terms are those of any function by default, `_linear` for
  sums; rows are where the inputs have them. `"cumsum": _rule(_linear, across=_named)` works across the axis in its
  parameter, so rows in that axis are mixed, and rows in another one are not.
- Entries change their places: `_layout(where)`; `_repeated` is a short example of `where`.
- Anything else, such as one that holds a jaxpr: a rule `(equation, inputs) -> output`, which raises `mixes()` or
  `unknown(why)` where terms can't say what it does; `_split` is a short one. `equation.made` describes an output.
- A test in tests/jax/loss: a loss with it that passes in silence, and one across the rows that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from gradaccum.jax.batch import equations
from gradaccum.jax.loss import algebra
from gradaccum.jax.loss.algebra import COUNT, ONE, Flaw, Lost, Place, Scale, Source, Term, Value
from gradaccum.jax.loss.rules import RULES
from gradaccum.jax.loss.walk import LAYOUT, Walk, is_integral, is_ours, line

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
    roots: list[int]
    """Of each input, algebra.DIFFERENTIATED, FRESH, and a bit for each leaf of the state, as of `Value.roots`."""
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
        rows, traces, names = _traces(spec)
        if own := [each for each in equations(traces[-1].jaxpr) if _has_own_derivative(each)]:
            rows, traces, names = _traces(spec._replace(function=_graded(spec)))
    except Exception as error:  # it is written for other numbers of rows
        return Verdict(
            "unknown", (f"It can't be traced for other numbers of rows: {str(error).strip().partition(chr(10))[0]}")
        )
    walk = Walk(rows, RULES)
    inputs = [_input(n, *each, walk) for n, each in enumerate(zip(traces[-1].in_avals, spec.axes, spec.roots))]
    try:
        found = walk.run(traces, inputs)
    except Lost:
        return Verdict("unknown", f"Its operations for {rows[0]} rows differ from those for {rows[-1]}.")
    except Exception as error:  # what looks at a loss must not keep it from training
        return Verdict("unknown", f"It can't be followed: {type(error).__name__}: {error}")
    losses, weights, more = jax.tree.unflatten(names, found)
    verdicts = [*_of_losses(losses, weights, more, inputs, spec.reduction, walk, own)]
    wrong = [verdict for verdict in verdicts if verdict.kind not in ("exact", "unknown")]
    if wrong:
        return max(wrong, key=lambda verdict: verdict.certain)
    verdicts.append(_of_one_row(spec, rows, traces))
    verdicts.append(_of_state(inputs, [*losses.values(), *weights.values()], more["state"]))
    for (how, path), value in more["aux"].items():
        verdicts.append(_of_aux(how, path, value, weights.get(""), spec.reduction, walk))
    return next((verdict for verdict in verdicts if verdict.kind != "exact"), EXACT)


def _of_losses(
    losses: Any, weights: Any, more: Any, inputs: list[Value], reduction: str, walk: Walk, own: list[Any]
) -> Iterator[Verdict]:
    statistics = set().union(*(walk.ancestors(value.number) for value in more["statistics"]))
    for name, loss in losses.items():
        verdict = _of_loss(loss, weights.get(name), reduction, walk, statistics)
        if verdict.kind == "exact" and (found := more["gradients"].get(name)):
            verdict = _of_gradients(found, inputs, weights.get(name), reduction, walk, own) or verdict
        yield verdict._replace(message=f"As to the loss {name!r}: {verdict.message}" if name else verdict.message)


def _input(n: int, kind: Any, axis: int | None, roots: int, walk: Walk) -> Value:
    place = None if axis is None else Place(axis)
    roots |= algebra.FLOWING if roots & algebra.DIFFERENTIATED else 0
    number, integral = walk.number("input", n), is_integral(kind.dtype)
    return Value(frozenset([Term(axis is not None)]), place, None, number, roots, integral=integral)


def _traces(spec: LossSpec) -> tuple[tuple[int, ...], list[Any], Any]:
    """Numbers of rows, and the loss for each: those of the batch and its micro-batches, if these tell rows apart."""
    sizes, few = tuple(sorted(size for size in {*spec.sizes} if size > 1)), _ROWS * spec.unit
    failed: Exception | None = None
    for rows in ([sizes] if len(sizes) > 1 else []) + [(few, 2 * few, *sizes)]:
        try:
            found = [_traced(spec, count) for count in sorted({*rows})]
            return tuple(sorted({*rows})), [closed for closed, _ in found], jax.tree.structure(found[-1][1])
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _traced(spec: LossSpec, rows: int) -> Any:
    return jax.make_jaxpr(spec.function, return_shape=True)(spec.kinds(rows))


def _graded(spec: LossSpec) -> Callable[[list[Any]], Any]:
    """The loss with its gradients, by name and by the position of their input: what runs under differentiation."""

    def function(values: list[Any]) -> Any:
        inputs = {
            n: value
            for n, (value, roots) in enumerate(zip(values, spec.roots))
            if roots & algebra.DIFFERENTIATED and jnp.issubdtype(value.dtype, jnp.floating)
        }

        def named(name: str) -> Any:
            def loss(some: dict[int, Any]) -> Any:
                found = spec.function([some.get(n, value) for n, value in enumerate(values)])
                return found[0][name], found

            return jax.value_and_grad(loss, has_aux=True)(inputs)

        found = {name: named(name) for name in jax.eval_shape(spec.function, values)[0]}
        ((_, (_, weights, more)), _), *_ = found.values()
        losses = {name: loss for name, ((loss, _), _) in found.items()}
        return losses, weights, more | {"gradients": {name: gradients for name, (_, gradients) in found.items()}}

    return function


def _has_own_derivative(equation: Any) -> bool:
    """Whether it is a custom derivative that is not JAX' own, nor what `jax.custom_gradient` makes of others."""
    if not equation.primitive.name.startswith(("custom_vjp", "custom_jvp")):
        return False

    def path(of: Any) -> str:
        return (getattr(getattr(of, "debug_info", None), "func_src_info", None) or "").rpartition(" at ")[2]

    params = equation.params
    function, rule = path(params["call_jaxpr"].jaxpr), path(params.get("bwd", params.get("jvp_jaxpr_fun")))
    return not (is_ours(function) and is_ours(rule) and "custom_derivatives" not in function)


def _of_one_row(spec: LossSpec, rows: tuple[int, ...], traces: list[Any]) -> Verdict:
    """Whether the loss of a single row does what it does for more; JAX leaves some layout out there, so it is not
    followed: its operations are the same, and so are its numbers, or they go with the rows."""
    if 1 not in spec.sizes:
        return EXACT
    done = [list(_done(closed)) for closed in (_traced(spec, 1)[0], *traces)]
    alike = len({len(each) for each in done}) == 1 and all(
        (isinstance(some[0], float) and algebra.exponent(some, (1, *rows)) is not None) or len({*some}) == 1
        for some in zip(*done)
    )
    return EXACT if alike else Verdict("unknown", "Its operations for one row differ from those for more.")


def _done(closed: Any) -> Iterator[Any]:
    """The operations of a jaxpr but for layout, and the numbers that are written down in it."""
    for equation in equations(closed.jaxpr):
        if equation.primitive.name not in LAYOUT:
            yield equation.primitive.name
            yield from (float(v.val) for v in equation.invars if isinstance(v, Literal) and np.isfinite(v.val))


def _of_state(inputs: list[Value], losses: list[Value], state: dict[tuple[str, int], Value]) -> Verdict:
    """Whether a loss is computed from state that moves."""
    still = {value.number for value in inputs}
    moving = [(name, bit) for (name, bit), value in state.items() if value.number not in still]
    read = sorted(name for name, bit in moving if any(loss.roots & bit for loss in losses))
    if not read:
        return EXACT
    return Verdict(
        "state",
        f"The loss is computed from state that each micro-batch moves: {read[0]}. So later micro-batches see another "
        "state than the large batch does. Move it once per update, outside of loss_fn.",
    )


_AUX = {
    "mean": "aux='mean' is the mean of micro-batches, and aux{} is no mean over {}: {}",
    "sum": "aux='sum' is the sum of micro-batches, and aux{} is no sum over rows: {}",
    "concat": "aux='concat' joins rows, and those of aux{} look at other rows of their micro-batch: {}",
}


def _of_aux(how: str, path: str, value: Value, weight: Value | None, reduction: str, walk: Walk) -> Verdict:
    """Whether a leaf of the aux is what the option `aux` says of it."""
    if how != "concat":
        of = weight if how == "mean" else None
        found = _of_loss(value, of, how if reduction == "mean" else "sum", walk)
        why = "" if found.kind in ("exact", "unknown") else found.message.partition(" If this is the loss")[0]
    elif value.flaw is not None:
        why = "" if value.flaw.kind == "unknown" else f"{_at(value.flaw.source)}."
    else:
        plain = not value.own or (value.place == Place(0) and not any(term.scale for term in value.terms))
        why = "" if plain else f"{_at(walk.first_sum(value))}."
    over = ["what the loss is a mean over" if weight is not None else "rows"] if how == "mean" else []
    return Verdict("aux", _AUX[how].format(path, *over, why)) if why else EXACT


def _of_loss(
    loss: Value, weight: Value | None, reduction: str, walk: Walk, statistics: frozenset[int] | set[int] = frozenset()
) -> Verdict:
    if loss.flaw is not None:
        verdict = _of_flaw(loss.flaw, statistics)
        return verdict._replace(certain=verdict.certain and not (loss.flaw.kind == "mixed" and walk.has_branches))
    if loss.place is not None:
        return Verdict("unknown", "Its result still has an axis of rows.")
    if weight is not None and weight.flaw is not None and weight.flaw.kind == "unknown":
        return Verdict("unknown", f"`weight` uses {_at(weight.flaw.source)}, which is not followed.")
    divisor = ONE if reduction == "sum" else walk.batches.count
    if weight is not None:
        rows = {Term(True), Term(False, walk.batches.count)}
        if weight.flaw is not None or len(weight.terms) != 1 or not weight.terms <= rows:
            why = "what it returns for the batch is not the sum of what it returns for micro-batches"
            return Verdict("unknown", f"`weight` must be a sum over the rows: {why}.")
        divisor = walk.factor(weight)
    return _of_terms(loss, divisor, weight, reduction, walk)


def _of_gradients(
    gradients: dict[int, Value], inputs: list[Value], weight: Value | None, reduction: str, walk: Walk, own: list[Any]
) -> Verdict | None:
    """Whether gradients follow from those of micro-batches as the loss does, where custom derivatives make them."""
    for n, gradient in gradients.items():
        place = None if gradient.place == inputs[n].place else gradient.place
        found = _of_loss(gradient.but(place=place), weight, reduction, walk)
        if found.kind == "unknown":
            return found
        if found.kind != "exact":
            return _by_derivative(own)
    return None


def _of_flaw(flaw: Flaw, statistics: frozenset[int] | set[int]) -> Verdict:
    if flaw.kind == "unknown":
        return Verdict("unknown", f"{_at(flaw.source)} is not followed{flaw.why and f' ({flaw.why})'}.")
    if flaw.kind == "random":
        verdict = Verdict(
            "randomness",
            f"It draws random numbers for its rows ({_at(flaw.source)}) from a key that all micro-batches share, so "
            "all of them would draw the same numbers. Name the key's argument with rng_argnum=..., so that each "
            "micro-batch gets a key of its own, or put a key for each row into the batch.",
        )
    elif flaw.kind == "count":
        verdict = _by_another_count(f" ({_at(flaw.source)})")
    else:
        verdict = _mixes(flaw.source, statistics)
        if flaw.soft and flaw.source.primitive == "dot_general":
            verdict = Verdict(
                verdict.kind,
                f"It multiplies rows with each other: {_at(flaw.source)}. If only the products of each row with itself "
                "count (a trace or diagonal), compute these alone: (a * b).sum(-1). If not, it looks across the rows "
                "of the batch: use gradaccum.jax.chunked around the model.",
            )
    return verdict._replace(certain=flaw.certain)


def _of_terms(loss: Value, divisor: Scale, weight: Value | None, reduction: str, walk: Walk) -> Verdict:
    named, is_weighed, flowing = walk.batches.named, weight is not None, _flowing(weight, walk)
    off = {term: _off(term, divisor, reduction, walk) for term in loss.terms}
    names = {term: named(algebra.power(term.scale, -1)) for term in loss.terms}
    wrong = [term for term in loss.terms if not algebra.is_one(off[term]) or names[term] in flowing]
    if not wrong:
        doubts = [*walk.doubts, *_holes(loss, divisor, walk)]
        return Verdict("unknown", doubts[0]) if doubts else EXACT
    if all(algebra.is_choice(off[term]) and names[term] not in flowing for term in wrong):
        return _mixes(walk.first_sum(loss))  # but for a choice where a sum is 0, it is right
    divisors = {names[term] for term in loss.terms if term.own}
    if _is_mixed(wrong, names, divisors, walk):
        return _mixes(walk.first_sum(loss))._replace(certain=not walk.has_branches)
    same_for_all = is_weighed and divisor == ONE  # right where micro-batches have as many rows
    verdict = _by_divisors(wrong, loss, divisors, named(divisor) if is_weighed else None, reduction, walk)
    return verdict._replace(certain=verdict.kind != "unknown" and not same_for_all)


def _flowing(weight: Value | None, walk: Walk) -> set[Any]:
    """Sums that a gradient flows through, which a mean isn't over; if `weight` has one, too, that is another error."""
    return walk.flowing if weight is None or not weight.roots & algebra.FLOWING else set()


def _is_mixed(wrong: list[Term], names: dict[Term, Any], divisors: set[Any], walk: Walk) -> bool:
    """Whether it is no sum of means, and of sums: rows are multiplied by what takes all rows to know."""
    if (len(divisors) > 1 and "" in divisors) or any(names[term] in walk.bound for term in wrong):
        return True
    if all(algebra.is_by_rows(algebra.ordinary(term.scale)) for term in wrong):
        return False
    return None in divisors or not all(term.own or algebra.is_by_rows(term.scale) for term in wrong)


def _off(term: Term, divisor: Scale, reduction: str, walk: Walk) -> Scale:
    """What keeps a term from being right: ONE, if it is; what weighs nothing is left out."""
    shared = ONE if reduction == "mean" else algebra.power(walk.batches.count, -1)  # of a sum it goes with the rows
    scale = algebra.times(term.scale, divisor if term.own else shared)
    if not any(x == x and x for x in scale):
        return ONE
    return tuple(x if y else algebra.NONE for x, y in zip(scale, divisor)) if divisor else scale


def _holes(loss: Value, divisor: Scale, walk: Walk) -> Iterator[str]:
    """Where a micro-batch that isn't left out makes NaN, though the large batch need not."""
    for lane in range(len(walk.batches.count)):
        isnt_number = any(term.scale and term.scale[lane] != term.scale[lane] for term in loss.terms)
        if isnt_number and not (divisor and divisor[lane] == 0):
            empty = _divisor(walk.batches.empty_in(lane), walk)
            yield f"In a micro-batch in which {empty} is 0, it is 0 / 0 or infinite, and so the whole gradient is NaN."


def _by_divisors(
    wrong: list[Term], loss: Value, divisors: set[Any], weight: Any, reduction: str, walk: Walk
) -> Verdict:
    """Why it isn't exact, where it is a sum of means or of sums; `weight` is what that returns, if there is one."""
    if None in divisors:
        return _by_another_count()
    named = " and ".join(sorted(_divisor(symbol, walk) for symbol in divisors))
    if len(divisors) > 1:
        each = "{name: (loss, weight)}, each with what it is a mean over"
        return Verdict("weight", f"It is a sum of means over {named}. Return them as {each}.")
    if all(algebra.is_by_rows(term.scale) for term in wrong):
        return _by_count(wrong, loss, reduction, walk)
    if weight is not None and weight != COUNT:
        return Verdict("unknown", f"It divides by {named}. Whether `weight` equals that is unknown.")
    weighed, asked = ("rows", "") if reduction == "mean" else ("nothing, as sums", 'reduction="mean" and ')
    return Verdict(
        "weight",
        f"It divides by {named}, a sum over the batch, but its micro-batches are weighed by {weighed}. Pass "
        f"{asked}weight=, a function of the batch that returns this sum.",
    )


def _by_count(wrong: list[Term], loss: Value, reduction: str, walk: Walk) -> Verdict:
    """Where nothing but the number of rows is a factor."""
    divisors = {walk.batches.named(algebra.power(term.scale, -1)) for term in wrong if term.own}
    as_mean = "counted once per micro-batch. Return a mean over rows plus the term."
    if not divisors:
        how = f"that is multiplied by the number of rows, or, next to a sum over them, {as_mean}"
        return Verdict("regulariser", f"It has a term without rows (a regulariser) {how}")
    if divisors == {COUNT} and reduction == "sum":
        return Verdict("weight", 'It is a mean over rows, but was treated as a sum. Pass reduction="mean".')
    if divisors == {COUNT}:
        return Verdict("weight", "It is a mean over rows, but `weight` says otherwise. Leave `weight` out.")
    if divisors != {""}:
        return _by_another_count()
    if all(term.own for term in loss.terms):
        return Verdict("reduction", 'It is a sum over its rows, but was treated as a mean. Pass reduction="sum".')
    how = f"a sum over rows and a term without rows (a regulariser), which would be {as_mean}"
    return Verdict("regulariser", f"It is {how}")


def _by_another_count(where: str = "") -> Verdict:
    why = f"It depends on the number of rows{where}, and not as a sum or a mean over them does"
    return Verdict("reduction", f"{why}. Return the mean over rows.")


def _mixes(source: Source | None, statistics: set[int] | frozenset[int] = frozenset()) -> Verdict:
    if source is not None and source.number in statistics:
        return Verdict(
            "batch_norm",
            "A row's output depends on the other rows of its micro-batch through statistics that are returned with the "
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


def _by_derivative(own: list[Any]) -> Verdict:
    places = dict.fromkeys(_at(Source(each.primitive.name, each.source_info)) for each in own)
    return Verdict(
        "loss",
        f"The custom derivative of {' or '.join(places)} does more than multiply each row's gradient by a number of "
        "that row: it clips or normalises gradients, say, or averages them over rows. Applied to micro-batches it "
        "gives another gradient than applied to the large batch. Apply it once, to the gradients of the update.",
        certain=True,
    )


def _divisor(symbol: Any, walk: Walk) -> str:
    if symbol in ("", COUNT):
        return symbol or "nothing"
    where = line(walk.sources[symbol].info) if symbol in walk.sources else ""
    return f"what is summed at {where}" if where else "a sum"


def _at(source: Source | None) -> str:
    where = line(source.info) if source is not None else ""
    return "somewhere" if source is None else f"`{source.primitive}` at {where}" if where else f"`{source.primitive}`"
