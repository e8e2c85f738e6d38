"""The sums over micro-batches: two scans at most, one for each size, that hold one micro-batch's activations each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum.jax.batch import Group, as_varying, like, varying_axes, zeros
from gradaccum.jax.train_step.aux_outputs import AuxOutputs
from gradaccum.jax.train_step.call import Call, Outcome
from gradaccum.jax.train_step.noise import NoiseMeter, norms_of_one
from gradaccum.on_jax import scan

__all__ = ["accumulated"]


def accumulated(call: Call, micro_batch_size: int) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
    """The losses by name, the new state, the aux and the gradients of the whole batch; and its norms, if asked for."""
    groups = call.batch.groups(max(micro_batch_size // call.devices, 1))
    if len(groups) == groups[0].count == 1 and not call.axes:
        outcome, gradients = _gradients(call, list(call.args), {})
        norms = None
        if call.options.noise_scale:
            pairs = zip(jax.tree.leaves(gradients), _axes(call))
            norms = norms_of_one(call, [leaf for leaf, axis in pairs if axis is None])
        return outcome.losses, outcome.state, AuxOutputs(call, groups, outcome).of_one(outcome.aux), gradients, norms
    accumulation = _Accumulation(call, groups)  # an error of the loss itself comes before anything is said of it
    if call.options.verification is not None:
        call.options.verification.look(call, tuple(sorted({call.batch.rows, *(group.size for group in groups)})))
    return accumulation.run()


class _Accumulation:
    """One pass over the micro-batches of a batch."""

    def __init__(self, call: Call, groups: list[Group]) -> None:
        self.call = call
        self.options = call.options
        self.groups = groups
        self.count = sum(group.count for group in groups)
        self.keys = jax.tree.map(lambda key: jax.random.split(key, self.count), call.key)
        self.kinds = call.kinds(groups[0])
        self.state = call.state_like(call.state, self.kinds.state)
        self.factors = _factors_of(call, groups, self.kinds, self.state, self.keys)
        self.aux = AuxOutputs(call, groups, self.kinds)
        self.given = tuple(call.args[number] for number in self.options.differentiated)
        self.axes = _axes(call)
        varying = varying_axes(self.kinds.losses)
        for number, argument in zip(self.options.differentiated, self.given):
            if number not in self.options.batches:
                # Else each micro-batch's gradients would be summed over the devices of an enclosing `shard_map`.
                call = call.replaced(number, as_varying(jax.tree.map(jnp.asarray, argument), varying))
        self.call = call
        self.noise: NoiseMeter | None = None
        if self.options.noise_scale:
            self.noise = NoiseMeter(call, self.count, varying | varying_axes((call.batch.leaves, self.given)))

    def run(self) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
        sums: Any = None
        state = self.state
        first = self.noise and self.noise.start()
        parts: list[Any] = []
        done = 0
        for group in self.groups:
            xs = jax.tree.map(
                lambda each: each[done : done + group.count],  # noqa: B023  # used at once
                (self.keys, self.factors),
            )
            done += group.count
            if sums is not None:
                sums = self._in_units_of(sums, group)
            if group.count == 1:
                state, added, part, first = self._visit(group, 0, state, first, *jax.tree.map(lambda each: each[0], xs))
                sums = added if sums is None else self._sum(sums, added)
                part = jax.tree.map(lambda each: each[None], part)
            else:
                (sums, state, first), part = self._scan(group, self._start(group, sums), state, first, xs)
            parts.append(part)
        return self._finished(sums, state, parts, first)

    def _scan(self, group: Group, sums: Any, state: Any, first: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            index, sums, state, first = carry
            state, added, part, first = self._visit(group, index, state, first, *x)
            return (index + 1, self._sum(sums, added), state, first), part

        # Counted in the carry: as `xs`, the numbers would be an array that grows with the micro-batches.
        start = jnp.zeros((), jnp.int32)
        (_, *sums_and_more), parts = scan(body, (start, sums, state, first), xs, length=group.count)
        return sums_and_more, parts

    def _visit(
        self, group: Group, index: Any, state: Any, first: Any, key: Any, factors: Any
    ) -> tuple[Any, Any, Any, Any]:
        """A micro-batch: the new state, what is added to the sums, what has a row for each of its rows; and `first`."""
        micro_batch = self.call.batch.micro_batch(group, index)
        outcome, gradients = _gradients(self.call, self.call.arguments(micro_batch, state, key), factors)
        leaves = [self._widened(leaf) for leaf in jax.tree.leaves(gradients)]
        losses = {name: _times(factors.get(name), self._widened(loss)) for name, loss in outcome.losses.items()}
        added = {
            "losses": losses,
            "gradients": [leaf for leaf, axis in zip(leaves, self.axes) if axis is None],
            **self.aux.added(outcome.aux, factors, group),
        }
        part = {
            "gradients": [leaf for leaf, axis in zip(leaves, self.axes) if axis is not None],
            "aux": self.aux.rows(outcome.aux, group),
        }
        if self.noise is not None:
            first = self.noise.seen(first, added["gradients"], factors, group)
        return self.call.state_like(outcome.state, self.kinds.state), added, part, first

    def _widened(self, number: Any) -> Any:
        return number.astype(self.options.sum_dtype(number.dtype))

    def _sum(self, sums: Any, added: Any) -> Any:
        total = {name: jax.tree.map(jnp.add, sums[name], part) for name, part in added.items() if name != "last"}
        total["last"] = added["last"]
        total["gradients"] = self._placed(total["gradients"])
        return total

    def _placed(self, gradients: list[Any]) -> list[Any]:
        summed = [leaf for leaf, axis in zip(jax.tree.leaves(self.given), self.axes) if axis is None]
        return [like(*pair) for pair in zip(summed, gradients)]

    def _start(self, group: Group, sums: Any) -> Any:
        """The sums to go on from: of the group before, or zeros."""
        last = self.aux.last(group)
        if sums is not None:
            return {**sums, "last": last}
        leaves = jax.tree.leaves(tuple(self.call.args[number] for number in self.options.differentiated))
        started = [
            zeros(jax.typeof(leaf), self.options.sum_dtype(jnp.result_type(leaf)))
            for leaf, axis in zip(leaves, self.axes)
            if axis is None
        ]
        return {
            "losses": {
                name: zeros(kind, self.options.sum_dtype(kind.dtype)) for name, kind in self.kinds.losses.items()
            },
            "gradients": self._placed(started),
            **self.aux.start(),
            "last": last,
        }

    def _unit(self, group: Group, name: str) -> float:
        """What the sums of a group are to be multiplied by."""
        if name in ("last", "sums") or (self.options.reduction == "sum" and name != "means"):
            return 1.0
        part = 1 / self.count if self.factors else group.size / self.call.batch.rows
        return part / self.call.devices

    def _in_units_of(self, sums: Any, group: Group) -> Any:
        """The sums of the group before, as if its micro-batches had been of this one's size."""
        return {
            name: _scaled(part, self._unit(self.groups[0], name) / self._unit(group, name))
            for name, part in sums.items()
        }

    def _finished(
        self, sums: Any, state: Any, parts: list[Any], first: Any
    ) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
        last = self.groups[-1]
        sums = self.call.of_all_devices({name: _scaled(part, self._unit(last, name)) for name, part in sums.items()})
        norms = None if self.noise is None else self.noise.finished(first, sums["gradients"])
        losses = {name: loss.astype(self.kinds.losses[name].dtype) for name, loss in sums["losses"].items()}
        summed = iter(sums["gradients"])
        rows = iter(zip(*(part["gradients"] for part in parts)))
        leaves, structure = jax.tree.flatten(self.given)
        gradients = []
        for leaf, axis in zip(leaves, self.axes):
            if axis is None:
                gradient = next(summed)
                # As the gradient of a parameter that is the same on these devices of an enclosing `shard_map`.
                axes = tuple(sorted(varying_axes(gradient) - varying_axes(leaf)))
                gradient = jax.lax.psum(gradient, axes) if axes else gradient
            else:
                scaled = [_scaled(part, self._unit(group, "gradients")) for part, group in zip(next(rows), self.groups)]
                gradient = self.call.batch.joined(scaled, axis)
            gradients.append(gradient.astype(jnp.result_type(leaf)))
        aux = self.aux.finished(sums, [part["aux"] for part in parts])
        return losses, state, aux, jax.tree.unflatten(structure, gradients), norms


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
    if options.noise_scale and None not in axes:
        raise ValueError(
            "noise_scale=True measures gradients that are summed over rows, and `argnums` names rows alone. Received: "
            f"argnums={options.argnums}, batch_argnums={options.batch_argnums}."
        )
    return axes


