"""Backward passes that do more than return gradients: fill the same tensors again, or update parameters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep, check_equivalence, chunked
from tests.torch.equivalence.problems import CE, seeded

X, Y = torch.randn(16, 6, generator=(same := seeded(5))), torch.randint(4, (16,), generator=same)


class Graphed(nn.Module):
    """As of torch.cuda.make_graphed_callables: each backward pass fills the same tensor, and returns it detached."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, generator=seeded(2)))
        static = torch.zeros(4, 6)

        class Replayed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight.T

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                static.copy_(grad.T @ x)
                return grad @ weight, static.detach()

        self.run = Replayed.apply

    def forward(self, x):
        return self.run(x, self.weight)


def network(last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), last)


def step(model, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(model, optimizer, loss_fn=CE, micro_batch_size=4)(X, Y)


def test_gradients_that_the_next_backward_pass_overwrites_are_named():
    with pytest.raises(NotEquivalentError, match=r"returns the same tensors each time as gradients of '2\.weight'"):
        step(network(Graphed()))
    with pytest.raises(NotEquivalentError, match=r"returns the same tensor each time as the gradient of '2\.weight'"):
        chunked(network(Graphed()), 4)(X)
    (cause,) = check_equivalence(network(Graphed()), (X, Y), loss_fn=CE).causes
    assert (cause.kind, cause.where) == ("gradient", "2.weight")


def test_gradients_that_are_cloned_add_up():
    ours, theirs = network(Graphed()), network(Graphed())
    ours[2].weight.register_hook(torch.clone)
    step(ours)
    CE(theirs(X), Y).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


class Idle(torch.optim.Optimizer):
    """For a loop whose updates are made elsewhere."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


def by_optimizers(model):
    optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return update


def by_hand(model):
    def update(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    return update


@pytest.mark.parametrize("way", [by_optimizers, by_hand])
def test_updates_in_backward_are_refused_before_anything_is_trained(way):
    model = network(nn.Linear(6, 4))
    before, update = {key: value.clone() for key, value in model.state_dict().items()}, way(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with pytest.raises(NotEquivalentError, match="Remove the hooks, and give TrainStep the optimizer"):
        step(model, Idle(model.parameters()))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_check_names_updates_in_backward_and_makes_none():
    model = network(nn.Linear(6, 4))
    before, update = {key: value.clone() for key, value in model.state_dict().items()}, by_optimizers(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    (cause,) = check_equivalence(model, (X, Y), loss_fn=F.cross_entropy).causes
    assert cause.kind == "hook"
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_hook_that_only_looks_is_fine():
    model, seen = network(nn.Linear(6, 4)), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm()))
    step(model)
    assert seen
