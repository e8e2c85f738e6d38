"""Any call of `value_and_grad`: what its options say together, against a plain loop over its micro-batches.

`CALLS` names some, hypothesis puts others together. Without keys and state they are the large batch at once, too.
"""

import math
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import gradaccum.jax
from gradaccum.core.noise import Norms
from tests.jax.comparisons import assert_same
from tests.jax.problems import PARAMS, errors, outputs, rows

KEYS = {"typed": jax.random.key(3), "raw": jax.random.PRNGKey(3), "rbg": jax.random.key(3, impl="rbg")}
STATE = {"mean": jnp.zeros(5), "calls": 0}
HOWS = {"rows": "concat", "right": "sum", "few": "sum", "pooled": "mean", "size": "last", "none": "concat"}


class Case(NamedTuple):
    """The large batch, the most rows of a micro-batch, and options."""

    rows: int = 11
    size: int = 4
    over: str = "rows"  # what the loss is a mean over: "rows" or "tokens"; "sum"; or "both", by name
    empty: tuple[int, int] = (0, 0)  # rows from and to which no token counts
    of_rows: bool = False  # gradients of the rows, too
    columns: bool = False  # the rows of x are its columns
    key: str = ""
    aux: bool = False
    state: bool = False
    noise: bool = False
    last: bool = True  # an aux of the last micro-batch, which no device has alone

    @property
    def without(self) -> set[str]:
        """Aux that there is none of."""
        return {name for name, none in (("pooled", self.over == "both"), ("size", not self.last)) if none}

    @property
    def options(self) -> dict[str, Any]:
        return {
            "argnums": (0, 1) if self.of_rows else 0, "batch_argnums": (1, 2), "in_axes": (-int(self.columns), 0),
            "has_aux": self.aux, "aux": {name: how for name, how in HOWS.items() if name not in self.without},
            "rng_argnum": 3 if self.key else None, "state_argnum": 4 if self.state else None,
            "weight": (lambda x, more: more["mask"].sum()) if self.over == "tokens" else None,
            "reduction": "sum" if self.over == "sum" else "mean", "noise_scale": self.noise,
        }  # fmt: skip

    @property
    def args(self) -> tuple[Any, ...]:
        x, y = rows(self.rows)
        # Of floats: a product with booleans XLA makes a select, which hides NaN.
        mask = (jnp.arange(self.rows) * 7 % 5 > 1).at[slice(*self.empty)].set(False).astype(float)
        return PARAMS, x.T if self.columns else x, {"y": y, "mask": mask}, KEYS.get(self.key, KEYS["typed"]), STATE

    def named(self, params: Any, x: Any, more: Any, key: Any, state: Any) -> tuple[dict[str, Any], Any, Any]:
        """Losses with what they are means over, by name; the new state, the aux."""
        x, mask, calls = x.T if self.columns else x, more["mask"], state["calls"]
        if self.key:
            x = x + jax.random.normal(key, x.shape)
        if self.state:
            x, state = x - state["mean"], {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0), "calls": calls + 1}
        if self.over == "both" and self.key and self.state:  # weights that random numbers and a state decide
            mask = mask * (0.5 + jax.random.bernoulli(key, 0.5, mask.shape)) * (1 + calls)
        each = errors(params, x, more["y"])
        tokens = (each * mask).sum() / mask.sum(), mask.sum()  # 0 / 0 where none counts
        losses = {
            "rows": {"": (each.mean(), len(x))}, "sum": {"": (each.sum(), 1)}, "tokens": {"": tokens},
            "both": {"tokens": tokens, "rows": ((outputs(params, x) ** 2).mean(), len(x))},
        }[self.over]  # fmt: skip
        pooled = (x * mask[:, None]).sum(0) / mask.sum() if self.over == "tokens" else x.mean(0)
        right, size = (each < 5).sum(), jnp.asarray(len(x))
        aux = {"rows": {"error": each}, "right": right, "few": right.astype(jnp.int32), "pooled": pooled, "size": size}
        return losses, state, {name: aux.get(name) for name in self.options["aux"]}

    def returned(self, losses: Any, state: Any, aux: Any) -> Any:
        loss = losses if self.over == "both" else losses[""]
        rest = [state] * self.state + [aux] * self.aux
        return (loss, rest[0] if len(rest) == 1 else tuple(rest)) if rest else loss

    def loss(self, *args: Any) -> Any:
        losses, *rest = self.named(*args)
        return self.returned(losses if self.over == "both" else {"": losses[""][0]}, *rest)


