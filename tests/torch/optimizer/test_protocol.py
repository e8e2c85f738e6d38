"""A wrapped optimizer is a torch optimizer: hooks, schedulers, groups, closures, gradients of every kind."""

import gc
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gradaccum.torch
from gradaccum.on_torch import grad_buffer
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, refused, scaler_of, train, wrapped
from tests.torch.problems import SAM, Does, Operations, adam, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

RAGGED = parts([2, 3, 1, 4, 2])


@pytest.mark.parametrize(("steps", "shown"), [(4, "4"), ({0: 8, 4: 2}, "{0: 8, 4: 2}")])
def test_the_start_up_line_says_the_optimizers_name_and_the_steps(steps, shown, caplog):
    with caplog.at_level(logging.INFO, "gradaccum"):
        wrapped(torch.optim.Adam, steps=steps)
        gradaccum.torch.optim.SGD(network().parameters(), lr=0.1, steps=steps)
    assert caplog.messages == [
        f"Wrapping 'Adam' PyTorch optimizer with GA of {shown} steps",
        f"Wrapping 'SGD' PyTorch optimizer with GA of {shown} steps",
    ]


def test_groups_state_and_defaults_are_the_inner_optimizers():
    inner = adam(network().parameters())
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=4)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.inner is inner
    for name in ("param_groups", "state", "defaults"):
        assert getattr(optimizer, name) is getattr(inner, name)
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    inner.flavour = "custom"
    assert optimizer.flavour == "custom"
    with pytest.raises(AttributeError, match="taste"):
        optimizer.taste  # noqa: B018
    assert "4 steps" in repr(optimizer)
    named = gradaccum.torch.optim.AdamW(3, network().parameters(), lr=0.25)
    other = pickle.loads(pickle.dumps(named))
    assert (type(other), other.param_groups[0]["lr"]) == (type(named), 0.25)


@pytest.mark.parametrize(("make", "steps"), [(adam, 2), (torch.optim.LBFGS, 1)])
def test_hooks_run_once_per_update_in_torchs_order_and_see_the_wrapper_and_those_of_the_inner_one_run_too(make, steps):
    calls = []

    def log(name):
        return lambda optimizer, args, kwargs: calls.append((name, optimizer))

    model, optimizer = wrapped(make, steps=steps)
    for each, whose in ((optimizer.inner, "inner "), (optimizer, "")):
        each.register_step_pre_hook(log(f"{whose}pre"))
        each.register_step_post_hook(log(f"{whose}post"))
    handles = register_optimizer_step_pre_hook(log("all pre")), register_optimizer_step_post_hook(log("all post"))
    for each, number in ((optimizer, steps), (optimizer.inner, 1)):
        for _ in range(number):
            each.step(closure_of(model, optimizer))
    for handle in handles:
        handle.remove()
    inner = [(name, optimizer.inner) for name in ("all pre", "inner pre", "inner post", "all post")]
    own = [(name, optimizer) for name in ("all pre", "pre", "post", "all post")]
    assert calls == [*own[:2], *inner[1:3], *own[2:], *inner], "as in torch, where it is the inner one's own"


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (torch.optim.SGD, {"momentum": 0.5}, "momentum from 0 to 0.5"),
        (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}, "weight_decay from 0 to 0.1, maximize from"),
        (torch.optim.SGD, {"dampening": 0.5}, "dampening from 0 to 0.5"),
        (torch.optim.SGD, {"nesterov": True, "momentum": 0.9}, "momentum from 0 to 0.9, nesterov from False to True"),
        (torch.optim.Adam, {"betas": (0.5, 0.9)}, r"betas from \(0.9, 0.999\) to \(0.5, 0.9\)"),
        (torch.optim.Adam, {"eps": 1e-3, "lr": torch.tensor(0.1)}, "lr from 0.001 to 0.1.*, eps from 1e-08 to 0.001"),
        (torch.optim.SGD, "a scheduler's step", "lr from 0.001 to 0.0005"),
    ],
)
def test_hyperparameters_that_change_inside_a_window_are_named_once(make, changes, named):
    model, optimizer = wrapped(make, steps=2)
    group = optimizer.param_groups[0]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = {name: value for name, value in group.items() if name != "params"}

    change = scheduler.step if isinstance(changes, str) else lambda: group.update(changes)

    def window():
        train(model, optimizer, [regression(2)] * 2, after=lambda: optimizer.updated or change())

    equal = pickle.loads(pickle.dumps(before))
    train(model, optimizer, [regression(2)] * 2, after=lambda: group.update(equal))
    with pytest.warns(UserWarning, match=f"changed, {named}.*inside an open window.*if optimizer.updated") as said:
        window()
    assert len(said) == 1
    group.update(before)
    window()  # warnings are errors


# Closures, and optimizers that evaluate them again.


def closure_of(model, optimizer, seed=1, clear=True):
    def closure():
        if clear:
            optimizer.zero_grad()
        loss = mse(model, *regression(4, seed))
        loss.backward()
        return loss

    return closure


