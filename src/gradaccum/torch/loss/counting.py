"""Forward passes that find out what several losses divide by, before the passes that count."""

from __future__ import annotations

from typing import Any

import torch

from gradaccum.core.sizes import Plan, Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import Passes
from gradaccum.on_torch.state import Snapshot
from gradaccum.torch.chunking.two_passes import no_word_of_missing_gradients
from gradaccum.torch.loss.named import MIXED_TERMS, Term, Terms


class CountingPasses(Passes):
    """Forward passes that find out what the terms of a loss weigh, before the passes that count.

    Without gradients, unless the loss needs some of its own, as a gradient penalty does.
    """

    def __init__(self, runner: Any, batch: Batch) -> None:
        self._runner, self._batch = runner, batch
        self._objective = runner.alone()
        self._found: list[Terms] = []

    def run(self, plan: Plan) -> list[Terms]:
        for piece in plan:
            buffers = Snapshot.of(self._runner.modules())  # each of them finds what the first one does
            self._runner.oom.run([piece], plan, self)
            buffers.put_back()
            if not self._objective.found.terms:
                break
        return self._found

    def forward(self, piece: Slice) -> Terms | None:
        found = self._objective.found
        with self._runner.batch_norm.micro_batch():
            if not found.needs_gradients:
                try:
                    return self._terms(piece, False)
                except RuntimeError as error:
                    if is_out_of_memory(error) or "does not require grad" not in str(error):
                        raise
                    found.needs_gradients = True
            return self._terms(piece, True)

    def _terms(self, piece: Slice, gradients: bool) -> Terms | None:
        with torch.set_grad_enabled(gradients), no_word_of_missing_gradients():
            _, terms = self._objective.evaluate(self._runner.batcher.take(self._batch, piece))
        if isinstance(terms, dict):
            return {name: Term(term.loss.detach(), term.weight) for name, term in terms.items()}
        if self._found:
            raise ValueError(MIXED_TERMS)
        return None

    def backward(self, piece: Slice, terms: Terms | None) -> None:
        if terms is not None:
            self._found.append(terms)
