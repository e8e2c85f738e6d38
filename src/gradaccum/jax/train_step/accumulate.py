"""The sums over micro-batches: two scans at most, one for each size, that hold one micro-batch's activations each.

What a micro-batch gives is a list of leaves: its losses, gradients and aux. A `_Way` says of each how those of all
micro-batches are put together: as their mean, their sum, their rows behind each other, or the last one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.core.noise import Norms
from gradaccum.jax.batch import Group, as_varying, like, over, spread, squared_norm, varying_axes, zeros
from gradaccum.jax.train_step.call import Call, Outcome


def accumulated(call: Call, micro_batch_size: int) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
    """The losses by name, the new state, the aux and the gradients of the whole batch; and its norms, if asked for."""
    groups = call.batch.groups(max(micro_batch_size // call.devices, 1))
    accumulation = _Accumulation(call, groups)  # an error of the loss itself comes before anything is said of it
    if call.options.verification is not None and not accumulation.is_plain:
        call.options.verification.look(call, tuple(sorted({call.batch.rows, *(group.size for group in groups)})))
    return accumulation.run()


class _Way(NamedTuple):
    """How a leaf of all micro-batches is put together."""

    how: str  # "mean", "sum", "concat" or "last"
    kind: Any  # its shape in a micro-batch, and its dtype
    dtype: Any = None  # what it is summed in; None: its own
    result: Any = None  # the dtype of the result; None: its own
    factor: str | None = None  # the loss whose factor it is multiplied by
    axis: int = 0  # where its rows are
    parameter: Any = None  # what it is the gradient of


class _First(NamedTuple):
    """The first micro-batch of nonzero weight, for the noise scale: its gradient's squared norm, and its rows."""

    squared: Any
    rows: Any


