"""Padded rows laid one behind the other, for models that keep them apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.batch import has_rows, leaves, map_leaves
from gradaccum.torch.padding.columns import IGNORED, extents, mask_of, masks, text_of

__all__ = ["causal_lm"]


def causal_lm(batch: Any, rows: Sequence[Sequence[int]]) -> Any:
    """Lay padded rows one behind the other, for causal language models of `transformers`.

    In place of the attention mask the model gets `position_ids`, which begin anew at each row: transformers (4.53 or
    newer, with "sdpa", "eager", "flex_attention" or flash attention) reads from them where rows begin. A row's first
    label is set to -100, as a causal model predicts it from nothing. `use_cache` is False: with a cache transformers
    would let rows see those before them. For `pack` of `TrainStep`, which proves that the model keeps rows apart.

    Args:
        batch: A mapping with an `attention_mask` of (rows, columns). What has a column for each token is packed, what
            has no rows stays.
        rows: Of each packed row, the rows that it holds.

    Returns:
        The mapping with (packed rows, columns of the fullest) in place of (rows, columns).

    Raises:
        TypeError: The batch is no mapping.
        ValueError: A mask has holes, something has rows and no columns, or a row's first label counts behind padding.

    Example:
        >>> ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
        >>> packed = causal_lm({"input_ids": ids, "attention_mask": (ids > 0).long()}, [[0, 1]])
        >>> packed["input_ids"], packed["position_ids"], packed["attention_mask"]
        (tensor([[5, 6, 7]]), tensor([[0, 1, 0]]), None)
    """
    if not isinstance(batch, Mapping) or not any(value is mask_of(batch) for value in batch.values()):
        raise TypeError(
            "causal_lm packs a flat mapping such as {'input_ids': ..., 'attention_mask': ..., 'labels': ...}, the only "
            f"argument of the step. Received: {type(batch).__name__}. Write pack(batch, rows) for other batches."
        )
    mask, spans = mask_of(batch), extents(batch)
    count, columns = mask.shape
    text = text_of(batch, count, columns)
    _check(batch, mask, spans, text)
    # None begins in the column after the one before it: their positions would go on.
    packs = [sorted(pack, key=lambda row: -spans[row][0]) for pack in rows]
    of_row, of_column, positions, first = _places(packs, spans, columns)

    def laid(path: str, leaf: Any) -> Any:
        if path not in text:
            return leaf
        taken = leaf[of_row.to(leaf.device), of_column.to(leaf.device)]
        return taken.masked_fill(first.to(leaf.device) != 0, IGNORED) if "label" in path else taken

    packed: Any = copy.copy(batch) if not isinstance(batch, dict) else dict(batch)
    for name, value in batch.items():
        paths = iter([path for path, _ in leaves(value, f"[{name!r}]")])
        packed[name] = None if value is mask else map_leaves(lambda leaf, paths=paths: laid(next(paths), leaf), value)
    if "position_ids" not in batch:
        packed["position_ids"] = positions.to(mask.device)
    packed["use_cache"] = False
    return packed


def _places(packs: Sequence[list[int]], spans: Sequence[tuple[int, int]], columns: int) -> tuple[Tensor, ...]:
    """Of each packed column: its row, its column there, its position, and whether a row begins."""
    width = max(sum(spans[row][1] - spans[row][0] for row in pack) for pack in packs)
    of_row, of_column, positions, first = (torch.zeros(len(packs), width, dtype=torch.long) for _ in range(4))
    for number, pack in enumerate(packs):
        at = 0
        for row in pack:
            start, stop = spans[row]
            until = at + stop - start
            of_row[number, at:until], of_column[number, at:until] = row, torch.arange(start, stop)
            first[number, at] = 1
            at = until
        if at < width:  # what is left shows padding of its last row, and begins a row, too
            of_row[number, at:], of_column[number, at:] = row, stop if stop < columns else start - 1
            positions[number, at:] = torch.arange(width - at) - of_column[number, at:]
            first[number, at:] = 1
    return of_row, of_column, positions + of_column, first


def _check(batch: Any, mask: Tensor, spans: list[tuple[int, int]], text: frozenset[str]) -> None:
    count, columns = mask.shape
    filled = (torch.as_tensor(mask) != 0).cpu()
    others = [path for path, _ in masks(batch)]
    if len(others) > 1:
        raise ValueError(f"causal_lm packs batches of one attention mask. Received: {', '.join(others)}.")
    for row, (start, stop) in enumerate(spans):
        if not filled[row, start:stop].all():
            raise ValueError(
                f"causal_lm lays a row's tokens one behind the other. Received: row {row} of a micro-batch with a mask "
                f"of 0 or a label on padding between its columns {start} and {stop}. Mark padding with -100 in the "
                "labels, or leave out `pack`."
            )
    for path, leaf in leaves(batch):
        if path not in text and has_rows(leaf) and len(leaf.shape) > 0 and leaf.shape[0] == count:
            raise ValueError(
                f"causal_lm packs what has a column for each token. Received: batch{path} of shape "
                f"{tuple(leaf.shape)} beside a mask of shape {(count, columns)}. Write pack(batch, rows) of your own."
            )
        if "label" in path and path in text and leaf.ndim == 2:
            for row, (start, _) in enumerate(spans):
                if start > 0 and leaf[row, start] != IGNORED:
                    raise ValueError(
                        f"Row {row} of a micro-batch begins behind padding, from which a causal model predicts its "
                        "first label. Packed, there is no padding: set the first label of such rows to -100."
                    )
