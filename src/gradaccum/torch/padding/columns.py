"""Padded rows: where their tokens are, and how columns of nothing but padding are cut off."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from gradaccum.on_torch.batch import Batch, has_rows, leaves, map_leaves
from gradaccum.sizes import Piece

__all__ = ["Left", "can_take_positions", "cut", "extents", "mask_of", "masks", "packed_rows", "trimmed"]

Left = Literal["cut", "number", "keep"]
"""What happens to padding on the left: cut off, cut off with the columns' numbers told to the model, or kept."""

IGNORED = -100
"""What `torch.nn.CrossEntropyLoss` and `transformers` ignore in labels."""


def masks(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The attention masks of a batch, with their paths: (rows, columns), not 0 where a token is."""
    for where, leaf in leaves(batch, path):
        if where.rstrip("']").endswith("attention_mask") and has_rows(leaf) and leaf.ndim == 2:
            yield where, leaf


def extents(batch: Any) -> list[tuple[int, int]]:
    """Of each row the column where its tokens begin, and the one after the last, by mask and by labels.

    Example:
        >>> extents({"attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])})
        [(0, 2), (1, 3), (0, 1)]
    """
    mask = mask_of(batch)
    counts = torch.as_tensor(mask) != 0
    for path, leaf in leaves(batch):
        if "label" in path and has_rows(leaf) and tuple(leaf.shape) == tuple(counts.shape):
            labels = torch.as_tensor(leaf)
            if not labels.is_floating_point():
                # A label that counts is never cut off, whatever the mask says; labels of 0 may be padding, or a class.
                counts = counts | ((labels != IGNORED) & (labels != 0)).to(counts.device)
    columns = counts.shape[1]
    positions = torch.arange(columns, device=counts.device)
    first = torch.where(counts, positions, columns).amin(1)
    last = torch.where(counts, positions + 1, 0).amax(1)
    empty = last == 0
    first, last = first.masked_fill(empty, 0), last.masked_fill(empty, 1)
    return list(zip(*torch.stack([first, last]).tolist(), strict=True))


def mask_of(batch: Any) -> Tensor:
    """The attention mask that says where tokens are: not a decoder's.

    Raises:
        ValueError: There is none; the message lists every path and shape.
    """
    found = list(masks(batch))
    for where, mask in found:
        if "decoder" not in where and "cross" not in where:
            return mask
    shapes = "".join(
        f"\n  batch{path}  shape {tuple(leaf.shape)}" for path, leaf in leaves(batch) if hasattr(leaf, "shape")
    )
    raise ValueError(
        "`max_tokens` needs an attention mask of shape (rows, columns) in the batch, under a key or field named "
        f"'attention_mask'. Received:{shapes}"
    )


def trimmed(batch: Any, start: int, stop: int, positions: bool = False) -> Any:
    """The batch with the columns from `start` up to `stop` alone: views, no copies.

    Cut are tensors of (rows, columns, ...) with as many columns as the attention mask, and masks of (..., columns,
    columns). What belongs to a decoder with a mask of its own stays as it is.

    Args:
        batch: A batch with an attention mask.
        start: The first column to keep.
        stop: The column after the last one to keep.
        positions: Say in `position_ids` which columns these are, for models that number what they get from 0.

    Example:
        >>> batch = {"attention_mask": torch.tensor([[0, 1, 1, 0]]), "x": torch.tensor([[5, 6, 7, 8]]), "kind": "text"}
        >>> trimmed(batch, 1, 3)
        {'attention_mask': tensor([[1, 1]]), 'x': tensor([[6, 7]]), 'kind': 'text'}
    """
    rows, columns = mask_of(batch).shape
    return cut(batch, rows, columns, start, stop, positions=positions)


def cut(batch: Any, rows: int, columns: int, start: int, stop: int, *, positions: bool = False) -> Any:
    """As `trimmed`, where the mask is known to have so many rows and columns."""
    if (start, stop) == (0, columns):
        return batch
    paths = iter([path for path, _ in leaves(batch)])

    def cut_one(leaf: Any) -> Any:
        path = next(paths)
        if not has_rows(leaf) or leaf.ndim < 2 or leaf.shape[0] != rows or "decoder" in path:
            return leaf
        square = "mask" in path or "bias" in path
        for dim in range(1, leaf.ndim):
            if leaf.shape[dim] == columns and (dim == 1 or square):
                leaf = leaf[(slice(None),) * dim + (slice(start, stop),)]
        return leaf

    new = map_leaves(cut_one, batch)
    return _with_positions(new, torch.arange(start, stop), rows) if positions else new


def packed_rows(batch: Batch, piece: Piece, left: Left) -> Batch:
    """The rows of a piece, with its columns alone."""
    assert piece.columns is not None
    start = piece.columns[0] if left != "keep" else 0
    columns = trimmed(batch.tree, start, piece.columns[1], positions=left == "number" and start > 0)
    return batch.like(columns).take(torch.tensor(piece.rows))


def can_take_positions(batch: Any, model: Any) -> bool:
    """Whether the model takes `position_ids`, and the batch, one mapping, has none."""
    parameters = inspect.signature(model.forward).parameters if hasattr(model, "forward") else {}
    mapping = _mapping(batch)
    return mapping is not None and "position_ids" not in mapping and "position_ids" in parameters


def _with_positions(batch: Any, positions: Tensor, rows: int) -> Any:
    mapping = _mapping(batch)
    assert mapping is not None
    new = copy.copy(mapping)
    new["position_ids"] = positions.to(mask_of(mapping).device).expand(rows, -1)
    return _replaced(batch, mapping, new)


def _replaced(tree: Any, old: Any, new: Any) -> Any:
    if tree is old:
        return new
    if not isinstance(tree, tuple):
        return tree
    items = [_replaced(item, old, new) for item in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)


def _mapping(batch: Any) -> Any:
    """The mapping among the arguments that holds the attention mask."""
    if isinstance(batch, Mapping):
        return batch if list(masks(batch)) else None
    found = [_mapping(item) for item in batch] if isinstance(batch, tuple) else []
    return next((mapping for mapping in found if mapping is not None), None)
