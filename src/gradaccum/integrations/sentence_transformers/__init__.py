"""sentence-transformers: embeddings of micro-batches, and a loss over the whole batch's in tiles."""

from gradaccum.extras import require
from gradaccum.lazy import listed

require("sentence_transformers")

from gradaccum.integrations.sentence_transformers.loss import ChunkedMultipleNegativesRankingLoss

__all__ = ["ChunkedMultipleNegativesRankingLoss"]

__dir__ = listed(__name__)
