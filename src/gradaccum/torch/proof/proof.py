"""Proofs and checks: rows of a batch at once and in micro-batches.

`Proof` is TrainStep's: a few rows, on the user's own model, through what makes its updates. `certify` is
`check_equivalence`'s: all rows in several ragged partitions, on a copy in float64, and the causes of a difference.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.equivalence import Cause, Difference, Equivalence
from gradaccum.core.numpy_arrays import numbers_of_rows
from gradaccum.core.proof import Comparison, WeightlessError, with_fewer_rows, worst
from gradaccum.core.rounding import IN_FLOAT64, rounding
from gradaccum.core.sizes import Groups, even_sizes
from gradaccum.core.ways import Way, interleaved_ways, ragged_ways
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch import random_state
from gradaccum.on_torch.adapter.kinds import arrays_of, rows_to_prove
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.reach import held_generators
from gradaccum.torch.batch_norm import BatchNormChoice, batch_norms, frozen
from gradaccum.torch.buffers import warn_of_buffers
from gradaccum.torch.loss import Objective
from gradaccum.torch.module_state import ModuleState, gradients_kept, left_as_found, owners_of_buffers
from gradaccum.torch.padding import what_is_cut
from gradaccum.torch.proof.causes import (
    counting_layers,
    find_causes,
    hook_cause,
    input_cause,
    nondeterminism_cause,
    suspicion,
    updated_cause,
    updating_hook,
)
from gradaccum.torch.proof.refilled import refilled, refilled_cause
from gradaccum.torch.proof.schedule import BatchSchedule
from gradaccum.torch.proof.trial import Accumulate, BatchRunner, Gradients, LoweredScale, Trial, named_parameters

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
        self.schedule = BatchSchedule()
        self.ran = False
        """Whether it has run since `tell`."""
        self.quick = False
        """Whether rows run just now as where nothing is drawn: what differs then is looked at once more."""
        self._begin(frozenset())
        self._warned: set[str] = set()
        self._generators: list[Any] = []
        self._unused: dict[bool, torch.dtype] = {}
        """With and without autocast: in which dtype the latest proof has computed, if nothing was drawn in it."""

    def _begin(self, text: frozenset[str]) -> None:
        self._text, self._pending_warning, self.quick = text, "", False
        self._failed_parts: tuple[int, Exception | None] = 0, None

    def run(self, batch: Batch, size: int | None = None, text: frozenset[str] = frozenset()) -> None:
        """Prove that micro-batches of the batch that `schedule` includes make its update, and that alone.

        `text`: the paths of what `max_tokens` cuts in it. Moves nothing, and compiles nothing.
        """
        self.ran = True
        self._begin(text)
        _uncompiled()(self, batch, size)

    def _run(self, batch: Batch, size: int | None) -> None:
        named = named_parameters(self.objective)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in named.values()):
            return
        self.schedule.attempts += 1
        for cause in counting_layers(self.objective.modules.values()):
            raise NotEquivalentError(f"{cause.message} verify=False leaves this proof out.")
        if hooked := updating_hook(named):
            raise NotEquivalentError(f"{hooked.message} verify=False leaves this proof out.")
        known = {id(parameter) for parameter in named.values()}
        named.update({f"parameter {i}": p for i, p in enumerate(self._parameters()) if id(p) not in known})
        most, way = self.schedule.scope(size)
        if self._prove(self.objective, batch, most, way, named) and self.objective.autocast is not None:
            precise = copy.copy(self.objective)  # rounding hides less without autocast
            precise.autocast = None
            self._prove(precise, batch, most, way, named)

    def _prove(self, objective: Objective, batch: Batch, most: int, way: int, parameters: dict[str, Tensor]) -> bool:
        """Compare so many rows, or half as many wherever memory runs out. Returns whether they could be compared."""
        if not self.schedule.repeated:
            self._unused = {}
            self._generators = held_generators(*objective.modules.values(), objective.evaluate)
        tried: list[Batch] = []

        def attempt(most: int) -> Comparison[BatchRunner]:
            tried.append(batch.take(torch.tensor(rows_to_prove(batch, most))))
            with (
                contextlib.nullcontext() if self.exact else frozen(objective.model, lends=True),
                left_as_found(
                    objective.modules,
                    [*parameters.values()],
                    [objective.device],
                    self._generators,
                    objective.holders(),
                ) as state,
                eager(),
                torch.enable_grad(),
            ):
                return self._compared(objective, tried[-1], way, parameters, state)

        try:
            found = with_fewer_rows(attempt, min(most, batch.rows), 2, is_out_of_memory)
        except Exception as error:
            self._could_not(tried[-1].rows if tried else 0, error)
            return False
        if found.found is None:
            if found.runner.updated:
                raise NotEquivalentError(updated_cause(found.runner.updated).message)
            self.schedule.attempts -= not found.weighs  # as no update is made with it, either
            self.schedule.postpone()
            return False
        runner, wrong = found.runner, found.wrong
        if wrong and all(difference.part == "buffer" for difference in wrong):
            self._warn_of_moves([difference.name for difference in wrong], runner.state.made)
        elif wrong and (causes := self._causes(runner, wrong)):
            sizes = tuple(tuple(sizes) for _, sizes in found.ways)
            self._refuse(Equivalence((*found.found,), runner.tolerance, tuple(causes), runner.rows, sizes))
        self.schedule.proven()
        return True

    def _compared(
        self, objective: Objective, few: Batch, way: int, parameters: dict[str, Tensor], state: ModuleState
    ) -> Comparison[BatchRunner]:
        """The rows at once and in micro-batches: in one way, quickly where nothing was drawn so far; then in all."""
        gradients = self._in_micro_batches
        ways = functools.partial(interleaved_ways, [unit.tolist() for unit in few.units()])
        casts = objective.autocast is not None

        def run(ways: Sequence[Way], idle: torch.dtype | None, *, closely: bool = False) -> Comparison[BatchRunner]:
            self.scale.power = 0
            how: dict[str, Any] = {"generators": self._generators, "scale": self.scale}
            runner = BatchRunner(objective, few, gradients, parameters, state, neutral=self.exact, idle=idle, **how)
            comparison = Comparison(runner, ways)
            if closely:
                comparison.judged()
            elif comparison.large:
                runner.rng.rest()
                comparison.differences()
            return comparison

        known, idle = ways(), self._unused.get(casts)
        place = way % len(known)  # the first one tells by numbers
        one = known[place : place + 1] if place else ways(numbers_of_rows(arrays_of(few)))[:1]
        self.quick = idle is not None
        # What goes wrong quickly, whatever it is, is looked at once more.
        with contextlib.suppress(Exception) if self.quick else contextlib.nullcontext():
            found = run(one, idle)
            if not found.wrong and (found.found is not None or not self.quick):
                if not found.runner.rng.used:
                    self._unused[casts] = found.runner.rng.precision
                return found
        self.quick = False
        found = run(ways(numbers_of_rows(arrays_of(few))), None, closely=True)
        if any(difference.part != "buffer" for difference in found.wrong):
            found.runner.rng.check("the model or the loss")
        return found

    def _in_micro_batches(self, objective: Objective, batch: Batch, sizes: Sequence[int]) -> Tensor:
        try:
            return self._gradients(objective, batch, sizes)
        except Exception as error:
            self._failed_parts = batch.rows, error
            raise

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
        self._end()
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
            self.schedule.proven()
        self._end()

    def _end(self) -> None:
        self.ran = False
        self._begin(frozenset())

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

    def _causes(self, runner: BatchRunner, wrong: Sequence[Difference]) -> Sequence[Cause]:
        """What makes the difference, by name; nothing where it is rounding, as it isn't there in float64."""
        few, tolerance = runner.batch, runner.tolerance
        if runner.updated:
            return [updated_cause(runner.updated)]
        with contextlib.suppress(Exception):  # the loss may have its own idea of which rows go together
            if names := refilled(self.objective, few, named_parameters(self.objective), self._generators):
                return [refilled_cause(names)]
        found = self._on_a_copy(few)
        if found is not None and found.causes:  # every micro-batch finds the same buffers: no cause, unless no other is
            paths = {path or "model" for path, _, _ in owners_of_buffers(self.objective.modules).values()}
            others = [cause for cause in found.causes if cause.kind != "buffer" or cause.where not in paths]
            return others or found.causes
        largest = max((difference.error for difference in wrong if difference.part == "gradient"), default=0.0)
        if found is not None and largest <= (NEARLY**2 if self.schedule.repeated else NEARLY) * tolerance:
            return []
        return [self._explain(few, found is not None) or suspicion(wrong)]

    def _on_a_copy(self, few: Batch) -> Equivalence | None:
        """What a check on a copy in float64 finds; None where there can't be one."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of parts that training never sees
                return certify(self.objective, few, None, device=self.objective.device, batch_norm=None)
        except Exception as error:
            logger.debug("The cause can't be looked for on a copy: %s", error)
            return None


@functools.cache
def _uncompiled() -> Callable[[Proof, Batch, int | None], None]:
    return torch.compiler.disable(Proof._run)  # takes as long as a pass, each time


def eager() -> contextlib.AbstractContextManager[Any]:
    """Compile nothing for a few rows. Where torch._dynamo, which takes long to load, is not loaded, nothing does."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def certify(
    objective: Objective,
    batch: Batch,
    accumulate: Accumulate | None,
    *,
    device: torch.device,
    tolerance: float = IN_FLOAT64,
    size: int | None = None,
    batch_norm: BatchNormChoice | None = "warn",
) -> Equivalence:
    """Compare the batch at once with several ragged partitions of its rows, and name what makes a difference.

    With `batch_norm=None`, BatchNorm is as in proofs.
    """
    if cause := input_cause(batch):
        return Equivalence((), tolerance, (cause,), device=str(device))
    if batch.rows < 2:
        raise ValueError(f"The batch must have at least 2 rows, to be split. Received: {batch.rows}.")
    if cause := updating_hook(named_parameters(objective)):
        return Equivalence((), tolerance, (cause,), device=str(device))
    if len(batch.units()) < 2:
        raise ValueError(f"The batch must have at least 2 groups, to be split. Received: one, of {batch.rows} rows.")
    generators = random_state.all_generators(random_state.every_device())
    generators += held_generators(objective.model, objective.loss_fn, objective.compute_loss, objective.weight)
    # The user's own have theirs, should a closure reach them past the copy.
    parameters = [*named_parameters(objective).values()]
    copied = functools.partial(Trial, objective, batch, accumulate, device=device, batch_norm=batch_norm)
    with torch.inference_mode(False), torch.enable_grad(), random_state.kept(generators), gradients_kept(parameters):
        result = _Check(copied, _ways(batch, size), tolerance).run()
    places = {leaf.device.type for _, leaf, _ in batch.leaves if isinstance(leaf, Tensor)}
    with contextlib.suppress(Exception):  # the loss may have its own idea of which rows go together
        alike = accumulate is not None and not result.causes and places == {objective.device.type}
        # A copy in float64 doesn't show it where the gradients are cast.
        if alike and (names := refilled(objective, batch, named_parameters(objective), generators)):
            return dataclasses.replace(result, causes=(refilled_cause(names),))
    return result


