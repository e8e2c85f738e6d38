"""A wrapped optimizer is a torch optimizer: hooks, schedulers, groups, pickling, closures, gradients of every kind."""

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, torch_updates, windows_of
from tests.torch.optimizer.loops import assert_same, by_rows, large, train, wrapped
from tests.torch.problems import Operations, adam, classes, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [2, 3, 1, 4, 2]


def ragged():
    return split(regression(sum(SIZES)), SIZES)


def in_batches(model, optimizer, micro_batches, **how):
    train(model, optimizer, optimizer.batches(micro_batches), **how)


def check(model, expected, micro_batches=None, *, make=sgd, loss=mse, steps=3, **options):
    """`model`'s windows make the updates of the large batches on `expected`."""
    micro_batches = ragged() if micro_batches is None else micro_batches
    in_batches(model, wrapped(make, model, steps=steps, **options)[1], micro_batches, loss=loss)
    assert_same(model, large(windows_of(micro_batches, steps), make, loss, expected))


@pytest.mark.parametrize(("steps", "shown"), [(4, "4"), ({0: 8, 4: 2}, "{0: 8, 4: 2}")])
def test_the_start_up_line_says_the_optimizers_name_and_the_steps(steps, shown, caplog):
    with caplog.at_level(logging.INFO, "gradaccum"):
        gradaccum.torch.optim.Optimizer(torch.optim.Adam(network().parameters()), steps=steps)
        gradaccum.torch.optim.SGD(network().parameters(), lr=0.1, steps=steps)
    assert caplog.messages == [
        f"Wrapping 'Adam' PyTorch optimizer with GA of {shown} steps",
        f"Wrapping 'SGD' PyTorch optimizer with GA of {shown} steps",
    ]


def test_groups_state_and_defaults_are_the_inner_optimizers():
    inner = adam(network().parameters())
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.inner is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    inner.flavour = "custom"
    assert optimizer.flavour == "custom"
    with pytest.raises(AttributeError, match="taste"):
        optimizer.taste  # noqa: B018
    assert "4 steps" in repr(gradaccum.torch.optim.Optimizer(inner, steps=4))


def test_hooks_run_once_per_update_and_see_the_finished_gradient_which_they_may_edit():
    model, optimizer = wrapped(steps=3)
    reference, seen = network(), []

    def edit(o, args, kwargs):
        seen.append(model[0].weight.grad.clone())
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    optimizer.register_step_pre_hook(edit)
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(o is optimizer))
    in_batches(model, optimizer, ragged()[:3])
    inner = sgd(reference.parameters())
    mse(reference, *join(ragged()[:3])).backward()
    assert len(seen) == 2
    assert relative_error([seen[0]], [reference[0].weight.grad]) <= FLOAT64
    assert seen[1] is True
    nn.utils.clip_grad_value_(reference.parameters(), 0.01)
    inner.step()
    assert_same(model, reference)


def test_an_ema_by_a_post_step_hook_moves_once_per_update():
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    model, optimizer = wrapped(steps=3)
    expected = network()
    ema, expected_ema = (torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=average) for m in (model, expected))
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    in_batches(model, optimizer, ragged())
    large(windows_of(ragged(), 3), model=expected, after_update=lambda: expected_ema.update_parameters(expected))
    assert_same(ema.module, expected_ema.module)


@pytest.mark.parametrize("around", ["wrapper", "inner"])
def test_a_scheduler_steps_once_per_update(around):
    model, optimizer = wrapped(steps=2)
    around = optimizer if around == "wrapper" else optimizer.inner
    scheduler = torch.optim.lr_scheduler.ExponentialLR(around, 0.5)
    in_batches(model, optimizer, ragged(), after=lambda: optimizer.updated and scheduler.step())
    expected = network()
    plain = sgd(expected.parameters())
    plain_scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    batches = [join(w) for w in windows_of(ragged(), 2)]
    torch_updates(expected, plain, batches, mse, after_update=plain_scheduler.step)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert_same(model, expected)


