"""An optimizer whose step fails halfway leaves everything as it was, or says that it may not be so."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz.problem import Faulty
from tests.reference import relative_error
from tests.torch.problems import Does
from tests.torch.train_step.problems import OUT, Fragile, Sharp, batches, moves_statistics, network, plain_loss, zeros
from tests.torch.train_step.steps import assert_same_state, everything, left_as_it_was, same, step_of


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


def model_and_step(kind):
    model = Fragile(dropout=0.5)
    optimizer = KINDS[kind]([{"params": model.first.parameters()}, {"params": model.last.parameters(), "lr": 0.05}])
    return model, optimizer, step_of(model, optimizer, micro_batch_size=4, batch_norm="micro")


def operations(optimizer):
    """How many operations a step takes from here."""
    trial = copy.deepcopy(optimizer)
    trial.mode = FailsAt(1e9)
    for parameter in (p for group in trial.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    trial.step()
    return int(1e9 - trial.mode.left)


def failed(step, batch, model, optimizer, number, *others, error=torch.OutOfMemoryError, match=None):
    """A call in which this operation of the optimizer fails, and changes nothing."""
    optimizer.mode = FailsAt(number) if error is torch.OutOfMemoryError else FailsAt(number, error)
    with left_as_it_was(model, error, match, optimizer, *others):
        step(*batch)
    optimizer.mode = FailsAt(math.inf)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_at_any_operation_of_the_first_update_and_of_any_after_it_changes_nothing(kind):
    data = batches()
    model, optimizer, step = model_and_step(kind)
    for batch in data:
        count = operations(optimizer)
        assert count > 1
        for number in range(count) if batch is data[0] or kind == "foreach adam" else (0, count - 1):
            failed(step, batch, model, optimizer, number, match=r"\.step\(\)(.|\n)*are as they were\.")
        step(*batch)
    assert step.updates == 3


@pytest.mark.parametrize("kind", ["sgd", "foreach adam", "fused adam"])
def test_what_cannot_be_taken_back_is_told_and_from_then_on_it_can(kind):
    data = batches(count=2)
    model, optimizer, step = model_and_step(kind)
    step(*data[0])
    before, generator, last = everything(model, optimizer), torch.get_rng_state(), operations(optimizer) - 1
    optimizer.mode = FailsAt(last)
    with pytest.raises(torch.OutOfMemoryError, match="may already have changed: continue from a checkpoint"):
        step(*data[1])
    assert not same(everything(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)
    failed(step, data[1], model, optimizer, last, match="are as they were")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_any_other_error_of_an_optimizer_changes_nothing_in_the_first_update_and_is_told_later(error, caplog):
    model, optimizer, step = model_and_step("foreach adam")
    data = batches(count=2)
    failed(step, data[0], model, optimizer, 5, error=error)
    assert not caplog.text
    step(*data[0])
    optimizer.mode = FailsAt(5, error)
    with pytest.raises(error):
        step(*data[1])
    assert f"{error.__name__}. Parameters and optimizer state may already have changed" in caplog.text


def test_of_several_optimizers_all_are_taken_back():
    model = network()
    first = torch.optim.Adam(model[0].parameters(), lr=0.1)
    second = fragile(torch.optim.SGD)(model[2].parameters(), lr=0.1, momentum=0.9)
    step = step_of(model, [first, second], micro_batch_size=4, verify=True)
    failed(step, batches()[0], model, second, 3, first)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_scaler_forgets_the_failed_update(clip):
    outcomes, data = [], batches(dtype=torch.float32)
    for fails in (False, True):
        model = network(torch.float32)
        optimizer = fragile(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        step = step_of(model, optimizer, micro_batch_size=4, scaler=scaler, clip_grad_norm=clip, verify=True)
        if fails:
            failed(step, data[0], model, optimizer, 3)
        for batch in data:
            step(*batch)
        outcomes.append([*everything(model, optimizer), scaler.state_dict()])
    assert same(*outcomes)


# Closures, which run windows inside of the optimizer's step.


class Fails:
    """A loss that can be evaluated so often, and then raises."""

    def __init__(self, error=torch.OutOfMemoryError):
        self.left, self.error = math.inf, error

    def __call__(self, model, x, y):
        self.left -= 1
        if self.left < 0:
            raise self.error(OUT)
        return plain_loss(model, x, y)


@pytest.mark.parametrize("evaluations", [0, 1, 4])
@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, ZeroDivisionError])
def test_an_error_in_a_closures_window_leaves_everything_as_before_the_call(evaluations, failure):
    model, loss = Fragile(dropout=0.1), Fails(failure)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)
    step = step_of(model, optimizer, compute_loss=loss, micro_batch_size=13, batch_norm="micro")
    first, second = batches(count=2)
    step(*first)
    loss.left = evaluations
    with left_as_it_was(model, failure, "one row" if failure is torch.OutOfMemoryError else None, optimizer):
        step(*second)
    loss.left = math.inf
    step(*second)
    assert step.updates == 2


class Evaluated(nn.Module):
    """Dropout, BatchNorm and other buffers. Notes the micro-batches of each evaluation of so many rows.

    From some evaluations on one of four rows or more doesn't fit: not the first one, unless it has all rows.
    """

    def __init__(self, rows, evaluations=(), where=""):
        super().__init__()
        torch.manual_seed(0)
        self.statistics = Does(moves_statistics, mean=zeros(5), count=torch.zeros(()))
        layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)
        self.layers = nn.Sequential(*layers).double()
        self.rows, self.failing, self.where = rows, [*evaluations], where
        self.sizes, self.evaluations = [], []

    def forward(self, x):
        due, before = bool(self.failing) and len(self.evaluations) >= self.failing[0], self.sizes
        fails = due and len(x) >= 4 and (bool(before) or len(x) == self.rows)
        self.sizes = []  # where this pass fails
        self.statistics(x)
        outputs = self.layers(x)
        if fails:
            del self.failing[0]
            fault = Faulty()
            fault.most[self.where] = 0
            return fault(outputs)
        self.sizes = [*before, len(x)]
        if sum(self.sizes) == self.rows:
            self.evaluations.append(self.sizes)
            self.sizes = []
        return outputs


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("size", "evaluations"), [(16, [1]), (16, [2, 3]), (16, [0, 7]), ("auto", [1]), ("auto", [8])])
def test_memory_that_runs_out_in_a_later_evaluation_costs_that_evaluation_alone(size, evaluations, where, line_search):
    model, reference = Evaluated(64, evaluations, where), Evaluated(64)
    lbfgs = {"lr": 0.1, "max_iter": 5, "line_search_fn": line_search}
    optimizer = torch.optim.LBFGS(model.parameters(), **lbfgs)
    step = step_of(model, optimizer, micro_batch_size=size, batch_norm="micro")
    data = batches(64, count=3)
    torch.manual_seed(2)
    losses = [step(*batch) for batch in data]
    after = torch.rand(3)
    assert not model.failing
    assert len(model.evaluations) > 9
    sizes, plain, expected = iter(model.evaluations), torch.optim.LBFGS(reference.parameters(), **lbfgs), []
    torch.manual_seed(2)
    for x, y in data:

        def closure(x=x, y=y):
            reference.zero_grad()
            reference.statistics(x)  # moves once
            of_evaluation, total = next(sizes), 0
            for rows, targets in zip(x.split(of_evaluation), y.split(of_evaluation), strict=True):
                loss = nn.functional.cross_entropy(reference.layers(rows), targets) * (len(rows) / len(x))
                loss.backward()
                total += loss.detach()
            return total

        expected.append(plain.step(closure))
    assert next(sizes, None) is None
    assert torch.equal(torch.rand(3), after)
    assert relative_error(losses, expected) <= 1e-9  # LBFGS amplifies rounding
    assert_same_state(model, reference, 1e-9)


@pytest.mark.parametrize("first", [0, 2])
def test_memory_that_runs_out_where_a_closure_is_optional_changes_nothing_or_says_so(first):
    model, loss = network(), Fails()
    optimizer = Sharp(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.first = first
    step = step_of(model, optimizer, compute_loss=loss, micro_batch_size=99)
    *data, failing, last = batches(count=4)
    for batch in data:
        step(*batch)
    loss.left = 1
    if first:  # the first time that this one evaluates twice
        with pytest.raises(torch.OutOfMemoryError, match="continue from a checkpoint"):
            step(*failing)
        return
    with left_as_it_was(model, torch.OutOfMemoryError, "as they were", optimizer):
        step(*failing)
    loss.left = math.inf
    step(*failing)
    step(*last)
