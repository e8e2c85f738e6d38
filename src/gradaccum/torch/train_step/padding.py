"""Padded rows: where their tokens are, and how columns of nothing but padding are cut off."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch, has_rows, leaves, map_leaves
from gradaccum.on_torch.transaction import as_found
from gradaccum.rounding import rounding
from gradaccum.sizes import Piece, TokenBudget, Tokens
from gradaccum.torch.loss import Objective

__all__ = ["Left", "Packing", "extents", "judged_left", "packed_rows", "trimmed"]

logger = logging.getLogger("gradaccum")

Left = Literal["cut", "number", "keep"]
"""What happens to padding on the left: cut off, cut off with the columns' numbers told to the model, or kept."""

ROWS = 4
"""Rows that are looked at to find out."""

IGNORED = -100
"""What `torch.nn.CrossEntropyLoss` and `transformers` ignore in labels."""


class Packing:
    """Packs padded rows into micro-batches of at most so many tokens.

    Args:
        objective: The loss, on which cutting off padding is tried out.
        max_tokens: Padded tokens of a micro-batch.
        max_rows: Rows of a micro-batch, or None.
        judge: Try out whether padding can be cut off; else it is.
    """

    def __init__(self, objective: Objective, max_tokens: int, max_rows: int | None, *, judge: bool) -> None:
        self.objective = objective
        self.budget = TokenBudget(max_tokens, max_rows)
        self.left: Left = "cut"
        self._judged: set[bool] = set() if judge else {False, True}

    def plan(self, batch: Batch, sizes: Sequence[int] | None = None) -> Tokens:
        """The micro-batches of a batch.

        Args:
            batch: The large batch.
            sizes: Rows of its micro-batches, in order; None: as many as fit.

        Raises:
            NotEquivalentError: Padding counts in the loss.
        """
        found = extents(batch.tree)
        plan = Tokens(self.budget, found, sizes)
        # Batches that are padded on the left may come first after many that are not.
        piece = next((piece for piece in plan.pieces if piece.columns and piece.columns[0] > 0), None)
        if batch.rows and (padded := piece is not None) not in self._judged:
            self.left = judged_left(self.objective, batch, piece or plan.pieces[-1])
            self._judged.add(padded)
        if self.left == "keep" and piece is not None:
            plan = Tokens(self.budget, [(0, stop) for _, stop in found], sizes)
        return plan


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
    mask = _mask(batch)
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


def _mask(batch: Any) -> Tensor:
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
    rows, columns = _mask(batch).shape
    if (start, stop) == (0, columns):
        return batch
    paths = iter([path for path, _ in leaves(batch)])

    def cut(leaf: Any) -> Any:
        path = next(paths)
        if not has_rows(leaf) or leaf.ndim < 2 or leaf.shape[0] != rows or "decoder" in path:
            return leaf
        square = "mask" in path or "bias" in path
        for dim in range(1, leaf.ndim):
            if leaf.shape[dim] == columns and (dim == 1 or square):
                leaf = leaf[(slice(None),) * dim + (slice(start, stop),)]
        return leaf

    new = map_leaves(cut, batch)
    return _with_positions(new, torch.arange(start, stop), rows) if positions else new


def packed_rows(batch: Batch, piece: Piece, left: Left) -> Batch:
    """The rows of a piece, with its columns alone."""
    assert piece.columns is not None
    start = piece.columns[0] if left != "keep" else 0
    columns = trimmed(batch.tree, start, piece.columns[1], positions=left == "number" and start > 0)
    return batch.like(columns).take(torch.tensor(piece.rows))


def judged_left(objective: Objective, batch: Batch, piece: Piece) -> Left:
    """How padding on the left can be cut off, found out on a few rows of a piece in evaluation mode.

    A model that numbers its columns from 0 sees other positions once some on the left are gone: it is told them in
    `position_ids`, if it takes them; else the left side stays. It stays where that can't be found out, too.

    Raises:
        NotEquivalentError: Cutting off the right side changes the gradient: something counts there.
    """
    assert isinstance(piece.rows, list)
    assert piece.columns is not None
    start, stop = piece.columns
    few = batch.take(torch.tensor(piece.rows[:ROWS]))
    ways: list[Left] = ["cut", "number", "keep"] if start > 0 else ["keep"]
    with _undisturbed(objective):
        try:
            expected, again = (_gradient(objective, few) for _ in range(2))
            if _differ(objective, expected, again):  # random numbers, or NaN
                return "keep"
            for way in ways:
                if way == "number" and not can_take_positions(few.tree, objective.model):
                    continue
                cut = packed_rows(batch, piece._replace(rows=piece.rows[:ROWS]), way)
                if not _differ(objective, expected, _gradient(objective, cut)):
                    if way == "keep" and start > 0:
                        logger.info("max_tokens: padding on the left is not cut off, for it changes this gradient.")
                    return way
        except Exception as error:
            logger.debug("The loss could not be evaluated on trimmed rows: %s", error)
            return "keep"
    raise NotEquivalentError(
        f"Cutting off columns of nothing but padding changes the loss (columns {stop} and more of "
        f"{_mask(few.tree).shape[1]}). Either padded positions count in it: mark them with -100 in the labels, or "
        "leave them out by the attention mask. Or the model looks at them in spite of the mask. Leave out "
        "`max_tokens`, or fix that."
    )


def _gradient(objective: Objective, batch: Batch) -> list[Tensor | None]:
    loss = objective.whole(batch)
    parameters = [p for p in objective.model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True))


def _differ(objective: Objective, expected: list[Tensor | None], actual: list[Tensor | None]) -> bool:
    """Whether two gradients differ by more than rounding, or are not finite."""
    zero = torch.zeros(())
    pairs = [(zero if a is None else a, zero if b is None else b) for a, b in zip(expected, actual, strict=True)]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    narrowest = min((a.dtype for a, _ in pairs), key=lambda dtype: torch.finfo(dtype).bits)
    tolerance = rounding(str(objective.autocast or narrowest), objective.device.type)
    return not max(float((a - b).abs().max()) for a, b in pairs) <= tolerance * largest


@contextlib.contextmanager
def _undisturbed(objective: Objective) -> Iterator[None]:
    """Evaluation mode, eager; everything as before afterwards."""
    modules = [
        m for root in (objective.model, objective.loss_fn) if isinstance(root, nn.Module) for m in root.modules()
    ]
    modes = [(module, module.training) for module in modules]
    try:
        for module in modules:
            module.training = False
        found = as_found(modules, objective.device)
        with found, torch.compiler.set_stance("force_eager"), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def can_take_positions(batch: Any, model: Any) -> bool:
    """Whether the model takes `position_ids`, and the batch, one mapping, has none."""
    parameters = inspect.signature(model.forward).parameters if hasattr(model, "forward") else {}
    mapping = _mapping(batch)
    return mapping is not None and "position_ids" not in mapping and "position_ids" in parameters


def _with_positions(batch: Any, positions: Tensor, rows: int) -> Any:
    mapping = _mapping(batch)
    assert mapping is not None
    new = copy.copy(mapping)
    new["position_ids"] = positions.to(_mask(mapping).device).expand(rows, -1)
    return tuple(new if item is mapping else item for item in batch)


def _mapping(batch: Any) -> Any:
    """The mapping among the arguments that holds the attention mask."""
    return next((item for item in batch if isinstance(item, Mapping) and list(masks(item))), None)