def _times(factor: Any, number: Any) -> Any:
    if factor is None:
        return number
    return jnp.where(factor == 0, jnp.zeros_like(number), number * factor.astype(number.dtype))


def _scaled(tree: Any, unit: float) -> Any:
    return tree if unit == 1.0 else jax.tree.map(lambda leaf: leaf * unit, tree)


def _factors_of(call: Call, groups: list[Group], kinds: Outcome, state: Any, keys: Any) -> dict[str, Any]:
    """For each loss by name, n * w_i / sum_i w_i for each of the n micro-batches. Empty where rows are what counts.

    They are known before the first gradient is computed, so that several losses need one backward pass. The weights
    that the loss function returns itself take a pass of which the compiler keeps what they depend on: a mask, mostly.
    Where all of them are 0, the micro-batches count alike: the large batch's loss is 0 / 0, too, or has its own answer.
    """
    if call.options.weight is None and not kinds.weights:
        return {}
    weights: dict[str, list[Any]] = {}
    done = 0
    for group in groups:
        some = jax.tree.map(lambda each: each[done : done + group.count], keys)  # noqa: B023  # used at once
        done += group.count

        def weigh(state: Any, x: Any, group: Group = group) -> tuple[Any, dict[str, Any]]:
            index, key = x
            values = call.arguments(call.batch.micro_batch(group, index), state, key)
            if call.options.weight is not None:
                return state, {"": call.weight(values)}
            outcome = call.outcome(values)
            return call.state_like(outcome.state, kinds.state), outcome.weights

        state, found = scan(weigh, state, (jnp.arange(group.count), some))
        for name, weight in found.items():
            _check_weight(name, weight, kinds.losses[name])
            dtype = jnp.promote_types(kinds.losses[name].dtype, jnp.float32)
            weights.setdefault(name, []).append(weight.astype(dtype))
    return {name: _normalised(call, jnp.concatenate(each)) for name, each in weights.items()}


def _check_weight(name: str, weight: Any, loss: Any) -> None:
    """Inside a `shard_map` a loss of all devices' rows has a weight of all devices' rows."""
    axes = ", ".join(map(repr, sorted(varying_axes(weight) - varying_axes(loss))))
    if axes:
        raise ValueError(
            f"The loss{f' {name!r}' if name else ''} is that of all devices along {axes}, and its weight is that of "
            f"one device's rows: it differs along {axes}. Return the sum of all of them, jax.lax.psum(weight, {axes})."
        )


def _normalised(call: Call, weights: Any) -> Any:
    # What can't be refused, as it is traced, makes loss and gradients NaN, as in `windowed`.
    weights = jnp.where(jnp.isfinite(weights) & (weights >= 0), weights, jnp.nan)
    total = call.of_all_devices(weights.sum())
    none = total == 0
    return jnp.where(none, jnp.ones_like(weights), weights * (len(weights) * call.devices) / jnp.where(none, 1, total))
