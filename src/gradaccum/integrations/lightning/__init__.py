"""Lightning's Trainer: its own accumulation, with every window divided by what it really weighs."""

from gradaccum.extras import require

require("lightning")

from gradaccum.integrations.lightning.callback import GradientAccumulation

__all__ = ["GradientAccumulation"]
