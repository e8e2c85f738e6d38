"""Generators of the user's own stand after an update where first passes have left them, whatever holds them."""

import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from gradaccum.on_torch.random_state import RandomState
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error
from tests.torch.layers.problems import in_blocks
from tests.torch.problems import Does

MADE = {
    "torch.Generator": lambda: torch.Generator().manual_seed(3),
    "numpy Generator": lambda: np.random.default_rng(3),
    "numpy RandomState": lambda: np.random.RandomState(3),
    "random.Random": lambda: random.Random(3),
}


def masked(x, generator):
    if isinstance(generator, torch.Generator):
        return x * (torch.rand(x.shape, generator=generator) < 0.5)
    if isinstance(generator, random.Random):
        return x * torch.tensor([[generator.random() < 0.5 for _ in row] for row in x])
    return x * torch.as_tensor(generator.uniform(size=tuple(x.shape)) < 0.5)


def of_global(layer, given, y):
    return masked(y, GLOBAL)


def as_it_is(model, x):
    return x


NOT_IN_BLOCKS = (lambda generator: None, lambda layer, given, y: y)
HOW = {  # what blocks are given, what one does; what the model does before its blocks, and after them
    "passed to blocks": (lambda generator: generator, lambda layer, given, y: masked(y, given)),
    "passed to blocks in an object": (
        lambda generator: types.SimpleNamespace(inside=generator), lambda layer, given, y: masked(y, given.inside),
    ),
    "attribute of blocks": (lambda generator: None, lambda layer, given, y: masked(y, layer.generator)),
    "global of blocks": (lambda generator: None, of_global),
    "before blocks": (*NOT_IN_BLOCKS, lambda model, x: masked(x, model.generator)),
    "in a list, before blocks": (*NOT_IN_BLOCKS, lambda model, x: masked(x, model.generators[0])),
    "after blocks": (*NOT_IN_BLOCKS, as_it_is, lambda model, x: masked(x, model.generator)),
    "in the loss, before the model": NOT_IN_BLOCKS,
}  # fmt: skip


def net(how, generator):
    give, draw, *around = HOW[how]
    before, after = [*around, as_it_is, as_it_is][:2]
    held = None if how in ("global of blocks", "in a list, before blocks") else generator

    def run(model, x):
        x, given = before(model, model.first(x)), give(model.generator)
        for layer in model.layers:
            x = layer(x, given)
        return after(model, x)

    def block(layer, x, given):
        return x + draw(layer, given, torch.tanh(layer.linear(x)))

    own = {"generator": generator} if how == "attribute of blocks" else {}
    layers = nn.ModuleList(Does(block, linear=nn.Linear(3, 3), **own) for _ in range(3))
    return Does(run, layers=layers, first=nn.Linear(3, 3), generator=held, generators=[generator]).double()


def trained(kind, how, **keywords):
    """The losses and parameters after three updates, and where the generator stands."""
    global GLOBAL
    GLOBAL = generator = MADE[kind]()
    torch.manual_seed(0)
    model = net(how, generator)

    def compute_loss(model, x):
        return model(masked(x, generator) if "loss" in how else x).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = in_blocks({"verify": False, **keywords})
    step = TrainStep(model, optimizer, compute_loss=compute_loss, micro_batch_size=2, **options)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = [step(x).detach().clone() for _ in range(3)]
    return [*losses, *(p.detach() for p in model.parameters())], RandomState([generator])


def assert_same_place(here, there):
    here.states = dict(zip(there.states, here.states.values(), strict=True))
    assert there.moved(here) == []


ALONE = ("passed to blocks", "global of blocks", "before blocks")
RUNS = [(kind, how, {}) for kind in MADE for how in HOW] + [
    ("torch.Generator", how, options)
    for how in ALONE
    for options in ({"update": "in_backward"}, {"on": "cpu"}, {"verify": True})
]


@pytest.mark.parametrize(("kind", "how", "options"), RUNS, ids=str)
def test_blocks_draw_what_the_model_draws_without_them_update_after_update(kind, how, options):
    plain, there = trained(kind, how)
    by_blocks, here = trained(kind, how, blocks="layers", **options)
    assert relative_error(by_blocks, plain) <= FLOAT64
    assert_same_place(here, there)


@pytest.mark.parametrize("kind", ["numpy Generator", "random.Random"])
def test_a_proof_and_a_pass_that_counts_leave_generators_where_they_were(kind):
    plain, _ = trained(kind, "before blocks")
    proven, _ = trained(kind, "before blocks", verify=True)
    assert relative_error(proven, plain) <= FLOAT64
    generator, expected, model = MADE[kind](), MADE[kind](), nn.Linear(3, 3)

    def compute_loss(model, x):
        y, kept = model(x), masked(torch.ones(x.shape).double(), generator) + 0.5
        return {"kept": ((y * kept).sum() / kept.sum(), kept.sum()), "all": (y.abs().mean(), len(y))}

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    TrainStep(model, optimizer, compute_loss=compute_loss, micro_batch_size=2, verify=False)(torch.ones(4, 3))
    masked(torch.ones(4, 3), expected)
    assert_same_place(RandomState([generator]), RandomState([expected]))
