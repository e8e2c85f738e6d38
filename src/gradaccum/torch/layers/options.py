"""What goes together with `blocks`, and what doesn't."""

from __future__ import annotations

from typing import Any

__all__ = ["check_options"]


def check_options(blocks: Any, *, batch_norm: str, noise_scale: bool) -> None:
    """Whether these options of a `TrainStep` go together.

    Raises:
        ValueError: They don't.
    """
    if blocks is None:
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
