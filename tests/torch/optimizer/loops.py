"""Loops around a wrapped optimizer that these tests share, and what the large batches' own updates leave."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import join, mse, network, regression, sgd, split


def wrapped(make=sgd, model=None, **options):
    """A network and its wrapped optimizer."""
    model = network() if model is None else model
    return model, gradaccum.torch.optim.Optimizer(make(model.parameters()), **options)


def heads(count=6):
    return nn.ModuleList(nn.Linear(5, 3) for _ in range(count))


def parts(sizes, seed=1):
    """Micro-batches of these sizes, in float64 also where a module's constants are made of them."""
    return split(tuple(t.double() for t in regression(sum(sizes), seed)), list(sizes))


def backward(model, optimizer, batch, *, loss=mse, weigh=None, scaler=None):
    """A micro-batch's pass; with `weigh(*batch)`, by `optimizer.backward`."""
    value = loss(model, *batch)
    value = value if scaler is None else scaler.scale(value)
    value.backward() if weigh is None else optimizer.backward(value, weight=weigh(*batch))


def train(model, optimizer, batches, *, clear="before", scaler=None, before_step=None, after=None, **how):
    """zero_grad, backward and step on each batch; gradients are cleared before the pass, after the step, or never."""
    for batch in batches:
        if clear == "before":
            optimizer.zero_grad()
        backward(model, optimizer, batch, scaler=scaler, **how)
        if before_step is not None:
            before_step()
        step(optimizer, scaler)
        if clear == "after":
            optimizer.zero_grad()
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


@contextlib.contextmanager
def refused(says, *models, error=WindowError):
    """An error that says so, and leaves the parameters of these as they were."""
    before = [values(model) for model in models]
    with pytest.raises(error, match=says):
        yield
    assert all(torch.equal(p, old) for model, olds in zip(models, before) for p, old in zip(model.parameters(), olds))


@contextlib.contextmanager
def warned():
    """The warnings that there are, each time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def resumed(model, optimizer, make=sgd, **options):
    """A new network and wrapper that go on from the state of these."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    new = wrapped(make, network(seed=99), **options)
    for part, state in zip(new, saved, strict=True):
        part.load_state_dict(state)
    return new
