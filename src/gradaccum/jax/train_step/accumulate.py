"""The sums over micro-batches: two scans at most, one for each size, that hold one micro-batch's activations each.

What a micro-batch gives is a list of leaves: its losses, gradients and aux. A `Way` says of each how those of all
micro-batches are put together: as their mean, their sum, their rows behind each other, or the last one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum.jax.batch import Group, as_varying, like, over, varying_axes, zeros
from gradaccum.jax.train_step.call import Call, Outcome
from gradaccum.jax.train_step.ways import Way, ways_of_aux
from gradaccum.jax.train_step.weights import factors_of


def accumulated(
    call: Call, micro_batch_size: int, accumulation_type: type[Accumulation]
) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
    """The losses by name, the new state, the aux and the gradients of the whole batch; and what else was measured."""
    groups = call.batch.groups(max(micro_batch_size // call.devices, 1))
    accumulation = accumulation_type(call, groups)  # an error of the loss itself comes before anything is said of it
    if call.options.verification is not None and not accumulation.is_plain:
        call.options.verification.look(call, tuple(sorted({call.batch.rows, *(group.size for group in groups)})))
    return accumulation.run()


class Accumulation:
    """One pass over the micro-batches of a batch."""

    def __init__(self, call: Call, groups: list[Group]) -> None:
        self.options, self.groups = call.options, groups
        self.count = sum(group.count for group in groups)
        self.is_plain = self.count == 1 and not call.axes
        """Whether it is one micro-batch, as `jax.value_and_grad` has it: its key is its own, and it isn't weighed."""
        one = (lambda key: key[None]) if self.is_plain else (lambda key: jax.random.split(key, self.count))
        self.keys = jax.tree.map(one, call.key)
        self.kinds = kinds = call.kinds(groups[0])
        self.state = call.state_like(call.state, kinds.state)
        weighs = not self.is_plain and (call.options.weight is not None or bool(kinds.weights))
        self.factors = factors_of(call, groups, kinds, self.state, self.keys) if weighs else {}
        """For each loss by name, a factor for each micro-batch; empty where rows are what counts."""
        self.given = tuple(call.args[number] for number in self.options.differentiated)
        varying = varying_axes(kinds.losses)
        self.varying = tuple(sorted(varying | varying_axes((call.batch.leaves, self.given))))
        self.call = call
        for number, argument in zip(self.options.differentiated, self.given):
            if number not in self.options.batches:
                # Else each micro-batch's gradients would be summed over the devices of an enclosing `shard_map`.
                self.call = self.call.replaced(number, as_varying(jax.tree.map(jnp.asarray, argument), varying))
        self.ways = self._ways()
        self.summed = [way for way in self.ways if way.how in ("mean", "sum")]

    def _ways(self) -> list[Way]:
        """How the losses, the gradients and the aux are put together, in this order."""
        how, sum_dtype, kinds = self.options.reduction, self.options.sum_dtype, self.kinds
        ways = [Way(how, kind, sum_dtype(kind.dtype), kind.dtype, name) for name, kind in kinds.losses.items()]
        inside = jax.tree.leaves(tuple(self.call.args[number] for number in self.options.differentiated))
        for leaf, varying, axis in zip(jax.tree.leaves(self.given), inside, _axes(self.call)):
            dtype = jnp.result_type(leaf)
            way = Way("concat", jax.typeof(varying), sum_dtype(dtype), dtype, None, axis or 0, leaf)
            ways.append(way._replace(how=how) if axis is None else way)
        return ways + ways_of_aux(self.call, self.groups, kinds) if self.options.has_aux else ways

    def run(self) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
        sums = self._placed([zeros(way.kind, way.dtype) for way in self.summed])
        carry: Any = sums, self.state, [], self.measured()
        (sums, state, last, measured), parts = over(
            self.groups, self._visit, carry, (self.keys, self.factors), self._entered
        )
        return self._finished(sums, last, state, parts, measured)

    # For what measures gradients while they are summed.

    def measured(self) -> Any:
        """What is measured, before the first micro-batch."""

    def with_micro_batch(self, measured: Any, gradients: list[Any], factors: dict[str, Any], group: Group) -> Any:
        """What is measured after a micro-batch of this group, with these gradients of parameters, times `factors`."""

    def finished(self, measured: Any, gradients: list[Any]) -> Any:
        """What is returned of what was measured, with the finished gradients of parameters."""

    def _entered(self, carry: Any, group: Group) -> Any:
        """The sums as if all micro-batches so far had been of this group's size; and places for the last one's aux."""
        sums, state, last, measured = carry
        if group is not self.groups[0]:
            units = [self._unit(self.groups[0], way) / self._unit(group, way) for way in self.summed]
            sums = list(map(_scaled, sums, units))
        if group is self.groups[-1] and any(way.how == "last" for way in self.ways):
            kinds = jax.tree.leaves((self.kinds if group.size == self.groups[0].size else self.call.kinds(group)).aux)
            last = [zeros(kind) for way, kind in zip(self.ways[-len(kinds) :], kinds) if way.how == "last"]
        return sums, state, last, measured

    def _visit(self, carry: Any, group: Group, index: Any, x: Any) -> tuple[Any, list[Any]]:
        """A micro-batch: what it adds to the sums, the new state, its last leaves, what is measured; and its rows."""
        (sums, state, _, measured), (key, factors) = carry, x
        micro_batch = self.call.batch.micro_batch(group, index)
        outcome, gradients = _gradients(self.call, self.call.arguments(micro_batch, state, key), factors)
        losses = [outcome.losses[name] for name in self.kinds.losses]
        added: list[Any] = []
        leaves: dict[str, list[Any]] = {"mean": added, "sum": added, "last": [], "concat": []}
        for way, leaf in zip(self.ways, [*losses, *jax.tree.leaves(gradients), *jax.tree.leaves(outcome.aux)]):
            leaf = jnp.asarray(leaf) if way.dtype is None else jnp.asarray(leaf).astype(way.dtype)
            leaves[way.how].append(leaf if way.factor is None else _times(factors.get(way.factor), leaf))
        measured = self.with_micro_batch(measured, self._of_parameters(added), factors, group)
        sums = self._placed(list(map(jnp.add, sums, added)))
        last = leaves["last"] if group is self.groups[-1] else []
        return (sums, self.call.state_like(outcome.state, self.kinds.state), last, measured), leaves["concat"]

    def _placed(self, sums: list[Any]) -> list[Any]:
        pairs = zip(self.summed, sums)
        return [leaf if way.parameter is None else like(way.parameter, leaf) for way, leaf in pairs]

    def _of_parameters(self, sums: list[Any]) -> list[Any]:
        return [leaf for way, leaf in zip(self.summed, sums) if way.parameter is not None]

    def _unit(self, group: Group, way: Way) -> float:
        """What the sums of a group are to be multiplied by."""
        is_gradient = way.parameter is not None and self.options.reduction == "mean"
        if way.how != "mean" and not is_gradient:
            return 1.0
        part = 1 / self.count if self.factors else group.size / self.call.batch.rows
        return part / self.call.devices

    def _finished(self, sums: Any, last: Any, state: Any, parts: list[Any], measured: Any) -> tuple[Any, ...]:
        units = [self._unit(self.groups[-1], way) for way in self.summed]
        sums = self.call.of_all_devices(list(map(_scaled, sums, units)))
        measured = self.finished(measured, self._of_parameters(sums))
        summed, others = iter(sums), {"last": iter(last), "concat": iter(zip(*parts))}
        leaves = []
        for way in self.ways:
            leaf = next(others.get(way.how, summed))
            if way.how == "concat":
                scaled = [_scaled(part, self._unit(group, way)) for part, group in zip(leaf, self.groups)]
                leaf = self.call.batch.joined(scaled, way.axis)
            elif way.parameter is not None:
                # As the gradient of a parameter that is the same on these devices of an enclosing `shard_map`.
                axes = tuple(sorted(varying_axes(leaf) - varying_axes(way.parameter)))
                leaf = jax.lax.psum(leaf, axes) if axes else leaf
            leaves.append(leaf if way.result is None else leaf.astype(way.result))
        rest = iter(leaves)
        losses = {name: next(rest) for name in self.kinds.losses}
        gradients, aux = (jax.tree.map(lambda _: next(rest), tree) for tree in (self.given, self.kinds.aux))
        return losses, state, aux, gradients, measured


