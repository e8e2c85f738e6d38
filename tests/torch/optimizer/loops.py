"""Loops around a wrapped optimizer that these tests share, and what the large batches' own updates leave."""

from __future__ import annotations

import copy

import torch

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import join, mse, network, regression, sgd, split


def wrapped(make=sgd, model=None, **options):
    """A network and its wrapped optimizer."""
    model = network() if model is None else model
    return model, gradaccum.torch.optim.Optimizer(make(model.parameters()), **options)


def parts(sizes, seed=1):
    """Micro-batches of these sizes, in float64 also where a module's constants are made of them."""
    return split(tuple(t.double() for t in regression(sum(sizes), seed)), list(sizes))


def train(model, optimizer, batches, *, loss=mse, weigh=None, scaler=None, before_step=None, after=None):
    """zero_grad, backward and step on each batch; with `weigh(*batch)`, by `optimizer.backward`."""
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value = value if scaler is None else scaler.scale(value)
        value.backward() if weigh is None else optimizer.backward(value, weight=weigh(*batch))
        if before_step is not None:
            before_step()
        step(optimizer, scaler)
        if after is not None:
            after()


def step(optimizer, scaler=None):
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def scaler_of(scale, growth_interval=1000):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


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


def values(model):
    """The parameters' values as they are now."""
    return [p.detach().clone() for p in model.parameters()]


def resumed(model, optimizer, make=sgd, **options):
    """A new network and wrapper that go on from the state of these."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    new = wrapped(make, network(seed=99), **options)
    for part, state in zip(new, saved, strict=True):
        part.load_state_dict(state)
    return new
