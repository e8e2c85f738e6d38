"""Checkpoints: snapshots of open windows, a plain optimizer's, those that do not fit, torch's own ways of saving."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import relative_error, torch_updates
from tests.torch.optimizer.loops import assert_same
from tests.torch.problems import adam, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

PARTS = split(tuple(t.double() for t in regression(15)), [2, 3, 1, 4, 2, 3])


def start(make=adam, steps=4, **options):
    model = network()
    return model, gradaccum.torch.optim.Optimizer(make(model.parameters()), steps=steps, **options)


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        optimizer.backward(mse(model, x, y), weight=len(x))
        optimizer.step()


def test_batches_go_on_with_a_restored_window_and_its_epoch():
    model, optimizer = start(steps={0: 2, 1: 4})
    for _ in optimizer.batches(PARTS):
        pass
    train(model, optimizer, optimizer.batches(PARTS))
    train(model, optimizer, PARTS[:1])
    state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    assert (optimizer.epoch, optimizer.steps) == (1, 4)
    other_model, other = start(steps={0: 2, 1: 4})
    other_model.load_state_dict(weights)
    other.load_state_dict(state)
    train(other_model, other, other.batches(PARTS[1:]))
    assert other.epoch == 2
    train(model, optimizer, PARTS[1:])
    optimizer.flush()
    assert_same(other_model, model)


def test_a_snapshot_in_memory_does_not_move_with_the_window():
    model, optimizer = start()
    train(model, optimizer, PARTS[:1])
    snapshot = optimizer.state_dict()
    before = copy.deepcopy(snapshot)
    train(model, optimizer, PARTS[1:2])
    for index, gradient in snapshot["gradaccum"]["gradients"].items():
        assert torch.equal(gradient, before["gradaccum"]["gradients"][index])
    other_model, other = start()
    other.load_state_dict(snapshot)
    train(other_model, other, PARTS[1:2])
    assert torch.equal(snapshot["gradaccum"]["gradients"][0], before["gradaccum"]["gradients"][0])


def test_the_usual_keys_hold_the_inner_optimizers_state():
    model, optimizer = start()
    train(model, optimizer, PARTS)
    state = optimizer.state_dict()
    plain_model = network()
    plain_model.load_state_dict(model.state_dict())
    plain = adam(plain_model.parameters())
    plain.load_state_dict(state)
    assert state["param_groups"] == plain.state_dict()["param_groups"]
    assert (
        relative_error([s["exp_avg"] for s in plain.state.values()], [s["exp_avg"] for s in optimizer.state.values()])
        == 0
    )


def test_a_plain_optimizers_state_dict_loads():
    data = join(PARTS)
    plain_model = network()
    plain = adam(plain_model.parameters())
    torch_updates(plain_model, plain, [data], mse)
    model, optimizer = start(steps=3)
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, PARTS[:3])
    assert optimizer.updated
    torch_updates(plain_model, plain, [tuple(t[:6] for t in data)], mse)
    assert_same(model, plain_model)


def test_loading_replaces_an_open_window():
    model, optimizer = start(sgd, steps=2)
    closed = optimizer.state_dict()
    train(model, optimizer, PARTS[:1])
    optimizer.load_state_dict(closed)
    assert optimizer.micro_batches == 0
    assert all(p.grad is None for p in model.parameters())


def test_the_hooks_of_state_dicts_run():
    _, optimizer = start()
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["pre", "loaded"]


def of_another_length():
    model, optimizer = start(steps=4)
    train(model, optimizer, PARTS[:2])
    return optimizer.state_dict()


def of_another_model(layers, batches):
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    optimizer = gradaccum.torch.optim.Optimizer(adam(model.parameters()), steps=2)
    train(model, optimizer, PARTS[:batches])
    return optimizer.state_dict()


def narrow(batches):
    return of_another_model([nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)], batches)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (of_another_length, WindowError, r"window of 4 steps \(2 of them done\).*steps=2"),
        (lambda: of_another_model([nn.Linear(5, 3)], 0), ValueError, "another model.*2.*4"),
        (lambda: narrow(3), ValueError, r"another model.*\(6, 5\).*\(7, 5\)"),
        (lambda: narrow(4), ValueError, r"another model.*\(6, 5\).*\(7, 5\)"),
        (lambda: network().state_dict(), ValueError, "no optimizer's state dict"),
    ],
    ids=["another steps", "another number of parameters", "other shapes", "other shapes, closed", "no optimizer's"],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_touched(make, error, says):
    model, optimizer = start(steps=2)
    train(model, optimizer, PARTS[:3])
    before = copy.deepcopy([optimizer.state_dict(), model.state_dict()])
    with pytest.raises(error, match=says):
        optimizer.load_state_dict(make())
    assert str(before) == str([optimizer.state_dict(), model.state_dict()])


def test_another_steps_between_windows_is_fine():
    model, optimizer = start(steps=2)
    train(model, optimizer, PARTS[:2])
    _, other = start(steps=3)
    other.load_state_dict(optimizer.state_dict())
    assert (other.steps, other.updates) == (3, 1)


@pytest.mark.parametrize("make", [adam, sgd])
def test_get_state_dict_and_set_state_dict_take_the_wrapper_for_an_optimizer(make):
    model, optimizer = start(make, steps=3)
    train(model, optimizer, PARTS[:3])
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, PARTS[3:])
    again, other = start(make, steps=3)
    get_state_dict(again, other)  # as torch.distributed.checkpoint wants it: makes the inner optimizer's state
    assert other.micro_batches == other.updates == 0
    set_state_dict(again, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(again, other, PARTS[3:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
