"""Padded rows: sorted, packed, rid of columns of nothing but padding, or laid one behind the other."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradaccum.core.sizes import Slice, TokenBudget, Tokens
from gradaccum.on_torch.batch import Batch, has_rows, leaves, map_leaves, rebuild

Left = Literal["cut", "number", "keep", "whole"]
"""What happens to padding on the left: cut off, cut off with the columns' numbers told to the model, or kept; "whole"
keeps it on both sides."""

IGNORED = -100
"""What `torch.nn.CrossEntropyLoss` and `transformers` ignore in labels."""


def masks(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The attention masks of a batch, with their paths: (rows, columns), not 0 where a token is."""
    for where, leaf in leaves(batch):
        if where.rstrip("']").endswith("attention_mask") and has_rows(leaf) and leaf.ndim == 2:
            yield where, leaf


class Text:
    """The padded text of a batch: where the tokens of its rows are, and which tensors have a column for each token.

    Cut are tensors of (rows, columns, ...) with as many columns as the attention mask, and masks of (..., columns,
    columns). What belongs to a decoder stays as it is, the labels of one with inputs of its own, too; and so does what
    is `not_text`, by its path.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
        >>> text = Text({"attention_mask": mask, "kind": torch.ones(3), "boxes": torch.ones(3, 3, 4)})
        >>> text.spans, sorted(text.dims)
        ([(0, 2), (1, 3), (0, 1)], ["['attention_mask']", "['boxes']"])
        >>> text.cut(1, 3)["boxes"].shape
        torch.Size([3, 2, 4])
    """

    def __init__(self, tree: Any, not_text: Collection[str] = ()) -> None:
        self.tree = tree
        self.mask = self._mask()
        self.rows, self.width = self.mask.shape
        self._decoder = any("decoder" in path for path, _ in leaves(tree))
        found = {path: self._columns(path, leaf) for path, leaf in leaves(tree) if path not in not_text}
        self.dims = {path: dims for path, dims in found.items() if dims}
        """Of each tensor that is cut, by its path, the dimensions that are the text's columns."""

    def _mask(self) -> Tensor:
        """The mask that says where tokens are: not a decoder's."""
        for where, mask in masks(self.tree):
            if "decoder" not in where and "cross" not in where:
                return mask
        found = [(path, leaf.shape) for path, leaf in leaves(self.tree) if hasattr(leaf, "shape")]
        shapes = "".join(f"\n  batch{path}  shape {tuple(shape)}" for path, shape in found)
        raise ValueError(
            "`max_tokens` needs an attention mask of shape (rows, columns) in the batch, under a key or field named "
            f"'attention_mask'. Received:{shapes}"
        )

    def _columns(self, path: str, leaf: Any) -> list[int]:
        if not has_rows(leaf) or leaf.ndim < 2 or leaf.shape[0] != self.rows or "decoder" in path:
            return []
        if self._decoder and "label" in path:
            return []
        square = "mask" in path or "bias" in path
        return [dim for dim in range(1, leaf.ndim) if leaf.shape[dim] == self.width and (dim == 1 or square)]

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Of each row the column where its tokens begin, and the one after the last, by mask and by labels."""
        if self.width == 0:
            raise ValueError(f"The attention mask has no columns. Received: a mask of shape {tuple(self.mask.shape)}.")
        counts = torch.as_tensor(self.mask) != 0
        for path, leaf in leaves(self.tree):
            if "label" in path and not self._decoder and has_rows(leaf) and tuple(leaf.shape) == tuple(counts.shape):
                labels = torch.as_tensor(leaf)
                if not labels.is_floating_point():
                    # A label that counts is never cut off, whatever the mask says; 0 may be padding, or a class.
                    counts = counts | ((labels != IGNORED) & (labels != 0)).to(counts.device)
        positions = torch.arange(self.width, device=counts.device)
        first = torch.where(counts, positions, self.width).amin(1)
        last = torch.where(counts, positions + 1, 0).amax(1)
        empty = last == 0
        first, last = first.masked_fill(empty, 0), last.masked_fill(empty, 1)
        return list(zip(*torch.stack([first, last]).tolist(), strict=True))

    def kept(self, span: tuple[int, int], left: Left) -> tuple[int, int]:
        """The columns that stay of a row or a micro-batch whose tokens are between these."""
        return (span[0] if left in ("cut", "number") else 0), (self.width if left == "whole" else span[1])

    def cut(self, start: int, stop: int, tree: Any = None, *, numbered: bool = False) -> Any:
        """The batch, or a tree of some of its rows, with these columns alone: views, no copies.

        `numbered`: with the columns' numbers as `position_ids` beside the attention mask, where some on the left go.
        """
        tree = self.tree if tree is None else tree
        if (start, stop) == (0, self.width):
            return tree
        columns = slice(start, stop)

        def narrowed(path: str, leaf: Any) -> Any:
            for dim in self.dims.get(path, ()):
                leaf = leaf[(slice(None),) * dim + (columns,)]
            return leaf

        new = _map_paths(narrowed, tree)
        found = _mapping(new) if numbered and start > 0 else None
        if found is None:
            return new
        mapping, put = copy.copy(found[0]), found[1]
        mask = next(mask for _, mask in masks(mapping))
        mapping["position_ids"] = torch.arange(start, stop, device=mask.device).expand(len(mask), -1)
        return put(mapping)

    def rows_of(self, batch: Batch, piece: Slice, left: Left) -> Batch:
        """The rows of a piece of the batch, with its columns alone."""
        assert piece.columns is not None
        narrow = self.cut(*self.kept(piece.columns, left), numbered=left == "number")
        return batch.like(narrow).take(torch.tensor(piece.rows))


def _map_paths(function: Callable[[str, Any], Any], tree: Any, root: str = "") -> Any:
    paths = iter([path for path, _ in leaves(tree, root)])
    return map_leaves(lambda leaf: function(next(paths), leaf), tree)


def _mapping(tree: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """The mapping among the arguments that holds the attention mask; and what puts another in its place."""
    if isinstance(tree, Mapping):
        return (tree, lambda new: new) if any(masks(tree)) else None
    for index, item in enumerate(tree if isinstance(tree, tuple) else ()):
        if (found := _mapping(item)) is not None:
            return found[0], functools.partial(_put, tree, index, found[1])
    return None


def _put(tree: Any, index: int, put: Callable[[Any], Any], new: Any) -> Any:
    return rebuild(tree, [*tree[:index], put(new), *tree[index + 1 :]])


def can_take_positions(batch: Any, model: Any) -> bool:
    """Whether the model takes `position_ids`, and the batch, one mapping, has none."""
    parameters = inspect.signature(model.forward).parameters if hasattr(model, "forward") else {}
    found = _mapping(batch)
    return found is not None and "position_ids" not in found[0] and "position_ids" in parameters


def other_widths(batch: Any, rows: int, columns: int) -> Iterator[str]:
    """The paths of tensors of rows that are wider or narrower than the text: no text of this batch, nor of another."""
    for path, leaf in leaves(batch):
        if has_rows(leaf) and leaf.ndim >= 2 and leaf.shape[0] == rows and leaf.shape[1] not in (1, columns):
            yield path


def what_is_cut(text: Collection[str]) -> str:
    """What `max_tokens` takes for text, in a sentence, and what to do about what is none."""
    return (
        f"Taken for text, because of their shape: {', '.join(f'batch{path}' for path in sorted(text))}. A tensor that "
        "has as many columns by chance must be passed as tensor[:, None]."
    )


class Packs:
    """How the padded rows of a chunked module are packed into micro-batches of at most so many tokens."""

    def __init__(self, tree: Any, budget: TokenBudget, left: Left, sizes: Sequence[int] | None = None) -> None:
        self._text, self._left = text, left = Text(tree), left
        sides = {"left": any(i > 0 for i, _ in text.spans), "right": any(j < text.width for _, j in text.spans)}
        self.padded = frozenset(side for side, is_padded in sides.items() if is_padded)
        """The sides on which there is padding."""
        self.text = frozenset(text.dims)
        """The paths of what is cut."""
        pieces = Tokens(budget, [text.kept(span, left) for span in text.spans], sizes).pieces
        self.sizes = [piece.size for piece in pieces]
        """Rows of each micro-batch."""
        self._columns = [piece.columns or (0, text.width) for piece in pieces]
        self.order = torch.tensor([row for piece in pieces for row in piece.rows])  # type: ignore[union-attr]  # lists
        """The rows, as they come: the longest ones first."""
        self.back = torch.empty_like(self.order)
        """Where each row has come."""
        self.back[self.order] = torch.arange(len(self.order))

    def informative_rows(self, most: int) -> Tensor:
        """A few rows of all lengths: those with the most padding on the left and on the right, and an empty one."""
        filled, spans = (torch.as_tensor(self._text.mask) != 0).any(1).tolist(), self._text.spans
        order = self.order.tolist()
        rows = [row for row in order if filled[row]] or order
        ends = [min(rows, key=lambda row: spans[row][1]), *[row for row in order if not filled[row]][:1]]
        spread = [rows[int(place)] for place in torch.linspace(0, len(rows) - 1, most).round()]
        first = [row for row in dict.fromkeys([max(rows, key=lambda row: spans[row][0]), *spread]) if row not in ends]
        return torch.tensor([*first[: most - len(ends)], *dict.fromkeys(ends)])

    def trimmed(self, tree: Any, index: int) -> Any:
        """The rows of a micro-batch, with its columns alone."""
        return self._text.cut(*self._columns[index], tree, numbered=self._left == "number")


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
        ValueError: A mask has holes, something has rows and no columns, or a row's first label counts after padding.

    Example:
        >>> ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
        >>> packed = causal_lm({"input_ids": ids, "attention_mask": (ids > 0).long()}, [[0, 1]])
        >>> packed["input_ids"], packed["position_ids"], packed["attention_mask"]
        (tensor([[5, 6, 7]]), tensor([[0, 1, 0]]), None)
    """
    if not isinstance(batch, Mapping) or not any(value is Text(batch).mask for value in batch.values()):
        raise TypeError(
            "causal_lm packs a flat mapping such as {'input_ids': ..., 'attention_mask': ..., 'labels': ...}, the only "
            f"argument of the step. Received: {type(batch).__name__}. Write pack(batch, rows) for other batches."
        )
    text = Text(batch)
    _check_packable(text)
    # None begins in the column after the one before it: their positions would go on.
    packs = [sorted(pack, key=lambda row: -text.spans[row][0]) for pack in rows]
    of_row, of_column, positions, first = _places(packs, text)

    def laid(path: str, leaf: Any) -> Any:
        if path not in text.dims:
            return leaf
        taken = leaf[of_row.to(leaf.device), of_column.to(leaf.device)]
        return taken.masked_fill(first.to(leaf.device) != 0, IGNORED) if "label" in path else taken

    packed: Any = copy.copy(batch) if not isinstance(batch, dict) else dict(batch)
    for name, value in batch.items():
        packed[name] = None if value is text.mask else _map_paths(laid, value, f"[{name!r}]")
    if "position_ids" not in batch:
        packed["position_ids"] = positions.to(text.mask.device)
    packed["use_cache"] = False
    return packed


