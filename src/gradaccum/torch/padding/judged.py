"""Padded rows in micro-batches of so many tokens, and what cutting off padding does to the loss."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Cause
from gradaccum.core.rounding import rounding
from gradaccum.core.sizes import Groups, Joined, Slice, TokenBudget, Tokens
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.probes import Trace, mixing, tokens_differ
from gradaccum.on_torch.batch import Batch, leaves
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.state import evaluated
from gradaccum.torch.loss import Objective
from gradaccum.torch.padding.text import IGNORED, Left, Text, can_take_positions, other_widths, what_is_cut

logger = logging.getLogger("gradaccum")

ROWS = 4
"""Rows that are looked at to find out."""
WAYS: tuple[Left, ...] = "cut", "number", "keep", "whole"
"""From the one that cuts most to the one that changes nothing."""


class Packing:
    """Packs padded rows into micro-batches of at most so many tokens."""

    def __init__(self, objective: Objective, max_tokens: int, max_rows: int | None, *, judge: bool) -> None:
        self.objective = objective
        self.budget = TokenBudget(max_tokens, max_rows)
        self.left: Left = "cut"  # what happens to padding on the left of this batch
        self._not_text = set[str]()  # their paths: in some batch they were wider or narrower
        self._judge = judge
        self._judged: dict[frozenset[str], dict[Edge, Left]] = {}

    def plan(self, batch: Batch, sizes: Sequence[int] | None = None) -> Tokens:
        text = self._text(batch)
        groups = None if batch.groups is None else Groups(batch.groups.tolist())
        plan = Tokens(self.budget, text.spans, sizes, groups)
        if self._judge and batch.rows:
            self.left = self._found_out(batch, text, plan.pieces, known=sizes is not None)
        if self.left == "whole" or (self.left == "keep" and any(p.columns and p.columns[0] > 0 for p in plan.pieces)):
            return Tokens(self.budget, [text.kept(span, self.left) for span in text.spans], sizes, groups)
        return plan

    def keep_left(self) -> None:
        """Leave padding on the left as it is, since nothing can be tried out."""
        self._judge, self.left = False, "keep"

    def take(self, batch: Batch, piece: Slice) -> Batch:
        return Text(batch.tree, self._not_text).rows_of(batch, piece, self.left)

    def explain(self, error: BaseException, batch: Batch) -> None:
        """Note beside an error of the model's what has been cut."""
        with contextlib.suppress(ValueError):  # no mask
            cut = what_is_cut(self.text(batch))
            getattr(error, "add_note", str)(f"max_tokens cuts columns of padding. {cut}")  # since Python 3.11

    def cause(self, batch: Batch, sure: bool) -> Cause | None:
        """Why micro-batches differ from a batch, if it is sure that nothing else is wrong with it."""
        what = f"Cutting off columns of nothing but padding changes it. {what_is_cut(self.text(batch))}"
        return Cause("padding", "max_tokens", what) if sure else None

    def _found_out(self, batch: Batch, text: Text, pieces: Sequence[Slice], *, known: bool) -> Left:
        """What happens to padding on the left of this batch: what each kind of row in it can bear, judged once."""
        # Positions that are in some batches alone decide what a model can bear.
        judged = self._judged.setdefault(frozenset(text.dims), {})
        ways = list[Left]()
        for edge, piece in edges(text, pieces).items():
            if known and edge not in judged:
                ways.append("keep" if edge.left else "cut")
                continue
            if edge not in judged:
                judged[edge] = judged_left(self.objective, batch, piece, text)
                if judged[edge] == "keep" and edge.left:
                    names = ", ".join(f"batch{path}" for path in sorted(edge.counting)) or "nothing but the mask"
                    logger.info(
                        "max_tokens: left padding is kept for rows whose first token counts, as in this batch (%s), "
                        "because cutting it off changes the gradient. A first label of -100 predicts nothing from "
                        "padding.",
                        names,
                    )
            if edge.left or judged[edge] == "whole":
                ways.append(judged[edge])
        return max(ways, key=WAYS.index, default="cut")

    def text(self, batch: Batch) -> frozenset[str]:
        """The paths of what is cut."""
        return frozenset(self._text(batch).dims)

    def _text(self, batch: Batch) -> Text:
        rows, columns = Text(batch.tree).mask.shape
        if rows != batch.rows:
            raise ValueError(
                "max_tokens sorts rows and cuts columns, so rows must be the first dimension: batch_dims=0. Received: "
                f"{batch.rows} rows and an attention mask of shape {(rows, columns)}."
            )
        self._not_text.update(other_widths(batch.tree, rows, columns))
        return Text(batch.tree, self._not_text)