def test_a_scheduler_that_steps_inside_a_window_is_named():
    model, optimizer = wrapped(steps=4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, [regression(2)])
    scheduler.step()
    with pytest.warns(UserWarning, match=r"from 0.1 to 0.05 inside an open window.*if optimizer.updated"):
        train(model, optimizer, [regression(2)] * 3)


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (torch.optim.SGD, {"momentum": 0.5}, "momentum from 0 to 0.5"),
        (
            torch.optim.SGD,
            {"weight_decay": 0.1, "maximize": True},
            "weight_decay from 0 to 0.1, maximize from",
        ),
        (torch.optim.SGD, {"dampening": 0.5}, "dampening from 0 to 0.5"),
        (torch.optim.SGD, {"nesterov": True, "momentum": 0.9}, "momentum from 0 to 0.9, nesterov from False to True"),
        (torch.optim.Adam, {"betas": (0.5, 0.9)}, r"betas from \(0.9, 0.999\) to \(0.5, 0.9\)"),
        (torch.optim.Adam, {"eps": 1e-3, "lr": torch.tensor(0.1)}, "lr from 0.001 to 0.1.*, eps from 1e-08 to 0.001"),
    ],
)
def test_hyperparameters_that_change_inside_a_window_are_named_once(make, changes, named):
    model, optimizer = wrapped(make, steps=2)

    def window():
        for change in ({}, changes):
            optimizer.zero_grad()
            mse(model, *regression(2)).backward()
            optimizer.param_groups[0].update(change)
            optimizer.step()

    before = {name: optimizer.param_groups[0][name] for name in changes}
    with pytest.warns(UserWarning, match=f"changed, {named}.*inside an open window.*if optimizer.updated") as said:
        window()
    assert len(said) == 1
    optimizer.param_groups[0].update(before)
    window()  # warnings are errors


def test_hyperparameters_that_change_between_windows_are_fine():
    model, optimizer = wrapped(torch.optim.AdamW, steps=2)
    inner = optimizer.inner
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)  # moves lr and betas
    rates = []
    for _ in range(6):
        optimizer.zero_grad()
        mse(model, *regression(2)).backward()
        inner.param_groups[0]["betas"] = tuple([*inner.param_groups[0]["betas"]])  # an equal one
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if optimizer.updated:
            scheduler.step()
            optimizer.param_groups[0]["weight_decay"] += 0.1
    assert len(set(rates)) == 3


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("limit", [0.1, float("inf")])
def test_clipping_sees_the_finished_gradient_once_and_its_norm_can_be_watched(make, limit):
    model, optimizer = wrapped(make, steps=3, clip_grad_norm=limit)
    norms, expected, expected_norms = [], network(), []
    in_batches(model, optimizer, ragged(), after=lambda: optimizer.updated and norms.append(optimizer.grad_norm))
    inner = make(expected.parameters())
    for window in windows_of(ragged(), 3):
        inner.zero_grad()
        mse(expected, *join(window)).backward()
        expected_norms.append(nn.utils.clip_grad_norm_(expected.parameters(), limit))
        inner.step()
    assert_same(model, expected)
    assert isinstance(norms[0], torch.Tensor)
    assert relative_error(norms, expected_norms) <= FLOAT64
    assert norms[0] > 0.1


def test_lbfgs_is_refused_with_a_pointer_to_train_step():
    with pytest.raises(ValueError, match=r"LBFGS re-evaluates its closure.*steps=2.*TrainStep"):
        gradaccum.torch.optim.LBFGS(network().parameters(), steps=2)
    optimizer = gradaccum.torch.optim.LBFGS(network().parameters(), steps=lambda epoch, update: 2)
    with pytest.raises(ValueError, match="TrainStep"):
        optimizer.step(lambda: None)


def test_lbfgs_with_one_step_is_the_plain_loop():
    model, expected = network(), network()
    optimizer = gradaccum.torch.optim.LBFGS(model.parameters(), lr=0.1, steps=1)
    plain = torch.optim.LBFGS(expected.parameters(), lr=0.1)

    def closure(model, optimizer):
        optimizer.zero_grad()
        loss = mse(model, *regression(6))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(lambda: closure(model, optimizer))
        plain.step(lambda: closure(expected, plain))
    assert optimizer.updates == 2
    assert relative_error(model.parameters(), expected.parameters()) == 0


def test_a_custom_one_is_recognised_by_its_signature():
    class LineSearch(torch.optim.Optimizer):
        def step(self, closure):
            return closure()

    inner = LineSearch(network().parameters(), {"lr": 1.0})
    with pytest.raises(ValueError, match="LineSearch re-evaluates"):
        gradaccum.torch.optim.Optimizer(inner, steps=4)


