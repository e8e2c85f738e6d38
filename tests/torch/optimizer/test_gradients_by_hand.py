"""Gradients that no backward pass brings, loops that still accumulate by hand, and windows that go on elsewhere."""

import copy
import gc
import logging
import pickle

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import NoiseSchedule, WindowError
from tests.reference import FLOAT64, relative_error, windows_of
from tests.torch.optimizer.loops import assert_same, large, train, wrapped
from tests.torch.problems import mse, network, regression, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 2, 5]
BATCHES = split(tuple(t.double() for t in regression(sum(SIZES), seed=3)), SIZES)


def gradients_of(model, x, y):
    return torch.autograd.grad(mse(model, x, y), [*model.parameters()])


# add_gradients


def by_position(model, x, y):
    return gradients_of(model, x, y)


def by_parameter(model, x, y):
    return dict(zip(model.parameters(), gradients_of(model, x, y), strict=True))


@pytest.mark.parametrize("form", [by_position, by_parameter])
@pytest.mark.parametrize("way", ["weights", "batches", "mixed with backward passes"])
@pytest.mark.parametrize("epochs", [1, 5])
def test_added_gradients_make_the_large_batchs_update(form, way, epochs):
    model, optimizer = wrapped(steps=3)
    for _ in range(epochs):
        for i, (x, y) in enumerate(optimizer.batches(BATCHES) if way == "batches" else BATCHES):
            optimizer.zero_grad()
            weight = None if way == "batches" else len(x)
            if way.startswith("mixed") and i % 2:
                optimizer.backward(mse(model, x, y), weight)
            else:
                optimizer.add_gradients(form(model, x, y), weight)
            optimizer.step()
    assert optimizer.updates == 2 * epochs
    assert_same(model, large(windows_of(BATCHES, 3) * epochs))


def test_added_gradients_are_left_alone_and_may_be_missing():
    model, optimizer = wrapped(steps=2)
    given = [torch.ones_like(p) if p.dim() > 1 else None for p in model.parameters()]
    for weight in (2, 6):
        optimizer.zero_grad()
        optimizer.add_gradients(given, weight)
        optimizer.step()
    assert all(g is None or bool((g == 1).all()) for g in given)
    assert [p.grad is None for p in model.parameters()] == [g is None for g in given]
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)


