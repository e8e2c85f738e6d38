"""What a loss reaches: held still while it is proven, and looked through however it is held."""

import dataclasses
import functools
import itertools
import logging
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.on_torch.reach import Reach
from gradaccum.torch import TrainStep, check_equivalence
from tests.torch.equivalence.problems import seeded

X, Y = torch.randn(16, 6, generator=(same := seeded(5))), torch.randint(4, (16,), generator=same)


class Centre(nn.Module):
    """A loss whose buffer each call moves, as DINO's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, outputs):
        loss = (outputs - self.centre).square().mean()
        with torch.no_grad():
            self.centre.mul_(0.5).add_(outputs.mean(0), alpha=0.5)
        return loss


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def update(model, loss, updates=3, size=4, **keywords):
    """The parameters after some updates in micro-batches; or by a plain loop with size=None."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = size and TrainStep(model, optimizer, compute_loss=loss, micro_batch_size=size, **keywords)
    for number in range(updates):
        x, y = X + 0.1 * number, Y.roll(number)
        if step:
            step(x, y)
        else:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def of_method():
    class Trainer:
        def __init__(self):
            self.centre = Centre()

        def loss(self, model, x, y):
            return self.centre(model(x))

    return network(), Trainer().loss


def of_helper():
    class Trainer:
        def __init__(self):
            self.parts = {"losses": [Centre()]}

        def inner(self):
            return getattr(self, "parts")["losses"][0]  # noqa: B009  # named by a string

        def loss(self, model, x, y):
            return self.inner()(model(x))

    return network(), Trainer().loss


def of_lambda():
    trainer = types.SimpleNamespace(inside=types.SimpleNamespace(centre=Centre()))
    return network(), lambda model, x, y: trainer.inside.centre(model(x))


def of_dataclass():
    @dataclasses.dataclass(frozen=True)
    class Config:
        centre: nn.Module

        def __call__(self, model, x, y):
            return self.centre(model(x))

    return network(), Config(Centre())


def of_class():
    class Trainer:
        centre = Centre()

        @classmethod
        def loss(cls, model, x, y):
            return cls.centre(model(x))

    return network(), Trainer.loss


def of_slots():
    class Trainer:
        __slots__ = ("__centre",)

        def __init__(self):
            self.__centre = Centre()

        def loss(self, model, x, y):
            return self.__centre(model(x))

    return network(), Trainer().loss


def of_module():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.centre = network(), Centre()

        def loss(self, model, x, y):
            return self.centre(model(x))

    both = Both()
    return both.model, both.loss


def of_partial():
    def loss(model, x, y, parts):
        return parts[0](model(x))

    return network(), functools.partial(loss, parts=(Centre(),))


def of_decorated():
    centre = Centre()

    def logged(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)

        return inner

    return network(), logged(lambda model, x, y: centre(model(x)))


WAYS = [of_method, of_helper, of_lambda, of_dataclass, of_class, of_slots, of_module, of_partial, of_decorated]


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_the_loss_moves_makes_the_large_batchs_update_however_it_is_held(way, caplog):
    torch.testing.assert_close(update(*way()), update(*way(), size=None), rtol=1e-5, atol=1e-6)
    assert not caplog.records


def test_what_code_does_not_name_is_not_looked_at():
    class Trainer:
        def __init__(self):
            self.centre, self.other = Centre(), Centre()

        def loss(self, model, x, y):
            return self.centre(model(x))

        def evaluate(self):
            return self.other

    trainer = Trainer()
    assert [*Reach(trainer.loss).modules.values()] == [trainer.centre]


def test_circles_and_long_containers_end():
    class Node:
        pass

    node = Node()
    node.node, node.items = node, [[node] * 10] * 1000
    assert Reach(lambda: (node.node, node.items)).modules == {}


def token_mean(factor):
    def loss(model, x, y):
        counts = (y > 0).float()
        return factor() * (F.cross_entropy(model(x), y, reduction="none") * counts).sum() / counts.sum()

    return loss


class Annealed:
    def __init__(self):
        self.calls = 0

    def factor(self):
        self.calls += 1
        return 1 + 1e-3 * self.calls


def test_a_wrong_weight_is_named_beside_a_coefficient_that_each_call_anneals():
    with pytest.raises(NotEquivalentError, match="mean over the entries of"):
        update(network(), token_mean(Annealed().factor))


@pytest.mark.parametrize("rate", [1e-2, 1e-3, 1e-4, 1e-5])
def test_state_that_nobody_can_hold_still_is_no_rounding(rate):
    calls = itertools.count()
    with pytest.raises(NotEquivalentError, match="gives another gradient each time"):
        update(network(), token_mean(lambda: 1 + rate * next(calls)))


def test_a_proof_leaves_what_the_loss_counts_as_it_was(caplog):
    class Trainer:
        rows = 0

        def __init__(self):
            self.log, self.seen, self.by_class = [], torch.zeros(()), {0: torch.zeros(())}

        def loss(self, model, x, y):
            Trainer.rows += len(x)
            self.seen += len(x)
            self.by_class[0] += (y == 0).sum()
            loss = F.cross_entropy(model(x), y)
            self.log.append(loss.item())
            return loss

    trainer = Trainer()
    update(network(), trainer.loss, updates=4)
    assert (Trainer.rows, trainer.seen, len(trainer.log)) == (64, 64, 16)
    assert trainer.by_class[0] == 4 * (Y == 0).sum()
    assert not caplog.records


def test_a_number_that_moves_once_per_micro_batch_is_named_where_nothing_hangs_on_it(caplog):
    counter = types.SimpleNamespace(calls=0)

    def loss(model, x, y):
        counter.calls += 1
        return F.cross_entropy(model(x), y)

    with caplog.at_level(logging.WARNING):
        update(network(), loss, updates=2)
    assert counter.calls == 8
    assert "these move once per micro-batch, not once per update: 'counter.calls'" in caplog.text


def test_a_check_leaves_the_objects_of_a_loss_as_they_were():
    trainer = types.SimpleNamespace(centre=Centre(), calls=0)

    def loss(model, x, y):
        trainer.calls += 1
        return trainer.centre(model(x)) + F.cross_entropy(model(x), y)

    check_equivalence(network(), (X, Y), compute_loss=loss)
    assert trainer.calls == 0
    assert not trainer.centre.centre.any()