def by_hand(case: Case) -> Any:
    """A plain loop: each micro-batch's losses and gradients by their weights, its rows behind the others', its state
    to the next one, and the norms of the first one that counts."""

    @jax.jit
    def graded(*args: Any) -> Any:
        def of(name: str) -> Any:
            return jax.value_and_grad(lambda *two: case.named(*two, *args[2:])[0][name][0], (0, 1))(*args[:2])

        losses, state, aux = case.named(*args)
        return {name: (*of(name), weight) for name, (_, weight) in losses.items()}, state, aux

    params, x, more, key, state = case.args
    count = math.ceil(case.rows / case.size)
    sizes = [case.rows // count + (n < case.rows % count) for n in range(count)]
    found, auxes, start = [], [], 0
    for size, own in zip(sizes, [key] if count == 1 else jax.random.split(key, count)):
        part = slice(start, start := start + size)
        rest = jax.tree.map(lambda leaf: leaf[part], more)  # noqa: B023  # used at once
        some, state, aux = graded(params, x[:, part] if case.columns else x[part], rest, own, state)
        found.append(some)
        auxes.append(aux)
    totals = {name: 1 if case.over == "sum" else sum(some[name][2] for some in found) for name in found[0]}
    losses = {name: sum(scaled(some[name][0], some[name][2] / totals[name]) for some in found) for name in totals}
    shares = [
        added(scaled(some[name][1], some[name][2] / totals[name]) for name in totals)
        for some in found  # used at once
    ]
    grads = added(share[0] for share in shares)
    if case.noise:
        first = next(n for n, some in enumerate(found) if any(weight for *_, weight in some.values()))
        one, size = found[first].get(""), sizes[first]
        mean = scaled(shares[first][0], case.rows / size) if one is None else one[1][0]
        per = (size, case.rows) if case.over == "sum" else (1, 1)
        norms = [Norms(squared(mean) / per[0] ** 2, size, squared(grads) / per[1] ** 2, case.rows)]
    weights = [size if case.over == "sum" else next(iter(some.values()))[2] for size, some in zip(sizes, found)]
    together = {
        "concat": lambda *each: jnp.concatenate(each), "sum": lambda *each: sum(each), "last": lambda *each: each[-1],
        "mean": lambda *each: sum(map(scaled, each, weights)) / sum(weights),
    }  # fmt: skip
    aux = {name: jax.tree.map(together[HOWS[name]], *(aux[name] for aux in auxes)) for name in auxes[0]}
    gradients = grads, jnp.concatenate([share[1] for share in shares], int(case.columns))
    return case.returned(losses, state, aux), gradients if case.of_rows else grads, *(norms if case.noise else ())


def scaled(tree: Any, factor: Any) -> Any:
    """0 where the factor is 0, whatever there is."""
    return jax.tree.map(lambda leaf: leaf * factor if factor else jnp.zeros_like(leaf), tree)


def added(trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def squared(gradients: Any) -> float:
    return sum(float((np.asarray(leaf) ** 2).sum()) for leaf in jax.tree.leaves(gradients))


def check(case: Case) -> None:
    found = jax.jit(gradaccum.jax.value_and_grad(case.loss, micro_batch_size=case.size, **case.options))(*case.args)
    expected = by_hand(case)
    assert_same(found, expected)
    kinds = [[jnp.result_type(leaf) for leaf in jax.tree.leaves(each[0])] for each in (found, expected)]
    assert kinds[0] == kinds[1]
    if not (case.key or case.state):

        def total(*args: Any) -> Any:
            losses = {name: loss for name, (loss, _) in case.named(*args)[0].items()}
            return sum(losses.values()), losses

        (_, losses), grads = jax.jit(jax.value_and_grad(total, case.options["argnums"], has_aux=True))(*case.args)
        loss = found[0][0] if case.aux else found[0]
        assert_same((loss, found[1]), (losses if case.over == "both" else losses[""], grads))


ALL = {"aux": True, "key": "typed", "state": True, "noise": True}
CALLS = {
    "aux of tokens": Case(over="tokens", aux=True, empty=(4, 8)),
    "aux of a sum": Case(over="sum", aux=True),
    "a first micro-batch without tokens": Case(over="tokens", empty=(0, 4), noise=True),
    "last ones without tokens": Case(over="tokens", empty=(4, 11), noise=True),
    "losses by name": Case(over="both", noise=True),
    "losses by name, one without tokens": Case(over="both", empty=(4, 8)),
    "a raw key": Case(key="raw"),
    "an rbg key": Case(key="rbg"),
    "columns, and gradients of them": Case(columns=True, of_rows=True),
    "gradients of rows, by a sum": Case(over="sum", of_rows=True, noise=True),
    "all of it, over tokens": Case(over="tokens", empty=(0, 4), **ALL),
    "all of it, by name": Case(over="both", **ALL),
    "all of it, by rows": Case(of_rows=True, columns=True, **ALL),
    "all of it, by rows of a single micro-batch": Case(rows=4, of_rows=True, columns=True, **ALL),
    "all of it, by name in a single micro-batch": Case(rows=4, over="both", **ALL),
}
SLOW = {"aux of a sum", "a raw key", "an rbg key", "last ones without tokens"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CALLS])
def test_a_call_is_a_plain_loop_over_its_micro_batches(name):
    check(CALLS[name])


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_call_is_a_plain_loop_over_its_micro_batches(data):
    over, key = (data.draw(st.sampled_from(of)) for of in (["rows", "tokens", "sum", "both"], ["", *KEYS]))
    count, size = data.draw(st.integers(4, 12)), data.draw(st.integers(1, 13))  # some token counts among 4
    empty = data.draw(st.sampled_from([(0, 0), (0, count // 3), (count // 2, count)]))
    flags = {name: data.draw(st.booleans(), name) for name in ("columns", "aux", "state", "noise")}
    check(Case(count, size, over, empty, over in ("rows", "sum") and data.draw(st.booleans()), key=key, **flags))
