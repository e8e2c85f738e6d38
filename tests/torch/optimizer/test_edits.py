"""Gradients that are written inside an open window, by operations that show or that don't, and to an effect or none."""

import copy

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.torch.optimizer import loops
from tests.torch.optimizer.loops import wrapped
from tests.torch.problems import mse, regression, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 2, 5, 1, 3, 3]


def train(model, optimizer, touch, when, parts=None):
    for x, y in optimizer.batches(split(regression(24), SIZES) if parts is None else parts):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        if when == "before step":
            touch(model)
        optimizer.step()
        if when == "after step" and not optimizer.updated:
            touch(model)


@pytest.mark.parametrize("window", [1, 3])
def test_reading_a_norm_with_clip_grad_norm_writes_gradients_and_is_refused_with_what_to_use(window):
    model, optimizer = wrapped(steps=2)
    loops.train(model, optimizer, [regression(2)] * (2 * window - 2))
    with pytest.raises(WindowError, match="get_total_norm"):
        for _ in range(2):
            optimizer.zero_grad()
            mse(model, *regression(2)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            optimizer.step()


EDITS = {
    "data.mul_": lambda p: p.grad.data.mul_(0.5),
    "data.clamp_": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
    "data.neg_": lambda p: p.grad.data.neg_(),
    "data.zero_": lambda p: p.grad.data.zero_(),
    "a mask": lambda p: p.grad.data[:1].zero_(),
    "numpy": lambda p: p.grad.numpy().__imul__(0.5),
    "clamp_": lambda p: p.grad.clamp_(-1e-3, 1e-3),
}


@pytest.mark.parametrize("when", ["before step", "after step"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_that_raise_no_version_are_seen_in_the_first_window(edit, when):
    model, optimizer = wrapped(steps=3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WindowError, match="edited inside an open window"):
        train(model, optimizer, lambda model: [edit(p) for p in model.parameters()], when)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("steps", [3, 9])
def test_edits_that_raise_no_version_before_the_windows_last_step_are_seen_however_long_it_is(steps):
    model, optimizer = wrapped(steps=steps)
    micro_batches = split(regression(steps), [1] * steps)
    with pytest.raises(WindowError, match="edited inside an open window"):
        for index, (x, y) in enumerate(micro_batches):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if index + 1 == steps:
                for p in model.parameters():
                    p.grad.data.clamp_(-1e-3, 1e-3)
            optimizer.step()
    assert optimizer.updates == 0


def test_an_edit_of_one_gradient_alone_is_seen_in_the_first_window():
    model, optimizer = wrapped(steps=3)
    with pytest.raises(WindowError, match="edited"):
        train(model, optimizer, lambda model: model[0].bias.grad.data.mul_(0.5), "before step")


def test_gradients_that_are_not_finite_or_complex_are_compared_too():
    numbers = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    optimizer = gradaccum.torch.optim.Optimizer(torch.optim.SGD([numbers], lr=0.1), steps=3)
    for factor in (float("nan"), 1.0):
        (numbers.abs().sum() * factor).backward()
        optimizer.step()
    numbers.grad.data.neg_()
    optimizer.discard()
    numbers.abs().sum().backward()
    numbers.grad.data.neg_()
    with pytest.raises(WindowError, match="edited"):
        optimizer.step()


def test_unscaling_by_the_scaler_where_the_window_closes_is_no_edit_and_clipping_after_it_is():
    model, optimizer = wrapped(steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for index, (x, y) in enumerate(split(regression(8), [2] * 4)):
        optimizer.zero_grad()
        scaler.scale(mse(model, x, y)).backward()
        if optimizer.closes_next:
            scaler.unscale_(optimizer)
            if index == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                with pytest.raises(WindowError, match="edited"):
                    scaler.step(optimizer)
                break
        scaler.step(optimizer)
        scaler.update()
