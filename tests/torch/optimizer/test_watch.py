"""What is done to an open window behind the wrapper's back is seen wherever gradients really arrive."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import torch_updates
from tests.torch.optimizer.loops import assert_same, train, wrapped
from tests.torch.problems import join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")


class WithSpare(nn.Module):
    """A network, and layers around it that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.front = nn.Linear(3, 3)
        self.network = network()
        self.pooler = nn.Linear(3, 3)

    def forward(self, x):
        return self.network(x)


def unused_ends():
    return WithSpare()


def frozen_ends():
    model = WithSpare()
    model.pooler.requires_grad_(False)
    model.front.requires_grad_(False)
    model.network[0].requires_grad_(False)
    return model


def frozen_at_first():
    model = WithSpare()
    model.requires_grad_(False)
    return model


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("make", [unused_ends, frozen_ends, frozen_at_first])
@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (lambda model: model.zero_grad(), "cleared or replaced"),
        (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01), "edited inside"),
    ],
    ids=["model.zero_grad()", "clipping"],
)
def test_tampering_is_seen_where_the_last_parameter_gets_no_gradient(window, make, tamper, named):
    model = make()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    if make is frozen_at_first:
        model.network.requires_grad_(True)
    train(model, optimizer, [regression(2)] * (3 * (window - 1)))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(WindowError, match=named):
        for _ in range(3):
            optimizer.zero_grad()
            mse(model, *regression(2)).backward()
            tamper(model)
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_window_whose_gradients_arrive_at_other_parameters_is_watched_there():
    heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(6))
    optimizer = gradaccum.torch.optim.Optimizer(sgd(heads.parameters()), steps=2)

    def train(head, tamper=lambda: None):
        for _ in range(2):
            optimizer.zero_grad()
            mse(heads[head], *regression(2)).backward()
            optimizer.step()
            if not optimizer.updated:
                tamper()

    for _ in range(4):
        train(0)
    train(4)
    with pytest.raises(WindowError, match="cleared"):
        train(3, tamper=lambda: heads.zero_grad())


@pytest.mark.parametrize("plain", range(6))
def test_a_loss_without_a_weight_beside_one_with_a_weight_is_seen_on_any_head(plain):
    heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(6))
    optimizer = gradaccum.torch.optim.Optimizer(sgd(heads.parameters()), steps=2)
    with pytest.raises(WindowError, match=r"backward\(loss, weight=\.\.\.\)"):
        for rows in (4, 2):
            optimizer.zero_grad()
            optimizer.backward(mse(heads[0], *regression(rows)), weight=rows)
            mse(heads[plain], *regression(rows)).backward()
            optimizer.step()


def test_clearing_is_called_clearing_even_if_the_new_gradient_has_the_old_ones_address():
    model, optimizer = wrapped(steps=20)
    for _ in range(10):
        mse(model, *regression(2)).backward()
        optimizer.step()
        model.zero_grad()
        mse(model, *regression(2)).backward()
        with pytest.raises(WindowError, match="cleared or replaced"):
            optimizer.step()
        optimizer.discard()


def hooks_of(parameter):
    return len(parameter._post_accumulate_grad_hooks or ()) + len(parameter._backward_hooks or ())


def test_a_wrapper_leaves_the_model_as_it_found_it():
    model = network()
    for _ in range(5):
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(mse(model, *regression(2))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert sum(map(hooks_of, model.parameters()))
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    assert sum(map(hooks_of, model.parameters())) == 0


def test_a_wrapper_that_is_gone_leaves_the_gradients_dtype_as_it_was():
    model = network(dtype=torch.bfloat16)
    before = [p.grad_dtype for p in model.parameters()]
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2, accumulate_dtype=torch.float32)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).mean().backward()
    optimizer.step()
    del optimizer
    assert [p.grad_dtype for p in model.parameters()] == before
    model(torch.ones(2, 5, dtype=torch.bfloat16)).mean().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_a_new_wrapper_keeps_its_dtype_when_the_one_before_goes():
    model = network(dtype=torch.bfloat16)
    inner = sgd(model.parameters())
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=2, accumulate_dtype=torch.float32)
    optimizer = gradaccum.torch.optim.Optimizer(optimizer.inner, steps=4, accumulate_dtype=torch.float32)
    gc.collect()
    model(torch.ones(2, 5, dtype=torch.bfloat16)).mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    optimizer.step()


# Gradients that are written inside an open window, by operations that show or that don't, and to an effect or none.


SIZES = [3, 1, 4, 2, 2, 5, 1, 3, 3]


def touched(model, optimizer, touch, when, parts=None):
    for x, y in optimizer.batches(split(regression(24), SIZES) if parts is None else parts):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        if when == "before step":
            touch(model)
        optimizer.step()
        if when == "after step" and not optimizer.updated:
            touch(model)


