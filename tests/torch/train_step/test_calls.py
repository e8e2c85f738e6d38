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
    return list(found.values())


def beyond_the_loop(layers):
    """Calls of a TrainStep's seventh window, which looks at nothing, beyond those of the same loop by hand."""
    models, loss_fn = [], nn.CrossEntropyLoss()
    for _ in range(2):
        hidden = [nn.Linear(32, 32) for _ in range(layers)]
        models.append(nn.Sequential(nn.Linear(16, 32), *hidden, nn.ReLU(), nn.Linear(32, 4)))
    x, y, plain = torch.randn(ROWS, 16), torch.randint(4, (ROWS,)), models[1]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = TrainStep(models[0], optimizers[0], loss_fn=loss_fn, micro_batch_size=MICRO)

    def by_hand():
        optimizers[1].zero_grad()
        for start in range(0, ROWS, MICRO):
            rows = slice(start, start + MICRO)
            (loss_fn(plain(x[rows]), y[rows]) / (ROWS // MICRO)).backward()
        optimizers[1].step()

    for _ in range(6):
        step(x, y)
        by_hand()
    return [ours - theirs for ours, theirs in zip(calls(lambda: step(x, y)), calls(by_hand))]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are calls or not by version")
def test_an_ordinary_window_of_four_makes_so_many_calls_beyond_the_loop_by_hand():
    few, many = beyond_the_loop(layers=0), beyond_the_loop(layers=300)
    assert few == many
    python, c = few
    assert python <= 91
    assert c <= 69
