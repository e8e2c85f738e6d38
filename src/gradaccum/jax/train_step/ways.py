"""How the leaves that micro-batches give are put together: as their mean, their sum, their rows, or the last one's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.jax.batch import Group, spread
from gradaccum.jax.train_step.call import Call, Outcome


class Way(NamedTuple):
    """How a leaf of all micro-batches is put together."""

    how: str  # "mean", "sum", "concat" or "last"
    kind: Any  # its shape in a micro-batch, and its dtype
    dtype: Any = None  # what it is summed in; None: its own
    result: Any = None  # the dtype of the result; None: its own
    factor: str | None = None  # the loss whose factor it is multiplied by
    axis: int = 0  # where its rows are
    parameter: Any = None  # what it is the gradient of


def ways_of_aux(call: Call, groups: list[Group], kinds: Outcome) -> list[Way]:
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
        ways.append(Way(how, kind, dtype, result, "" if how == "mean" else None))
    return ways
