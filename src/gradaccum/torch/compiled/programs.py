"""Which passes are compiled: the whole window, each micro-batch, or neither."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.torch.compiled.form import Form, form_of
from gradaccum.torch.compiled.passes import PassesOf
from gradaccum.torch.compiled.program import Program
from gradaccum.torch.loss import BatchLosses, Term, Terms, Totals, Weight, plain_weight
from gradaccum.torch.train_step.window import WindowRunner

logger = logging.getLogger("gradaccum")

MOST, OPERATORS = 16, 600
"""Micro-batches of a window that is one program at most, and their operators: each of them takes time to compile."""
OFTEN = 8
"""So many micro-batches of other sizes run eagerly before a program for any size is compiled."""
KINDS = 4
"""Kinds of micro-batches, as by their dtypes, for which programs are compiled."""

_RARE = (
    "micro-batches of other sizes than the first ones run eagerly, and compiled for any size after the first %d of them"
)

Factors = Sequence[Sequence[Weight]]


MOST_RENEWED = 4
"""How often programs are compiled anew because hooks or settings have changed."""


class Programs:
    """The programs of one loss, and when to use which."""

    def __init__(self, runner: WindowRunner, keywords: Mapping[str, Any], eager: Callable[..., None]) -> None:
        self._runner, self._keywords, self._tell_eager = runner, keywords, eager
        self.failure: str | None = None
        """Why nothing is compiled any more."""
        self._moves = False
        """Whether micro-batches move buffers, which each of them is to find as the first one does."""
        self.rehearses = False
        """Whether a proof runs just now, whose micro-batches don't count."""
        self.unproven = False
        """Whether a program has run that has never been compared with the eager passes."""
        self.form: Form | None = None
        self._parameters: list[Tensor] = []
        self._factors: dict[Any, Tensor] = {}
        self._kinds: dict[Hashable, Kind] = {}
        self._latest: tuple[list[Any], Program] | None = None
        self._window: tuple[list[Any], Program] | None = None
        options = keywords.get("options") or {}
        self._graphs = bool(options.get("triton.cudagraphs")) and runner.objective.device.type == "cuda"
        """Whether programs are recorded as CUDA graphs, which read and write the same memory each time."""
        self._static: dict[int, Tensor] = {}
        self._traced: Any = None
        self._renewed = 0

    def parameters(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        if self._runner.state.looks or not self._parameters:
            found = [p for root in self._runner.roots for p in root.parameters()] + self._runner.buffer.parameters()
            self._parameters = [*{id(p): p for p in found}.values()]
        return [p for p in self._parameters if p.requires_grad]

    def renew(self) -> None:
        """Forget all programs if hooks, or settings of a loss of torch.nn, have changed since: they aren't guarded."""
        traced = _traced_state(self._runner.modules(), self.parameters(), self._runner.objective.loss_fn)
        if self._traced is not None and traced != self._traced:
            self._window, self._latest, self._kinds, self.form = None, None, {}, None
            self._renewed += 1
            if self._renewed > MOST_RENEWED:
                self.failure = "hooks or settings of the loss change again and again"
        self._traced = traced

    def prepare(self, window: BatchLosses, micro_batch: Batch) -> Form:
        """Learn from one eager micro-batch what the passes are."""
        form = form_of(self._runner, window, micro_batch, self.parameters())
        if self.form is not None and (form.names, form.told) != (self.form.names, self.form.told):
            self._window, self._latest, self._kinds = None, None, {}  # they were of other losses
        self.form = form
        return form

    def at_once(self, batch: Batch, pieces: Sequence[Slice]) -> bool:
        """Whether this window runs as one program."""
        form, first = self.form, pieces[0]
        if form is None or self._moves or len(pieces) < 2:
            return False
        if any([type(piece.rows) is not slice or piece.size != first.size for piece in pieces]):
            return False
        if self._window is not None:
            return self._window[0] == [len(pieces), first.size, *batch.signature]
        if form.draws or len(pieces) > MOST or form.operators * len(pieces) > OPERATORS:
            return False
        return not any(map(_sums_wider, self._parameters))

    def cuts(self, batch: Batch) -> bool:
        """Whether a program for a window takes this batch as a whole, and cuts it itself."""
        return batch.flat and self._runner.objective.weight is None

    def each_apart(self) -> None:
        """Each micro-batch is a program by itself from now on, as they move buffers."""
        self._moves, self._window, self._latest, self._kinds = True, None, None, {}

    def factors(
        self, window: BatchLosses, micro_batches: Sequence[Batch]
    ) -> tuple[list[Totals | None], Factors] | None:
        """What is known of the weights, and what the losses are multiplied by; None where that can't be known."""
        assert self.form is not None
        knowns, factors = [], []
        for micro_batch in micro_batches:
            known = window.known(micro_batch)
            factor = window.factors(self.form.names, known, micro_batch.rows, told=self.form.told)
            if factor is None:
                self._tell_eager("the weight of a loss is unknown before its forward pass, or 0", rare=True)
                return None
            knowns.append(known)
            factors.append(factor)
        return knowns, factors

    def tensors(self, factors: Factors, scale: Callable[[Tensor], Tensor] | None) -> list[list[Tensor]]:
        """The factors on the device, times a GradScaler's scale."""
        tensors = [[self._tensor(factor) for factor in each] for each in factors]
        return tensors if scale is None else [[scale(tensor) for tensor in each] for each in tensors]

    def _tensor(self, factor: Weight) -> Tensor:
        if isinstance(factor, Tensor):
            return factor
        found = self._factors.get(factor)
        if found is None:
            if len(self._factors) > MOST:
                self._factors.clear()
            device = self._runner.objective.device
            dtype = torch.float32 if device.type == "mps" else torch.float64
            found = self._factors[factor] = torch.full((), factor, dtype=dtype, device=device)
        return found

    def find(self, window: BatchLosses, batch: Batch, micro_batches: Sequence[Batch]) -> Program | None:
        """The program for these micro-batches; None where they run eagerly."""
        if len(micro_batches) > 1:
            if self._window is None:
                rows = micro_batches[0].rows
                key = [len(micro_batches), rows, *batch.signature]
                self._window = key, self._new(window, rows=rows if self.cuts(batch) else 0)
            return self._window[1]
        micro_batch = micro_batches[0]
        if self._latest is not None and self._latest[0] == micro_batch.signature:
            return self._latest[1]
        program = self._find(window, micro_batch)
        if program is not None and not program.dynamic:
            self._latest = micro_batch.signature, program
        return program

    def _find(self, window: BatchLosses, micro_batch: Batch) -> Program | None:
        kind = self._kinds.get(which := kind_of(micro_batch))
        if kind is None:
            if len(self._kinds) >= KINDS:
                self._tell_eager(f"there are more than {KINDS} kinds of batches, by their dtypes", rare=True)
                return None
            kind = self._kinds[which] = Kind(others=self._window is not None)
        sizes = sizes_of(micro_batch)
        if kind.waits(sizes, counts=not self.rehearses):
            self._tell_eager(_RARE % OFTEN, rare=True)
            return None
        if sizes == kind.fixed_sizes:
            kind.fixed = kind.fixed or self._new(window)
            return kind.fixed
        if kind.any is None:
            kind.any = self._new(window, dynamic=True)
        kind.mark(micro_batch)
        return kind.any

    def _new(self, window: BatchLosses, *, rows: int = 0, dynamic: bool = False) -> Program:
        form, objective = self.form, window.objective
        assert form is not None
        self.unproven = True
        passes = PassesOf(
            objective.model,
            objective.summed_loss if window.summed else objective.loss_fn,
            objective.compute_loss,
            objective.autocast,
            objective.device.type,
            form.names,
            form.told,
            form.told and not window.adds,
            window.summed,
            rows,
        )
        return Program(passes, self._keywords, dynamic=dynamic)

    def zeros(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Where the gradients of these parameters are added up."""
        if not self._graphs:
            return [p.new_zeros(p.shape, dtype=p.grad_dtype or p.dtype) for p in parameters]
        found = [self._static.get(id(p)) for p in parameters]
        if any(
            t is None or t.shape != p.shape or t.dtype != (p.grad_dtype or p.dtype) for t, p in zip(found, parameters)
        ):
            self._static = {id(p): p.new_zeros(p.shape, dtype=p.grad_dtype or p.dtype) for p in parameters}
            for tensor in (*parameters, *self._static.values()):
                torch._dynamo.mark_static_address(tensor)
        sums = [self._static[id(p)] for p in parameters]
        for parameter, total in zip(parameters, sums):
            if parameter.grad is not total:
                total.zero_()
        return sums

    def call(self, program: Program, *arguments: Any) -> tuple[Any, ...]:
        if not self._graphs:
            return program(*arguments)
        torch.compiler.cudagraph_mark_step_begin()
        losses, weights, reached, new = program(*arguments)
        # The next replay overwrites what the program has returned.
        return (
            [[loss.clone() for loss in each] for each in losses],
            [[w.clone() if isinstance(w, Tensor) else w for w in each] for each in weights],
            reached,
            None if new is None else [gradient if gradient is None else gradient.clone() for gradient in new],
        )

    def told(self, losses: Sequence[Tensor], weights: Sequence[Any]) -> tuple[Tensor, Weight | Terms | None]:
        """What `Objective.evaluate` would have returned."""
        assert self.form is not None
        if self.form.names == (None,):
            return losses[0], plain_weight(weights[0]) if self.form.told else None
        terms = zip(self.form.names, losses, weights)
        return losses[0], {n: Term(loss, plain_weight(w) if self.form.told else None) for n, loss, w in terms}


class Kind:
    """Micro-batches that differ in their sizes alone: a program for the first sizes, and one for any others.

    `others`: there is a program for whole windows, so that all micro-batches by themselves are rare.
    """

    def __init__(self, *, others: bool) -> None:
        self.fixed: Program | None = None
        self.any: Program | None = None
        self.fixed_sizes: tuple[int, ...] | None = () if others else None
        self._seen: set[tuple[int, ...]] = set()
        self._others = 0

    def waits(self, sizes: tuple[int, ...], *, counts: bool) -> bool:
        """Whether a micro-batch of these sizes is still too rare to be compiled."""
        if self.fixed_sizes is None:
            self.fixed_sizes = sizes
        self._seen.add(sizes) if len(self._seen) < 2 * OFTEN else None
        if sizes == self.fixed_sizes or self.any is not None:
            return False
        self._others += counts
        return self._others <= OFTEN or not counts

    def mark(self, micro_batch: Batch) -> None:
        """Tell torch.compile which sizes may be others."""
        varying = [len(set(each)) > 1 for each in zip(*({*self._seen, self.fixed_sizes or ()} - {()}))]
        varies = iter(varying)
        for _, leaf, _ in micro_batch.leaves:
            for dim in range(leaf.dim()):
                if next(varies, False):
                    torch._dynamo.maybe_mark_dynamic(leaf, dim)


def _sums_wider(parameter: Tensor) -> bool:
    """Whether this parameter's gradients are added up in another dtype than its own."""
    return parameter.grad_dtype not in (None, parameter.dtype)


def kind_of(batch: Batch) -> Hashable:
    """What batches have in common whose sizes alone differ."""
    return tuple([(path, leaf.dtype, leaf.dim()) for path, leaf, _ in batch.leaves])


def sizes_of(batch: Batch) -> tuple[int, ...]:
    return tuple([size for _, leaf, _ in batch.leaves for size in leaf.shape])


def _traced_state(modules: Sequence[nn.Module], parameters: Sequence[Tensor], loss_fn: Any) -> list[Any]:
    """What a program takes over from its tracing without a guard: which hooks there are, and a loss's settings."""
    hooks = [
        key
        for module in modules
        for each in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        for key in each
    ]
    for parameter in parameters:
        hooks += [*(parameter._backward_hooks or ()), *(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())]
    settings = vars(loss_fn) if isinstance(loss_fn, nn.Module) else {}
    plain = [value for value in settings.values() if value is None or isinstance(value, (bool, int, float, str))]
    return [hooks, plain]
