"""An optimizer whose step fails halfway leaves everything as it was, or says that it may not be so."""

import contextlib
import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.torch import TrainStep
from tests.torch.train_step.test_memory import OUT, Fragile
from tests.torch.train_step.test_train_step import batches, network, step_of


class FailsAt(TorchDispatchMode):
    """Fails in place of the operation with this number."""

    def __init__(self, number, failure=lambda: torch.OutOfMemoryError(OUT)):
        super().__init__()
        self.left, self.failure = number, failure

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        if self.left == 0:
            raise self.failure()
        self.left -= 1
        return func(*args, **(kwargs or {}))


def fragile(kind):
    """This optimizer, with an attribute `mode` in which its steps run."""

    class FragileOptimizer(kind):
        mode = FailsAt(math.inf)

        def step(self, closure=None):
            with self.mode:
                return super().step(closure)

    return FragileOptimizer


class AverageEverything(torch.optim.SGD):
    """State of its own kind: counters in the groups, containers in containers, and an entry for no parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["counter"] = group.get("counter", 0) + 1
            group["lr"] = 0.1 / group["counter"]
            for parameter in group["params"]:
                seen = self.state[parameter].setdefault("seen", {"steps": [], "gradients": []})
                seen["steps"].append(group["counter"])
                seen["gradients"].append(parameter.grad.clone())
                for gradient in seen["gradients"]:
                    gradient.mul_(0.5)
        total = self.state["total"].setdefault("value", torch.zeros(()))
        total += 1
        return super().step(closure)


KINDS = {
    "sgd": lambda groups: fragile(torch.optim.SGD)(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda groups: fragile(torch.optim.Adam)(groups, lr=0.1, foreach=False),
    "foreach adam": lambda groups: fragile(torch.optim.Adam)(groups, lr=0.1, foreach=True, amsgrad=True),
    "fused adam": lambda groups: fragile(torch.optim.AdamW)(groups, lr=0.1, fused=True),
    "tensor lr": lambda groups: fragile(torch.optim.RMSprop)(groups, lr=torch.tensor(0.1), momentum=0.9),
    "its own state": lambda groups: fragile(AverageEverything)(groups, lr=0.1),
}


def model_and_step(kind, **keywords):
    model = Fragile(dropout=0.5)
    optimizer = KINDS[kind]([{"params": model.first.parameters()}, {"params": model.last.parameters(), "lr": 0.05}])
    keywords = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 4, "batch_norm": "micro", **keywords}
    return model, optimizer, TrainStep(model, optimizer, verify=False, **keywords)


def everything(model, *optimizers):
    """Parameters, buffers, optimizer state, groups and random state, as copies."""
    values = [*model.state_dict().values(), torch.get_rng_state()]
    for optimizer in optimizers:
        values += [[dict(state) for state in optimizer.state.values()], list(optimizer.state), optimizer.param_groups]
    return copy.deepcopy(values)


def same(one, other):
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def operations(optimizer):
    """How many operations a step takes from here."""
    trial = copy.deepcopy(optimizer)
    trial.mode = FailsAt(1e9)
    for parameter in (p for group in trial.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    trial.step()
    return int(1e9 - trial.mode.left)


@contextlib.contextmanager
def unchanged(model, *optimizers, error=torch.OutOfMemoryError, match=None):
    """What is raised inside leaves everything as it was."""
    before = everything(model, *optimizers)
    with pytest.raises(error, match=match):
        yield
    assert same(everything(model, *optimizers), before)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_at_any_operation_of_the_first_update_and_of_any_after_it_changes_nothing(kind):
    data = batches(count=3)
    model, optimizer, step = model_and_step(kind)
    for batch in data:
        count = operations(optimizer)
        assert count > 1
        for number in range(count) if batch is data[0] or kind == "foreach adam" else (0, count - 1):
            optimizer.mode = FailsAt(number)
            with unchanged(model, optimizer, match=r"\.step\(\)(.|\n)*are as they were\."):
                step(*batch)
        optimizer.mode = FailsAt(math.inf)
        step(*batch)
    assert step.updates == 3


@pytest.mark.parametrize("kind", ["sgd", "foreach adam", "fused adam"])
def test_what_cannot_be_taken_back_is_told_and_from_then_on_it_can(kind):
    data = batches(count=2)
    model, optimizer, step = model_and_step(kind)
    step(*data[0])
    before, generator = everything(model, optimizer), torch.get_rng_state()
    optimizer.mode = FailsAt(operations(optimizer) - 1)
    with pytest.raises(torch.OutOfMemoryError, match="may already have changed: continue from a checkpoint"):
        step(*data[1])
    assert not same(everything(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)
    with unchanged(model, optimizer, match="are as they were"):
        step(*data[1])


@pytest.mark.parametrize("failure", [KeyboardInterrupt, lambda: ValueError("the user's own")])
def test_any_other_error_of_an_optimizer_changes_nothing_in_the_first_update_and_is_told_later(failure, caplog):
    model, optimizer, step = model_and_step("foreach adam")
    data, kind = batches(count=2), type(failure())
    optimizer.mode = FailsAt(5, failure)
    with unchanged(model, optimizer, error=kind):
        step(*data[0])
    assert not caplog.text
    optimizer.mode = FailsAt(math.inf)
    step(*data[0])
    optimizer.mode = FailsAt(5, failure)
    with pytest.raises(kind):
        step(*data[1])
    assert f"{kind.__name__}. Parameters and optimizer state may already have changed" in caplog.text


@pytest.mark.parametrize("choice", ["pooled", "exact", "frozen"])
def test_batch_norms_buffers_are_as_they_were(choice):
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = fragile(torch.optim.Adam)(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, micro_batch_size=4, batch_norm=choice, verify=True)
    for batch in batches(count=2):
        optimizer.mode = FailsAt(0)
        with unchanged(model, optimizer):
            step(*batch)
        optimizer.mode = FailsAt(math.inf)
        step(*batch)


def test_of_several_optimizers_all_are_taken_back():
    model = network()
    first = torch.optim.Adam(model[0].parameters(), lr=0.1)
    second = fragile(torch.optim.SGD)(model[2].parameters(), lr=0.1, momentum=0.9)
    step = step_of(model, [first, second], micro_batch_size=4, verify=True)
    batch = batches()[0]
    second.mode = FailsAt(3)
    with unchanged(model, first, second):
        step(*batch)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_scaler_forgets_the_failed_update(clip):
    outcomes = []
    for fails in (False, True):
        model = network(torch.float32)
        optimizer = fragile(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        step = step_of(model, optimizer, micro_batch_size=4, scaler=scaler, clip_grad_norm=clip, verify=True)
        for number, batch in enumerate(batches(count=3, dtype=torch.float32)):
            if fails and number == 0:
                optimizer.mode = FailsAt(3)
                with pytest.raises(torch.OutOfMemoryError):
                    step(*batch)
                optimizer.mode = FailsAt(math.inf)
            step(*batch)
        outcomes.append([*everything(model, optimizer), scaler.state_dict()])
    assert same(*outcomes)


@pytest.mark.parametrize("evaluation", [1, 2, 5])
@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, ZeroDivisionError])
def test_an_error_in_a_closures_window_leaves_everything_as_before_the_call(evaluation, failure):
    model = Fragile(dropout=0.1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)
    evaluations = 99

    def loss_fn(outputs, y):
        nonlocal evaluations
        evaluations -= 1
        if evaluations <= 0:
            raise failure
        return nn.functional.cross_entropy(outputs, y)

    step = step_of(model, optimizer, loss_fn=loss_fn, micro_batch_size=13, batch_norm="micro")
    first, second = batches(count=2)
    step(*first)
    evaluations = evaluation
    with unchanged(model, optimizer, error=failure, match="one row" if failure is torch.OutOfMemoryError else None):
        step(*second)
    evaluations = 99
    step(*second)
    assert step.updates == 2


class Sharp(torch.optim.SGD):
    """Moves parameters between two evaluations of an optional closure, in later steps alone."""

    first = 0

    def step(self, closure=None):
        loss = closure()
        self.first -= 1
        if self.first < 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=0.5)
            closure()
        super().step()
        return loss


@pytest.mark.parametrize("first", [0, 2])
def test_memory_that_runs_out_where_a_closure_is_optional_changes_nothing_or_says_so(first: int) -> None:
    left = math.inf

    def loss_fn(outputs: Tensor, y: Tensor):
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError(OUT)
        return nn.functional.cross_entropy(outputs, y)

    model = network()
    optimizer = Sharp(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.first = first
    step = TrainStep(model, optimizer, loss_fn=loss_fn, micro_batch_size=99, verify=False)
    for number, batch in enumerate(batches(count=4)):
        before = everything(model, optimizer)
        if number == 2:
            left = 1
            with pytest.raises(torch.OutOfMemoryError, match="continue from a checkpoint" if first else "as they were"):
                step(*batch)
            left = math.inf
            if first:  # the first time that this one evaluates twice
                break
            assert same(everything(model, optimizer), before)
        step(*batch)
