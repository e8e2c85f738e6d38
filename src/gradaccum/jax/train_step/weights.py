"""What each micro-batch counts for, where its loss is a mean over something else than rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gradaccum.jax.batch import Group
from gradaccum.jax.train_step.call import Call, Outcome

__all__ = ["factors_of"]


def factors_of(call: Call, groups: list[Group], kinds: Outcome, state: Any, keys: Any) -> dict[str, Any]:
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

        state, found = jax.lax.scan(weigh, state, (jnp.arange(group.count), some))
        for name, weight in found.items():
            dtype = jnp.promote_types(kinds.losses[name].dtype, jnp.float32)
            weights.setdefault(name, []).append(weight.astype(dtype))
    return {name: _normalised(call, jnp.concatenate(each)) for name, each in weights.items()}


def _normalised(call: Call, weights: Any) -> Any:
    # What can't be refused, as it is traced, makes loss and gradients NaN, as in `windowed`.
    weights = jnp.where(jnp.isfinite(weights) & (weights >= 0), weights, jnp.nan)
    total = call.of_all_devices(weights.sum())
    none = total == 0
    return jnp.where(none, jnp.ones_like(weights), weights * (len(weights) * call.devices) / jnp.where(none, 1, total))
