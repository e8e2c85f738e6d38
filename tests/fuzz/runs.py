"""Runs a scenario, and the oracle beside it. A run is right, or refused by an error of the library's own."""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
from gradaccum.errors import NotEquivalentError, WindowError
from gradaccum.torch import TrainStep, chunked
from gradaccum.torch.optim import Optimizer
from tests.fuzz.problem import OPTIMIZERS, Injected, Model, halve, loader_of, loss_of, rows_of, update
from tests.fuzz.scenario import MicroBatch, Scenario
from tests.reference import FLOAT64, relative_error

__all__ = ["on_rank", "outcome"]

HOME = str(Path(gradaccum.__file__).parent)
RANKS_SEED = 500


def outcome(scenario: Scenario, rank: int = 0) -> str:
    """`""` if the run is right, `"refused: ..."` if the library refuses it, else what is wrong."""
    logging.getLogger("gradaccum").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wrong = _RUNS[scenario.kind](scenario, rank)
        except (WindowError, NotEquivalentError, ValueError, TypeError) as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(HOME):
                return f"refused: {type(error).__name__}: {str(error)[:200]}"
            return "".join(traceback.format_exception(error))
        except Exception as error:  # whatever it is, it is not an answer
            return "".join(traceback.format_exception(error))
    return "; ".join(f"{what}: {error}" for what, error in wrong.items() if not error <= FLOAT64)


def _chunked(scenario: Scenario, rank: int) -> dict[str, float]:
    found = {}
    whole = Model(scenario, alone=True)
    module = Model(scenario, alone=True)
    small: Any = chunked(
        module, scenario.micro, keep=scenario.keep, **({"batch_norm": "exact"} if scenario.norm else {})
    )
    for i, one in enumerate(scenario.epochs[0]):
        x, _ = rows_of(one, i)
        for model in (whole, small):
            outputs, hidden = model(x, one.head, hidden_too=True)
            loss = (outputs - outputs.mean(0) / 2).square().sum() + (hidden @ hidden.T).logsumexp(1).sum()
            loss.backward()
        found["gradient"] = _apart(_gradients(module), _gradients(whole))
        found["buffers"] = relative_error(_buffers(module), _buffers(whole))
    return found


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def _buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.double() for buffer in model.buffers()]


def _apart(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    if [g is None for g in actual] != [g is None for g in expected]:
        return float("inf")
    return relative_error([g for g in actual if g is not None], [g for g in expected if g is not None])


def _several(scenario: Scenario, model: nn.Module) -> Any:
    """The model over all ranks."""
    if not scenario.engine:
        return model
    if scenario.engine.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters="unused" in scenario.engine)
    from torch.distributed.fsdp import fully_shard

    if scenario.engine.startswith("nested"):
        for part in (model.trunk, model.heads[0]):
            fully_shard(part)  # type: ignore[arg-type]
    return fully_shard(model)


