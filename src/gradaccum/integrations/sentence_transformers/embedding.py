"""The columns of a batch, embedded in micro-batches by the model that the trainer has wrapped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import chunked

__all__ = ["embedded"]


class Embedding(nn.Module):
    """A sentence transformer that returns the embedding of each text, and nothing of its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any]) -> Tensor:
        return self.model(dict(features))["sentence_embedding"]  # a copy, to which the model adds its outputs


class Columns(nn.Module):
    """All columns in one forward pass, which is what DistributedDataParallel expects of a backward pass."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, columns: list[dict[str, Any]]) -> list[Tensor]:
        return [self.embedding(features) for features in columns]


def embedded(
    model: nn.Module, columns: list[dict[str, Any]], rows: int, max_tokens: int | None, known: dict[Any, Any]
) -> list[Tensor]:
    """The embeddings of each column.

    Args:
        model: A sentence transformer, in DistributedDataParallel or not.
        columns: The features of each column of texts.
        rows: Of a micro-batch, at most.
        max_tokens: Padded tokens of a micro-batch, at most; or None.
        known: The chunked models of earlier calls, which have proven themselves.

    Raises:
        ValueError: The model's `forward` is that of another loss for the time being.
    """
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    for layer in {model, inside}:
        replaced = type(vars(layer).get("forward"))
        if replaced.__module__.startswith("sentence_transformers."):
            raise ValueError(
                f"A {replaced.__name__} stands in the place of the model's forward while the loss is computed, as "
                "MatryoshkaLoss and AdaptiveLayerLoss put it there. It is gone when backward computes the embeddings "
                "again. Use sentence-transformers' own CachedMultipleNegativesRankingLoss inside of them."
            )
    key = id(inside), rows, max_tokens
    if key not in known:
        known.clear()
        known[key] = chunked(Embedding(inside), rows, max_tokens=max_tokens)
    wrapper = Columns(known[key])
    if inside is model:
        return wrapper(columns)
    with _in_place_of(model, wrapper):
        return model(columns)


@contextlib.contextmanager
def _in_place_of(parallel: nn.Module, module: nn.Module) -> Iterator[None]:
    """What DistributedDataParallel wraps, replaced for a forward pass by a module of the same parameters."""
    inside = parallel._modules["module"]
    parallel._modules["module"] = module
    try:
        yield
    finally:
        parallel._modules["module"] = inside
