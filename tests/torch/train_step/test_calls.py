"""Calls that an ordinary window makes beyond a loop by hand: exact numbers, without a clock."""

import sys

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from tests.torch.test_calls import Calls, undisturbed

ROWS, MICRO = 16, 4
LOSS = nn.CrossEntropyLoss()


def calls(layers, make):
    """Calls of the seventh window, which looks at nothing."""
    hidden = [nn.Linear(32, 32) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(16, 32), *hidden, nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(ROWS, 16), torch.randint(4, (ROWS,))
    run = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(6):
        run(x, y)
    with Calls() as found:
        run(x, y)
    return found.names.total()


def split(model, optimizer):
    return TrainStep(model, optimizer, loss_fn=LOSS, micro_batch_size=MICRO)


def by_hand(model, optimizer):
    def run(x, y):
        optimizer.zero_grad()
        for start in range(0, ROWS, MICRO):
            rows = slice(start, start + MICRO)
            (LOSS(model(x[rows]), y[rows]) / (ROWS // MICRO)).backward()
        optimizer.step()

    return run


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are calls or not by version")
@pytest.mark.usefixtures(undisturbed.__name__)
def test_an_ordinary_window_of_four_makes_so_many_calls_beyond_the_loop_by_hand():
    few, many = (calls(layers, split) - calls(layers, by_hand) for layers in (0, 300))
    assert few == many
    assert few <= 86
