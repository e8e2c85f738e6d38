"""Misuse of an open window, and bad arguments: a clear error, parameters and optimizer state untouched."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import relative_error
from tests.torch.optimizer.loops import assert_same, large, train, wrapped
from tests.torch.problems import adam, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def opened():
    """A window of 3 with one micro-batch in it, and what must not change."""
    model, optimizer = wrapped(adam, steps=3)
    before = [p.detach().clone() for p in model.parameters()]
    mse(model, *regression(2)).backward()
    optimizer.step()
    yield model, optimizer
    assert relative_error(model.parameters(), before) == 0
    assert not optimizer.inner.state


def backward(model):
    mse(model, *regression(2)).backward()


def double(model):
    for p in model.parameters():
        p.grad.mul_(2)


def assign(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


EDITS = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "mul_": double,
    "_foreach_mul_": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
    "filled with zero": lambda model: model.zero_grad(set_to_none=False),
    "zero_grad()": lambda model: model.zero_grad(),
    "assigned": assign,
}


@pytest.mark.parametrize(
    ("micro_batch", "when"),
    [(0, "before step"), (0, "after step"), (1, "before step"), (1, "after step"), (2, "before step")],
)
@pytest.mark.parametrize("window", [1, 2, 3, 6])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_inside_any_window_is_refused(edit, window, micro_batch, when):
    """Also in windows that compare three parameters at their end, where another micro-batch has followed by then."""
    model, optimizer = wrapped(steps=3)
    train(model, optimizer, [regression(2)] * (3 * window - 3 + micro_batch))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    backward(model)
    edited = r"edited inside an open window.*clip_grad_norm=|cleared or replaced inside an open window|were assigned"
    with pytest.raises(WindowError, match=edited):
        if when == "after step":
            optimizer.step()
        edit(model)
        if when == "before step":
            optimizer.step()
        train(model, optimizer, [regression(2)] * (2 - micro_batch))
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.discard()
    train(model, optimizer, [regression(2)] * 3)
    assert optimizer.updates == window


def test_clipping_by_hand_in_a_window_of_one_is_the_plain_loop():
    model, optimizer = wrapped(steps=1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert_same(model, large([[regression(2)]] * 3, clip_grad_norm=0.1))


def test_changing_steps_inside_an_open_window_is_refused(opened):
    _, optimizer = opened
    with pytest.raises(WindowError, match=r"holds 1 of its 3 micro-batches.*steps=5"):
        optimizer.steps = 5
    assert optimizer.steps == 3


def test_steps_can_be_set_between_windows():
    micro_batches = split(regression(10), [2] * 5)
    model, optimizer = wrapped(steps=2)
    train(model, optimizer, micro_batches[:2])
    optimizer.steps = 3
    train(model, optimizer, micro_batches[2:])
    assert_same(model, large([micro_batches[:2], micro_batches[2:]]))


def test_a_backward_pass_that_fails_leaves_no_half_window_unnoticed(opened):
    model, optimizer = opened

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("no room")

    x = torch.ones(2, 5)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.backward(model[2](Fails.apply(model[0](x))).mean())
    for call in (optimizer.step, optimizer.flush, lambda: optimizer.backward(model(x).mean())):
        with pytest.raises(WindowError, match=r"OutOfMemoryError.*discard\(\)"):
            call()
    optimizer.discard()
    assert optimizer.micro_batches == 0
    assert all(p.grad is None for p in model.parameters())
    optimizer.backward(model(x).mean())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(
    ("first", "second", "exact"),
    [
        (7, "plain", False),
        (7, None, False),
        ("plain", 7, False),
        (None, 7, False),
        (1, "plain", True),  # which weighs 1
        ("plain", 0, True),  # left out
        (0, "plain", True),
        (7, 0, True),
    ],
)
def test_losses_with_and_without_a_weight_are_refused_unless_all_count_as_one(first, second, exact, window, reduction):
    model, optimizer = wrapped(steps=2, reduction=reduction)

    def micro_batch(weight):
        optimizer.zero_grad()
        loss = mse(model, *regression(3))
        if weight == "plain":
            loss.backward()
        else:
            optimizer.backward(loss, weight=weight)
        optimizer.step()

    for _ in range(2 * window - 2):
        micro_batch(1)
    micro_batch(first)
    if exact:
        micro_batch(second)
        return
    with pytest.raises(WindowError, match="Use one of the two"):
        micro_batch(second)
    optimizer.discard()
    micro_batch(first)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("save", [lambda o: o.state_dict(), copy.deepcopy, pickle.dumps])
def test_a_sum_that_was_edited_is_not_saved(save, window):
    model, optimizer = wrapped(steps=3)
    train(model, optimizer, [regression(2)] * (3 * window - 2))
    double(model)
    with pytest.raises(WindowError, match="edited inside an open window"):
        save(optimizer)


@pytest.mark.parametrize("window", [1, 3])
def test_a_group_that_joins_an_open_window_must_not_bring_gradients(window):
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model[0].parameters()), steps=2)
    train(model, optimizer, [regression(2)] * (2 * window - 1))
    with pytest.raises(WindowError, match="have gradients already"):
        optimizer.add_param_group({"params": model[2].parameters()})
    assert len(optimizer.param_groups) == 1
    model[2].zero_grad()
    optimizer.add_param_group({"params": model[2].parameters()})
    backward(model)
    optimizer.step()
    assert optimizer.updated


def test_mixing_them_in_one_micro_batch_is_named(opened):
    model, optimizer = opened
    optimizer.discard()
    optimizer.backward(mse(model, *regression(7)), weight=7)
    optimizer.step()
    optimizer.backward(mse(model, *regression(3)), weight=3)
    backward(model)
    with pytest.raises(WindowError, match="Use one of the two"):
        optimizer.step()


def test_flush_with_a_backward_pass_but_no_step_is_named(opened):
    model, optimizer = opened
    backward(model)
    with pytest.raises(WindowError, match=r"Call step\(\)"):
        optimizer.flush()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        *(({"steps": steps}, ValueError, "Received: steps=") for steps in (0, -1, {}, {2: 4}, {0: 0}, {0: 4, -1: 2})),
        *(({"steps": s}, TypeError, "Received: steps=") for s in (2.5, True, "4", None, {0: 2.5}, {"0": 4}, {0: True})),
        ({"reduction": "none"}, ValueError, "reduction"),
        ({"clip_grad_norm": 0}, ValueError, "clip_grad_norm"),
        ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm"),
        ({"clip_grad_value": -1.0}, ValueError, "clip_grad_value"),
        ({"accumulate_dtype": torch.int32}, TypeError, "accumulate_dtype"),
        ({"accumulate_dtype": "float32"}, TypeError, "accumulate_dtype"),
        ({"nonfinite": "ignore"}, ValueError, "skip_window.*Received: nonfinite='ignore'"),
        ({"sync": "never"}, ValueError, "sync"),
        ({"model": torch.optim}, TypeError, "model"),
        ({"make": network}, TypeError, "must be a torch.optim.Optimizer. Received: Sequential"),
        ({"make": lambda: torch.optim.Adam}, TypeError, "Received: type"),
        ({"make": lambda: wrapped(steps=4)[1]}, ValueError, "wrapped already"),
    ],
)
def test_a_wrong_argument_is_refused(options, error, says):
    options = {"steps": 2} | options
    make = options.pop("make", lambda: sgd(network().parameters()))
    with pytest.raises(error, match=says):
        gradaccum.torch.optim.Optimizer(make(), **options)


def test_what_is_wrong_with_steps_that_are_missing_or_come_from_a_callable_is_named():
    with pytest.raises(TypeError, match="`steps` is missing: Adam"):
        gradaccum.torch.optim.Adam(network().parameters())
    _, optimizer = wrapped(steps=lambda epoch, update: 0)
    with pytest.raises(ValueError, match="0 from the callable at epoch=0, update=0"):
        optimizer.step()


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (lambda state: None, TypeError, "must be a dict, as state_dict() returns it"),
        (lambda state: {**state, "param_groups": [{}]}, ValueError, "a group has no 'params'"),
        (
            lambda state: {**state, "gradaccum": 1},
            ValueError,
            "incomplete: epoch, updates, in_epoch, window is missing",
        ),
        (lambda state: {**state, "gradaccum": without("window", state["gradaccum"])}, ValueError, "window is missing"),
        (lambda state: {**state, "gradaccum": without("gradients", state["gradaccum"])}, ValueError, "gradients is"),
        (
            lambda state: {**state, "gradaccum": {**state["gradaccum"], "window": {"micro_batches": 0}}},
            ValueError,
            r"window['steps'] is missing under 'gradaccum'",
        ),
    ],
)
def test_a_state_dict_that_is_not_whole_is_named_and_nothing_loaded(opened, edit, error, says):
    _, optimizer = opened
    state = edit(optimizer.state_dict())
    with pytest.raises(error, match=re.escape(says)):
        optimizer.load_state_dict(state)
    assert optimizer.micro_batches == 1


def without(key, state):
    return {name: value for name, value in state.items() if name != key}


def test_states_of_batches_are_named_where_they_are_none_and_batches_are_not_copied():
    optimizer = gradaccum.torch.optim.Optimizer(adam(network().parameters()), steps=3)
    batches = optimizer.batches([regression(2)])
    for state in ({}, None, {"batches": 1}):
        with pytest.raises(ValueError, match=re.escape("This is no state of batches(): 'batches' and 'loader' must")):
            batches.load_state_dict(state)
    with pytest.raises(ValueError, match=re.escape("has no load_state_dict(). Received: loader of type list")):
        batches.load_state_dict({"batches": 1, "loader": {"place": 3}})
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=re.escape("can't be copied or pickled. Save their state_dict()")):
            copied(batches)
    assert len(list(batches)) == 1
