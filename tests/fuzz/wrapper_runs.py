"""A user's loop around a wrapped optimizer, and the same by hand."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch.optim import Optimizer
from tests.fuzz import problem
from tests.fuzz.loaders import loader_of
from tests.fuzz.problem import Gone, Injected, Script, apart, buffers_of, loss_of, rows_of, state_of
from tests.fuzz.scenario import MicroBatch, Scenario
from tests.fuzzing import Errors
from tests.reference import relative_error, windows_of

Epoch = tuple[MicroBatch, ...]


def steps_of(scenario: Scenario, number: int, epoch: int, updates: int) -> int:
    """How long this window of the optimizer of this number is."""
    steps = scenario.steps + number
    return steps + {"": 0, "epoch": int(epoch > 0), "update": (epoch + updates) % 3}[scenario.lengths]


def weight_in_window(scenario: Scenario, one: MicroBatch) -> float:
    if scenario.way in ("plain", "closure"):
        return 1.0
    return one.rows if one.weight is None else one.weight


def given(scenario: Scenario, weight: float) -> Any:
    """A weight as users count it: a number, or a tensor."""
    return torch.tensor(weight) if scenario.seed % 3 == 1 else weight


def unscales(scenario: Scenario) -> bool:
    """Whether the loop calls `scaler.unscale_` as a window closes."""
    return scenario.scaler != 0 and scenario.seed % 4 == 0


def overflows(scenario: Scenario, one: MicroBatch) -> int:
    """Which of the losses is infinite."""
    return one.rows % scenario.losses


def seed_of(rank: int, number: int, i: int) -> int:
    return 37 * number + i + 500 * rank


class _Wrapped:
    """A model and its wrapped optimizers."""

    def __init__(self, scenario: Scenario, copied: Any = None) -> None:
        self.scenario = scenario
        if copied is not None:
            self.model, self.optimizers = copied
            self.used = self.model
        else:
            script = Script(dataclasses.replace(scenario, schedule=""), alone=False)
            self.model, self.used = script.model, script.used
            self.optimizers = [
                Optimizer(
                    inner,
                    steps=self._steps(number),
                    model=self.used,
                    reduction="sum" if scenario.loss == "sum" else "mean",
                    clip_grad_norm=scenario.clip,
                    accumulate_dtype=torch.float64 if scenario.wide else None,
                    nonfinite=scenario.nonfinite,
                    noise_scale=scenario.noise,
                    sync=scenario.sync,
                )
                for number, inner in enumerate(script.plain)
            ]
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._before_update)
        self.fails_to_step = False
        self.finished: list[list[Any]] = [[] for _ in self.optimizers]
        """Of each update: loss, and norm before clipping."""
        self.trace: list[tuple[bool, int, int, bool]] = []
        """Of each step: whether it closes its window; updates, micro-batches in the open window, `updated` after it."""
        around = [optimizer.inner if scenario.seed % 2 else optimizer for optimizer in self.optimizers]
        self.schedules = problem.schedules_of(scenario, around)
        # The loop's body does not see an update that a skipped last batch, or another rank, makes after it.
        last = {epoch[-1].event for epoch in scenario.epochs}
        self.in_hook = bool(scenario.engine or (scenario.way.startswith("batches") and last - {"", "save", "eval"}))
        for optimizer, schedule in zip(self.optimizers, self.schedules if self.in_hook else ()):
            optimizer.register_step_post_hook(lambda *_, schedule=schedule: schedule.step())
        self.scaler = problem.scaler_of(scenario)

    def _steps(self, number: int) -> Any:
        if self.scenario.lengths == "epoch":
            return {epoch: steps_of(self.scenario, number, epoch, 0) for epoch in (0, 1)}
        if self.scenario.lengths == "update":
            return lambda epoch, update: steps_of(self.scenario, number, epoch, update)
        return self.scenario.steps + number

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self.fails_to_step:
            self.fails_to_step = False
            raise Injected
        if not self.scenario.engine:
            self.finished[self.optimizers.index(optimizer)].append((optimizer.loss, optimizer.grad_norm))
        if self.scenario.hook == "step":
            problem.limit(optimizer)

    def resumed(self) -> _Wrapped:
        """A new run that goes on from this one's files."""
        scenario, objects = self.scenario, (self.model, self.optimizers)
        states = problem.states_of(scenario, [self.model, *self.optimizers, *self.schedules, self.scaler])
        lost = scenario.schedule or scenario.engine or scenario.hook not in ("", "step")  # where objects are copied
        copied = None
        if scenario.seed % 3 == 0 and not lost:
            by_file = scenario.lengths != "update" and not scenario.chunk  # which hold no functions
            copied = pickle.loads(pickle.dumps(objects)) if by_file else copy.deepcopy(objects)
        new = _Wrapped(scenario, copied)
        new.finished, new.trace = self.finished, self.trace
        for part, state in zip([new.model, *new.optimizers, *new.schedules, new.scaler], states, strict=True):
            if copied is None or part is new.scaler:
                part.load_state_dict(state)
        if scenario.seed % 5 < 2:  # as frameworks do before they go on
            new.model.zero_grad(set_to_none=scenario.seed % 5 == 1)
        return new

    def micro_batch(self, one: MicroBatch, x: Tensor, y: Tensor, seed: int) -> None:
        """The body of a user's loop."""
        scenario = self.scenario
        if one.event == "gone":
            raise Gone
        if one.event == "skip":
            return
        for optimizer in self.optimizers:
            if one.event == "reload":
                optimizer.load_state_dict(problem.saved(optimizer.state_dict()))
            optimizer.zero_grad()
        if one.event == "eval":
            self.used.eval()
            with torch.no_grad():
                self.used(x, one.head)
            self.used.train()
        if one.event == "freeze":
            problem.freeze(self.model)
        self.model.fault.prepare(one.event, one.rows // 2)
        torch.manual_seed(seed)
        try:
            self._passes(one, x, y)
        except (Injected, torch.OutOfMemoryError):
            if one.event.startswith("backward"):
                for optimizer in self.optimizers:
                    optimizer.discard()
            return
        finally:
            self.model.fault.calm()
        if one.event == "save inside":
            return
        self.fails_to_step = one.event == "step error"
        closes = [optimizer.closes_next for optimizer in self.optimizers] if scenario.way != "closure" else []
        for optimizer, is_last in zip(self.optimizers, closes):
            if is_last and unscales(scenario):
                self.scaler.unscale_(optimizer)
        for optimizer in self.optimizers:
            if scenario.way != "closure":
                with contextlib.suppress(Injected):
                    self.scaler.step(optimizer)
            if self.schedules and optimizer.updated and not self.in_hook:
                self.schedules[self.optimizers.index(optimizer)].step()
        self.fails_to_step = False
        self.trace += [(c, o.updates, o.micro_batches, o.updated) for c, o in zip(closes, self.optimizers)]
        self.scaler.update(2.0 ** (3 * len(self.trace) % 7) if scenario.scaler < 0 else None)
        if one.event == "zero_grad":
            self.model.zero_grad()
        for optimizer in self.optimizers if one.event == "discard" else []:
            optimizer.discard()

    def flush(self) -> None:
        """Close all windows."""
        for number, optimizer in enumerate(self.optimizers):
            if optimizer.flush() and self.schedules and not self.in_hook:
                self.schedules[number].step()

    def _passes(self, one: MicroBatch, x: Tensor, y: Tensor) -> None:
        scenario, optimizer = self.scenario, self.optimizers[0]
        if scenario.way == "closure":
            self.fails_to_step = one.event == "step error"
            optimizer.step(lambda: self._loss(one, x, y, backward=True))
            return
        weight = given(scenario, weight_in_window(scenario, one)) if scenario.way == "backward" else None
        if one.event == "no pass" or (one.event == "save inside" and scenario.seed % 2):
            for part in range(scenario.losses):  # each loss has a forward pass of its own
                self.scaler.scale(self._loss(one, x, y, part))
            return
        if one.event == "by hand":
            self._by_hand(one, x, y, weight)
            return
        for part in range(scenario.losses):
            loss = self.scaler.scale(self._loss(one, x, y, part))
            if scenario.way.endswith("backward"):
                optimizer.backward(loss, weight)
            else:
                loss.backward()

    def _by_hand(self, one: MicroBatch, x: Tensor, y: Tensor, weight: float | None) -> None:
        own = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        model, asked = self.used, [p for _, p in own]
        if (self.scenario.scaler or self.scenario.seed % 2) and not self.scenario.hook and not self.scenario.engine:
            # As `torch.func.grad` does: no hook of a parameter sees this pass.
            asked = [p.detach().requires_grad_() for p in asked]
            copies = dict(zip((name for name, _ in own), asked, strict=True))
            model = lambda *args: torch.func.functional_call(self.model, copies, args)  # noqa: E731
        losses = [self.scaler.scale(self._loss(one, x, y, part, model=model)) for part in range(self.scenario.losses)]
        gradients = torch.autograd.grad(sum(losses), asked, allow_unused=True)
        found = {p: gradient for (_, p), gradient in zip(own, gradients, strict=True)}
        for optimizer in self.optimizers:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            by_parameter = {p: found[p] for p in own if found.get(p) is not None}
            optimizer.add_gradients([found.get(p) for p in own] if self.scenario.seed % 2 else by_parameter, weight)

    def _loss(
        self, one: MicroBatch, x: Tensor, y: Tensor, part: int = 0, backward: bool = False, model: Any = None
    ) -> Tensor:
        with problem.autocast(self.scenario):
            loss = loss_of(self.scenario, model or self.used, x, y, one.head, part)
        if one.event == "inf" and part == overflows(self.scenario, one):
            loss = loss * float("inf" if self.scenario.seed % 2 else "nan")
        if weight_in_window(self.scenario, one) == 0:
            loss = loss * float("nan")  # a mean over nothing
        if backward:
            loss.backward()
        return loss


class ByHand(Script):
    """The naive oracle: each micro-batch's own gradient, and at a window's end their weighted mean."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.windows: list[list[tuple[float, float, list[Tensor | None]]]] = [[] for _ in self.plain]
        """Of each optimizer, of each micro-batch: weight, loss and gradients."""
        self.epochs, self.in_epoch = 0, False
        self.number = 0
        """Of the epoch that runs, whether or not it has a pass."""
        self.updates = [0 for _ in self.plain]
        self.finished: list[list[tuple[float, Any]]] = [[] for _ in self.plain]
        """Of each update: the window's mean loss, NaN where it isn't known, and the gradient's norm."""
        self.trace: list[tuple[bool, int, int, bool]] = []
        self.halvings = 0

    def micro_batch(self, one: MicroBatch, x: Tensor, y: Tensor, seed: int) -> bool:
        """Its passes. Returns whether they are counted."""
        if one.event in ("skip", "save inside"):
            return False
        scenario = self.scenario
        if one.event == "freeze":
            problem.freeze(self.model)
        torch.manual_seed(seed)
        losses: list[Any] = []
        for part in range(scenario.losses):
            if one.event in ("forward error", "oom"):
                with torch.no_grad():
                    self.model(x, one.head)
                return False  # up to the fault, the trunk moves its buffers
            with problem.autocast(scenario):
                losses.append(loss_of(scenario, self.model, x, y, one.head, part))
            if one.event in ("backward error", "backward oom"):
                self.windows = [[] for _ in self.plain]
                return False
        loss, weight = sum(losses), weight_in_window(scenario, one)
        self.in_epoch = True
        if one.event == "inf" and weight > 0:
            weight = float("inf")
            self.halvings += 1
        self.model.zero_grad()
        if one.event != "no pass" and weight:  # rows that weigh nothing leave no gradient
            loss.backward()
        known = float("nan") if one.event in ("by hand", "no pass") else loss.item()
        for part, window in zip(self.parts, self.windows, strict=True):
            window.append((weight, known, [p.grad for p in part]))
        self.model.zero_grad()
        return True

    def close_full(self, one: MicroBatch, counted: bool, with_batches: bool, is_last: bool) -> None:
        """After a micro-batch: the windows that are full, or that it ends."""
        for number, window in enumerate(self.windows):
            before = self.updates[number]
            steps = steps_of(self.scenario, number, self.epochs, before)
            closes = bool(window) and (len(window) >= steps or (is_last and with_batches))
            if closes:
                self.close(number, fails=one.event == "step error")
            if counted and self.scenario.way != "closure":
                now = self.updates[number]
                self.trace.append((closes, now, len(self.windows[number]), now > before))
        if one.event == "flush":
            self.flush(ends_epoch=not with_batches)
        if one.event == "discard" or (one.event == "break" and with_batches):
            self.windows = [[] for _ in self.plain]

    def flush(self, ends_epoch: bool) -> None:
        for number, _ in enumerate(self.windows):
            self.close(number)
        if ends_epoch:
            self.epochs += self.in_epoch
            self.in_epoch = False

    def close(self, number: int, fails: bool = False) -> None:
        """Make the update of a window."""
        scenario, window = self.scenario, self.windows[number]
        self.windows[number] = []
        divisor = sum(weight for weight, *_ in window)
        if fails or not 0 < divisor < float("inf"):
            return
        if scenario.loss == "sum":
            divisor = divisor if self.is_weighed else 1.0
            window = [(float(weight > 0), loss, found) for weight, loss, found in window]
        mean = sum(weight * loss for weight, loss, _ in window if weight) / divisor
        gradients: list[list[Tensor]] = [[] for _ in self.parts[number]]
        for weight, _, found in window:
            for own, gradient in zip(gradients, found, strict=True):
                own.extend([] if gradient is None else [weight / divisor * gradient])
        for parameter, own in zip(self.parts[number], gradients, strict=True):
            parameter.grad = sum(own[1:], own[0]) if own else None
        norm = None
        if scenario.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.parts[number], scenario.clip)
        self.finished[number].append((mean, norm))
        if scenario.hook == "step":
            problem.limit(self.plain[number])
        self.plain[number].step()
        if self.schedules:
            self.schedules[number].step()
        self.updates[number] += 1

    @property
    def is_weighed(self) -> bool:
        """Whether this epoch gives weights, which a sum is divided by."""
        if self.scenario.way in ("plain", "closure"):
            return False
        ones = [one for epochs in self.scenario.ranks for one in epochs[self.number]]
        return self.scenario.way == "backward" or any(one.weight is not None for one in ones)


