"""What goes together with `blocks`, and what doesn't."""

from __future__ import annotations

from typing import Any, Literal, get_args

from gradaccum.on_torch.arguments import checked_choice

__all__ = ["UpdateChoice", "check_in_backward", "check_options"]


UpdateChoice = Literal["after_backward", "in_backward"]
"""When parameters are updated: all of them after the backward pass, or each block's as soon as its gradient is in."""


def check_options(blocks: Any, update: Any, blocks_on: Any, *, batch_norm: str, noise_scale: bool) -> None:
    """Whether these options of a `TrainStep` go together.

    Raises:
        ValueError: They don't.
    """
    checked_choice("update", update, get_args(UpdateChoice))
    if blocks is None:
        if blocks_on is not None:
            raise ValueError("`blocks_on` says where blocks live. Pass `blocks` as well, such as model.layers.")
        if update == "in_backward":
            raise ValueError(
                "update='in_backward' updates block by block. Pass `blocks` as well, such as blocks=model.layers."
            )
        return
    if batch_norm == "exact":
        raise ValueError(
            '`blocks` runs the model in micro-batches, and batch_norm="exact" all rows at once. Leave out one of them.'
        )
    if noise_scale:
        raise ValueError(
            "noise_scale=True compares the gradient of a micro-batch with that of the batch, and with `blocks` no "
            "micro-batch's gradient is ever complete by itself. Leave out one of them."
        )


def check_in_backward(*, closure: str | None, searched: bool, several: bool) -> None:
    """Whether a block can be updated before the gradients of the others are known.

    Args:
        closure: The name of an optimizer that evaluates a closure, if there is one.
        searched: Whether the size of micro-batches is searched for.
        several: Whether other ranks have the same parameters.

    Raises:
        ValueError: It can't; the message says why.
    """
    for wrong, why in (
        (closure, f"{closure} evaluates a closure, which needs all gradients and all parameters as they were"),
        (searched, "a size of micro-batches is searched for by their whole passes: give a `micro_batch_size` in rows"),
        (
            several,
            "several ranks of a replicated model reduce their gradients when all are there; fully_shard with a mesh of "
            "(ranks, 1) replicates it, too, and reduces by blocks",
        ),
    ):
        if wrong:
            raise ValueError(
                f"update='in_backward' frees each gradient before the next is known, and {why}. Use "
                "update='after_backward', or leave that out."
            )