class _Accumulation:
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
        self.factors = {} if self.is_plain else _factors_of(call, groups, kinds, self.state, self.keys)
        self.given = tuple(call.args[number] for number in self.options.differentiated)
        varying = varying_axes(kinds.losses)
        self.varying = tuple(sorted(varying | varying_axes((call.batch.leaves, self.given))))
        self.call = call
        for number, argument in zip(self.options.differentiated, self.given):
            if number not in self.options.batches:
                # Else each micro-batch's gradients would be summed over the devices of an enclosing `shard_map`.
                self.call = self.call.replaced(number, as_varying(jax.tree.map(jnp.asarray, argument), varying))
        how, sum_dtype = self.options.reduction, self.options.sum_dtype
        self.ways = [_Way(how, kind, sum_dtype(kind.dtype), kind.dtype, name) for name, kind in kinds.losses.items()]
        inside = jax.tree.leaves(tuple(self.call.args[number] for number in self.options.differentiated))
        for leaf, one, axis in zip(jax.tree.leaves(self.given), inside, _axes(call)):
            dtype = jnp.result_type(leaf)
            way = _Way("concat", jax.typeof(one), sum_dtype(dtype), dtype, None, axis or 0, leaf)
            self.ways.append(way._replace(how=how) if axis is None else way)
        self.ways += _ways_of_aux(call, groups, kinds)
        self.summed = [way for way in self.ways if way.how in ("mean", "sum")]

    def run(self) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
        sums = self._placed([zeros(way.kind, way.dtype) for way in self.summed])
        first = self._first(*jnp.zeros(2, jnp.result_type(float))) if self.options.noise_scale else None
        carry: Any = sums, self.state, [], first
        (sums, state, last, first), parts = over(
            self.groups, self._visit, carry, (self.keys, self.factors), self._entered
        )
        return self._finished(sums, last, state, parts, first)

    def _entered(self, carry: Any, group: Group) -> Any:
        """The sums as if all micro-batches so far had been of this group's size; and places for the last one's aux."""
        sums, state, last, first = carry
        if group is not self.groups[0]:
            units = [self._unit(self.groups[0], way) / self._unit(group, way) for way in self.summed]
            sums = list(map(_scaled, sums, units))
        if group is self.groups[-1] and any(way.how == "last" for way in self.ways):
            kinds = jax.tree.leaves((self.kinds if group.size == self.groups[0].size else self.call.kinds(group)).aux)
            last = [zeros(kind) for way, kind in zip(self.ways[-len(kinds) :], kinds) if way.how == "last"]
        return sums, state, last, first

    def _visit(self, carry: Any, group: Group, index: Any, x: Any) -> tuple[Any, list[Any]]:
        """A micro-batch: what it adds to the sums, the new state, its last leaves and `first`; and its rows."""
        (sums, state, _, first), (key, factors) = carry, x
        micro_batch = self.call.batch.micro_batch(group, index)
        outcome, gradients = _gradients(self.call, self.call.arguments(micro_batch, state, key), factors)
        losses = [outcome.losses[name] for name in self.kinds.losses]
        found: dict[str, list[Any]] = {"mean": [], "last": [], "concat": []}
        found["sum"] = found["mean"]
        for way, leaf in zip(self.ways, [*losses, *jax.tree.leaves(gradients), *jax.tree.leaves(outcome.aux)]):
            leaf = jnp.asarray(leaf) if way.dtype is None else jnp.asarray(leaf).astype(way.dtype)
            found[way.how].append(leaf if way.factor is None else _times(factors.get(way.factor), leaf))
        if first is not None:
            first = self._seen(first, self._of_parameters(found["sum"]), factors, group)
        sums = self._placed(list(map(jnp.add, sums, found["sum"])))
        last = found["last"] if group is self.groups[-1] else []
        return (sums, self.call.state_like(outcome.state, self.kinds.state), last, first), found["concat"]

    def _placed(self, sums: list[Any]) -> list[Any]:
        pairs = zip(self.summed, sums)
        return [leaf if way.parameter is None else like(way.parameter, leaf) for way, leaf in pairs]

    def _of_parameters(self, sums: list[Any]) -> list[Any]:
        return [leaf for way, leaf in zip(self.summed, sums) if way.parameter is not None]

    def _unit(self, group: Group, way: _Way) -> float:
        """What the sums of a group are to be multiplied by."""
        is_gradient = way.parameter is not None and self.options.reduction == "mean"
        if way.how != "mean" and not is_gradient:
            return 1.0
        part = 1 / self.count if self.factors else group.size / self.call.batch.rows
        return part / self.call.devices

    def _finished(self, sums: Any, last: Any, state: Any, parts: list[Any], first: Any) -> tuple[Any, ...]:
        units = [self._unit(self.groups[-1], way) for way in self.summed]
        sums = self.call.of_all_devices(list(map(_scaled, sums, units)))
        norms = None if first is None else self._norms(first, self._of_parameters(sums))
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
        return losses, state, aux, gradients, norms

    # The noise scale: the norms of the first micro-batch's gradient and of the whole batch's.

    def _first(self, squared: Any, rows: Any) -> _First:
        return as_varying(_First(squared, rows), self.varying)

    def _seen(self, first: _First, gradients: list[Any], factors: dict[str, Any], group: Group) -> _First:
        """After a micro-batch of this group with these gradients, times these factors."""
        counts: Any = True
        multiple: Any = 1
        if not factors:
            multiple = group.size if self.options.reduction == "sum" else 1
        elif len(factors) == 1:
            (factor,) = factors.values()
            counts, multiple = factor > 0, jnp.where(factor > 0, factor, 1)
        else:  # by the denominators of the whole batch: an estimate of the mean gradient
            counts = jnp.any(jnp.stack([factor > 0 for factor in factors.values()]))
            multiple = self.count * group.size / self.call.batch.rows

        def measured() -> _First:
            squared = squared_norm(gradients) / jnp.asarray(multiple, jnp.result_type(float)) ** 2
            return self._first(squared, jnp.asarray(group.size, jnp.result_type(float)))

        return jax.lax.cond((first.rows == 0) & counts, measured, lambda: first)

    def _norms(self, first: _First, gradients: list[Any]) -> Norms:
        rows, of_all = self.call.batch.rows * self.call.devices, self.call.of_all_devices
        squared, size = first
        if self.call.axes:  # each device has measured a micro-batch of its own
            some = size > 0
            measured = of_all(some.astype(size.dtype))
            squared = of_all(jnp.where(some, squared, 0)) / measured
            size = measured / of_all(jnp.where(some, 1 / jnp.where(some, size, 1), 0))
        of_mean = squared_norm(gradients) / (rows**2 if self.options.reduction == "sum" else 1)
        return Norms(squared, size, of_mean, jnp.asarray(rows, size.dtype))


