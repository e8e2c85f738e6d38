"""What inner optimizers do beyond `step()`: closures they evaluate again, methods of their own, hooks, frameworks."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gradaccum.torch
from gradaccum import WindowError
from gradaccum.on_torch import grad_buffer
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, train, wrapped
from tests.torch.problems import adam, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

Optimizer = gradaccum.torch.optim.Optimizer


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is written everywhere."""

    def __init__(self, parameters, rho=0.05, **kwargs):
        super().__init__(parameters, {"rho": rho, **kwargs})
        self.base = torch.optim.SGD(self.param_groups, **kwargs)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = self._grad_norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * group["rho"] / norm)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = self.state[p]["old"]
        self.base.step()

    @torch.no_grad()
    def step(self, closure=None):
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()

    def _grad_norm(self):
        return torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()

    def sharpness(self):
        return self._grad_norm()

    def describe(self):
        return f"rho={self.defaults['rho']}"


class Careful(torch.optim.SGD):
    """Asks for its closure once, as torch's own do."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


def careful(parameters):
    return Careful(parameters, lr=0.1, momentum=0.9)


def sam_updates(model, batches, optimizer, clear):
    def evaluate(x, y):
        optimizer.zero_grad() if clear else None
        loss = mse(model, x, y)
        loss.backward()
        return loss

    for x, y in batches:
        optimizer.zero_grad()
        evaluate(x, y)
        optimizer.step(lambda x=x, y=y: evaluate(x, y))


@pytest.mark.parametrize("clear", [True, False])
def test_a_closure_that_is_evaluated_again_reaches_the_inner_optimizer_in_the_plain_loop(clear):
    model, alone = network(), network()
    batches = [regression(4, seed=seed) for seed in range(3)]
    optimizer = Optimizer(SAM(model.parameters(), lr=0.1), steps=1)
    sam_updates(model, batches, optimizer, clear)
    sam_updates(alone, batches, SAM(alone.parameters(), lr=0.1), clear)
    assert optimizer.updates == 3
    assert_same(model, alone)


@pytest.mark.parametrize("options", [{"steps": 2}, {"steps": 1, "clip_grad_norm": 1.0}])
def test_a_closure_that_is_evaluated_again_is_refused_in_a_window(options):
    model = network()
    optimizer = Optimizer(SAM(model.parameters(), lr=0.1), **options)

    def closure():
        loss = mse(model, *regression(4))
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"SAM.step evaluates its closure again.*TrainStep"):
        for _ in range(2):
            optimizer.step(closure)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_closure_that_is_evaluated_once_is_evaluated_once_per_micro_batch(steps):
    model, optimizer = wrapped(careful, steps=steps)
    parts, calls = split(regression(8), [2] * 4), []
    for part in parts:

        def closure(part=part):
            optimizer.zero_grad()
            loss = mse(model, *part)
            loss.backward()
            calls.append(1)
            return loss

        assert optimizer.step(closure).dim() == 0
    assert len(calls) == 4
    assert optimizer.updates == 4 // steps
    assert_same(model, large(windows_of(parts, steps), careful))


@pytest.mark.parametrize("method", ["first_step", "second_step", "sharpness"])
def test_methods_of_the_inner_optimizer_that_work_on_gradients_are_refused_in_windows(method):
    model = network()
    optimizer = Optimizer(SAM(model.parameters(), lr=0.1), steps=2)
    mse(model, *regression(4)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(WindowError, match=rf"SAM.{method}\(\) works on gradients.*TrainStep"):
        getattr(optimizer, method)()
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer.describe() == "rho=0.05"
    assert Optimizer(SAM(network().parameters(), lr=0.1), steps=1).first_step.__self__ is not optimizer


def log_of(optimizer, calls):
    """Register a hook of each kind on it, and for all optimizers; returns what takes the latter off again."""

    def log(name):
        return lambda opt, args, kwargs: calls.append((name, opt))

    optimizer.register_step_pre_hook(log("pre"))
    optimizer.register_step_post_hook(log("post"))
    return [register_optimizer_step_pre_hook(log("global pre")), register_optimizer_step_post_hook(log("global post"))]


@pytest.mark.parametrize("make", [adam, lambda p: torch.optim.LBFGS(p)])
def test_hooks_run_once_per_update_in_torchs_order_and_see_the_wrapper(make):
    orders = []
    for wrap in (False, True):
        model, calls = network(), []
        optimizer = make(model.parameters())
        closure_only = isinstance(optimizer, torch.optim.LBFGS)
        if wrap:
            optimizer = Optimizer(optimizer, steps=1 if closure_only else 2)
        handles = log_of(optimizer, calls)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = mse(model, *regression(4))
            loss.backward()
            return loss

        for _ in range(2 if wrap and not closure_only else 1):
            if closure_only:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        for handle in handles:
            handle.remove()
        assert {opt for _, opt in calls} == {optimizer}
        orders.append([name for name, _ in calls])
    assert orders[0] == orders[1] == ["global pre", "pre", "post", "global post"]


def test_hooks_of_the_inner_optimizer_run_too():
    model, calls = network(), []
    inner = sgd(model.parameters())
    inner.register_step_pre_hook(lambda *_: calls.append("inner pre"))
    inner.register_step_post_hook(lambda *_: calls.append("inner post"))
    optimizer = Optimizer(inner, steps=2)
    handles = log_of(optimizer, log := [])
    for _ in range(2):
        mse(model, *regression(4)).backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    assert calls == ["inner pre", "inner post"]
    assert len(log) == 4


def test_a_torch_that_cannot_sum_in_another_dtype_is_named(monkeypatch):
    monkeypatch.setattr(grad_buffer, "_SUMS_WIDE", False)
    model = network(dtype=torch.bfloat16)
    Optimizer(sgd(model.parameters()), steps=2)
    with pytest.raises(ValueError, match=r"cannot be summed in torch.float32: torch .* has no `grad_dtype`"):
        Optimizer(sgd(model.parameters()), steps=2, accumulate_dtype=torch.float32)


def test_lazy_modules_take_shape_under_the_wrapper():
    model = nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.LazyLinear(3))
    optimizer = Optimizer(sgd(model.parameters()), steps=2)
    parts = split(regression(4), [2, 2])
    model(parts[0][0])
    model.load_state_dict(network().state_dict())
    train(model, optimizer, parts)
    assert_same(model, large([parts]))