@pytest.mark.parametrize("window", [1, 3])
def test_reading_a_norm_with_clip_grad_norm_writes_gradients_and_is_refused_with_what_to_use(window):
    model, optimizer = wrapped(steps=2)
    train(model, optimizer, [regression(2)] * (2 * window - 2))
    with pytest.raises(WindowError, match="get_total_norm"):
        for _ in range(2):
            optimizer.zero_grad()
            mse(model, *regression(2)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            optimizer.step()


EDITS = {
    "data.mul_": lambda p: p.grad.data.mul_(0.5),
    "data.clamp_": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
    "data.neg_": lambda p: p.grad.data.neg_(),
    "data.zero_": lambda p: p.grad.data.zero_(),
    "a mask": lambda p: p.grad.data[:1].zero_(),
    "numpy": lambda p: p.grad.numpy().__imul__(0.5),
    "clamp_": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "mul_": lambda p: p.grad.mul_(2),
    "zero_": lambda p: p.grad.zero_(),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1e-3),
    "data.mul_ of one bias": lambda p: p.grad.data.mul_(0.5) if p.shape == (7,) else None,
}


@pytest.mark.parametrize("when", ["before step", "after step"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_that_raise_a_version_or_none_are_seen_in_the_first_window(edit, when):
    model, optimizer = wrapped(steps=3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WindowError, match="edited inside an open window.*clip_grad_norm="):
        touched(model, optimizer, lambda model: [edit(p) for p in model.parameters()], when)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("steps", [3, 9])
def test_edits_that_raise_no_version_before_the_windows_last_step_are_seen_however_long_it_is(steps):
    model, optimizer = wrapped(steps=steps)
    micro_batches = split(regression(steps), [1] * steps)
    with pytest.raises(WindowError, match="edited inside an open window"):
        for index, (x, y) in enumerate(micro_batches):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if index + 1 == steps:
                for p in model.parameters():
                    p.grad.data.clamp_(-1e-3, 1e-3)
            optimizer.step()
    assert optimizer.updates == 0


def test_gradients_that_are_not_finite_or_complex_are_compared_too():
    numbers = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    optimizer = gradaccum.torch.optim.Optimizer(torch.optim.SGD([numbers], lr=0.1), steps=3)
    for factor in (float("nan"), 1.0):
        (numbers.abs().sum() * factor).backward()
        optimizer.step()
    numbers.grad.data.neg_()
    optimizer.discard()
    numbers.abs().sum().backward()
    numbers.grad.data.neg_()
    with pytest.raises(WindowError, match="edited"):
        optimizer.step()


def test_unscaling_by_the_scaler_where_the_window_closes_is_no_edit_and_clipping_after_it_is():
    model, optimizer = wrapped(steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for index, (x, y) in enumerate(split(regression(8), [2] * 4)):
        optimizer.zero_grad()
        scaler.scale(mse(model, x, y)).backward()
        if optimizer.closes_next:
            scaler.unscale_(optimizer)
            if index == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                with pytest.raises(WindowError, match="edited"):
                    scaler.step(optimizer)
                break
        scaler.step(optimizer)
        scaler.update()


# Backward passes that fail halfway: the layers that had their gradient must not have it twice.


class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.model.fails:
            ctx.model.fails = False
            raise torch.OutOfMemoryError("no room")
        return gradient, None


class Fragile(nn.Module):
    """Fails behind its last layers, once."""

    def __init__(self, layers=6, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(layers))
        self.head = nn.Linear(5, 3)
        self.fails, self.reentrant = False, reentrant

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = Fault.apply(x, self) if index == len(self.layers) - 1 else x
            x = layer(x).tanh() if self.reentrant is None else self.checkpointed(layer, x)
        return self.head(x)

    def checkpointed(self, layer, x):
        return checkpoint(lambda x: layer(x).tanh(), x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_plain_backward_pass_that_failed_and_is_tried_again_is_named(reentrant, window, index):
    model = Fragile(reentrant=reentrant)
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    train(model, optimizer, [regression(2)] * (3 * (window - 1) + index))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        mse(model, *regression(4)).backward()
    mse(model, *regression(4)).backward()
    for call in (optimizer.state_dict, optimizer.step) if index else (optimizer.step,):
        with pytest.raises(WindowError, match=r"A backward pass of this window failed.*discard\(\)"):
            call()
            for _ in range(2 - index):
                mse(model, *regression(2)).backward()
                optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.discard()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("drop", ["discard", "zero_grad"])
def test_what_a_failed_pass_left_is_gone_after_discard_or_zero_grad_of_an_empty_window(drop):
    model, plain = Fragile(), Fragile()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    model.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        mse(model, *regression(4)).backward()
    getattr(optimizer, drop)()
    parts = split(regression(9), [2, 3, 4])
    train(model, optimizer, optimizer.batches(parts))
    torch_updates(plain, sgd(plain.parameters()), [join(parts[:2]), parts[2]], mse)
    assert_same(model, plain)


def test_passing_over_a_micro_batch_whose_pass_failed_is_named_where_it_left_a_part():
    model = Fragile()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    with pytest.raises(WindowError, match="A backward pass of this window failed"):
        for index, (x, y) in enumerate(optimizer.batches(split(regression(9), [2, 3, 4]))):
            optimizer.zero_grad()
            model.fails = index == 1
            try:
                mse(model, x, y).backward()
            except torch.OutOfMemoryError:
                continue
            optimizer.step()


def test_a_step_in_the_middle_of_a_backward_pass_is_no_failure():
    model, plain = Fragile(), Fragile()
    optimizers = {p: gradaccum.torch.optim.Optimizer(sgd([p]), steps=2) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for part in split(regression(8), [4, 4]):
        mse(model, *part).backward()
    torch_updates(plain, sgd(plain.parameters()), [regression(8)], mse)
    assert_same(model, plain)
