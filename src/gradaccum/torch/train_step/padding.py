"""Padded rows in micro-batches of so many tokens, and what cutting off padding does to the loss."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.transaction import as_found
from gradaccum.rounding import rounding
from gradaccum.sizes import Groups, Piece, TokenBudget, Tokens
from gradaccum.torch.loss import Objective
from gradaccum.torch.padding import (
    Left,
    can_take_positions,
    extents,
    mask_of,
    packed_rows,
    text_of,
    what_is_cut,
    widths_apart,
)

__all__ = ["Packing", "judged_left"]

logger = logging.getLogger("gradaccum")

ROWS = 4
"""Rows that are looked at to find out."""


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
        self.apart = set[str]()
        """The paths of what is no text: in some batch it was wider or narrower."""
        self._judged: set[bool] = set() if judge else {False, True}

    def plan(self, batch: Batch, sizes: Sequence[int] | None = None) -> Tokens:
        """The micro-batches of a batch.

        Args:
            batch: The large batch.
            sizes: Rows of its micro-batches, in order; None: as many as fit.

        Raises:
            NotEquivalentError: Padding counts in the loss.
            ValueError: The rows are not in front.
        """
        self.text(batch)
        found = extents(batch.tree)
        groups = None if batch.groups is None else Groups(batch.groups.tolist())
        plan = Tokens(self.budget, found, sizes, groups)
        # Batches that are padded on the left may come first after many that are not.
        piece = next((piece for piece in plan.pieces if piece.columns and piece.columns[0] > 0), None)
        if batch.rows and (padded := piece is not None) not in self._judged:
            self.left = judged_left(self.objective, batch, piece or plan.pieces[-1], self.apart)
            self._judged.add(padded)
        if self.left == "keep" and piece is not None:
            plan = Tokens(self.budget, [(0, stop) for _, stop in found], sizes, groups)
        return plan

    def text(self, batch: Batch) -> frozenset[str]:
        """The paths of what is cut in this batch: as wide as its attention mask, in it and in all batches before."""
        rows, columns = mask_of(batch.tree).shape
        if rows != batch.rows:
            raise ValueError(
                "max_tokens sorts rows and cuts columns, so rows must be the first dimension: batch_dims=0. Received: "
                f"{batch.rows} rows and an attention mask of shape {(rows, columns)}."
            )
        self.apart.update(widths_apart(batch.tree, rows, columns))
        return text_of(batch.tree, rows, columns) - self.apart


def judged_left(objective: Objective, batch: Batch, piece: Piece, apart: Collection[str] = ()) -> Left:
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
                cut = packed_rows(batch, piece._replace(rows=piece.rows[:ROWS]), way, apart)
                if not _differ(objective, expected, _gradient(objective, cut)):
                    if way == "keep" and start > 0:
                        logger.info("max_tokens: padding on the left is not cut off, for it changes this gradient.")
                    return way
        except Exception as error:
            logger.debug("The loss could not be evaluated on trimmed rows: %s", error)
            return "keep"
    raise NotEquivalentError(
        f"Cutting off columns of nothing but padding changes the loss (columns {stop} and more of "
        f"{mask_of(few.tree).shape[1]}). Either padded positions count in it: mark them with -100 in the labels, or "
        "leave them out by the attention mask. Or the model looks at them in spite of the mask. Leave out "
        f"`max_tokens`, or fix that. {what_is_cut(text_of(batch.tree, *mask_of(batch.tree).shape) - set(apart))}"
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
