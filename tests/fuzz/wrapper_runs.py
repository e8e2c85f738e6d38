"""A user's loop around a wrapped optimizer, and the same by hand."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch.optim import Optimizer
from tests.fuzz.loaders import loader_of, parts_of_batch
from tests.fuzz.problem import OPTIMIZERS, SCHEDULES, Gone, Injected, Model, halve, loss_of, parts_of, rows_of
from tests.fuzz.scenario import MicroBatch, Scenario
from tests.reference import relative_error

__all__ = ["apart", "autocast", "buffers_of", "freeze", "run_wrapper", "saved", "several", "state_of", "whole"]

RANKS_SEED = 500
Epoch = tuple[MicroBatch, ...]


def several(scenario: Scenario, model: Any) -> Any:
    """The model over all ranks."""
    if not scenario.engine:
        return model
    if scenario.engine.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters="unused" in scenario.engine)
    from torch.distributed.fsdp import fully_shard

    if scenario.engine.startswith("nested"):
        for part in (model.trunk, model.heads[0]):
            fully_shard(part)
    return fully_shard(model)


def whole(tensors: Any) -> list[Tensor]:
    """Tensors, of which each rank may hold a part."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.double() for buffer in model.buffers()]


def apart(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The relative error; infinite where one is None and the other is not."""
    if [g is None for g in actual] != [g is None for g in expected]:
        return float("inf")
    return relative_error([g for g in actual if g is not None], [g for g in expected if g is not None])


def saved(states: Any) -> Any:
    """What a file makes of them."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def autocast(scenario: Scenario) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if scenario.dtype == "autocast" else contextlib.nullcontext()


def steps_of(scenario: Scenario, number: int, epoch: int, updates: int) -> int:
    """How long this window of the optimizer of this number is."""
    steps = scenario.steps + number
    return steps + {"": 0, "epoch": int(epoch > 0), "update": (epoch + updates) % 3}[scenario.lengths]


def weight_in_window(scenario: Scenario, one: MicroBatch) -> float:
    if scenario.way in ("plain", "closure"):
        return 1.0
    return one.rows if one.weight is None else one.weight


def seed_of(rank: int, number: int, i: int) -> int:
    return 37 * number + i + RANKS_SEED * rank


class _Wrapped:
    """A model and its wrapped optimizers."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.model = Model(scenario)
        self.used = several(scenario, self.model)
        self.optimizers = []
        for number, parameters in enumerate(parts_of(scenario, self.model)):
            inner = OPTIMIZERS[scenario.optimizer](parameters)
            optimizer = Optimizer(
                inner,
                steps=self._steps(number),
                model=self.used,
                reduction="sum" if scenario.loss == "sum" else "mean",
                clip_grad_norm=scenario.clip,
                accumulate_dtype=torch.float64 if scenario.wide else None,
                nonfinite=scenario.nonfinite,  # type: ignore[arg-type]  # one of the three
                noise_scale=scenario.noise,
                sync=scenario.sync,  # type: ignore[arg-type]  # one of the two
            )
            optimizer.register_step_pre_hook(self._before_update)
            self.optimizers.append(optimizer)
        self.fails_to_step = False
        kind = scenario.schedule
        self.schedules = [SCHEDULES[kind](optimizer) for optimizer in self.optimizers if kind]
        # The loop's body does not see an update that a skipped last batch, or another rank, makes after it.
        last = {epoch[-1].event for epoch in scenario.epochs}
        self.in_hook = bool(scenario.engine or (scenario.way.startswith("batches") and last - {"", "save", "eval"}))
        if self.in_hook:
            for optimizer, schedule in zip(self.optimizers, self.schedules):
                optimizer.register_step_post_hook(lambda *_, schedule=schedule: schedule.step())
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, growth_interval=scenario.scaler or 1, enabled=scenario.scaler > 0
        )

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
        if self.scenario.hook == "step":
            halve(optimizer)

    def resumed(self) -> _Wrapped:
        """A new run that goes on from this one's files."""
        save = copy.deepcopy if self.scenario.engine else saved
        parts = [self.model, *self.optimizers, *self.schedules, self.scaler]
        states = save([part.state_dict() for part in parts])
        new = _Wrapped(self.scenario)
        for part, state in zip([new.model, *new.optimizers, *new.schedules, new.scaler], states, strict=True):
            part.load_state_dict(state)
        return new

    def micro_batch(self, one: MicroBatch, x: Tensor, y: Tensor, seed: int) -> None:
        """The body of a user's loop."""
        if one.event == "gone":
            raise Gone
        if one.event == "skip":
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if one.event == "eval":
            self.used.eval()
            with torch.no_grad():
                self.used(x, one.head)
            self.used.train()
        if one.event == "freeze":
            freeze(self.model)
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
        self.fails_to_step = one.event == "step error"
        for optimizer in self.optimizers:
            if self.scenario.way != "closure":
                with contextlib.suppress(Injected):
                    self.scaler.step(optimizer)
            if self.schedules and optimizer.updated and not self.in_hook:
                self.schedules[self.optimizers.index(optimizer)].step()
        self.fails_to_step = False
        self.scaler.update()
        if one.event == "zero_grad":
            self.model.zero_grad()

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
        for part in range(scenario.losses):
            loss = self.scaler.scale(self._loss(one, x, y, part))
            if scenario.way == "backward":
                optimizer.backward(loss, weight=weight_in_window(scenario, one))
            elif scenario.way == "batches backward":
                optimizer.backward(loss)
            else:
                loss.backward()

    def _loss(self, one: MicroBatch, x: Tensor, y: Tensor, part: int = 0, backward: bool = False) -> Tensor:
        with autocast(self.scenario):
            loss = loss_of(self.scenario, self.used, x, y, one.head, part)
        loss = loss * float("inf") if one.event == "inf" else loss
        if backward:
            loss.backward()
        return loss


def freeze(model: Model) -> None:
    """Switch whether the trunk is trained."""
    for parameter in model.trunk.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


class ByHand:
    """The naive oracle: each micro-batch's own gradient, and at a window's end their weighted mean."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.model = Model(scenario, alone=True)
        self.parts = parts_of(scenario, self.model)
        self.plain = [OPTIMIZERS[scenario.optimizer](part) for part in self.parts]
        self.schedules = [SCHEDULES[scenario.schedule](optimizer) for optimizer in self.plain if scenario.schedule]
        self.windows: list[list[tuple[float, float, list[Tensor | None]]]] = [[] for _ in self.plain]
        """Of each optimizer: weight, loss and gradients of each micro-batch; an infinite loss left out."""
        self.epochs, self.in_epoch = 0, False
        self.number = 0
        """Of the epoch that runs, whether or not it has a pass."""
        self.updates = [0 for _ in self.plain]
        self.losses: list[float | None] = [None for _ in self.plain]

    def micro_batch(self, one: MicroBatch, x: Tensor, y: Tensor, seed: int) -> None:
        """Its passes."""
        if one.event == "skip":
            return
        scenario = self.scenario
        if one.event == "freeze":
            freeze(self.model)
        torch.manual_seed(seed)
        loss: Any = 0.0
        for part in range(scenario.losses):
            if one.event in ("forward error", "oom"):
                with torch.no_grad():
                    self.model(x, one.head)
                return  # up to the fault, the trunk moves its buffers
            with autocast(scenario):
                loss = loss + loss_of(scenario, self.model, x, y, one.head, part)
            if one.event in ("backward error", "backward oom"):
                self.windows = [[] for _ in self.plain]
                return
        weight = weight_in_window(scenario, one)
        left_out = one.event == "inf" and bool(weight) and scenario.nonfinite == "skip_micro_batch"
        if one.event == "inf" and weight:
            weight = 0.0 if left_out else float("inf")
        self.in_epoch = True
        self.model.zero_grad()
        loss.backward()
        for part, window in zip(self.parts, self.windows, strict=True):
            window.append((weight, loss.item(), [None if left_out else p.grad for p in part]))  # as without its rows
        self.model.zero_grad()

    def close_full(self, one: MicroBatch, with_batches: bool, is_last: bool) -> None:
        """After a micro-batch: the windows that are full, or that it ends."""
        for number, window in enumerate(self.windows):
            steps = steps_of(self.scenario, number, self.epochs, self.updates[number])
            if window and (len(window) >= steps or (is_last and with_batches)):
                self.close(number, fails=one.event == "step error")
        if one.event == "flush":
            self.flush(ends_epoch=not with_batches)

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
        total = sum(weight for weight, _, _ in window)
        if not 0 < total < float("inf") or fails:
            return
        divisor = total
        if scenario.loss == "sum":
            divisor = total if self.is_weighed else 1.0
            window = [(float(weight > 0), loss, gradients) for weight, loss, gradients in window]
        self.losses[number] = sum(weight * loss for weight, loss, _ in window) / divisor
        for i, parameter in enumerate(self.parts[number]):
            terms = [(weight, gradients[i]) for weight, _, gradients in window if gradients[i] is not None]
            parameter.grad = sum(weight / divisor * gradient for weight, gradient in terms) if terms else None
        if scenario.clip is not None:
            nn.utils.clip_grad_norm_(self.parts[number], scenario.clip)
        if scenario.hook == "step":
            halve(self.plain[number])
        self.plain[number].step()
        if self.schedules:
            self.schedules[number].step()
        self.updates[number] += 1

    @property
    def is_weighed(self) -> bool:
        """Whether this epoch gives weights, which a sum is divided by."""
        if self.scenario.way in ("plain", "closure"):
            return False
        ranks = self.scenario.epochs, self.scenario.others
        ones = [one for epochs in ranks for epoch in epochs[self.number : self.number + 1] for one in epoch]
        return self.scenario.way == "backward" or any(one.weight is not None for one in ones)


def _expected(scenario: Scenario, data: list[list[list[Any]]]) -> ByHand:
    """The whole run, by hand."""
    oracle = ByHand(scenario)
    with_batches = scenario.way.startswith("batches")
    ranks = [scenario.epochs, *([scenario.others] if scenario.others else [])]
    for number in range(len(scenario.epochs)):
        own = [epochs[number] for epochs in ranks]
        oracle.number = number
        if len(own) == 1:
            for i, one in enumerate(own[0]):
                oracle.micro_batch(one, *data[0][number][i][:2], seed_of(0, number, i))
                oracle.close_full(one, with_batches, is_last=i + 1 == len(own[0]))
            oracle.flush(ends_epoch=True)
            continue
        for window in _windows_of_ranks(scenario, own):
            for rank, i in window:
                oracle.micro_batch(own[rank][i], *data[rank][number][i][:2], seed_of(rank, number, i))
            oracle.flush(ends_epoch=False)
    return oracle


def _windows_of_ranks(scenario: Scenario, epochs: list[Epoch]) -> list[list[tuple[int, int]]]:
    """The micro-batches, by rank and number, of each window of an epoch."""
    columns = []
    for rank, epoch in enumerate(epochs):
        own: list[list[tuple[int, int]]] = [[]]
        for i, one in enumerate(epoch):
            if one.event in ("skip", "forward error"):
                continue
            own[-1].append((rank, i))
            if len(own[-1]) == scenario.steps:
                own.append([])
        columns.append([window for window in own if window])
    count = max(map(len, columns))
    return [[place for own in columns for window in own[w : w + 1] for place in window] for w in range(count)]


def run_wrapper(scenario: Scenario, rank: int) -> dict[str, float]:
    """What is wrong: relative errors by name."""
    run = _Wrapped(scenario)
    ranks = [scenario.epochs, *([scenario.others] if scenario.others else [])]
    data = [
        [
            [(*rows_of(scenario, one, seed_of(r, number, i)), i) for i, one in enumerate(epoch)]
            for number, epoch in enumerate(epochs)
        ]
        for r, epochs in enumerate(ranks)
    ]
    oracle = _expected(scenario, data)
    for number, epoch in enumerate(ranks[rank]):
        run = _epoch(run, scenario, epoch, data[rank][number], rank, number)
    found = {"parameters": relative_error(whole(run.model.parameters()), oracle.model.parameters())}
    found["updates"] = float(sum(abs(o.updates - n) for o, n in zip(run.optimizers, oracle.updates, strict=True)))
    if scenario.engine:
        return found
    loss = run.optimizers[0].loss
    if loss is not None and run.optimizers[0].updated and oracle.losses[0] is not None:
        found["loss"] = abs(loss.item() / oracle.losses[0] - 1)
    for optimizer, plain in zip(run.optimizers, oracle.plain, strict=True):
        if scenario.dtype == "float64":  # in narrower ones the promise is about parameters
            found["state"] = max(apart(state_of(optimizer), state_of(plain)), found.get("state", 0.0))
        rates = [abs(a["lr"] / b["lr"] - 1) for a, b in zip(optimizer.param_groups, plain.param_groups, strict=True)]
        found["learning rate"] = max(rates)
    found["buffers"] = relative_error(buffers_of(run.model), buffers_of(oracle.model))
    return found


def state_of(optimizer: Any) -> list[Tensor | None]:
    return [
        optimizer.state.get(p, {}).get(name)
        for group in optimizer.param_groups
        for p in group["params"]
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq", "ax")
    ]


def _epoch(run: _Wrapped, scenario: Scenario, epoch: Epoch, data: list[Any], rank: int, number: int) -> _Wrapped:
    """A user's epoch, with what happens in it. Returns the run that ends it, which may be a resumed one."""
    with_batches = scenario.way.startswith("batches")
    weight: Any = None
    if any(one.weight is not None for one in epoch):
        weight = lambda batch: weight_in_window(scenario, epoch[parts_of_batch(batch)[2]])  # noqa: E731
    faults = [i for i, one in enumerate(epoch) if one.event == "loader error"]
    first, state = 0, None
    loader = loader_of(scenario.loader, data, faults, Injected())
    while first < len(epoch):
        batches: Any = loader
        for optimizer in run.optimizers if with_batches else []:
            batches = optimizer.batches(batches, weight=weight)
        if state is not None:
            batches.load_state_dict(state)
        first = len(epoch)
        try:
            for batch in batches:
                x, y, i = parts_of_batch(batch)
                run.micro_batch(epoch[i], x, y, seed_of(rank, number, i))
                if epoch[i].event == "flush":
                    run.flush()
                if epoch[i].event == "save" and i + 1 < len(epoch):
                    state = batches.state_dict() if with_batches and not faults else None
                    run, first = run.resumed(), i + 1
                    if not faults:
                        loader = loader_of(scenario.loader, data if state is not None else data[first:])
                    break
        except Injected:  # the loader's: it goes on
            first, state = 0, None
    if not with_batches:
        run.flush()
    return run
