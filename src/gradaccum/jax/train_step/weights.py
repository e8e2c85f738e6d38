"""What the losses of micro-batches are means over, if not their rows: a factor for each loss of each micro-batch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from gradaccum.jax.batch import Group, over, varying_axes
from gradaccum.jax.train_step.call import Call, Outcome


def factors_of(call: Call, groups: list[Group], kinds: Outcome, state: Any, keys: Any) -> dict[str, Any]:
    """For each loss by name, n * w_i / sum_i w_i for each of the n micro-batches.

    They are known before the first gradient is computed, so that several losses need one backward pass. The weights
    that the loss function returns itself take a pass of which the compiler keeps what they depend on: a mask, mostly.
    Where all of them are 0, the micro-batches count alike: the large batch's loss is 0 / 0, too, or has its own answer.
    """

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
