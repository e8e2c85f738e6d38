"""The first update proves itself: a few rows, whole and split, through the machinery that makes the updates."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Cause, Difference, Equivalence
from gradaccum.core.rounding import rounding
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.batch_norm import BatchNormChoice, batch_norms, in_eval_mode
from gradaccum.torch.buffers import ModuleState, choose_rules, left_as_found, owners_of_buffers, tell_of_buffers
from gradaccum.torch.equivalence.causes import counting_layers, suspicion, unusual_batch_norms
from gradaccum.torch.equivalence.certificate import certify
from gradaccum.torch.equivalence.kinds import GROUPS, Occasions, splits, telling_rows
from gradaccum.torch.equivalence.outcome import LoweredScale, Outcome, worst
from gradaccum.torch.equivalence.row_randomness import Replay, watched
from gradaccum.torch.loss import Objective
from gradaccum.torch.padding import what_is_cut

__all__ = ["Gradients", "Proof", "eager"]

logger = logging.getLogger("gradaccum")

ENTRIES = 1 << 18
"""Entries of a gradient that are compared, at most."""
NEARLY = 20
"""Times the tolerance: up to there a difference that isn't there in float64 is one of rounding."""
TIMES, TIMES_IN_HALF = 32, 2
"""Times what the last bits of the parameters make of the result: up to there a difference is one of rounding."""
ATTEMPTS = 8
"""Batches in a row on which there is nothing to compare, before no more is tried."""

Gradients = Callable[[Batch, Sequence[int]], Tensor]
"""Runs the rows of a batch in micro-batches of these sizes, in order, as an update does: takes each of them by
`batch.take(rows)` before its forward pass, leaves the finished gradients in the parameters (scaled by `Proof.scale`,
not clipped), and returns the loss. Exchanges nothing with other ranks, and learns nothing about sizes."""