def _expected(scenario: Scenario, data: list[list[list[Any]]]) -> ByHand:
    """The whole run, by hand."""
    oracle = ByHand(scenario)
    with_batches = scenario.way.startswith("batches")
    for number in range(len(scenario.epochs)):
        own = [epochs[number] for epochs in scenario.ranks]
        oracle.number = number
        if len(own) == 1:
            for i, one in enumerate(own[0]):
                counted = oracle.micro_batch(one, *data[0][number][i][:2], seed_of(0, number, i))
                oracle.close_full(one, counted, with_batches, is_last=i + 1 == len(own[0]))
                if one.event == "break":
                    break
            oracle.flush(ends_epoch=True)
            continue
        for window in _windows_of_ranks(scenario, own):
            for rank, i in window:
                oracle.micro_batch(own[rank][i], *data[rank][number][i][:2], seed_of(rank, number, i))
            oracle.flush(ends_epoch=False)
    return oracle


def _windows_of_ranks(scenario: Scenario, epochs: list[Epoch]) -> list[list[tuple[int, int]]]:
    """The micro-batches, by rank and number, of each window of an epoch."""
    counted = [
        [(rank, i) for i, one in enumerate(epoch) if one.event not in ("skip", "forward error")]
        for rank, epoch in enumerate(epochs)
    ]
    columns = [windows_of(own, scenario.steps) for own in counted]
    return [[*itertools.chain(*windows)] for windows in itertools.zip_longest(*columns, fillvalue=[])]