def _gradients(call: Call, values: list[Any], factors: dict[str, Any]) -> tuple[Outcome, tuple[Any, ...]]:
    """What the loss gives for these arguments, and the gradients of the sum of its losses, each times its factor.

    A loss whose factor is 0 may be 0 / 0, and its gradient, too: it is left out, not multiplied.
    """
    numbers = call.options.differentiated

    def of(names: list[str] | None) -> Callable[[], tuple[Outcome, tuple[Any, ...]]]:
        def objective(*arguments: Any) -> tuple[Any, Outcome]:
            replaced = list(values)
            for number, argument in zip(numbers, arguments):
                replaced[number] = argument
            outcome = call.outcome(replaced)
            chosen = outcome.losses if names is None else {name: outcome.losses[name] for name in names}
            terms = [loss * factors[name].astype(loss.dtype) if factors else loss for name, loss in chosen.items()]
            return sum(terms[1:], terms[0]), outcome

        def run() -> tuple[Outcome, tuple[Any, ...]]:
            every = tuple(range(len(numbers)))
            (_, outcome), gradients = jax.value_and_grad(objective, every, has_aux=True)(*(values[n] for n in numbers))
            return outcome, gradients

        return run

    def one(name: str) -> tuple[Outcome, tuple[Any, ...]]:
        outcome, gradients = of([name])()
        return outcome, jax.tree.map(lambda leaf: jnp.where(factors[name] == 0, jnp.zeros_like(leaf), leaf), gradients)

    def one_by_one() -> tuple[Outcome, tuple[Any, ...]]:
        outcomes = [one(name) for name in factors]
        return outcomes[0][0], jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(g for _, g in outcomes))

    if not factors:
        return of(None)()
    if len(factors) == 1:
        return one(*factors)
    empty = jnp.any(jnp.stack([factor == 0 for factor in factors.values()]))
    return jax.lax.cond(empty, one_by_one, of(None))


def _axes(call: Call) -> list[int | None]:
    """For each leaf of the gradients, the axis of its rows; None for what is summed over micro-batches."""
    options = call.options
    axes: list[int | None] = []
    for number in options.differentiated:
        if number in options.batches:
            axes += call.batch.axes_of(options.batches.index(number))
        else:
            axes += [None] * len(jax.tree.leaves(call.args[number]))
    return axes


def _times(factor: Any, number: Any) -> Any:
    if factor is None:
        return number
    return jnp.where(factor == 0, jnp.zeros_like(number), number * factor.astype(number.dtype))


def _scaled(tree: Any, unit: float) -> Any:
    return tree if unit == 1.0 else jax.tree.map(lambda leaf: leaf * unit, tree)