class LineSearch(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure):
        return closure()


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (torch.optim.LBFGS, {"steps": 2}, r"LBFGS re-evaluates its closure.*steps=2.*TrainStep"),
        (torch.optim.LBFGS, {"steps": lambda epoch, update: 2}, "TrainStep"),
        (LineSearch, {"steps": 4}, "LineSearch re-evaluates"),  # told by its signature
        (SAM, {"steps": 2}, r"SAM.step evaluates its closure again.*TrainStep"),
        (SAM, {"steps": 1, "clip_grad_norm": 1.0}, r"SAM.step evaluates its closure again.*TrainStep"),
    ],
)
def test_a_closure_that_is_evaluated_again_is_refused_in_a_window(make, options, says):
    with pytest.raises(ValueError, match=says):
        model, optimizer = wrapped(make, **options)
        for _ in range(2):
            optimizer.step(closure_of(model, optimizer, clear=False))


@pytest.mark.parametrize(("make", "clear"), [(torch.optim.LBFGS, True), (SAM, True), (SAM, False)])
def test_a_closure_that_is_evaluated_again_reaches_the_inner_optimizer_in_the_plain_loop(make, clear):
    (model, optimizer), alone = wrapped(make, steps=1), network()
    for network_, each in ((model, optimizer), (alone, make(alone.parameters()))):
        for seed in range(3):
            each.zero_grad()
            closure = closure_of(network_, each, seed, clear)
            closure()
            each.step(closure)
    assert optimizer.updates == 3
    assert_same(model, alone)


@pytest.mark.parametrize("method", ["first_step", "second_step", "sharpness"])
def test_methods_of_the_inner_optimizer_that_work_on_gradients_are_refused_in_windows(method):
    model, optimizer = wrapped(SAM, steps=2)
    mse(model, *regression(4)).backward()
    with refused(rf"SAM.{method}\(\) works on gradients.*TrainStep", model):
        getattr(optimizer, method)()
    assert optimizer.describe() == "rho=0.05"
    assert wrapped(SAM, steps=1)[1].first_step.__self__ is not optimizer


def shared():
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3))


