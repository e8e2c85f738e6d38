"""sentence-transformers: embeddings of micro-batches, and a loss over the whole batch's in tiles."""

from __future__ import annotations

from gradaccum.extras import require

require("sentence_transformers")

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score, similarity_fct_name
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradaccum.integrations.trainer import replaced
from gradaccum.lazy import listed
from gradaccum.schedule import checked_count
from gradaccum.torch import chunked
from gradaccum.torch.losses import info_nce

__all__ = ["ChunkedMultipleNegativesRankingLoss"]

__dir__ = listed(__name__)

logger = logging.getLogger("gradaccum")

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]


class ChunkedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """`CachedMultipleNegativesRankingLoss` on `chunked` and `info_nce`: the same arguments, loss and gradients.

    Texts are embedded in micro-batches, which backward computes again with the same dropout, and the similarities of
    all queries and documents are computed in tiles. Hooks, `GradScaler`, `torch.autograd.grad` and
    DistributedDataParallel see the large batch's gradients, as `loss.backward()` is an ordinary backward pass.

    Args:
        model: A `SentenceTransformer`.
        scale: Factor of the similarities, one over the temperature.
        similarity_fct: `cos_sim` or `dot_score` run in tiles; any other function of two lists of embeddings needs the
            whole matrix in memory.
        mini_batch_size: The largest number of texts in a micro-batch.
        mini_batch_num_tokens: In its place, the largest number of padded tokens in a micro-batch: texts are sorted by
            length, trimmed and packed.
        gather_across_devices: Compare the texts of all ranks, which may differ in rows. The loss is the same on each
            rank.
        directions: What is compared. `("query_to_doc",)`, and `("query_to_doc", "doc_to_query")` with
            `partition_mode="per_direction"`, run in tiles; others need the whole matrix in memory.
        partition_mode: `"joint"`, or `"per_direction"`: a softmax for each direction.
        show_progress_bar: Accepted, but has no effect.
        hardness_mode: As in sentence-transformers; any but None needs the whole matrix in memory.
        hardness_strength: Its strength.
        tile: Queries and documents whose similarities are in memory at a time.

    Raises:
        TypeError, ValueError: An argument is invalid; in a call, there are fewer than two columns, or a column without
            a row for each text.

    Example:
        >>> loss = ChunkedMultipleNegativesRankingLoss(model, mini_batch_size=64)            # doctest: +SKIP
        >>> trainer = SentenceTransformerTrainer(model=model, train_dataset=data, loss=loss)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        show_progress_bar: bool = False,
        hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = None,
        hardness_strength: float = 0.0,
        *,
        tile: int = 1024,
    ) -> None:
        super().__init__(  # it checks these, and is the loss where there are no tiles
            model,  # type: ignore[arg-type]  # a SentenceTransformer, or a trainer's wrapper of one
            scale=scale,
            similarity_fct=similarity_fct,
            gather_across_devices=gather_across_devices,
            directions=directions,
            partition_mode=partition_mode,
            hardness_mode=hardness_mode,
            hardness_strength=hardness_strength,
        )
        self.mini_batch_size = checked_count(mini_batch_size, "mini_batch_size")
        self.mini_batch_num_tokens = mini_batch_num_tokens
        if mini_batch_num_tokens is not None:
            checked_count(mini_batch_num_tokens, "mini_batch_num_tokens")
        self.show_progress_bar = show_progress_bar
        self.tile = checked_count(tile, "tile")
        self._chunked: dict[Any, Any] = {}
        if not self._in_tiles:
            logger.info(
                "ChunkedMultipleNegativesRankingLoss holds the whole matrix of similarities: directions=%r with "
                "partition_mode=%r, similarity_fct=%s and hardness_mode=%r are not computed in tiles.",
                directions,
                partition_mode,
                similarity_fct_name(similarity_fct),
                hardness_mode,
            )

    @property
    def _in_tiles(self) -> bool:
        directions = set(self.directions)
        both = directions == {"query_to_doc", "doc_to_query"} and self.partition_mode == "per_direction"
        is_hardened = self.hardness_mode is not None and self.hardness_strength > 0
        is_known = self.similarity_fct in (cos_sim, dot_score) and not is_hardened
        return is_known and (both or directions == {"query_to_doc"})

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ValueError(f"Expected at least 2 inputs, got {len(columns)}")
        if any("cu_seq_lens_q" in features for features in columns):
            raise ValueError(
                "Flattened texts (DataCollatorWithFlattening) have no row for each text, so they can't be cut into "
                "micro-batches. Leave them padded, and pass `mini_batch_num_tokens`, which cuts padding off."
            )
        rows = self.mini_batch_size if self.mini_batch_num_tokens is None else sys.maxsize
        embeddings = _embedded(self.model, columns, rows, self.mini_batch_num_tokens, self._chunked)
        if not self._in_tiles:
            return self.compute_loss_from_embeddings(embeddings, labels)  # type: ignore[arg-type]  # unused there
        queries, documents = embeddings[0], torch.cat(embeddings[1:])
        if len(documents) < len(queries):
            raise ValueError(
                "Text i of the first column and text i of the second are a pair, so there must be at least as many "
                f"documents as queries. Received: columns of {', '.join(str(len(e)) for e in embeddings)} texts."
            )
        if self.similarity_fct is cos_sim:
            queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
        spans_ranks = self.gather_across_devices and dist.is_available() and dist.is_initialized()
        return info_nce(
            queries,
            documents,
            temperature=1 / self.scale,
            tile=self.tile,
            symmetric=len(set(self.directions)) > 1,
            group=dist.group.WORLD if spans_ranks else None,
        )

    def get_config_dict(self) -> dict[str, Any]:
        """The loss's entry in a model card."""
        sizes = {name: getattr(self, name) for name in ("mini_batch_size", "mini_batch_num_tokens", "tile")}
        return {**super().get_config_dict(), **sizes}

    @property
    def citation(self) -> str:
        """The loss's citation in a model card."""
        return super().citation

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunked": {}}  # found by identity


# The columns of a batch, embedded in micro-batches by the model that the trainer has wrapped.


class _Embedding(nn.Module):
    """A sentence transformer that returns the embedding of each text, and nothing of its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any]) -> Tensor:
        return self.model(dict(features))["sentence_embedding"]  # a copy, to which the model adds its outputs


class _Columns(nn.Module):
    """All columns in one forward pass, which is what DistributedDataParallel expects of a backward pass."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, columns: list[dict[str, Any]]) -> list[Tensor]:
        return [self.embedding(features) for features in columns]


def _embedded(
    model: nn.Module, columns: list[dict[str, Any]], rows: int, max_tokens: int | None, known: dict[Any, Any]
) -> list[Tensor]:
    """The embeddings of each column; `known` has the chunked models of earlier calls, which have proven themselves."""
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    for layer in {model, inside}:
        kind = type(vars(layer).get("forward"))
        if kind.__module__.startswith("sentence_transformers."):
            raise ValueError(
                f"A {kind.__name__} replaces the model's forward while the loss is computed, as MatryoshkaLoss and "
                "AdaptiveLayerLoss do. The replacement is gone when backward computes the embeddings again. Use "
                "sentence-transformers' own CachedMultipleNegativesRankingLoss inside of them."
            )
    key = id(inside), rows, max_tokens
    if key not in known:
        known.clear()
        known[key] = chunked(_Embedding(inside), rows, max_tokens=max_tokens)
    wrapper = _Columns(known[key])
    if inside is model:
        return wrapper(columns)
    with replaced(model, module=wrapper):  # by a module of the same parameters, for a forward pass
        return model(columns)