def _whole(tensors: Any) -> list[Tensor]:
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def _train_step(scenario: Scenario, rank: int) -> dict[str, float]:
    oracle, model = Model(scenario, alone=True), Model(scenario)
    plain = OPTIMIZERS[scenario.optimizer](_trained(oracle))
    used = _several(scenario, model)
    step, inner = _new_step(scenario, used, model)
    ranks = [scenario.epochs, *([scenario.others] if scenario.others else [])]
    found = {"parameters": 0.0}
    batches_of = [[one for epoch in epochs for one in epoch] for epochs in ranks]
    for number, epoch in enumerate(zip(*batches_of, strict=True)):
        one = epoch[rank]
        batches = [rows_of(other, number + RANKS_SEED * r) for r, other in enumerate(epoch)]
        x, y = (torch.cat(parts) for parts in zip(*batches))
        failure = one.event if one.event.endswith("error") else ""
        model.fault.where = failure.removesuffix(" error")
        model.fault.most = max(1, scenario.micro // 2) if one.event == "oom" else 10**9
        skipped = False
        if one.event == "eval":
            used.eval()
            with torch.no_grad():
                used(batches[rank][0])
            used.train()
        overflows = any(other.event == "inf" for other in epoch)
        try:
            loss = step(batches[rank][0] * (float("inf") if one.event == "inf" else 1.0), batches[rank][1])
        except Injected:
            skipped = True
        model.fault.where, model.fault.most = "", 10**9
        if not skipped:
            expected = loss_of(scenario, oracle, x * (float("inf") if overflows else 1.0), y)
        if not skipped and not overflows and _counted(scenario, y):
            update(scenario, oracle, plain, expected.backward)
            found["loss"] = max(found.get("loss", 0.0), abs((loss / expected - 1).item()))
        if one.event == "save":
            states = _saved({"m": model.state_dict(), "o": inner.state_dict(), "s": step.state_dict()})
            model = Model(scenario)
            model.load_state_dict(states["m"])
            used = _several(scenario, model)
            step, inner = _new_step(scenario, used, model)
            inner.load_state_dict(states["o"])
            step.load_state_dict(states["s"])
        found["parameters"] = relative_error(_whole(model.parameters()), oracle.parameters())
        found["buffers"] = relative_error(_buffers(model), _buffers(oracle))
    return found


def _counted(scenario: Scenario, y: Tensor) -> bool:
    return scenario.loss != "ignored" or bool((y != 0).any())


def _new_step(scenario: Scenario, used: Any, model: nn.Module) -> tuple[TrainStep, torch.optim.Optimizer]:
    inner = OPTIMIZERS[scenario.optimizer](_trained(model))
    if scenario.hook:
        inner.register_step_pre_hook(halve)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=scenario.scaler) if scenario.scaler else None
    if scenario.loss == "told":
        loss: dict[str, Any] = {"compute_loss": lambda m, x, y: (loss_of(scenario, m, x, y), float(len(x)))}
    elif scenario.loss == "sum":
        loss = {"compute_loss": lambda m, x, y: loss_of(scenario, m, x, y), "reduction": "sum"}
    else:
        weights = {"ignored": {"ignore_index": 0}, "classes": {"weight": torch.tensor([1.0, 3.0, 0.2]).double()}}
        loss = {"loss_fn": nn.CrossEntropyLoss(**weights.get(scenario.loss, {}))}  # type: ignore[arg-type]
        if scenario.loss == "classes":
            loss["loss_fn"].weight = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)
    norm = {"batch_norm": "exact"} if scenario.norm else {}
    step = TrainStep(
        used,
        inner,
        micro_batch_size=scenario.micro,
        clip_grad_norm=scenario.clip,
        scaler=scaler,
        sync=scenario.sync,
        **loss,
        **norm,
    )
    return step, inner


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _saved(states: Any) -> Any:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class _Wrapped:
    """A model and its wrapped optimizer."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.model = Model(scenario)
        self.used = _several(scenario, self.model)
        self.optimizer = Optimizer(
            OPTIMIZERS[scenario.optimizer](_trained(self.model)),
            steps=scenario.steps,
            model=self.used,
            reduction="sum" if scenario.loss == "sum" else "mean",
            clip_grad_norm=scenario.clip,
            nonfinite=scenario.nonfinite,
            sync=scenario.sync,
        )
        if scenario.hook:
            self.optimizer.register_step_pre_hook(halve)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, growth_interval=scenario.scaler or 1, enabled=scenario.scaler > 0
        )

    def reloaded(self) -> _Wrapped:
        states = _saved((self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()))
        new = _Wrapped(self.scenario)
        new.model.load_state_dict(states[0])
        new.optimizer.load_state_dict(states[1])
        new.scaler.load_state_dict(states[2])
        return new

    def micro_batch(self, one: MicroBatch, x: Tensor, y: Tensor) -> bool:
        """The body of a user's loop. Returns whether the micro-batch was counted."""
        scenario, optimizer = self.scenario, self.optimizer
        if one.event == "skip":
            return False
        optimizer.zero_grad()
        if one.event == "eval":
            with torch.no_grad():
                self.used(x, one.head)
        self.model.fault.where = one.event.removesuffix(" error") if one.event.endswith("error") else ""
        try:
            for part in range(scenario.losses):
                loss = loss_of(scenario, self.used, x, y, one.head, part)
                if one.event == "inf":
                    loss = loss * float("inf")
                loss = self.scaler.scale(loss)
                if scenario.way == "backward":
                    optimizer.backward(loss, weight=_weight(scenario, one))
                elif scenario.way == "batches backward":
                    optimizer.backward(loss)
                else:
                    loss.backward()
        except Injected:
            if one.event == "backward error":
                optimizer.discard()
            return False
        finally:
            self.model.fault.where = ""
        self.scaler.step(optimizer)
        self.scaler.update()
        if one.event == "zero_grad":
            self.model.zero_grad()
        return True


def _weight(scenario: Scenario, one: MicroBatch) -> float:
    return one.rows if one.weight is None else one.weight


