"""Backward passes that fail halfway: the layers that had their gradient must not have it twice."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import torch_updates
from tests.torch.optimizer.loops import assert_same, train
from tests.torch.problems import join, mse, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")


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


def test_gradients_asked_for_inside_of_a_pass_are_no_failure():
    model = Fragile()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    for x, y in split(regression(8), [4, 4]):
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (mse(model, x, y) + slope.square().mean()).backward()
        optimizer.step()
    assert optimizer.updates == 1
