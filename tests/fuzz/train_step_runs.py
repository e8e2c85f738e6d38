"""Calls of TrainStep, and one ordinary step on each of its batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch import BlockStep, TrainStep
from tests.fuzz import problem
from tests.fuzz.loaders import loader_of
from tests.fuzz.problem import Gone, Injected, Model, Script, apart, buffers_of, loss_of, state_of, weight_of
from tests.fuzz.scenario import MicroBatch, Scenario
from tests.fuzzing import Errors
from tests.reference import relative_error

LOSS_FNS: dict[str, dict[str, Any]] = {
    "rows": {},
    "ignored": {"ignore_index": 0},
    "classes": {"weight": problem.CLASS_WEIGHTS},
}
WEIGHED = ("ignored", "classes", "told", "tokens", "weighed sum")


class _Split(Script):
    """A model, its optimizers, and the TrainStep that trains it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, alone=False)
        self.fails_to_step = False
        events = {one.event for epoch in scenario.epochs for one in epoch}
        if scenario.hook == "step" or "step error" in events or not scenario.blocks:  # which refuse such hooks
            for optimizer in self.plain:
                optimizer.register_step_pre_hook(self._before_update)
        self.scaler = problem.scaler_of(scenario)
        own: dict[str, Any] = {"scaler": self.scaler if scenario.scaler else None, "noise_scale": scenario.noise}
        kind: Callable[..., Any] = functools.partial(TrainStep, **own, sync=scenario.sync)
        if scenario.blocks:
            kind = functools.partial(BlockStep, blocks="layers", update=scenario.blocks, on=scenario.blocks_on or None)
        self.step = kind(
            self.used,
            self.plain if scenario.optimizers > 1 else self.plain[0],
            micro_batch_size=scenario.micro or "auto",
            max_tokens=scenario.micro * 4 + 4 if scenario.loss == "tokens" else None,
            clip_grad_norm=scenario.clip if scenario.way != "loop" else None,
            autocast=torch.bfloat16 if scenario.dtype == "autocast" else None,
            accumulate_dtype=torch.float64 if scenario.wide else None,
            batch_norm=scenario.norm or "warn",
            batch_dims=_dims(scenario),
            groups={"pairs": 2, "groups": lambda *batch: batch[3]}.get(scenario.loss),
            verify=scenario.seed % 4 > 0 or scenario.loss == "across",
            **self._loss(),
        )

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self.fails_to_step:
            self.fails_to_step = False
            raise Injected
        if self.scenario.hook == "step":
            problem.limit(optimizer)

    def _loss(self) -> dict[str, Any]:
        scenario = self.scenario
        heads = {one.head for epochs in (scenario.epochs, scenario.others) for epoch in epochs for one in epoch}
        plain = heads == {0} and scenario.batch == "tuple"
        if plain and scenario.loss in LOSS_FNS and scenario.dtype != "float32":
            arguments = LOSS_FNS[scenario.loss]
            if scenario.dtype == "autocast":
                arguments = {name: value.float() if name == "weight" else value for name, value in arguments.items()}
            return {"loss_fn": nn.CrossEntropyLoss(**arguments)}
        by_batch: Any = None
        if scenario.loss in (*WEIGHED, "names") and scenario.seed % 2:
            by_batch = lambda *batch: self._weight(*self._parts(batch)[1:])  # noqa: E731
        return {
            "compute_loss": functools.partial(self._compute, by_batch is None),
            "weight": by_batch,
            "reduction": "sum" if scenario.loss.endswith("sum") or self._summed else "mean",
        }

    @property
    def _summed(self) -> bool:
        return self.scenario.loss == "names" and self.scenario.seed % 3 == 0

    def _parts(self, batch: Any) -> tuple[Any, Tensor, int]:
        if self.scenario.batch == "dict":
            return batch[0]["rows"], batch[0]["others"][0], batch[0]["head"]
        x, y, head, *_ = batch
        return x.T if self.scenario.batch == "columns" else x, y, head

    def _weight(self, y: Tensor, head: int) -> Any:
        if self.scenario.loss != "names":
            return weight_of(self.scenario, y)
        every = {0: (y != 0).sum(), 1: int((y != 1).sum()), 2: len(y), 3: float(len(y))}
        return {name: weight for name, weight in every.items() if problem.is_there(self.scenario, name, weight)}

    def _compute(self, tells: bool, model: Any, *batch: Any) -> Any:
        scenario, (x, y, head) = self.scenario, self._parts(batch)
        if scenario.loss in ("pairs", "groups"):
            return problem.in_groups(model(x, head), batch[3])
        if scenario.loss == "names":
            found = problem.named_losses(scenario, model, x, y, head)
            sums = {name: loss * w if w else loss.nan_to_num() for name, (loss, w) in found.items()}
            losses = sums if self._summed else {name: loss for name, (loss, _) in found.items()}
            told = {name: (loss, found[name][1]) for name, loss in losses.items()} if tells else losses
            return list(told.values()) if len(told) == 4 and scenario.seed % 7 == 0 else told  # names are numbers
        loss = loss_of(scenario, model, x, y, head)
        if scenario.loss == "weighed sum":
            loss = loss * weight if (weight := weight_of(scenario, y)) else loss.nan_to_num()
        return (loss, weight_of(scenario, y)) if tells and scenario.loss in WEIGHED else loss

    def call(self, one: MicroBatch, x: Any, y: Tensor) -> Tensor:
        """Hand a batch over."""
        batch: tuple[Any, ...] = x, y, one.head
        if "loss_fn" in self._loss():
            batch = x, y
        elif self.scenario.batch == "dict":
            batch = ({"rows": x, "others": [y], "head": one.head},)
        elif self.scenario.batch == "columns":
            batch = x.T.contiguous(), y, one.head
        elif self.scenario.batch == "shared":
            batch = (*batch, torch.arange(3.0))
        if self.scenario.loss in ("pairs", "groups"):
            batch = (*batch, problem.ids_of(self.scenario, len(y)))
        return self._loop(batch) if self.scenario.way == "loop" else self.step(*batch)

    def _loop(self, batch: Any) -> Tensor:
        """One's own, which clips and steps."""
        for optimizer in self.plain:
            optimizer.zero_grad()
        loss = self.step.backward(*batch)
        if all(p.grad is None for p in self.model.parameters()):
            return loss  # nothing weighs anything
        for optimizer in self.plain if self.scenario.scaler else []:
            self.scaler.unscale_(optimizer)
        if self.scenario.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.scenario.clip)
        for optimizer in self.plain:
            self.scaler.step(optimizer)
        self.scaler.update()
        return loss

    def resumed(self) -> _Split:
        """A new run that goes on from this one's files."""
        states, new = problem.states_of(self.scenario, self._saved()), _Split(self.scenario)
        for part, state in zip(new._saved(), states, strict=True):
            part.load_state_dict(state)
        return new

    def _saved(self) -> list[Any]:
        return [self.model, *self.plain, *self.schedules, self.scaler, self.step]


