"""Loops around a wrapped optimizer that these tests share, and what the large batches' own updates leave."""

from __future__ import annotations

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import join, mse, network, sgd


def wrapped(make=sgd, model=None, **options):
    """A network and its wrapped optimizer."""
    model = network() if model is None else model
    return model, gradaccum.torch.optim.Optimizer(make(model.parameters()), **options)


def train(model, optimizer, batches, *, loss=mse, weigh=None, scaler=None, after=None):
    """zero_grad, backward and step on each batch; with `weigh(*batch)`, by `optimizer.backward`."""
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value = value if scaler is None else scaler.scale(value)
        value.backward() if weigh is None else optimizer.backward(value, weight=weigh(*batch))
        step(optimizer, scaler)
        if after is not None:
            after()


def step(optimizer, scaler=None):
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def by_rows(x, y):
    return len(x)


def large(windows, make=sgd, loss=mse, model=None, **options):
    """A network after plain updates, one from each window's rows."""
    model = network() if model is None else model
    torch_updates(model, make(model.parameters()), [join(window) for window in windows], loss, **options)
    return model


def assert_same(model, expected, bound=FLOAT64):
    """The parameters are equal, to rounding."""
    assert relative_error(model.parameters(), expected.parameters()) <= bound
