"""A wrapped optimizer for Accelerate's Accelerator, with its loss scale, clipping and checkpoints."""

from gradaccum.extras import require
from gradaccum.lazy import listed

require("accelerate")

from gradaccum.integrations.accelerate.prepared import PreparedOptimizer, prepare_optimizer

__all__ = ["PreparedOptimizer", "prepare_optimizer"]

__dir__ = listed(__name__)
