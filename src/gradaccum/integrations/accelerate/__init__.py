"""Accelerate: a wrapped optimizer that an Accelerator knows, with its loss scale, its clipping and its files."""

from gradaccum.extras import require
from gradaccum.lazy import listed

require("accelerate")

from gradaccum.integrations.accelerate.prepared import PreparedOptimizer, prepare_optimizer

__all__ = ["PreparedOptimizer", "prepare_optimizer"]

__dir__ = listed(__name__)