def _ways_of_aux(call: Call, groups: list[Group], kinds: Outcome) -> list[_Way]:
    """How the aux of micro-batches is put together, checked."""
    leaves = jax.tree.leaves(kinds.aux)
    hows = spread(call.options.aux, kinds.aux, "aux", "the aux of loss_fn") if leaves else []
    if "mean" in hows and "" not in kinds.losses:
        raise ValueError(
            "aux='mean' is weighed as the loss, and `loss_fn` returns several, each with a weight of its own. Use "
            "'sum', or return it as one more loss with its weight, behind jax.lax.stop_gradient."
        )

    def check(kinds: Any, size: int) -> None:
        lines = [
            f"  aux{jax.tree_util.keystr(path)}: {tuple(kind.shape)}"
            for (path, kind), how in zip(jax.tree_util.tree_flatten_with_path(kinds)[0], hows)
            if how == "concat" and kind.shape[:1] != (size,)
        ]
        if lines:
            raise ValueError(
                f"aux='concat' needs a row for each row of the micro-batch, {size} here, in the first axis:\n"
                + "\n".join(lines)
                + "\nFor others say 'sum', 'mean' (weighed as the loss) or 'last': aux={...}, a prefix of the aux."
            )

    check(kinds.aux, groups[0].size)
    if any(how == "concat" and groups[0].size in kind.shape[1:] for how, kind in zip(hows, leaves)):
        check(call.kinds(groups[-1]).aux, groups[-1].size)  # its first axis may have as many entries by chance
    ways = []
    for how, kind in zip(hows, leaves):
        result = None
        if how in ("sum", "mean"):
            one = jax.ShapeDtypeStruct((1,), kind.dtype)
            result = jax.eval_shape(jnp.sum if how == "sum" else jnp.mean, one).dtype
            if how == "sum" and jnp.issubdtype(kind.dtype, jnp.integer) and kind.dtype.itemsize >= 4:
                result = kind.dtype  # which jnp.sum would make int64, where 64 bits are enabled
        dtype = None if result is None else call.options.sum_dtype(result)
        ways.append(_Way(how, kind, dtype, result, "" if how == "mean" else None))
    return ways


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
            "noise_scale=True measures gradients that are summed over rows, but `argnums` names only the batch. "
            f"Received: argnums={options.argnums}, batch_argnums={options.batch_argnums}."
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

    def weigh(state: Any, group: Group, index: Any, key: Any) -> tuple[Any, dict[str, Any]]:
        values = call.arguments(call.batch.micro_batch(group, index), state, key)
        if call.options.weight is not None:
            return state, {"": call.weight(values)}
        outcome = call.outcome(values)
        return call.state_like(outcome.state, kinds.state), outcome.weights

    weights: dict[str, Any] = {}
    _, parts = over(groups, weigh, state, keys)
    for name in parts[0]:
        found = [part[name] for part in parts]
        _check_weight(name, found[0], kinds.losses[name])
        dtype = jnp.promote_types(kinds.losses[name].dtype, jnp.float32)
        weights[name] = _normalised(call, jnp.concatenate([each.astype(dtype) for each in found]))
    return weights


def _check_weight(name: str, weight: Any, loss: Any) -> None:
    """Inside a `shard_map` a loss of all devices' rows has a weight of all devices' rows."""
    axes = ", ".join(map(repr, sorted(varying_axes(weight) - varying_axes(loss))))
    if axes:
        raise ValueError(
            f"The loss{f' {name!r}' if name else ''} covers all devices along {axes}, but its weight covers one "
            f"device's rows: it differs along {axes}. Return the sum over the devices, jax.lax.psum(weight, {axes})."
        )


def _normalised(call: Call, weights: Any) -> Any:
    # What can't be refused, as it is traced, makes loss and gradients NaN, as in `windowed`.
    weights = jnp.where(jnp.isfinite(weights) & (weights >= 0), weights, jnp.nan)
    total = call.of_all_devices(weights.sum())
    none = total == 0
    return jnp.where(none, jnp.ones_like(weights), weights * (len(weights) * call.devices) / jnp.where(none, 1, total))