# Gradients of every kind.


class Unusual(nn.Module):
    """Frozen, unused and shared parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.unused, self.shared = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.shared(self.shared(self.frozen(x)).tanh()))


class Joined(nn.Module):
    """Gradients that are parts of one tensor share a version, so that adding to one looks like editing the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (x @ torch.cat([self.a, self.b]))[:, None].expand(-1, 3)


@pytest.mark.parametrize(("model", "make"), [(Unusual, adam), (Joined, sgd)])
def test_frozen_unused_shared_and_joined_parameters(model, make):
    trained = model()
    check(trained, model(), make=make)
    assert model is Joined or trained.unused.weight.grad is None


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}, {"nonfinite": "skip_window"}])
def test_sparse_gradients(options):
    def model():
        torch.manual_seed(0)
        return nn.Embedding(10, 3, sparse=True)

    def loss(model, index, y):
        return nn.functional.mse_loss(model(index), y)

    index = torch.tensor([1, 1, 3, 9, 0, 1, 3, 3, 2, 2, 1, 5])
    micro_batches = split((index, regression(12)[1]), SIZES)
    accumulated, expected = model(), model()
    optimizer = gradaccum.torch.optim.SparseAdam(accumulated.parameters(), lr=0.1, steps=3, **options)
    in_batches(accumulated, optimizer, micro_batches, loss=loss)
    inner = torch.optim.SparseAdam(expected.parameters(), lr=0.1)
    for batch in (join(w) for w in windows_of(micro_batches, 3)):
        inner.zero_grad()
        loss(expected, *batch).backward()
        if "clip_grad_norm" in options:
            gradient = expected.weight.grad.coalesce()
            norm = gradient.values().norm()
            expected.weight.grad = gradient * torch.clamp(0.05 / (norm + 1e-6), max=1.0)
        inner.step()
    assert_same(accumulated, expected)


def test_a_gradient_penalty_with_create_graph():
    def loss(model, x, y):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return mse(model, x, y) + slope.square().sum(1).mean()

    check(network(), network(), loss=loss)


@pytest.mark.parametrize("foreach", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_every_implementation_of_an_inner_optimizer(foreach):
    check(network(), network(), make=lambda p: torch.optim.Adam(p, lr=0.01, **foreach))


class TestAccumulateDtype:
    """512 gradients of one: bfloat16 stops counting at 256."""

    @staticmethod
    def run(inner, dtype=torch.bfloat16, count=512, **options):
        parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = gradaccum.torch.optim.Optimizer(inner([parameter]), steps=count, **options)
        for _ in range(count):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        assert optimizer.updated
        return parameter

    def test_sums_in_float32_are_exact_where_bfloat16_is_not(self):
        def inner(parameters):
            return torch.optim.SGD(parameters, lr=1.0)

        assert self.run(inner).tolist() == [-0.5] * 3
        assert self.run(inner, accumulate_dtype=torch.float32).tolist() == [-1.0] * 3

    @pytest.mark.parametrize("foreach", [{"foreach": True}, {"fused": True}, {"foreach": False}])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_with_optimizers_that_refuse_another_dtype(self, dtype, foreach):
        def inner(parameters):
            return torch.optim.AdamW(parameters, lr=0.5, eps=1e-3, weight_decay=0, **foreach)

        parameter = self.run(inner, dtype, count=3, accumulate_dtype=torch.float32)
        assert parameter.dtype == dtype
        assert parameter.tolist() == pytest.approx([-0.5] * 3, rel=1e-2)

    @pytest.mark.parametrize("options", [{}, {"nonfinite": "skip_micro_batch"}, {"clip_grad_norm": 100.0}])
    def test_several_windows_against_float32_sums_by_hand(self, options):
        torch.set_default_dtype(torch.float32)
        micro_batches = [(x.bfloat16(), y.bfloat16()) for x, y in split(regression(24), [2] * 12)]
        accumulated, by_hand = (network(dtype=torch.bfloat16) for _ in range(2))
        _, optimizer = wrapped(model=accumulated, steps=6, accumulate_dtype=torch.float32, **options)
        in_batches(accumulated, optimizer, micro_batches)
        inner = sgd(by_hand.parameters())
        for window in windows_of(micro_batches, 6):
            gradients = [torch.autograd.grad(mse(by_hand, x, y), list(by_hand.parameters())) for x, y in window]
            for parameter, *parts in zip(by_hand.parameters(), *gradients, strict=True):
                parameter.grad = (sum(part.float() for part in parts) / len(window)).bfloat16()
            inner.step()
        for a, b in zip(accumulated.parameters(), by_hand.parameters(), strict=True):
            assert a.dtype == torch.bfloat16
            assert torch.equal(a, b)

    def test_parameters_that_are_wide_enough_are_left_alone(self):
        model = network()
        gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2, accumulate_dtype=torch.float32)
        mse(model, *regression(2)).backward()
        assert model[0].weight.grad.dtype == torch.float64


