"""Padded rows: sorted, packed, rid of columns of nothing but padding, or laid one behind the other."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradaccum.core.sizes import Slice, TokenBudget, Tokens
from gradaccum.on_torch.batch import Batch, has_rows, leaves, map_leaves

Left = Literal["cut", "number", "keep", "whole"]
"""What happens to padding on the left: cut off, cut off with the columns' numbers told to the model, or kept; "whole"
keeps it on both sides."""

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
    if counts.shape[1] == 0:
        raise ValueError(f"The attention mask has no columns. Received: a mask of shape {tuple(mask.shape)}.")
    decoder = _has_decoder(batch)
    for path, leaf in leaves(batch):
        if "label" in path and not decoder and has_rows(leaf) and tuple(leaf.shape) == tuple(counts.shape):
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
    """The attention mask that says where tokens are: not a decoder's."""
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


def _has_decoder(batch: Any) -> bool:
    return any("decoder" in path for path, _ in leaves(batch))


def text_of(batch: Any, rows: int, columns: int) -> frozenset[str]:
    """The paths of the tensors that have a column for each token, by their shape: those that are cut.

    Example:
        >>> batch = {"attention_mask": torch.ones(2, 3), "kind": torch.ones(2), "boxes": torch.ones(2, 3, 4)}
        >>> sorted(text_of(batch, 2, 3))
        ["['attention_mask']", "['boxes']"]
    """
    decoder = _has_decoder(batch)
    return frozenset(path for path, leaf in leaves(batch) if _columns(path, leaf, rows, columns, decoder))


def widths_apart(batch: Any, rows: int, columns: int) -> Iterator[str]:
    """The paths of tensors of rows that are wider or narrower than the text: no text of this batch, nor of another."""
    for path, leaf in leaves(batch):
        if has_rows(leaf) and leaf.ndim >= 2 and leaf.shape[0] == rows and leaf.shape[1] not in (1, columns):
            yield path


def what_is_cut(text: Collection[str]) -> str:
    """What `max_tokens` takes for text, in a sentence, and what to do about what is none."""
    return (
        f"Taken for text, by their shape: {', '.join(f'batch{path}' for path in sorted(text))}. What has no column for "
        "each token, and as many by chance: pass it as tensor[:, None]."
    )


def _columns(path: str, leaf: Any, rows: int, columns: int, decoder: bool) -> list[int]:
    """The dimensions of a tensor that are the text's columns."""
    if not has_rows(leaf) or leaf.ndim < 2 or leaf.shape[0] != rows or "decoder" in path:
        return []
    if decoder and "label" in path:
        return []
    square = "mask" in path or "bias" in path
    return [dim for dim in range(1, leaf.ndim) if leaf.shape[dim] == columns and (dim == 1 or square)]


def cut(
    batch: Any,
    rows: int,
    columns: int,
    start: int,
    stop: int,
    *,
    positions: bool = False,
    apart: Collection[str] = (),
) -> Any:
    """The batch with the columns from `start` up to `stop` alone: views, no copies.

    Cut are tensors of (rows, columns, ...) with as many columns as the attention mask, and masks of (..., columns,
    columns). What belongs to a decoder stays as it is, the labels of one with inputs of its own, too; and so does what
    is `apart`, by its path.
    """
    if (start, stop) == (0, columns):
        return batch
    paths = iter([path for path, _ in leaves(batch)])
    decoder = _has_decoder(batch)

    def cut_one(leaf: Any) -> Any:
        path = next(paths)
        for dim in () if path in apart else _columns(path, leaf, rows, columns, decoder):
            leaf = leaf[(slice(None),) * dim + (slice(start, stop),)]
        return leaf

    new = map_leaves(cut_one, batch)
    return _with_positions(new, _mapping(new), torch.arange(start, stop), rows) if positions else new


def packed_rows(batch: Batch, piece: Slice, left: Left, apart: Collection[str] = ()) -> Batch:
    """The rows of a piece, with its columns alone; what is `apart` has none, by its path."""
    assert piece.columns is not None
    rows, columns = mask_of(batch.tree).shape
    start, stop = kept_columns(piece.columns, left, columns)
    numbered = left == "number" and start > 0
    narrow = cut(batch.tree, rows, columns, start, stop, positions=numbered, apart=apart)
    return batch.like(narrow).take(torch.tensor(piece.rows))


