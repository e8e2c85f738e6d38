"""Generators of the user's own stand after an update where first passes have left them, whatever holds them."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradaccum.on_torch.random_state import RandomState
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error
from tests.torch.layers.test_blocks import in_blocks

MADE: dict[str, Callable[[], Any]] = {
    "torch.Generator": lambda: torch.Generator().manual_seed(3),
    "numpy Generator": lambda: np.random.default_rng(3),
    "numpy RandomState": lambda: np.random.RandomState(3),
    "random.Random": lambda: random.Random(3),
}
HOW = [
    "passed to blocks",
    "passed to blocks in an object",
    "attribute of blocks",
    "global of blocks",
    "before blocks",
    "in a list, before blocks",
    "after blocks",
    "in the loss, before the model",
]


def mask(x: Tensor, generator: Any) -> Tensor:
    if isinstance(generator, torch.Generator):
        return torch.rand(x.shape, generator=generator) < 0.5
    if isinstance(generator, random.Random):
        return torch.tensor([[generator.random() < 0.5 for _ in row] for row in x])
    return torch.as_tensor(generator.uniform(size=tuple(x.shape)) < 0.5)


class Block(nn.Module):
    def __init__(self, how: str, generator: Any) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(3, 3), how
        self.generator = generator if how == "attribute of blocks" else None

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        generator = given if given is not None else self.generator
        if isinstance(generator, types.SimpleNamespace):
            generator = generator.inside
        if self.how == "global of blocks":
            generator = GLOBAL
        return x + torch.tanh(self.linear(x)) * (mask(x, generator) if generator is not None else 1.0)


class Net(nn.Module):
    def __init__(self, how: str, generator: Any) -> None:
        super().__init__()
        self.first, self.how = nn.Linear(3, 3), how
        self.generator = None if how == "global of blocks" else generator
        self.generators = [generator]
        self.layers = nn.ModuleList(Block(how, generator) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        given = {
            "passed to blocks": self.generator,
            "passed to blocks in an object": types.SimpleNamespace(inside=self.generator),
        }.get(self.how)
        x = self.first(x)
        if self.how == "before blocks":
            x = x * mask(x, self.generator)
        if self.how == "in a list, before blocks":
            x = x * mask(x, self.generators[0])
        for layer in self.layers:
            x = layer(x, given)
        return x * mask(x, self.generator) if self.how == "after blocks" else x


def trained(kind: str, how: str, **keywords: Any) -> tuple[list[Tensor], RandomState]:
    """The losses and parameters after three updates, and where the generator stands."""
    global GLOBAL
    GLOBAL = generator = MADE[kind]()
    torch.manual_seed(0)
    model = Net(how, generator).double()

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        x = x * mask(x, generator) if how == "in the loss, before the model" else x
        return model(x).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = TrainStep(model, optimizer, compute_loss=compute_loss, micro_batch_size=2, **in_blocks(keywords))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = [step(x).detach().clone() for _ in range(3)]
    return [*losses, *(p.detach() for p in model.parameters())], RandomState([generator])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", MADE)
def test_blocks_draw_what_the_model_draws_without_them_update_after_update(kind: str, how: str) -> None:
    plain, there = trained(kind, how, verify=False)
    by_blocks, here = trained(kind, how, verify=False, blocks="layers")
    assert relative_error(by_blocks, plain) <= FLOAT64
    here.states = dict(zip(there.states, here.states.values(), strict=True))
    assert there.moved(here) == []


@pytest.mark.parametrize(
    "keywords",
    [{"update": "in_backward"}, {"on": "cpu"}, {"verify": True}],
    ids=str,
)
@pytest.mark.parametrize("how", ["passed to blocks", "global of blocks", "before blocks"])
def test_they_do_with_updates_in_backward_and_with_a_proof_too(how: str, keywords: dict[str, Any]) -> None:
    plain, _ = trained("torch.Generator", how, verify=False)
    by_blocks, _ = trained("torch.Generator", how, blocks="layers", **{"verify": False, **keywords})
    assert relative_error(by_blocks, plain) <= FLOAT64


@pytest.mark.parametrize("kind", ["numpy Generator", "random.Random"])
def test_a_proof_and_a_pass_that_counts_leave_generators_where_they_were(kind: str) -> None:
    plain, _ = trained(kind, "before blocks", verify=False)
    proven, _ = trained(kind, "before blocks", verify=True)
    assert relative_error(proven, plain) <= FLOAT64
    generator, model = MADE[kind](), nn.Linear(3, 3)

    def compute_loss(model: Any, x: Tensor) -> Any:
        y = model(x)
        kept = mask(y, generator).double() + 0.5
        return {"kept": ((y * kept).sum() / kept.sum(), kept.sum()), "all": (y.abs().mean(), len(y))}

    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), compute_loss=compute_loss, micro_batch_size=2, verify=False
    )
    step(torch.ones(4, 3))
    after, expected = RandomState([generator]), MADE[kind]()
    mask(torch.ones(4, 3), expected)
    expected = RandomState([expected])
    after.states = dict(zip(expected.states, after.states.values(), strict=True))
    assert expected.moved(after) == []