def test_added_gradients_of_weight_0_count_nothing():
    model, optimizer = wrapped(steps=2)
    for weight, value in ((0, float("nan")), (5, 1.0)):
        optimizer.add_gradients([torch.full_like(p, value) for p in model.parameters()], weight)
        optimizer.step()
    assert all(bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("gradients", "says"),
    [
        (lambda model: dict(model.named_parameters()), r"in the order.*Received: a dict with keys \['0.weight'"),
        (lambda model: [], "one for each of the 4 parameters"),
        (lambda model: [torch.zeros(2)] * 4, r"The gradient of parameter 0 has the shape \(2,\)"),
        (lambda model: {nn.Parameter(torch.zeros(2)): torch.zeros(2)}, "1 parameters that are not the optimizer's"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradients, says):
    model, optimizer = wrapped(steps=3)
    with pytest.raises((TypeError, ValueError), match=says):
        optimizer.add_gradients(gradients(model))
    assert all(p.grad is None for p in model.parameters())


def assign(parameter, gradient):
    parameter.grad = gradient


def copy_into(parameter, gradient):
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.copy_(gradient)


@pytest.mark.parametrize("put", [assign, copy_into])
def test_gradients_that_are_assigned_are_an_error_in_the_first_window(put):
    model, optimizer = wrapped(steps=3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WindowError, match=r"optimizer.add_gradients\("):
        for x, y in BATCHES:
            optimizer.zero_grad()
            for parameter, gradient in zip(model.parameters(), gradients_of(model, x, y), strict=True):
                put(parameter, gradient)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_assigned_gradients_are_the_plain_loops_where_a_window_is_one_micro_batch():
    model, optimizer = wrapped(steps=1)
    for x, y in BATCHES:
        optimizer.zero_grad()
        for parameter, gradient in zip(model.parameters(), gradients_of(model, x, y), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert_same(model, large([[batch] for batch in BATCHES]))


# Several backward passes to one step.


def kept_if(model, optimizer, passes, batches):
    """The loop as it was before the optimizer was wrapped."""
    for i, (x, y) in enumerate(batches):
        (mse(model, x, y) / passes).backward()
        if (i + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("steps", [2, 3])
def test_a_loop_that_still_accumulates_by_hand_is_named_in_its_first_window(steps, caplog):
    kept_if(*wrapped(steps=steps), steps, BATCHES[:steps])
    assert caplog.text.count(f"{steps} forward and backward passes reached one step()") == 1
    assert "if (i + 1) % steps == 0:" in caplog.text


def test_a_kept_if_is_named_also_where_its_first_step_has_one_pass_more(caplog):
    """`if i and i % 2 == 0:`, of three passes, then two."""
    caplog.set_level(logging.INFO)
    model, optimizer = wrapped(steps=2)
    for i, (x, y) in enumerate(BATCHES[:5]):
        (mse(model, x, y) / 2).backward()
        if i and i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("3 backward passes reached one step()") == 1
    assert caplog.text.count("2 forward and backward passes reached one step()") == 1


def several_losses_of_one_pass(model, x, y):
    hidden = model(x)
    (hidden - y).square().mean().backward(retain_graph=True)
    (hidden - y).abs().mean().backward()


def several_losses_at_once(model, x, y):
    losses = mse(model, x, y), mse(model, x + 1, y)
    for loss in losses:
        loss.backward()


def losses_of_two_domains(model, x, y):
    mse(model, x, y).backward()
    (model(x + 1).square().mean() * 0.1).backward()


@pytest.mark.parametrize("losses", [several_losses_of_one_pass, several_losses_at_once, losses_of_two_domains])
@pytest.mark.parametrize("steps", [2, 3])
def test_several_losses_in_several_passes_are_at_most_one_line_at_info(losses, steps, caplog):
    caplog.set_level(logging.INFO)
    model, optimizer = wrapped(steps=steps)
    for x, y in BATCHES:
        optimizer.zero_grad()
        losses(model, x, y)
        optimizer.step()
    lines = [r for r in caplog.records if "passes reached one step()" in r.getMessage()]
    assert len(lines) <= 1
    assert all(record.levelno == logging.INFO for record in lines)


# zero_grad(set_to_none=False)


@pytest.mark.parametrize("end", ["flush", "discard"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zeros_stay_zeros_after_flush_and_discard(end, dtype):
    """Weight decay and momentum move what has a gradient of zero, and pass over what has none."""
    options = {} if dtype == torch.float64 else {"accumulate_dtype": torch.float32}
    model, optimizer = wrapped(model=network(dtype=dtype), steps=3, **options)
    for x, y in BATCHES[:2]:
        optimizer.zero_grad(set_to_none=False)
        mse(model, x.to(dtype), y.to(dtype)).backward()
        optimizer.step()
    getattr(optimizer, end)()
    assert all(p.grad is not None and not p.grad.count_nonzero() for p in model.parameters())


# Hooks that torch runs twice.


class Base(torch.optim.SGD):
    pass


class Stepping(Base):
    def step(self, closure=None):
        return super().step(closure)


def test_a_noise_schedule_goes_around_an_optimizer_whose_hooks_run_twice():
    model = network()
    used = Base(network().parameters(), lr=0.1)
    used.step()
    inner = Stepping(model.parameters(), lr=0.1)
    schedule = NoiseSchedule(2, 8, scale_learning_rate="linear")
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=schedule)
    schedule.steps = 4
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, BATCHES[:4])
    assert optimizer.updates == 1
    assert inner.param_groups[0]["lr"] == 0.1
    moved = [(b - p) / 0.2 for b, p in zip(before, model.parameters(), strict=True)]  # at twice the rate
    assert relative_error(moved, [p.grad for p in model.parameters()]) <= FLOAT64


# Windows that were saved and go on elsewhere.


@pytest.mark.parametrize("save", [lambda o: o.state_dict(), pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("end", ["gone", "discard"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_window_that_was_saved_is_not_called_lost_but_what_came_after_is(save, end, more, caplog):
    model, optimizer = wrapped(steps=3)
    train(model, optimizer, BATCHES[:1])
    saved = save(optimizer)
    train(model, optimizer, BATCHES[1 : 1 + more])
    if end == "discard":
        optimizer.discard()
    del optimizer
    gc.collect()
    assert ("open window" in caplog.text) == bool(more)
    assert not more or "2 of 3 micro-batches" in caplog.text
    del saved