def test_add_param_group_between_windows():
    def run(model, optimizer, step):
        for batches in (ragged()[:3], ragged()[3:]):
            model[2].zero_grad()  # gradients that reach it before it is added are not this optimizer's
            step(batches)
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})

    model, expected = network(), network()
    optimizer, inner = wrapped(model=model[0], steps=3)[1], sgd(expected[0].parameters())
    run(model, optimizer, lambda batches: in_batches(model, optimizer, batches))
    run(expected, inner, lambda batches: (expected.zero_grad(), torch_updates(expected, inner, [join(batches)], mse)))
    assert_same(model, expected)


@pytest.mark.parametrize("through", ["pickle", "deepcopy"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
def test_a_copy_made_in_the_middle_of_a_window_goes_on_alike(through, nonfinite):
    model, optimizer = wrapped(adam, steps={0: 3}, nonfinite=nonfinite, clip_grad_norm=1.0)
    train(model, optimizer, ragged()[:2], weigh=by_rows)
    pair = (model, optimizer)
    copied = pickle.loads(pickle.dumps(pair)) if through == "pickle" else copy.deepcopy(pair)
    assert copied[1].micro_batches == 2
    for each in (pair, copied):
        train(*each, ragged()[2:], weigh=by_rows)
        each[1].flush()
    assert optimizer.updates == copied[1].updates == 2
    assert_same(model, large(windows_of(ragged(), 3), adam, clip_grad_norm=1.0))
    assert_same(copied[0], model, 0)
    assert optimizer.loss == copied[1].loss


def test_named_optimizers_pickle():
    model = network()
    optimizer = gradaccum.torch.optim.AdamW(3, model.parameters(), lr=0.25)
    other = pickle.loads(pickle.dumps(optimizer))
    assert type(other) is type(optimizer)
    assert other.param_groups[0]["lr"] == 0.25


def test_the_wrapper_does_not_outlive_its_last_reference():
    model, optimizer = wrapped(steps=2)
    train(model, optimizer, [regression(2)])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    mse(model, *regression(2)).backward()  # the hook that is left does no harm


def test_an_open_window_runs_no_tensor_operation_and_copies_no_gradient():
    model, optimizer = wrapped(adam, steps=100)
    x, y = regression(2)
    for _ in range(2):  # windows in which gradients are compared by value
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.flush()
    optimizer.inner.state.clear()
    for _ in range(2):
        mse(model, x, y).backward()
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
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), steps=3, clip_grad_norm=0.1
    )
    for x, y in optimizer.batches(split(regression(12), [2, 3, 1, 4, 1, 1])):
        optimizer.backward(mse(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    with Operations() as operations:
        for x, y in optimizer.batches(split(regression(10), [2, 3, 1, 4])):
            optimizer.zero_grad()
            optimizer.backward(mse(model, x, y))
            optimizer.step()
            if optimizer.updated:
                break
    assert optimizer.updates == 3
    assert not [name for name in operations.seen if "local_scalar" in name]


def test_autocast_in_bfloat16_runs_like_the_plain_loop():
    torch.set_default_dtype(torch.float32)
    parts = split(classes(8), [2] * 4)

    def loss(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(model(x), y)

    model, by_hand = network(), network()
    in_batches(model, wrapped(model=model, steps=4)[1], parts, loss=loss)
    inner = sgd(by_hand.parameters())
    for part in parts:
        loss(by_hand, *part).backward()
    for p in by_hand.parameters():
        p.grad /= 4
    inner.step()
    assert_same(model, by_hand, 0)