def run_wrapper(scenario: Scenario, rank: int) -> dict[str, float]:
    """What is wrong: relative errors by name."""
    data = [
        [
            [(*rows_of(scenario, one, seed_of(r, number, i)), i) for i, one in enumerate(epoch)]
            for number, epoch in enumerate(epochs)
        ]
        for r, epochs in enumerate(scenario.ranks)
    ]
    oracle, run, found = _expected(scenario, data), _trained(scenario, data, rank), Errors()
    found.note("parameters", relative_error(problem.whole(run.model.parameters()), oracle.model.parameters()))
    found.note("updates", sum(abs(o.updates - n) for o, n in zip(run.optimizers, oracle.updates, strict=True)))
    if scenario.engine:
        return found
    found.note("trace", float(run.trace != oracle.trace))
    for seen, right in zip(run.finished, oracle.finished, strict=True):
        for (loss, norm), (mean, whole_norm) in zip(seen, right):
            if scenario.way.endswith("backward"):
                unknown = mean != mean or (loss is None and unscales(scenario))
                found.note("loss", 0.0 if unknown else abs(loss.item() / mean - 1))
            if scenario.dtype == "float64":
                found.note("norm", apart([norm], [whole_norm]))
    if scenario.scaler == 1000:  # it doesn't grow
        found.note("scale", abs(run.scaler.get_scale() * 2**oracle.halvings / 256 - 1))
    for optimizer, plain in zip(run.optimizers, oracle.plain, strict=True):
        if scenario.dtype == "float64":  # in narrower ones the promise is about parameters
            found.note("state", apart(state_of(optimizer), state_of(plain)))
        for own, group in zip(optimizer.param_groups, plain.param_groups, strict=True):
            found.note("learning rate", abs(own["lr"] / group["lr"] - 1))
    found.note("buffers", relative_error(buffers_of(run.model), buffers_of(oracle.model)))
    without_files = dataclasses.replace(scenario, epochs=_without_files(scenario.epochs))
    if without_files != scenario and scenario.losses == 1:
        again = _trained(without_files, data, rank)
        same = all(map(torch.equal, run.model.parameters(), again.model.parameters()))
        found.note("bits", 0.0 if same else float("inf"))
    return found