class Joining:
    """Lays rows one behind the other, without their padding, in micro-batches of at most so many tokens."""

    def __init__(
        self, objective: Objective, max_tokens: int, max_rows: int | None, pack: Callable[[Any, list[list[int]]], Any]
    ) -> None:
        if not callable(pack):
            raise TypeError(
                "`pack` must be pack(batch, rows) -> batch, such as gradaccum.torch.packing.causal_lm. Received: "
                f"{pack!r} of type {type(pack).__name__}."
            )
        self.objective, self.pack = objective, pack
        self.budget = TokenBudget(max_tokens, max_rows)
        self._said = False

    def plan(self, batch: Batch, sizes: Sequence[int] | None = None) -> Tokens:
        if batch.groups is not None:
            raise ValueError(
                "`pack` puts each row where it fits best, and `groups` keeps rows together. Leave out one."
            )
        if Text(batch.tree).rows != batch.rows:
            raise ValueError("`pack` needs the rows in the first dimension: leave out batch_dims.")
        text = Text(batch.tree)
        lengths = [stop - start for start, stop in text.spans]
        plan = Joined(self.budget, lengths, sizes)
        if not self._said and sizes is None and batch.rows:
            self._said = True
            tokens, padded = sum(lengths), text.rows * text.width
            logger.info(
                "pack: %d rows in %d micro-batches; %.1f %% of the tokens computed are padding; in the batch as it "
                "came %.1f %%.",
                batch.rows,
                len(plan.pieces),
                100 * (1 - tokens / sum(piece.tokens for piece in plan)),
                100 * (1 - tokens / padded),
            )
        return plan

    def text(self, batch: Batch) -> frozenset[str]:
        return frozenset()

    def keep_left(self) -> None:
        """Nothing is cut."""

    def explain(self, error: BaseException, batch: Batch) -> None:
        """Nothing is cut."""

    def take(self, batch: Batch, piece: Slice) -> Batch:
        assert piece.packs is not None
        few, places = batch.take(torch.tensor(piece.rows)), iter(range(piece.size))
        one = len(few.tree) == 1
        packed = self.pack(few.tree[0] if one else few.tree, [[next(places) for _ in pack] for pack in piece.packs])
        if not one and not (isinstance(packed, tuple) and len(packed) == len(few.tree)):
            raise TypeError(
                f"`pack` must return the arguments that follow the model, a tuple of {len(few.tree)}, as it receives "
                f"them. Received: {packed!r:.80} of type {type(packed).__name__}."
            )
        return Batch((packed,) if one else packed, few.batch_dims, piece.size)

    def cause(self, batch: Batch, sure: bool) -> Cause | None:
        """Why packed rows differ from a batch: which module doesn't keep two of them apart, in evaluation mode."""
        lengths = [stop - start for start, stop in Text(batch.tree).spans]
        order = sorted(range(batch.rows), key=lambda row: -lengths[row])[:2]
        pair, last = batch.take(torch.tensor(order)), slice(-max(lengths), None)
        piece = Joined(TokenBudget(sum(lengths)), [max(lengths), 1]).pieces[0]
        model, found = self.objective.model, list[str]()

        def trace(*rows: int) -> Trace:
            laid = self.take(pair, piece._replace(rows=[*rows], packs=[[*rows]]))
            return Trace(model).run(lambda: self.objective.forward(laid))

        with contextlib.suppress(Exception), _undisturbed(self.objective), torch.no_grad():
            found = mixing(trace(0), trace(1, 0), tokens_differ(last))
        names = [f" {path!r} ({type(model.get_submodule(path)).__name__})" for path in found[:1] if path]
        what = f"{names[0]} gives a row's tokens other outputs after another row." if names else ""
        return Cause(
            "mixes_rows",
            "pack",
            f"Packed rows give other results than the same rows alone.{what} Use a model that keeps them apart: in "
            "transformers one whose attention restarts where `position_ids` do, without a cache. The loss may also "
            "count other tokens of packed rows. Or leave out `pack`: max_tokens alone sorts and trims padded rows.",
        )


def packing(
    objective: Objective, max_tokens: int, max_rows: int | None, pack: Callable[..., Any] | None, *, judge: bool
) -> Packing | Joining:
    """What makes micro-batches of at most so many tokens."""
    if pack is None:
        return Packing(objective, max_tokens, max_rows, judge=judge)
    return Joining(objective, max_tokens, max_rows, pack)


class Edge(NamedTuple):
    """A kind of row, by what happens where its padding is cut off."""

    left: bool  # cut off in front; else behind
    first: bool  # the first column that stays is this row's first token
    counting: frozenset[str]
    """The paths of what says something else there than in padding: labels that count, weights of tokens, ids."""