def _dims(scenario: Scenario) -> Any:
    return {"columns": (1, 0, None), "shared": (0, 0, None, None)}.get(scenario.batch, 0)


class _Ordinary(Script):
    """The naive oracle: one ordinary step per batch."""

    def with_bits_flipped(self, bits: int) -> _Ordinary:
        """This one, with other last bits in each of its parameters."""
        for parameter in self.model.parameters():
            parameter.data.view(torch.int64).bitwise_xor_(bits)
        return self

    def passes(self, one: MicroBatch, x: Any, y: Tensor) -> Tensor:
        """The large batch's, or those of its micro-batches where each is computed by itself. Returns the loss."""
        scenario = self.scenario
        self.losses: dict[Any, Tensor] = {}
        if not (scenario.dropout or scenario.norm in ("warn", "micro", "pooled")):
            with problem.autocast(scenario):
                loss = self._loss(one, x, y)
            loss.backward()
            return loss.detach()
        sizes, whole_weight = problem.split_sizes(len(y), scenario.micro), weight_of(scenario, y)
        pooled = _moved_once(self.model, x) if scenario.norm == "pooled" else None
        losses = []
        for rows, targets in zip(x.split(sizes), y.split(sizes), strict=True):
            weight = weight_of(scenario, targets)
            share = 1.0 if scenario.loss == "sum" else weight / whole_weight if whole_weight else 0.0
            with problem.autocast(scenario):
                own = self._loss(one, rows, targets)
            own = own * share if weight else own.detach().zero_()
            losses.append(own.detach())
            if own.requires_grad:
                own.backward()
        if pooled is not None:
            self.model.load_state_dict({**self.model.state_dict(), **pooled})
        return torch.stack(losses).sum()

    def _loss(self, one: MicroBatch, x: Any, y: Tensor) -> Tensor:
        scenario = self.scenario
        if scenario.loss in ("pairs", "groups"):
            return problem.in_groups(self.model(x, one.head), problem.ids_of(scenario, len(y)))
        if scenario.loss != "names":
            return loss_of(scenario, self.model, x, y, one.head)
        found = problem.named_losses(scenario, self.model, x, y, one.head)
        self.losses = {name: loss.detach() for name, (loss, weight) in found.items() if weight}
        return sum(loss for loss, weight in found.values() if weight)

    def step(self, one: MicroBatch, x: Any, y: Tensor, seed: int) -> Tensor:
        """The update. Returns the loss."""
        losses = []

        def closure() -> Tensor:
            self.model.zero_grad()
            if not losses or not self.scenario.dropout:
                torch.manual_seed(seed)
            losses.append(self.passes(one, x, y))
            self.norm = None
            if self.scenario.clip is not None:
                self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.scenario.clip)
            return losses[-1]

        if self.scenario.optimizer == "lbfgs":
            self.plain[0].step(closure)
            return losses[0]
        closure()
        for optimizer in self.plain:
            if self.scenario.hook == "step":
                problem.limit(optimizer)
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        return losses[0]


