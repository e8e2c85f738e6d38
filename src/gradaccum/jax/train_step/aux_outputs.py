"""Combines the `aux` outputs of micro-batches: a row for each row, a sum, a mean, or the last one's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gradaccum.jax.batch import Group, spread, zeros
from gradaccum.jax.train_step.call import Call, Outcome

__all__ = ["AuxOutputs"]


class AuxOutputs:
    """The aux of all micro-batches."""

    def __init__(self, call: Call, groups: list[Group], kinds: Outcome) -> None:
        self.call = call
        self.groups = groups
        self.options = call.options
        self.kinds, self.structure = jax.tree.flatten(kinds.aux)
        self.hows = spread(self.options.aux, kinds.aux, "aux", "the aux of loss_fn") if self.kinds else []
        self._check(kinds)

    def _check(self, kinds: Outcome) -> None:
        if "mean" in self.hows and "" not in kinds.losses:
            raise ValueError(
                "aux='mean' is weighed as the loss, and `loss_fn` returns several, each with a weight of its own. Use "
                "'sum', or return it as one more loss with its weight, behind jax.lax.stop_gradient."
            )
        self._check_rows(self.kinds, self.groups[0].size, kinds)
        if any(self.groups[0].size in kind.shape[1:] for kind in self._those("concat", self.kinds)):
            # Its first axis may have as many entries by chance.
            last = self.groups[-1]
            self._check_rows(jax.tree.leaves(self.call.kinds(last).aux), last.size, kinds)

    def _check_rows(self, leaves: list[Any], size: int, kinds: Outcome) -> None:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(kinds.aux)[0]]
        lines = [
            f"  aux{path}: {tuple(kind.shape)}"
            for path, kind, how in zip(paths, leaves, self.hows)
            if how == "concat" and kind.shape[:1] != (size,)
        ]
        if lines:
            raise ValueError(
                f"aux='concat' needs a row for each row of the micro-batch, {size} here, in the first axis:\n"
                + "\n".join(lines)
                + "\nFor others say 'sum', 'mean' (weighed as the loss) or 'last': aux={...}, a prefix of the aux."
            )

    def _those(self, how: str, leaves: list[Any]) -> list[Any]:
        return [leaf for leaf, mine in zip(leaves, self.hows) if mine == how]

    def _dtype(self, dtype: Any, how: str) -> Any:
        """The dtype of a sum or a mean: a sum's own, as the large batch's, but for bools and narrow integers."""
        if how == "sum" and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4:
            return dtype  # which jnp.sum would make int64, where 64 bits are enabled
        one = jax.ShapeDtypeStruct((1,), dtype)
        return jax.eval_shape(jnp.sum if how == "sum" else jnp.mean, one).dtype

    def _widened(self, leaf: Any, how: str) -> Any:
        return leaf.astype(self.options.sum_dtype(self._dtype(leaf.dtype, how)))

    def of_one(self, aux: Any) -> Any:
        """The aux of a batch that is one micro-batch."""
        leaves = [
            leaf.astype(self._dtype(leaf.dtype, how)) if how in ("sum", "mean") else leaf
            for leaf, how in zip(map(jnp.asarray, jax.tree.leaves(aux)), self.hows)
        ]
        return jax.tree.unflatten(self.structure, leaves)

    def added(self, aux: Any, factors: dict[str, Any], group: Group) -> dict[str, Any]:
        """What one micro-batch adds to the sums; `last` is replaced."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(aux)]
        means = [self._widened(leaf, "mean") for leaf in self._those("mean", leaves)]
        if factors and means:
            (factor,) = factors.values()
            means = [jnp.where(factor == 0, jnp.zeros_like(leaf), leaf * factor.astype(leaf.dtype)) for leaf in means]
        return {
            "sums": [self._widened(leaf, "sum") for leaf in self._those("sum", leaves)],
            "means": means,
            "last": self._those("last", leaves) if group is self.groups[-1] else [],
        }

    def start(self) -> dict[str, Any]:
        """Zeros for the sums."""

        def of(how: str) -> list[Any]:
            kinds = self._those(how, self.kinds)
            return [zeros(kind, self.options.sum_dtype(self._dtype(kind.dtype, how))) for kind in kinds]

        return {"sums": of("sum"), "means": of("mean")}

    def last(self, group: Group) -> list[Any]:
        """Zeros in place of the last micro-batch's, if it is of this group."""
        if group is not self.groups[-1] or "last" not in self.hows:
            return []
        kinds = self.call.kinds(group).aux if group.size != self.groups[0].size else self.kinds
        return [zeros(kind) for kind in self._those("last", jax.tree.leaves(kinds))]

    def rows(self, aux: Any, group: Group) -> list[Any]:
        """What has a row for each row of this micro-batch."""
        return self._those("concat", [jnp.asarray(leaf) for leaf in jax.tree.leaves(aux)])

    def finished(self, sums: dict[str, Any], parts: list[Any]) -> Any:
        """The aux of the whole batch."""
        found = {
            "sum": iter(sums["sums"]),
            "mean": iter(sums["means"]),
            "last": iter(sums["last"]),
            "concat": iter([self.call.batch.joined(list(each)) for each in zip(*parts)]),
        }
        leaves = []
        for kind, how in zip(self.kinds, self.hows):
            leaf = next(found[how])
            leaves.append(leaf.astype(self._dtype(kind.dtype, how)) if how in ("sum", "mean") else leaf)
        return jax.tree.unflatten(self.structure, leaves)
