"""Exact gradient accumulation in Lightning's Trainer."""

from gradaccum.extras import require
from gradaccum.lazy import listed

require("lightning")

from gradaccum.integrations.lightning.callback import GradientAccumulation

__all__ = ["GradientAccumulation"]

__dir__ = listed(__name__)