def _moved_once(model: Model, x: Any) -> dict[str, Tensor]:
    """Where one forward pass over all rows takes the buffers."""
    there = copy.deepcopy(model.trunk)
    with torch.no_grad(), torch.random.fork_rng():
        there(x)
    return {f"trunk.{name}": buffer for name, buffer in there.named_buffers()}


def run_train_step(scenario: Scenario, rank: int, flipped: tuple[int, ...] = ()) -> dict[str, float]:
    """What is wrong: relative errors by name.

    With `flipped`, how far the oracle moves where these last bits of its first parameters are the others: that is
    rounding, whoever computes it.
    """
    oracle, run, found = _Ordinary(scenario), _Split(scenario), Errors(parameters=0.0, loss=0.0)
    others = [_Ordinary(scenario).with_bits_flipped(bits) for bits in flipped]
    batches_of = [[one for epoch in epochs for one in epoch] for epochs in scenario.ranks]
    data = [
        [(*problem.rows_of(scenario, one, number + 500 * r), number) for number, one in enumerate(ones)]
        for r, ones in enumerate(batches_of)
    ]
    exactly, halvings = not scenario.engine and scenario.optimizer != "lbfgs" and scenario.dtype == "float64", 0
    for number, handed in enumerate(loader_of(scenario.loader, data[rank])):
        batches, ones = [own[number] for own in data], [own[number] for own in batches_of]
        one, (given, targets, _) = ones[rank], handed
        if one.event == "eval":
            run.used.eval()
            run.model.fault.calm()
            with torch.no_grad():
                run.used(given)
            run.used.train()
            run.model.fault.calm(scenario.memory)
        if one.event == "gone":
            raise Gone
        for each in (run, oracle, *others) if one.event == "freeze" else ():
            problem.freeze(each.model)
        infinite = [float("inf") if other.event == "inf" else 1.0 for other in ones]
        fits = 3 if scenario.loss in ("pairs", "groups") else 1
        run.model.fault.prepare(one.event, max(fits, scenario.micro // 2))
        run.fails_to_step = one.event == "step error"
        before = _everything(run) if "error" in one.event else []
        torch.manual_seed(number)
        loss = None
        try:
            loss = run.call(one, given * infinite[rank] if isinstance(given, Tensor) else given, targets)
        except Injected:
            found.note("undone", apart(_everything(run), before))
        random = torch.get_rng_state()
        run.model.fault.calm(scenario.memory)
        run.fails_to_step = False
        y = torch.cat([batch[1] for batch in batches])
        if loss is not None:
            x = batches[0][0] if len(batches) == 1 else torch.cat([batch[0] for batch in batches])
            if max(infinite) > 1 or not weight_of(scenario, y):
                halvings += bool(max(infinite) > 1 and weight_of(scenario, y))
                for each in (oracle, *others):
                    torch.manual_seed(number)
                    each.passes(one, x, y)  # it moves buffers, and nothing else
            else:
                expected = oracle.step(one, x, y, number)
                for each in [each.step(one, x, y, number) for each in others] or [loss]:
                    found.note("loss", abs((each / expected - 1).item()))
                if exactly and not flipped:
                    means = [run.step.losses.get(name) for name in oracle.losses]
                    found.note("losses", apart(means, [*oracle.losses.values()]))
                    if scenario.way != "loop":
                        found.note("norm", apart([run.step.grad_norm], [oracle.norm]))
                for schedule in run.schedules:
                    schedule.step()
            if scenario.dropout and not torch.equal(random, torch.get_rng_state()):
                found.note("random numbers", float("inf"))
        if one.event == "save":
            run = run.resumed()
        for each in others or [run]:
            found.note("parameters", relative_error(problem.whole(each.model.parameters()), oracle.model.parameters()))
            found.note("buffers", relative_error(buffers_of(each.model), buffers_of(oracle.model)))
            for pair in zip(each.plain, oracle.plain, strict=True) if exactly else ():
                found.note("state", apart(*map(state_of, pair)))
    if scenario.scaler == 1000:  # it doesn't grow
        found.note("scale", abs(run.scaler.get_scale() * 2**halvings / 256 - 1))
    return found


def _everything(run: _Split) -> list[Any]:
    """What an error must leave as it was."""
    states = [tensor for optimizer in run.plain for tensor in state_of(optimizer)]
    tensors = [*problem.whole(run.model.parameters()), *buffers_of(run.model), *states]
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]