def kept_columns(extent: tuple[int, int], left: Left, width: int) -> tuple[int, int]:
    """The columns that stay of those between which the tokens are.

    >>> kept_columns((2, 5), "cut", 8), kept_columns((2, 5), "keep", 8), kept_columns((2, 5), "whole", 8)
    ((2, 5), (0, 5), (0, 8))
    """
    return (extent[0] if left in ("cut", "number") else 0), (width if left == "whole" else extent[1])


def can_take_positions(batch: Any, model: Any) -> bool:
    """Whether the model takes `position_ids`, and the batch, one mapping, has none."""
    parameters = inspect.signature(model.forward).parameters if hasattr(model, "forward") else {}
    mapping = _mapping(batch)
    return mapping is not None and "position_ids" not in mapping and "position_ids" in parameters


def _with_positions(tree: Any, mapping: Any, positions: Tensor, rows: int) -> Any:
    """The tree with `position_ids` in the mapping that holds the attention mask."""
    if tree is mapping:
        new = copy.copy(mapping)
        new["position_ids"] = positions.to(mask_of(mapping).device).expand(rows, -1)
        return new
    if not isinstance(tree, tuple):
        return tree
    items = [_with_positions(item, mapping, positions, rows) for item in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)


def _mapping(batch: Any) -> Any:
    """The mapping among the arguments that holds the attention mask."""
    if isinstance(batch, Mapping):
        return batch if list(masks(batch)) else None
    found = [_mapping(item) for item in batch] if isinstance(batch, tuple) else []
    return next((mapping for mapping in found if mapping is not None), None)


class Packs:
    """How padded rows are packed into micro-batches of at most so many tokens."""

    def __init__(self, tree: Any, budget: TokenBudget, left: Left, sizes: Sequence[int] | None = None) -> None:
        self.extents = found = extents(tree)
        """Of each row the columns between which its tokens are."""
        self.left, self.width = left, mask_of(tree).shape[1]
        sides = {"left": any(start > 0 for start, _ in found), "right": any(stop < self.width for _, stop in found)}
        self.padded = frozenset(side for side, is_padded in sides.items() if is_padded)
        """The sides on which there is padding."""
        self.text = text_of(tree, len(found), self.width)
        """The paths of what is cut."""
        found = [kept_columns(extent, left, self.width) for extent in found]
        pieces = Tokens(budget, found, sizes).pieces
        self.sizes = [piece.size for piece in pieces]
        """Rows of each micro-batch."""
        self.columns = [piece.columns or (0, self.width) for piece in pieces]
        """Columns of each micro-batch."""
        self.order = torch.tensor([row for piece in pieces for row in piece.rows])  # type: ignore[union-attr]  # lists
        """The rows, as they come: the longest ones first."""
        self.back = torch.empty_like(self.order)
        """Where each row has come."""
        self.back[self.order] = torch.arange(len(self.order))

    def telling(self, tree: Any, most: int) -> torch.Tensor:
        """A few rows of all lengths: those with the most padding on the left and on the right, and an empty one."""
        filled = (torch.as_tensor(mask_of(tree)) != 0).any(1).tolist()
        order = self.order.tolist()
        rows = [row for row in order if filled[row]] or order
        ends = [min(rows, key=lambda row: self.extents[row][1]), *[row for row in order if not filled[row]][:1]]
        spread = [rows[int(place)] for place in torch.linspace(0, len(rows) - 1, most).round()]
        first = list(dict.fromkeys([max(rows, key=lambda row: self.extents[row][0]), *spread]))
        first = [row for row in first if row not in ends]
        return torch.tensor([*first[: most - len(ends)], *dict.fromkeys(ends)])

    def trimmed(self, tree: Any, index: int) -> Any:
        """The rows of a micro-batch, with its columns alone."""
        start, stop = self.columns[index]
        numbered = self.left == "number" and start > 0
        return cut(tree, self.sizes[index], self.width, start, stop, positions=numbered)


# Rows one behind the other.


def causal_lm(batch: Any, rows: Sequence[Sequence[int]]) -> Any:
    """Join padded rows without their padding, for causal language models of `transformers`.

    In place of the attention mask the model gets `position_ids`, which restart at each row; transformers (4.53 or
    newer, with "sdpa", "eager", "flex_attention" or flash attention) reads from them where rows begin. A row's first
    label is set to -100, because no token of its row predicts it. `use_cache` is False, because with a cache rows would
    see those before them. Pass it as `pack` to `TrainStep`, which proves that the model keeps rows apart.

    Args:
        batch: A mapping with an `attention_mask` of (rows, columns). Tensors with a column for each token are packed,
            values without rows stay.
        rows: The rows that each packed row holds.

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
