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
from gradaccum.core.proof import ATTEMPTS, Comparison, Outcome, ProofSchedule, interleaved_ways, with_fewer_rows
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.arrays import TorchRunner, sample
from gradaccum.on_torch.adapter.kinds import BatchKinds, rows_to_prove
from gradaccum.on_torch.adapter.rng import RowwiseRng, watched
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.batch_norm import BatchNormChoice, batch_norms, in_eval_mode
from gradaccum.torch.buffers import ModuleState, left_as_found, owners_of_buffers, warn_of_buffers
from gradaccum.torch.loss import Objective
from gradaccum.torch.padding import what_is_cut
from gradaccum.torch.proof.causes import counting_layers, suspicion, unusual_batch_norms
from gradaccum.torch.proof.check import certify

__all__ = ["Proof", "eager"]

logger = logging.getLogger("gradaccum")

NEARLY = 20
"""Times the tolerance: up to there a difference that isn't there in float64 is one of rounding."""

Gradients = Callable[[Objective, Batch, Sequence[int]], Tensor]
"""Runs the rows of a batch in micro-batches of these sizes, in order, as an update does: takes each of them by
`batch.take(rows)` before its forward pass, leaves the finished gradients in the parameters (scaled by `Proof.scale`,
not clipped), and returns the loss. Exchanges nothing with other ranks, and learns nothing about sizes."""


class LoweredScale:
    """A GradScaler's scale, lowered where gradients overflow in it: an update is skipped then, and tried again."""

    def __init__(self, scaler: Any) -> None:
        self._scaler, self.power = scaler, 0
        """The power of two that the scale is multiplied by."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
        return loss if self._scaler is None else self._scaler.scale(loss) * 2.0**self.power

    def lower(self) -> bool:
        """Scale less from now on. Returns False where no lower scale is left."""
        lowered = self._scaler is not None and self.power > -16
        self.power -= 4 * lowered
        return lowered


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
        self.objective, self._explain = objective, explain
        self.gradients, self._parameters = gradients, parameters
        # SyncBatchNorm would wait for ranks that have nothing to prove.
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in objective.model.modules())
        self.exact = batch_norm == "exact" and not synced
        self.scale = LoweredScale(scaler)
        self.schedule, self.kinds, self._attempts = ProofSchedule(), BatchKinds(), 0
        self._text = frozenset[str]()
        self._pending_warning, self.failed_parts = "", (0, Exception())
        self._warned: set[str] = set()

    def is_due(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch, which has rows to be split, is to be proven: of a new kind, or the 2nd, 4th, 8th, ..."""
        self._pending_warning, self._text, self.failed_parts = "", text, (0, Exception())
        if batch.rows < 2 or self._attempts >= ATTEMPTS or (batch.groups is not None and len(batch.units()) < 2):
            self.schedule.batches += 1
            return False
        return self.schedule.is_due(self.kinds.is_new(batch, modes, text))

    def run(self, batch: Batch, size: int | None = None) -> None:
        """Prove that micro-batches of the batch that `is_due` make its update. Moves nothing."""
        roots = self.objective.modules
        parameters = [p for root in roots.values() for p in root.parameters()]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            return
        self._attempts += 1
        for cause in counting_layers(roots.values()):
            raise NotEquivalentError(f"{cause.message} verify=False leaves this proof out.")
        named: dict[str, Tensor] = {
            f"{prefix}.{n}" if prefix else n: p for prefix, r in roots.items() for n, p in r.named_parameters()
        }
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

        def attempt(most: int) -> tuple[Batch, _Runner, Comparison, list[Difference] | None, list[Difference]]:
            nonlocal tried
            few = batch.take(torch.tensor(rows_to_prove(batch, most)))
            tried = few.rows
            ways = interleaved_ways([unit.tolist() for unit in few.units()])
            found = [*parameters.values()]
            with (
                contextlib.nullcontext() if self.exact else in_eval_mode(objective.model),
                left_as_found(objective.modules, found, [objective.device], [objective.evaluate]) as state,
                eager(),
                torch.enable_grad(),
            ):
                runner = _Runner(self, objective, few, parameters, state)
                for chosen in ([ways[way % len(ways)]], ways):  # all of them before anything is said
                    comparison = Comparison(runner, range(few.rows), chosen)
                    differences = comparison.differences()
                    wrong = comparison.beyond_rounding(differences or [])
                    if not wrong:
                        break
                if any(difference.part != "buffer" for difference in wrong):
                    runner.rng.check("the model or the loss")
            return few, runner, comparison, differences, wrong

        try:
            few, runner, comparison, differences, wrong = with_fewer_rows(
                attempt, min(most, batch.rows), 2, is_out_of_memory
            )
        except Exception as error:
            self._could_not(tried, error)
            return False
        if differences is None:
            self.schedule.postpone()
            return False
        if wrong:
            self._judge(few, runner, comparison, differences, wrong)
        self._proven()
        return True

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
        rows, known = self.failed_parts
        if type(error) is type(known) and type(error) in (RuntimeError, AssertionError, IndexError):
            message = (
                f"The model or the loss raises on micro-batches, and not on {rows} rows at once: "
                f"{type(error).__name__}: {error}. Where rows go together, as pairs do, groups= keeps them together."
            )
            result = Equivalence((), 0.0, (Cause("error", "loss", message),), rows)
            try:
                result.raise_if_different()
            except NotEquivalentError as refused:
                raise refused from error

    def tell(self) -> None:
        """The update has been made, so what could not be proven is no error of the batch or the model: warn of it."""
        if self._pending_warning:
            logger.warning(self._pending_warning)
            self._pending_warning = ""
            self._proven()

    def _judge(
        self,
        few: Batch,
        runner: _Runner,
        comparison: Comparison,
        differences: Sequence[Difference],
        wrong: Sequence[Difference],
    ) -> None:
        if all(difference.part == "buffer" for difference in wrong):
            names = [difference.name for difference in wrong]
            if self.exact:  # these move once per update, and twice where a plain loop recomputes them in a checkpoint
                layers = batch_norms(self.objective.model)
                own = {f"{path}.{name}".lstrip(".") for path, layer in layers for name, _ in layer.named_buffers()}
                names = [name for name in names if name not in own]
            self._warn_of_moves(names, runner.state.made)
            return
        causes = self._causes(few, wrong, runner.tolerance)
        if not causes:
            return
        sizes = tuple(tuple(sizes) for _, sizes in comparison.ways)
        result = Equivalence(tuple(differences), runner.tolerance, tuple(causes), few.rows, sizes)
        try:
            result.raise_if_different()
        except NotEquivalentError as error:
            said = not self._text or what_is_cut(self._text) in str(error)
            cut = "" if said else f"\n`max_tokens` has cut off padding there. {what_is_cut(self._text)}"
            raise NotEquivalentError(
                f"{error}{cut}\nFound on {few.rows} rows of this batch, whole and in micro-batches, before an update "
                "was made with it. verify=False leaves this proof out."
            ) from None

    def _warn_of_moves(self, names: list[str], made: dict[str, tuple[str, str, str]]) -> None:
        """Name what goes elsewhere than where the large batch takes it, once."""
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


