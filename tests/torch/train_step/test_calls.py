"""Calls that an ordinary window makes beyond a loop by hand: exact numbers, without a clock."""

import gc
import sys

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep

ROWS, MICRO = 16, 4


def calls(run):
    """How many functions of Python and of C a call makes."""
    found = {"call": 0, "c_call": 0}

    def count(frame, event, _):
        if event in found:
            found[event] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found["call"], found["c_call"]


def beyond_the_loop(layers):
    """Calls of a TrainStep's seventh window, which looks at nothing, beyond those of the same loop by hand."""

    def network():
        torch.manual_seed(0)
        hidden = [nn.Linear(32, 32) for _ in range(layers)]
        model = nn.Sequential(nn.Linear(16, 32), *hidden, nn.ReLU(), nn.Linear(32, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    loss_fn, x, y = nn.CrossEntropyLoss(), torch.randn(ROWS, 16), torch.randint(4, (ROWS,))
    model, optimizer = network()
    step = TrainStep(model, optimizer, loss_fn=loss_fn, micro_batch_size=MICRO)
    plain, plain_optimizer = network()

    def by_hand():
        plain_optimizer.zero_grad()
        for start in range(0, ROWS, MICRO):
            rows = slice(start, start + MICRO)
            (loss_fn(plain(x[rows]), y[rows]) / (ROWS // MICRO)).backward()
        plain_optimizer.step()

    for _ in range(6):
        step(x, y)
        by_hand()
    (python, c), (python_by_hand, c_by_hand) = calls(lambda: step(x, y)), calls(by_hand)
    return python - python_by_hand, c - c_by_hand


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are calls or not by version")
def test_an_ordinary_window_of_four_makes_so_many_calls_beyond_the_loop_by_hand():
    few, many = beyond_the_loop(layers=0), beyond_the_loop(layers=300)
    assert few == many
    python, c = few
    assert python <= 91
    assert c <= 69