def edges(text: Text, pieces: Sequence[Slice]) -> dict[Edge, Slice]:
    """The kinds of rows in a batch, and for each a few rows of one piece.

    A causal model predicts a row's first token from the padding in front of it, if there is any, so a label there may
    count before padding is cut off, and not after. It does in some rows, not in others: each kind is judged by itself.
    Behind a row's last token a label of 0 may be padding, or count.
    """
    found: dict[Edge, Slice] = {}
    if all(piece.columns == (0, text.width) for piece in pieces):
        return found
    at_first, last = _counting(text)
    for piece in pieces:
        assert piece.columns is not None
        assert isinstance(piece.rows, list)
        rows, (first, stop) = piece.rows, piece.columns
        for row in rows if first > 0 else ():
            counting = frozenset(path for path, counts in at_first.items() if counts[row])
            known = found.setdefault(Edge(True, text.spans[row][0] == first, counting), piece._replace(rows=[]))
            assert isinstance(known.rows, list)
            if known.columns == piece.columns and known.size < ROWS:
                known.rows.append(row)
        for row in rows if stop < text.width else ():  # of the shortest ones, which come last
            behind = frozenset(path for path, ends in last.items() if ends[row] > stop)
            others = [row, *(other for other in rows if other != row)][:ROWS]
            found[Edge(False, False, behind)] = piece._replace(rows=others)
    return found


def _counting(text: Text) -> tuple[dict[str, list[bool]], dict[str, list[int]]]:
    """By path and row: whether something is said at the first token; the column after the last label that counts."""
    at_first, last = dict[str, list[bool]](), dict[str, list[int]]()
    every, starts = torch.arange(text.rows), torch.tensor([start for start, _ in text.spans])
    for path, leaf in leaves(text.tree):
        if path in text.dims and "attention_mask" not in path and leaf.shape[1] == text.width:
            values = torch.as_tensor(leaf).detach().cpu()
            differs = values[every, starts] != values[every, (starts - 1).clamp(min=0)]
            at_first[path] = differs.reshape(text.rows, -1).any(1).tolist()
            if "label" in path:
                counts = (values != IGNORED).reshape(text.rows, text.width, -1).any(2)
                last[path] = torch.where(counts, torch.arange(1, text.width + 1), 0).amax(1).tolist()
    return at_first, last


def judged_left(objective: Objective, batch: Batch, piece: Slice, text: Text) -> Left:
    """How padding on the left can be cut off, found out on a few rows of a piece in evaluation mode.

    A model that numbers its columns from 0 sees other positions once some on the left are gone: it is told them in
    `position_ids`, if it takes them; else the left side stays. Both sides stay where that can't be found out.
    """
    assert piece.columns is not None
    assert isinstance(piece.rows, list)
    (start, stop), rows = piece.columns, piece.rows[:ROWS]
    few, piece = batch.take(torch.tensor(rows)), piece._replace(rows=rows)
    ways: list[Left] = ["cut", "number", "keep"] if start > 0 else ["keep"]
    with _undisturbed(objective):
        try:
            expected, again = (_gradient(objective, few) for _ in range(2))
            if _differ(objective, expected, again):
                raise ValueError("two evaluations differ, or it is not finite")
            for way in ways:
                if way == "number" and not can_take_positions(few.tree, objective.model):
                    continue
                if not _differ(objective, expected, _gradient(objective, text.rows_of(batch, piece, way))):
                    return way
        except Exception as error:
            if is_out_of_memory(error):
                fewer = rows[: len(rows) // 2]
                return judged_left(objective, batch, piece._replace(rows=fewer), text) if fewer else "keep"
            reason = str(error).strip().partition("\n")[0]
            logger.warning(
                "max_tokens: padding is not cut off, because the loss can't be evaluated without it (%s). %s",
                reason,
                what_is_cut(text.dims),
            )
            return "whole"
    raise NotEquivalentError(
        f"Cutting off columns of nothing but padding changes the loss (columns {stop} and more of {text.width}). "
        "Either padded positions count in it: mark them with -100 in the labels, or leave them out by the attention "
        "mask. Or the model looks at them in spite of the mask. Leave out `max_tokens`, or fix that. "
        f"{what_is_cut(text.dims)}"
    )


def _gradient(objective: Objective, batch: Batch) -> list[Tensor | None]:
    loss = objective.whole(batch)
    parameters = [p for p in objective.model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True))


def _differ(objective: Objective, expected: list[Tensor | None], actual: list[Tensor | None]) -> bool:
    zero = torch.zeros(())
    pairs = [(zero if a is None else a, zero if b is None else b) for a, b in zip(expected, actual, strict=True)]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    narrowest = min((a.dtype for a, _ in pairs), key=lambda dtype: torch.finfo(dtype).bits)
    tolerance = rounding(str(objective.autocast or narrowest), objective.device.type)
    return not max(float((a - b).abs().max()) for a, b in pairs) <= tolerance * largest


@contextlib.contextmanager
def _undisturbed(objective: Objective) -> Iterator[None]:
    modules = [
        m for root in (objective.model, objective.loss_fn) if isinstance(root, nn.Module) for m in root.modules()
    ]
    with evaluated(modules, objective.device), torch.compiler.set_stance("force_eager"):
        yield