def _places(packs: Sequence[list[int]], text: Text) -> tuple[Tensor, ...]:
    """Of each packed column: its row, its column there, its position, and whether a row begins."""
    width = max(sum(text.spans[row][1] - text.spans[row][0] for row in pack) for pack in packs)
    of_row, of_column, positions, first = (torch.zeros(len(packs), width, dtype=torch.long) for _ in range(4))
    for number, pack in enumerate(packs):
        at = 0
        for row in pack:
            start, stop = text.spans[row]
            until = at + stop - start
            of_row[number, at:until], of_column[number, at:until] = row, torch.arange(start, stop)
            first[number, at] = 1
            at = until
        if at < width:  # what is left shows padding of its last row, and begins a row, too
            of_row[number, at:], of_column[number, at:] = row, stop if stop < text.width else start - 1
            positions[number, at:] = torch.arange(width - at) - of_column[number, at:]
            first[number, at:] = 1
    return of_row, of_column, positions + of_column, first


def _check_packable(text: Text) -> None:
    filled = (torch.as_tensor(text.mask) != 0).cpu()
    others = [path for path, _ in masks(text.tree)]
    if len(others) > 1:
        raise ValueError(f"causal_lm packs batches with one attention mask. Received: {', '.join(others)}.")
    for row, (start, stop) in enumerate(text.spans):
        if not filled[row, start:stop].all():
            raise ValueError(
                "causal_lm puts each row's tokens one after the other, so there must be no gap between them. Received: "
                f"row {row} of a micro-batch with a mask of 0, or a label on padding, between its columns {start} and "
                f"{stop}. Mark padding with -100 in the labels, or leave out `pack`."
            )
    for path, leaf in leaves(text.tree):
        if path not in text.dims and has_rows(leaf) and len(leaf.shape) > 0 and leaf.shape[0] == text.rows:
            raise ValueError(
                f"causal_lm packs tensors that have a column for each token. Received: batch{path} of shape "
                f"{tuple(leaf.shape)} with a mask of shape {(text.rows, text.width)}. Write pack(batch, rows) of your "
                "own."
            )
        if "label" in path and path in text.dims and leaf.ndim == 2:
            for row, (start, _) in enumerate(text.spans):
                if start > 0 and leaf[row, start] != IGNORED:
                    raise ValueError(
                        f"Row {row} of a micro-batch begins after padding, from which a causal model predicts its "
                        "first label. Packing removes this padding, so set the first label of such rows to -100."
                    )