def _trained(scenario: Scenario, data: Any, rank: int) -> _Wrapped:
    run = _Wrapped(scenario)
    for number, epoch in enumerate(scenario.ranks[rank]):
        run = _epoch(run, scenario, epoch, data[rank][number], rank, number)
    return run


def _without_files(epochs: tuple[Epoch, ...]) -> tuple[Epoch, ...]:
    """The epochs without checkpoints."""
    plain = {"save": "", "reload": ""}
    return tuple(tuple(dataclasses.replace(one, event=plain.get(one.event, one.event)) for one in e) for e in epochs)


def _epoch(run: _Wrapped, scenario: Scenario, epoch: Epoch, data: list[Any], rank: int, number: int) -> _Wrapped:
    """A user's epoch, with what happens in it. Returns the run that ends it, which may be a resumed one."""
    with_batches = scenario.way.startswith("batches")
    weight: Any = None
    if any(one.weight is not None for one in epoch):
        weight = lambda batch: given(scenario, weight_in_window(scenario, epoch[int(batch[2])]))  # noqa: E731
    faults = [i for i, one in enumerate(epoch) if one.event == "loader error"]
    first, state = 0, None
    loader = loader_of(scenario.loader, data, faults, Injected())
    while first < len(epoch):
        batches: Any = run.optimizers[0].batches(loader, weight=weight) if with_batches else loader
        if state is not None:
            batches.load_state_dict(state)
        first = len(epoch)
        try:
            for batch in batches:
                x, y, i = batch[0], batch[1], int(batch[2])
                run.micro_batch(epoch[i], x, y, seed_of(rank, number, i))
                if epoch[i].event == "flush":
                    run.flush()
                if epoch[i].event.startswith("save") and (i + 1 < len(epoch) or not with_batches):
                    has_place = with_batches and not faults and (scenario.lengths or scenario.seed % 2)
                    state = batches.state_dict() if has_place else None
                    run, first = run.resumed(), i + 1
                    if not faults:
                        loader = loader_of(scenario.loader, data if state is not None else data[first:])
                    break
                if epoch[i].event == "break":
                    break
        except Injected:  # the loader's: it goes on
            first, state = 0, None
    if not with_batches:
        run.flush()
    return run
