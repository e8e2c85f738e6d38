"""TrainStep's proof: a few rows of a batch at once and in micro-batches, through what makes its updates."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Cause, Difference, Equivalence
from gradaccum.core.proof import ATTEMPTS, Comparison, ProofSchedule, interleaved_ways, with_fewer_rows
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.kinds import BatchKinds, rows_to_prove
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.batch_norm import BatchNormChoice, batch_norms, in_eval_mode
from gradaccum.torch.buffers import left_as_found, owners_of_buffers, warn_of_buffers
from gradaccum.torch.loss import Objective
from gradaccum.torch.padding import what_is_cut
from gradaccum.torch.proof.causes import counting_layers, suspicion, unusual_batch_norms
from gradaccum.torch.proof.check import certify
from gradaccum.torch.proof.trial import BatchRunner, Gradients, LoweredScale, named_parameters

__all__ = ["Proof", "eager"]

logger = logging.getLogger("gradaccum")

NEARLY = 20
"""Times the tolerance: up to there a difference that isn't there in float64 is one of rounding."""


class Proof:
    """Compares a few rows at once, as a plain loop has them, with the same rows in micro-batches.

    Losses, gradients, and what modules keep must agree to rounding. Random numbers follow their rows, so dropout is
    no difference. BatchNorm that is not exact uses its running statistics meanwhile.
    """

    def __init__(
        self,
        objective: Objective,
        gradients: Gradients,
        *,
        parameters: Callable[[], list[Tensor]],
        batch_norm: BatchNormChoice = "warn",
        scaler: Any = None,
        explain: Callable[[Batch, bool], Cause | None] = lambda *_: None,
    ) -> None:
        self.objective, self._gradients, self._parameters, self._explain = objective, gradients, parameters, explain
        # SyncBatchNorm would wait for ranks that have nothing to prove.
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in objective.model.modules())
        self.exact = batch_norm == "exact" and not synced
        self.scale = LoweredScale(scaler)
        self.schedule, self.kinds, self._attempts = ProofSchedule(), BatchKinds(), 0
        self._text = frozenset[str]()
        self._failed_parts: tuple[int, Exception | None] = 0, None
        self._pending_warning = ""
        self._warned: set[str] = set()

    def is_due(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch, which has rows to be split, is to be proven: of a new kind, or the 2nd, 4th, 8th, ..."""
        self._pending_warning, self._text, self._failed_parts = "", text, (0, None)
        if batch.rows < 2 or self._attempts >= ATTEMPTS or (batch.groups is not None and len(batch.units()) < 2):
            self.schedule.batches += 1
            return False
        return self.schedule.is_due(self.kinds.is_new(batch, modes, text))

    def run(self, batch: Batch, size: int | None = None) -> None:
        """Prove that micro-batches of the batch that `is_due` make its update. Moves nothing."""
        named = named_parameters(self.objective)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in named.values()):
            return
        self._attempts += 1
        for cause in counting_layers(self.objective.modules.values()):
            raise NotEquivalentError(f"{cause.message} verify=False leaves this proof out.")
        known = {id(parameter) for parameter in named.values()}
        named.update({f"parameter {i}": p for i, p in enumerate(self._parameters()) if id(p) not in known})
        most, way = self.schedule.scope(size)
        if self._prove(self.objective, batch, most, way, named) and self.objective.autocast is not None:
            precise = copy.copy(self.objective)  # rounding hides less without autocast
            precise.autocast = None
            self._prove(precise, batch, most, way, named)

    def _prove(self, objective: Objective, batch: Batch, most: int, way: int, parameters: dict[str, Tensor]) -> bool:
        """Compare so many rows, or half as many wherever memory runs out. Returns whether they could be compared."""
        tried = 0

        def attempt(most: int) -> tuple[BatchRunner, Comparison, list[Difference] | None, list[Difference]]:
            nonlocal tried
            few = batch.take(torch.tensor(rows_to_prove(batch, most)))
            tried = few.rows
            ways = interleaved_ways([unit.tolist() for unit in few.units()])
            with (
                contextlib.nullcontext() if self.exact else in_eval_mode(objective.model),
                left_as_found(
                    objective.modules, [*parameters.values()], [objective.device], [objective.evaluate]
                ) as state,
                eager(),
                torch.enable_grad(),
            ):
                self.scale.power = 0
                runner = BatchRunner(
                    objective, few, self._in_micro_batches, parameters, state, neutral=self.exact, scale=self.scale
                )
                for chosen in ([ways[way % len(ways)]], ways):  # all of them before anything is said
                    comparison = Comparison(runner, range(few.rows), chosen)
                    differences = comparison.differences()
                    wrong = comparison.beyond_rounding(differences or [])
                    if not wrong:
                        break
                if any(difference.part != "buffer" for difference in wrong):
                    runner.rng.check("the model or the loss")
            return runner, comparison, differences, wrong

        try:
            runner, comparison, differences, wrong = with_fewer_rows(
                attempt, min(most, batch.rows), 2, is_out_of_memory
            )
        except Exception as error:
            self._could_not(tried, error)
            return False
        if differences is None:
            self.schedule.postpone()
            return False
        if wrong and all(difference.part == "buffer" for difference in wrong):
            self._warn_of_moves([difference.name for difference in wrong], runner.state.made)
        elif wrong and (causes := self._causes(runner.batch, wrong, runner.tolerance)):
            sizes = tuple(tuple(sizes) for _, sizes in comparison.ways)
            self._refuse(Equivalence(tuple(differences), runner.tolerance, tuple(causes), runner.rows, sizes))
        self._proven()
        return True

    def _in_micro_batches(self, objective: Objective, batch: Batch, sizes: Sequence[int]) -> Tensor:
        try:
            return self._gradients(objective, batch, sizes)
        except Exception as error:
            self._failed_parts = batch.rows, error
            raise

    def _proven(self) -> None:
        self.kinds.add()
        self._attempts = 0

    def _could_not(self, rows: int, error: Exception) -> None:
        if self.schedule.repeated:
            logger.debug("The proof could not be repeated on %d rows: %s", rows, error)
            return
        self._pending_warning = (
            f"Whether micro-batches make the large batch's update could not be proven: {rows} rows of this batch can't "
            f"be evaluated, at once or in parts ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})."
        )

    def check_error(self, error: BaseException) -> None:
        """Raise a NotEquivalentError where the update has failed as micro-batches of the proof did, unlike its rows."""
        rows, known = self._failed_parts
        if type(error) is type(known) and type(error) in (RuntimeError, AssertionError, IndexError):
            raise NotEquivalentError(
                "accumulated gradients differ from the large batch's.\n"
                f"The model or the loss raises on micro-batches, and not on {rows} rows at once: "
                f"{type(error).__name__}: {error}. Where rows go together, as pairs do, groups= keeps them together."
            ) from error

    def tell(self) -> None:
        """The update has been made, so what could not be proven is no error of the batch or the model: warn of it."""
        if self._pending_warning:
            logger.warning(self._pending_warning)
            self._pending_warning = ""
            self._proven()

    def _refuse(self, result: Equivalence) -> None:
        try:
            result.raise_if_different()
        except NotEquivalentError as error:
            said = not self._text or what_is_cut(self._text) in str(error)
            cut = "" if said else f"\n`max_tokens` has cut off padding there. {what_is_cut(self._text)}"
            raise NotEquivalentError(
                f"{error}{cut}\nFound on {result.rows} rows of this batch, whole and in micro-batches, before an "
                "update was made with it. verify=False leaves this proof out."
            ) from None

    def _warn_of_moves(self, names: list[str], made: dict[str, tuple[str, str, str]]) -> None:
        """Name what goes elsewhere than where the large batch takes it, once."""
        if self.exact:  # these move once per update, and twice where a plain loop recomputes them in a checkpoint
            layers = batch_norms(self.objective.model)
            self._warned |= {
                f"{path}.{name}".lstrip(".") for path, layer in layers for name, _ in layer.named_buffers()
            }
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        owners = {**owners_of_buffers(self.objective.modules), **made}
        if others := [repr(name) for name in new if name not in owners]:
            logger.warning(
                "The update is the large batch's, but these move once per micro-batch, not once per update: %s. "
                "Where that matters, move them once per update, after the optimizer's step.",
                ", ".join(others[:5]) + (", ..." if len(others) > 5 else ""),
            )
        warn_of_buffers([owners[name] for name in new if name in owners])

    def _causes(self, few: Batch, wrong: Sequence[Difference], tolerance: float) -> Sequence[Cause]:
        """What makes the difference, by name; nothing where it is rounding, as it isn't there in float64."""
        found = self._on_a_copy(few)
        if found is not None and found.causes:  # every micro-batch finds the same buffers: no cause, unless no other is
            paths = {path or "model" for path, _, _ in owners_of_buffers(self.objective.modules).values()}
            others = [cause for cause in found.causes if cause.kind != "buffer" or cause.where not in paths]
            return others or found.causes
        if self.exact and (layers := unusual_batch_norms(self.objective.model)):
            return layers
        largest = max((difference.error for difference in wrong if difference.part == "gradient"), default=0.0)
        if found is not None and largest <= (NEARLY**2 if self.schedule.repeated else NEARLY) * tolerance:
            return []
        return [self._explain(few, found is not None) or suspicion(self.objective.modules, wrong)]

    def _on_a_copy(self, few: Batch) -> Equivalence | None:
        """What a check on a copy in float64 finds; None where there can't be one."""
        try:
            with in_eval_mode(self.objective.model), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of parts that training never sees
                return certify(self.objective, few, None, device=self.objective.device)
        except Exception as error:
            logger.debug("The cause can't be looked for on a copy: %s", error)
            return None


def eager() -> contextlib.AbstractContextManager[Any]:
    """Compile nothing for a few rows. Where torch._dynamo, which takes long to load, is not loaded, nothing does."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