def joined():
    """Gradients that are parts of one tensor share a version, so that adding to one looks like editing the other."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    return Does(lambda model, x: (x @ torch.cat([model.a, model.b]))[:, None].expand(-1, 3), a=a, b=b)


def lazy():
    """Takes shape with the first rows; then it is `network()`."""

    def run(model, x):
        if isinstance(model.layers[0], nn.LazyLinear):
            model.layers(x)
            model.layers.load_state_dict(network().state_dict())
        return model.layers(x)

    return Does(run, layers=nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.LazyLinear(3)))


def with_saliency(model, x, y):
    """Gradients that are asked for by `torch.autograd.grad` belong to no micro-batch."""
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return mse(model, x, y) + slope.square().sum(1).mean()


KINDS = {
    "shared parameters": {"model": shared, "make": adam},
    "joined gradients": {"model": joined},
    "lazy modules": {"model": lazy, "plain": network},
    "autograd.grad on the side": {"loss": with_saliency},
    "autograd.grad on the side, under a scaler that moves": {"loss": with_saliency, "scaler": (4.0, 1)},
    **{
        str(kind): {"make": lambda p, kind=kind: torch.optim.Adam(p, lr=0.01, **kind)}
        for kind in ({"foreach": True}, {"fused": True}, {"foreach": False})
    },
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_windows_make_the_large_batchs_updates_with(kind):
    model, make, loss = kind.get("model", network)(), kind.get("make", sgd), kind.get("loss", mse)
    _, optimizer = wrapped(make, model, steps=3)
    scaler = scaler_of(*kind["scaler"]) if "scaler" in kind else None
    train(model, optimizer, optimizer.batches(RAGGED), loss=loss, scaler=scaler)
    plain = kind.get("plain", kind.get("model", network))()
    assert_same(model, large(windows_of(RAGGED, 3), make, loss, plain))


@pytest.mark.parametrize("scaler", [(), (4.0, 1)], ids=["", "a scale that grows"])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}, {"nonfinite": "skip_window"}])
def test_sparse_gradients(options, scaler):
    def model():
        torch.manual_seed(0)
        return nn.Embedding(10, 3, sparse=True)

    def loss(model, index, y):
        return nn.functional.mse_loss(model(index), y)

    index = torch.tensor([1, 1, 3, 9, 0, 1, 3, 3, 2, 2, 1, 5])
    micro_batches = split((index, regression(12)[1]), [2, 3, 1, 4, 2])

    def clip(optimizer, *_):
        (weight,) = optimizer.param_groups[0]["params"]
        gradient = weight.grad.coalesce()
        weight.grad = gradient * torch.clamp(0.05 / (gradient.values().norm() + 1e-6), max=1.0)

    def clipped(parameters):
        optimizer = torch.optim.SparseAdam(parameters, lr=0.1)
        optimizer.register_step_pre_hook(clip if "clip_grad_norm" in options else lambda *_: None)
        return optimizer

    accumulated = model()
    optimizer = gradaccum.torch.optim.SparseAdam(accumulated.parameters(), lr=0.1, steps=3, **options)
    scaler = scaler_of(*scaler) if scaler else None
    train(accumulated, optimizer, optimizer.batches(micro_batches), loss=loss, scaler=scaler)
    assert_same(accumulated, large(windows_of(micro_batches, 3), clipped, loss, model()))


def summed(dtype, count, gradient=1.0, make=lambda p: torch.optim.SGD(p, lr=1.0), weights=(), **options):
    """A parameter after one window of `count` gradients."""
    model, optimizer = wrapped(make, nn.ParameterList([torch.zeros(3, dtype=dtype)]), steps=count, **options)
    left, loss = [*weights], lambda model: model[0].sum() * gradient
    train(model, optimizer, [()] * count, loss=loss, weigh=(lambda: left.pop(0)) if weights else None)
    assert optimizer.updates == 1
    assert model[0].dtype == dtype
    return model[0].tolist()


def test_sums_in_float32_are_exact_where_bfloat16_is_not_and_those_of_float16_do_not_overflow():
    """bfloat16 stops counting at 256."""
    assert summed(torch.bfloat16, 512) == [-0.5] * 3
    assert summed(torch.bfloat16, 512, accumulate_dtype=torch.float32) == [-1.0] * 3
    assert summed(torch.float16, 8, gradient=30000.0) == [-30000.0] * 3
    assert summed(torch.float16, 2, gradient=4.0, weights=[30000, 15000]) == [-4.0] * 3  # tokens, as multiples of 30000


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wider_sums_go_with_optimizers_that_refuse_another_dtype(dtype, kind):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.5, eps=1e-3, weight_decay=0, **kind)

    found = summed(dtype, 3, make=adamw, accumulate_dtype=torch.float32)
    assert found == pytest.approx([-0.5] * 3, rel=1e-2)


def test_parameters_that_are_wide_enough_are_left_alone_and_a_torch_that_cannot_sum_wider_is_named(monkeypatch):
    model, _ = wrapped(steps=2, accumulate_dtype=torch.float32)
    mse(model, *regression(2)).backward()
    assert model[0].weight.grad.dtype == torch.float64
    monkeypatch.setattr(grad_buffer, "_SUMS_WIDE", False)
    wrapped(model=network(dtype=torch.bfloat16), steps=2)
    with pytest.raises(ValueError, match=r"cannot be summed in torch.float32: torch .* has no `grad_dtype`"):
        wrapped(model=network(dtype=torch.bfloat16), steps=2, accumulate_dtype=torch.float32)


# What a window leaves alone, and what it costs.


def hooks_of(model):
    return sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters())


def test_a_wrapper_goes_with_its_last_reference_and_leaves_the_model_as_it_found_it():
    model = network()
    for _ in range(2):
        _, optimizer = wrapped(model=model, steps=2)
        train(model, optimizer, [regression(2)], scaler=scaler_of(1.0))
        loop = iter(optimizer.batches([regression(2)] * 2, weight=lambda _: 0))
        next(loop)  # in which gradients are multiplied by 0 on their way
        assert hooks_of(model)
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    assert hooks_of(model) == 0
    mse(model, *regression(2)).backward()


def test_a_wrapper_that_is_gone_leaves_the_gradients_dtype_as_it_was_and_a_newer_one_keeps_its_own():
    x, model = torch.ones(2, 5, dtype=torch.bfloat16), network(dtype=torch.bfloat16)
    before = [p.grad_dtype for p in model.parameters()]
    _, optimizer = wrapped(model=model, steps=2, accumulate_dtype=torch.float32)
    optimizer = gradaccum.torch.optim.Optimizer(optimizer.inner, steps=4, accumulate_dtype=torch.float32)
    gc.collect()
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        model(x).mean().backward()
        assert all(p.grad.dtype == dtype for p in model.parameters())
        optimizer = None
        gc.collect()
        assert [p.grad_dtype for p in model.parameters()] == before


def test_an_open_window_runs_no_tensor_operation_and_copies_no_gradient():
    model, optimizer = wrapped(adam, steps=100)
    for _ in range(2):  # windows in which gradients are compared by value
        train(model, optimizer, [regression(2)])
        optimizer.flush()
    optimizer.inner.state.clear()
    for _ in range(2):
        mse(model, *regression(2)).backward()
        where = [p.grad.data_ptr() for p in model.parameters()]
        with Operations() as operations:
            optimizer.step()
            optimizer.zero_grad()
        assert operations.seen == []
        assert [p.grad.data_ptr() for p in model.parameters()] == where
    assert not optimizer.inner.state


def test_a_window_never_waits_for_the_device():
    """Host synchronisations show as `_local_scalar_dense` (item, bool, float of a tensor).

    In window 1, and at the beginning of windows 2, 4, 8, ..., gradients are compared by value, which waits.
    """
    model, optimizer = wrapped(lambda p: torch.optim.SGD(p, lr=0.1), steps=3, clip_grad_norm=0.1)
    for sizes in ([2, 3, 1, 4, 1, 1], [2, 3, 1]):
        with Operations() as operations:
            train(model, optimizer, optimizer.batches(parts(sizes)), weigh=lambda *batch: None)
    assert optimizer.updates == 3
    assert not [name for name in operations.seen if "local_scalar" in name]