class _Runner(TorchRunner):
    """Runs the same rows at once and in micro-batches, on the user's own model, each time from the same state."""

    def __init__(
        self, proof: Proof, objective: Objective, few: Batch, parameters: dict[str, Tensor], state: ModuleState
    ) -> None:
        self._proof, self._objective, self._parameters, self.state = proof, objective, parameters, state
        self._few = few.map(self._detached_leaf)
        super().__init__(RowwiseRng(few.rows, neutral=proof.exact), objective.device)
        self.rng.holds(*objective.modules.values(), objective.evaluate)
        proof.scale.power = 0

    def run(self, rows: Sequence[int], sizes: Sequence[int] | None) -> Outcome:
        for parameter in self._parameters.values():
            parameter.grad = None
        self.rng.start(None)
        try:
            with self.rng:
                return self._outcome(self._at_once() if sizes is None else self._in_micro_batches(rows, sizes))
        finally:
            self.rng.rewind()
            self.state.put_back()

    def _at_once(self) -> Tensor:
        few = self._few.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)  # may be edited
        loss = self._objective.whole(few)
        self._proof.scale.scale(loss).backward()
        return loss

    def _in_micro_batches(self, rows: Sequence[int], sizes: Sequence[int]) -> Tensor:
        order = torch.tensor(rows)
        few = self._few.take(order).map(self._detached_leaf)
        batch = watched(few, lambda taken: self.rng.start(order[taken]))
        try:
            return self._proof.gradients(self._objective, batch, sizes)
        except Exception as error:
            self._proof.failed_parts = self._few.rows, error
            raise

    def _outcome(self, loss: Tensor) -> Outcome:
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                gradient = None if parameter.grad is None else parameter.grad.detach().to_dense()
                taken = None if gradient is None else sample(gradient)
                gradients[name] = taken if taken is None or taken is gradient else taken.clone()
        return Outcome({"loss": loss.detach().clone()}, gradients, {**self.state.tensors(), **self.state.numbers()})

    def tensors(self) -> list[Tensor]:
        return list(self._parameters.values())

    def lower_scale(self) -> bool:
        return self._proof.scale.lower()

    def _detached_leaf(self, leaf: Any) -> Any:
        """What a proof does to the gradients of a batch is nobody's; those of parameters are put back."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or any(leaf is p for p in self._parameters.values()):
            return leaf
        return leaf.detach().requires_grad_()


def eager() -> contextlib.AbstractContextManager[Any]:
    """Compile nothing for a few rows. Where torch._dynamo, which takes long to load, is not loaded, nothing does."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
