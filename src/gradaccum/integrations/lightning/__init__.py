"""Exact gradient accumulation in Lightning's Trainer."""

from gradaccum.extras import require

require("lightning")

from gradaccum.integrations.lightning.callback import GradientAccumulation

__all__ = ["GradientAccumulation"]