def _wrapper(scenario: Scenario, rank: int) -> dict[str, float]:
    run, oracle = _Wrapped(scenario), Model(scenario, alone=True)
    plain = OPTIMIZERS[scenario.optimizer](_trained(oracle))
    ranks = [scenario.epochs, *([scenario.others] if scenario.others else [])]
    with_batches = scenario.way.startswith("batches")
    updates = 0
    for number in range(len(scenario.epochs)):
        data = [
            [(*rows_of(one, 37 * number + i + RANKS_SEED * r), i) for i, one in enumerate(epochs[number])]
            for r, epochs in enumerate(ranks)
        ]
        own = [epochs[number] for epochs in ranks]
        for window in _windows(scenario, own):
            updates += _oracle_update(scenario, oracle, plain, window, data, own)
        epoch, first = scenario.epochs[number] if not rank else scenario.others[number], 0
        while first < len(epoch):
            rest = data[rank][first:]
            loader: Any = loader_of(scenario, rest)
            weight: Any = None
            if any(one.weight is not None for one in epoch):
                weight = lambda batch, epoch=epoch: _weight(scenario, epoch[int(batch[2])])  # noqa: E731
            if with_batches:
                loader = run.optimizer.batches(loader, weight=weight)
            first = len(epoch)
            for x, y, i in loader:
                one = epoch[int(i)]
                run.micro_batch(one, x, y)
                if one.event == "flush":
                    run.optimizer.flush()
                if one.event == "save" and int(i) + 1 < len(epoch):
                    run, first = run.reloaded(), int(i) + 1
                    break
        if not with_batches:
            run.optimizer.flush()
    found = {"parameters": relative_error(_whole(run.model.parameters()), oracle.parameters())}
    found["updates"] = float(abs(run.optimizer.updates - updates))
    if scenario.engine:
        return found
    found["state"] = _apart(*[_state(o) for o in (run.optimizer, plain)])
    return found


def _state(optimizer: Any) -> list[Tensor | None]:
    return [
        optimizer.state.get(p, {}).get(name)
        for group in optimizer.param_groups
        for p in group["params"]
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq")
    ]


def _windows(scenario: Scenario, epochs: list[tuple[MicroBatch, ...]]) -> list[list[tuple[int, int]]]:
    """The micro-batches, by rank and number, of each window of an epoch."""
    columns = []
    for rank, epoch in enumerate(epochs):
        own: list[list[tuple[int, int]]] = [[]]
        for i, one in enumerate(epoch):
            if one.event in ("skip", "forward error"):
                continue
            if one.event == "backward error":
                own[-1] = []
                continue
            own[-1].append((rank, i))
            if len(own[-1]) == scenario.steps or one.event == "flush":
                own.append([])
        columns.append([window for window in own if window])
    count = max(map(len, columns))
    return [[place for own in columns for window in own[w : w + 1] for place in window] for w in range(count)]


def _oracle_update(
    scenario: Scenario, model: nn.Module, optimizer: Any, window: list[tuple[int, int]], data: Any, epochs: Any
) -> bool:
    micro = []
    for rank, i in window:
        one = epochs[rank][i]
        if one.event == "inf" and _weight(scenario, one):
            if scenario.nonfinite != "skip_micro_batch":
                return False
            micro.append((0.0, one, data[rank][i]))  # left out: its gradient counts as zero
            continue
        weight = 1.0 if scenario.way == "plain" else _weight(scenario, one)
        micro.append((weight, one, data[rank][i]))
    total = sum(weight for weight, _, _ in micro)
    if not total:
        return False
    if scenario.loss == "sum":
        given = scenario.way == "backward" or any(one.weight is not None for e in epochs for one in e)
        divisor = total if given and scenario.way != "plain" else 1.0
        shares = [float(weight > 0) / divisor for weight, _, _ in micro]
    else:
        shares = [weight / total for weight, _, _ in micro]

    def backward() -> None:
        for share, (_, one, (x, y, _)) in zip(shares, micro, strict=True):
            for part in range(scenario.losses):
                (loss_of(scenario, model, x, y, one.head, part) * share).backward()

    update(scenario, model, optimizer, backward)
    return True


_RUNS = {"chunked": _chunked, "TrainStep": _train_step, "wrapper": _wrapper}


def on_rank(rank: int, scenario: Scenario) -> str:
    """`outcome` on one of several ranks."""
    return outcome(scenario, rank)