class _Check:
    def __init__(self, copied: Callable[..., Trial], ways: list[Way], tolerance: float) -> None:
        self.ways = ways
        try:
            self._begin(copied(tolerance=tolerance))
        except RuntimeError as error:
            if not any(word in str(error) for word in ("dtype", "Double", "double", "Float", "Half", "BFloat16")):
                raise
            self._begin(copied(tolerance=tolerance, dtype=None))
            reason = str(error).splitlines()[0]
            self.trial.notes.append(f"Computed in the model's own dtype, as it can't in float64 ({reason}).")
            self.trial.allowed = max(tolerance, rounding(self.trial.precision, self.trial.device))

    def _begin(self, trial: Trial) -> None:
        self.trial = trial
        self.comparison = Comparison(trial, self.ways, "raise" if trial.by_train_step else "differs")
        self.comparison.check_loss()

    def run(self) -> Equivalence:
        trial, tolerance = self.trial, self.trial.allowed
        again = self.comparison.unrepeatable()
        nondeterminism = max(difference.error for difference in again)
        if not nondeterminism <= tolerance:
            return self._result(again, [nondeterminism_cause(trial, nondeterminism)])
        differences, failing = self._compared()
        if tolerance < max(difference.error for difference in differences) <= trial.tolerance:
            trial.notes.append(
                f"A part of the model computes in {trial.precision} whatever its parameters' dtype, so "
                f"{trial.tolerance:g} is allowed for its rounding."
            )
            trial.allowed = trial.tolerance
        wrong = self._wrong(differences)
        if not wrong:
            return self._result(differences, [])
        trial.rng.check("The model or the loss")
        if trial.hooks:
            for handle in itertools.chain(*trial.hooks.values()):
                handle.remove()
            self.comparison.restart()
            without, failing = self._compared()
            hooked = [name for name in wrong if name in trial.hooks]
            if hooked and not self._wrong(without):
                return self._result(differences, [hook_cause(hooked[0])])
            differences = without
        return self._result(differences, find_causes(trial, differences, failing, trial.allowed))

    def _wrong(self, differences: Sequence[Difference]) -> list[str]:
        return [difference.name for difference in differences if not difference.error <= self.trial.allowed]

    def _compared(self) -> tuple[list[Difference], list[Way]]:
        """Each tensor's largest error over all ways, and the ways that differ, the worst first."""
        first = self.comparison
        first.judged()
        # Rows drawn with replacement, so that what ranks or counts rows is put to a second test.
        drawn = self.trial.on(_drawn(self.trial.batch))
        second = Comparison(drawn, [_ways(drawn.batch, None)[-1]], first.failed)
        try:
            second.judged()
        except WeightlessError:  # what these rows drew weighs nothing
            pass
        except Exception:  # the loss may have its own idea of which rows go together
            if self.trial.by_train_step:
                raise
        compared = [*first.compared, *(one for one in second.compared if not one.failed)]
        failing = sorted(compared, key=lambda one: -one.error)
        # A way that cuts other groups may cut those of the batch itself.
        known = first.compared if drawn.batch.groups is not None else compared
        ways = [one.way if one in known else self.ways[-1] for one in failing if not one.error <= self.trial.allowed]
        return worst(compared), ways

    def _result(self, differences: Sequence[Difference], causes: Sequence[Cause]) -> Equivalence:
        notes = [*self.trial.notes]
        if not self.trial.original.model.training:
            notes.append("The model is in eval mode: dropout and BatchNorm were checked as they are there.")
        silent = [name for name, gradient in self.comparison.large.gradients.items() if gradient is None]
        if silent:
            shown = ", ".join(silent[:3]) + (" ..." if len(silent) > 3 else "")
            notes.append(
                f"No gradient reached {len(silent)} parameters on this batch, so they weren't compared: {shown}."
            )
        return self.comparison.record(differences, causes, self.trial.allowed, notes)


def _drawn(batch: Batch) -> Batch:
    """As many rows, or groups of rows, drawn from the batch with replacement."""
    units = batch.units()
    drawn = torch.randint(len(units), (len(units),), generator=torch.Generator().manual_seed(2)).tolist()
    while sum(len(units[place]) for place in drawn) > batch.rows:
        drawn.pop()
    second = batch.take(torch.cat([units[place] for place in drawn]))
    if batch.groups is not None:  # one that was drawn twice is two
        sizes = torch.tensor([len(units[place]) for place in drawn])
        second.groups = torch.arange(len(drawn)).repeat_interleave(sizes)
    return second


def _ways(batch: Batch, size: int | None) -> list[Way]:
    """Ways to cut the rows, none of them through rows that belong together: as TrainStep would, and ragged ones."""
    given: list[Way] = []
    if size is not None and size < batch.rows:
        rows = range(batch.rows)
        if batch.groups is None:
            given = [(rows, even_sizes(batch.rows, size))]
        else:
            parts = Groups(batch.groups.tolist()).cut(rows, size)
            given = [([row for part in parts for row in part], [len(part) for part in parts])]
    return [*given, *ragged_ways([unit.tolist() for unit in batch.units()])]
