"""Checkpoints at awkward moments, frameworks that clear gradients after they restore, and masks that change."""

import copy

import pytest
import torch

from gradaccum import WindowError
from tests.torch.optimizer.loops import assert_same, by_rows, large, train, wrapped
from tests.torch.problems import adam, mse, regression, split

pytestmark = pytest.mark.usefixtures("float64")

DATA, SIZES = regression(10), [3, 2, 1, 4]


def parts():
    return split(tuple(t.double() for t in DATA), SIZES)


def test_updated_is_false_after_a_step_that_raised():
    model, optimizer = wrapped(steps=1)
    train(model, optimizer, parts()[:1], weigh=by_rows)
    assert optimizer.updated

    def fails(*_):
        raise ZeroDivisionError

    handle = optimizer.register_step_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, parts()[1:2], weigh=by_rows)
    assert (optimizer.updated, optimizer.updates) == (False, 1)
    handle.remove()
    train(model, optimizer, parts()[2:], weigh=by_rows)
    assert (optimizer.updated, optimizer.updates) == (True, 3)


# A signal handler saves whenever it is called.


@pytest.mark.parametrize("save", [lambda o: o.state_dict(), copy.deepcopy], ids=["state_dict", "deepcopy"])
@pytest.mark.parametrize("weigh", [None, by_rows], ids=["loss.backward()", "optimizer.backward()"])
def test_a_checkpoint_between_backward_and_step_is_refused_in_an_open_window(save, weigh):
    model, optimizer = wrapped(steps=4)
    train(model, optimizer, parts()[:1], weigh=weigh)
    loss = mse(model, *parts()[1])
    loss.backward() if weigh is None else optimizer.backward(loss, weight=2)
    with pytest.raises(WindowError, match=r"state_dict\(\) was called between the backward pass.*Call it after step"):
        save(optimizer)


@pytest.mark.parametrize("when", ["before backward", "after backward", "after optimizer.backward()"])
def test_a_checkpoint_inside_a_weightless_batch_holds_the_window(when):
    model, optimizer = wrapped(steps=5)
    given = [*parts()[:2], regression(2, seed=7), *parts()[2:]]
    numbers = iter([3, 2, 0, 1, 4])
    saved = None
    for index, (x, y) in enumerate(optimizer.batches(given, weight=lambda part: next(numbers))):
        optimizer.zero_grad()
        if index == 2 and when == "before backward":
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if when == "after optimizer.backward()":
            optimizer.backward(mse(model, x, y))
        else:
            mse(model, x, y).backward()
        if index == 2 and when != "before backward":
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if index == 2:
            break
        optimizer.step()
    model, optimizer = wrapped(steps=5)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert optimizer.micro_batches == 2
    train(model, optimizer, given[3:], weigh=by_rows)
    optimizer.flush()
    assert_same(model, large([parts()]))


# Lightning calls zero_grad() on the model when it has restored, and on the optimizer.


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "clear",
    [
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
    ],
    ids=["model.zero_grad()", "optimizer.zero_grad()", "by hand"],
)
def test_a_restored_window_survives_what_frameworks_clear_before_they_go_on(clear, scaled, nonfinite):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None

    model, optimizer = wrapped(adam, steps=4, nonfinite=nonfinite)
    train(model, optimizer, parts()[:2], weigh=by_rows, scaler=scaler())
    state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    model, optimizer = wrapped(adam, steps=4, nonfinite=nonfinite)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    clear(model, optimizer)
    assert optimizer.micro_batches == 2
    again = optimizer.state_dict()["gradaccum"]["gradients"]
    assert all(torch.equal(again[i], state["gradaccum"]["gradients"][i]) for i in again)
    train(model, optimizer, parts()[2:], weigh=by_rows, scaler=scaler())
    assert optimizer.updates == 1
    assert_same(model, large([parts()], adam))


# Which parameters are trained changes.


# Whole loops that are compiled.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("whole_loop", "compiled_autograd", "backend"),
    [
        (True, False, "eager"),
        pytest.param(True, False, "aot_eager", marks=pytest.mark.slow),
        pytest.param(False, True, "aot_eager", marks=pytest.mark.slow),
        pytest.param(True, True, "aot_eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(torch.__version__ < "2.11", reason="its compiler fails on attributes that are set twice")
def test_a_compiled_loop_is_exact(whole_loop, compiled_autograd, backend):
    torch._dynamo.reset()
    model, optimizer = wrapped(steps=2)

    def forward_and_backward(x, y):
        mse(model, x, y).backward()

    def whole(x, y):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()

    compiled = torch.compile(whole if whole_loop else forward_and_backward, backend=backend)
    pairs = split(tuple(t.double() for t in DATA), [2] * 5)[:4]
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        for x, y in pairs:
            compiled(x, y)
            if not whole_loop:
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.updates == 2
    assert_same(model, large([pairs[:2], pairs[2:]]))
    torch._dynamo.reset()