class Proof:
    """Compares a few rows at once, as a plain loop has them, with the same rows in micro-batches.

    Losses, gradients, and what modules keep must agree to rounding. Random numbers follow their rows, so dropout is
    no difference. BatchNorm that is not exact uses its running statistics meanwhile.

    Args:
        objective: The loss, with the model that a plain loop calls.
        gradients: Runs micro-batches as an update does.
        parameters: What the optimizers update.
        batch_norm: As for `TrainStep`.
        scaler: A GradScaler, or None.
        explain: What makes micro-batches differ from a batch, and whether it is sure that the loss doesn't.
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
        self._gradients = gradients
        self._parameters = parameters
        # SyncBatchNorm would wait for ranks that have nothing to prove.
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in objective.model.modules())
        self._exact = batch_norm == "exact" and not synced
        self.scale = LoweredScale(scaler)
        self.occasions, self._attempts = Occasions(), 0
        self._text = frozenset[str]()
        self._untold = ""
        self._told: set[str] = set()

    def due(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch, which has rows to be split, is to be proven: of a new kind, or the 2nd, 4th, 8th, ...

        Args:
            batch: The large batch.
            modes: Of each module, the model first: whether it is in training mode.
            text: The paths of what `max_tokens` cuts.
        """
        self._untold, self._text = "", text
        if batch.rows < 2 or self._attempts >= ATTEMPTS or (batch.groups is not None and len(batch.units()) < 2):
            self.occasions.batches += 1
            return False
        return self.occasions.due(batch, modes, text)

    def run(self, batch: Batch, size: int | None = None) -> None:
        """Prove that micro-batches of the batch that was `due` make its update. Moves nothing.

        Args:
            batch: The large batch.
            size: Rows of its micro-batches, where that is known: not many more are looked at.

        Raises:
            NotEquivalentError: The gradients or the losses differ. The message names the cause, and what to do.
        """
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
        most, split = self.occasions.scope(size)
        if self._prove(batch, most, split, roots, named) and self.objective.autocast is not None:
            # Rounding hides less without it.
            autocast, self.objective.autocast = self.objective.autocast, None
            try:
                self._prove(batch, most, split, roots, named)
            finally:
                self.objective.autocast = autocast

    def _prove(
        self, batch: Batch, most: int, split: int | None, roots: dict[str, nn.Module], parameters: dict[str, Tensor]
    ) -> bool:
        """Compare so many rows, or half as many wherever memory runs out. Returns whether they could be compared."""
        own = list(parameters.values())
        while True:
            few = batch.take(telling_rows(batch, most))
            try:
                with (
                    contextlib.nullcontext() if self._exact else in_eval_mode(self.objective.model),
                    left_as_found(roots, own, [self.objective.device], [self.objective.evaluate]) as state,
                    eager(),
                    torch.enable_grad(),
                ):
                    comparison = _Comparison(self, few, parameters, state, split)
                    differences = comparison.differences()
                    wrong = comparison.beyond_rounding(differences or [])
                    if wrong and split is not None:
                        differences = comparison.in_all_ways()
                        wrong = comparison.beyond_rounding(differences or [])
                    if any(difference.part != "buffer" for difference in wrong):
                        comparison.replay.check("the model or the loss")
                    chosen = self._choose_rules(comparison, wrong)
                break
            except Exception as error:
                if not is_out_of_memory(error) or len(few.units()) <= (2 if few.groups is None else GROUPS):
                    self._could_not(few.rows, error)
                    return False
            most = max(few.rows // 2, 2)
        if differences is None:
            self.occasions.put_off()
            return False
        wrong = [difference for difference in wrong if difference.name not in chosen]
        if wrong:
            self._judge(few, differences, wrong, comparison)
        self._known()
        return True

    def _choose_rules(self, comparison: _Comparison, wrong: list[Difference]) -> Collection[str]:
        """The buffers that go where all rows at once take them by another rule than the mean: they follow it now."""
        if not wrong or any(difference.part != "buffer" for difference in wrong):
            return ()

        def still_wrong() -> set[str]:
            return {difference.name for difference in comparison.beyond_rounding(comparison.differences() or [])}

        owners = {**owners_of_buffers(self.objective.modules), **comparison.made}
        return choose_rules([difference.name for difference in wrong], self.objective.modules, owners, still_wrong)

    def _known(self) -> None:
        self.occasions.kinds.add()
        self._attempts = 0

    def _could_not(self, rows: int, error: Exception) -> None:
        if self.occasions.repeated:
            logger.debug("The proof could not be repeated on %d rows: %s", rows, error)
            return
        self._untold = (
            f"Whether micro-batches make the large batch's update could not be proven: {rows} rows of this batch can't "
            f"be evaluated, at once or in parts ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})."
        )

    def tell(self) -> None:
        """The update has been made, so what could not be proven is no error of the batch or the model: say it."""
        if self._untold:
            logger.warning(self._untold)
            self._untold = ""
            self._known()

    def _judge(
        self, few: Batch, differences: list[Difference], wrong: list[Difference], comparison: _Comparison
    ) -> None:
        if all(difference.part == "buffer" for difference in wrong):
            if self._exact:  # these move once per update, and twice where a plain loop recomputes them in a checkpoint
                layers = batch_norms(self.objective.model)
                own = {f"{path}.{name}".lstrip(".") for path, layer in layers for name, _ in layer.named_buffers()}
                wrong = [difference for difference in wrong if difference.name not in own]
            self._tell_of_moves([difference.name for difference in wrong], comparison.made)
            return
        causes = self._causes(few, wrong, comparison.tolerance)
        if causes is None:
            return
        sizes = tuple(tuple(sizes) for _, sizes in comparison.splits)
        result = Equivalence(tuple(differences), comparison.tolerance, tuple(causes), few.rows, sizes)
        try:
            result.raise_if_different()
        except NotEquivalentError as error:
            said = not self._text or what_is_cut(self._text) in str(error)
            cut = "" if said else f"\n`max_tokens` has cut off padding there. {what_is_cut(self._text)}"
            raise NotEquivalentError(
                f"{error}{cut}\nFound on {few.rows} rows of this batch, whole and in micro-batches, before an update "
                "was made with it. verify=False leaves this proof out."
            ) from None

    def _tell_of_moves(self, names: list[str], made: dict[str, tuple[str, str, str]]) -> None:
        """Name what goes elsewhere than where the large batch takes it, once."""
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        owners = {**owners_of_buffers(self.objective.modules), **made}
        if others := [repr(name) for name in new if name not in owners]:
            logger.warning(
                "The update is the large batch's, but these move once per micro-batch, not once per update: %s. "
                "Where that matters, move them once per update, after the optimizer's step.",
                _listed(others),
            )
        tell_of_buffers([owners[name] for name in new if name in owners])

    def _causes(self, few: Batch, wrong: list[Difference], tolerance: float) -> list[Cause] | None:
        """What makes the difference, by name; None where it is rounding."""
        try:
            with in_eval_mode(self.objective.model), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of parts that training never sees
                found = certify(self.objective, few, _no_accumulation, device=self.objective.device)
        except Exception as error:
            logger.debug("The cause can't be looked for on a copy: %s", error)
            found = None
        if found is not None and found.causes:  # every micro-batch finds the same buffers: no cause, unless no other is
            paths = {path or "model" for path, _, _ in owners_of_buffers(self.objective.modules).values()}
            others = [cause for cause in found.causes if cause.kind != "buffer" or cause.where not in paths]
            return others or list(found.causes)
        layers = unusual_batch_norms(self.objective.model) if self._exact else []
        if layers:
            return layers
        errors = [difference.error for difference in wrong if difference.part == "gradient"]
        nearly = NEARLY**2 if self.occasions.repeated else NEARLY
        if found is not None and found.ok and max(errors, default=0.0) <= nearly * tolerance:
            return None  # it isn't there in float64
        if (found is None or found.ok) and (cause := self._explain(few, found is not None)):
            return [cause]
        return [suspicion(self.objective.modules, wrong)]


class _Comparison:
    """Runs the same rows whole and in parts, each from the same state: in one of the ways to split them, or in all."""

    def __init__(
        self, proof: Proof, few: Batch, parameters: dict[str, Tensor], state: ModuleState, split: int | None
    ) -> None:
        self._proof, self._parameters, self._state = proof, parameters, state
        self._few = few.map(self._apart)
        self.made = state.made
        self._ways = self.splits = splits(few)
        if split is not None:
            self.splits = [self._ways[split % len(self._ways)]]
        self.replay = Replay(few.rows, neutral=proof._exact)
        self.replay.holds(*proof.objective.modules.values(), proof.objective.evaluate)
        self._error: Exception | None = None

    @property
    def tolerance(self) -> float:
        """What is rounding in the narrowest dtype that was computed in."""
        return rounding(str(self.replay.precision), self._proof.objective.device.type)

    def differences(self) -> list[Difference] | None:
        """The largest difference of each tensor over all splits; None without finite gradients to compare with."""
        found: list[Difference] = []
        scale = self._proof.scale
        for factor in scale.factors:
            scale.factor = factor
            expected = self._expected = self._whole()
            if not any(g is not None for g in expected.gradients.values()) or not expected.loss.isfinite():
                return None
            if expected.finite:
                found = [difference for split in self.splits for difference in self._compared(split, expected)]
                if all(d.part != "gradient" or math.isfinite(d.error) for d in found):
                    break  # otherwise it may be an overflow, which a GradScaler mends
        if not expected.finite:
            return None
        if not (self.replay.replays or self.replay.neutral):
            self.replay.neutral = True
            return self.differences()
        if not found:
            assert self._error is not None
            raise self._error
        return worst(found)

    def in_all_ways(self) -> list[Difference] | None:
        """The differences over all ways to split the rows."""
        self.splits = self._ways
        return self.differences()

    def beyond_rounding(self, differences: list[Difference]) -> list[Difference]:
        """Those that rounding doesn't make: where large terms cancel each other, it makes much of the difference."""
        wrong = [d for d in differences if not d.error <= self.tolerance]
        if not wrong:
            return wrong
        times = TIMES if self.replay.precision.itemsize > 2 else TIMES_IN_HALF
        moved = self._expected.moved_by_last_bits(list(self._parameters.values()), self._whole)
        allowed = {key: times * distance for key, distance in moved.items()}
        for split in self.splits:
            with contextlib.suppress(Exception):  # the loss can't be evaluated on such parts
                for key, distance in self._split(*split).distances(self._expected).items():
                    if distance > allowed.get(key, 0.0):
                        allowed[key] = -1.0
        return [d for d in wrong if allowed.get((d.part, d.name), -1.0) < 0]

    def _apart(self, leaf: Any) -> Any:
        """What a proof does to the gradients of a batch is nobody's; those of parameters are put back."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or any(leaf is p for p in self._parameters.values()):
            return leaf
        return leaf.detach().requires_grad_()

    def _whole(self) -> Outcome:
        with self._started():
            few = self._few.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)  # it may be edited
            loss = self._proof.objective.whole(few)
            self._proof.scale.scale(loss).backward()
            return self._outcome(loss)

    def _compared(self, split: tuple[Tensor, list[int]], expected: Outcome) -> list[Difference]:
        """How far a split is from the whole; nothing where the loss can't be evaluated on such parts."""
        try:
            return self._split(*split).differences(expected)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logger.debug("The loss can't be evaluated on parts of %s rows: %s", split[1], error)
            self._error = error
            return []

    def _split(self, order: Tensor, sizes: list[int]) -> Outcome:
        batch = watched(self._few.take(order).map(self._apart), lambda rows: self.replay.start(order[rows]))
        with self._started():
            return self._outcome(self._proof._gradients(batch, sizes))

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        for parameter in self._parameters.values():
            parameter.grad = None
        self.replay.start(None)
        try:
            with self.replay:
                yield
        finally:
            self.replay.rewind()
            self._state.put_back()

    def _outcome(self, loss: Tensor) -> Outcome:
        gradients = {
            name: None if p.grad is None else _sample(p.grad.detach().to_dense())
            for name, p in self._parameters.items()
            if p.requires_grad
        }
        return Outcome(loss.detach().clone(), gradients, {**self._state.tensors(), **self._state.numbers()})


def _sample(gradient: Tensor) -> Tensor:
    """Some entries from all over a large gradient, so that no second copy of it is needed."""
    stride = -(-gradient.numel() // ENTRIES)
    return gradient if stride <= 1 else gradient.flatten()[::stride].clone()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def eager() -> contextlib.AbstractContextManager[Any]:
    """Compile nothing for a few rows. Where torch._dynamo, which takes long to load, is not loaded, nothing does."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _no_accumulation(*_: Any) -> Tensor:
    raise AssertionError("micro-batches of a copy are added up by the trial itself")
