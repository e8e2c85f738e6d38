"""Several inner optimizers as one: the large batch's updates by the plain optimizers, with torch's clip over all."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, windows_of
from tests.torch.optimizer.loops import assert_same, by_rows, parts, refused, scaler_of, train
from tests.torch.problems import join, mse, network

pytestmark = pytest.mark.usefixtures("float64")

RAGGED = parts([3, 1, 4, 2, 5, 2, 3])


def muon_and_adamw(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [
        torch.optim.Muon(matrices, lr=0.05),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.02),
    ]


def wrapped(model=None, steps=3, **options):
    model = network() if model is None else model
    return model, gradaccum.torch.optim.Optimizer(muon_and_adamw(model), steps=steps, **options)


def large(windows, clip=None, schedule=None):
    """A network after the plain optimizers' updates."""
    model = network()
    optimizers = muon_and_adamw(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, schedule) for o in optimizers if schedule]
    for window in windows:
        model.zero_grad()
        mse(model, *join(window)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in (*optimizers, *schedulers):
            each.step()
    return model


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("way", ["batches", "weighed", "scaler"])
def test_one_window_and_one_clip_make_the_plain_optimizers_updates(way, clip):
    model, optimizer = wrapped(clip_grad_norm=clip)
    assert [type(each).__name__ for each in optimizer.inner] == ["Muon", "AdamW"]
    if way == "weighed":
        train(model, optimizer, RAGGED, weigh=by_rows)
        optimizer.flush()
    else:
        train(model, optimizer, optimizer.batches(RAGGED), scaler=scaler_of(16.0, 2) if way == "scaler" else None)
    assert optimizer.updates == 3
    assert_same(model, large(windows_of(RAGGED, 3), clip))


@pytest.mark.parametrize("on", ["the whole", "each"])
def test_schedulers_go_on_the_whole_or_on_each(on):
    model, optimizer = wrapped()
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer.inner if on == "each" else [optimizer])
    ]
    step = lambda: [scheduler.step() for scheduler in schedulers if optimizer.updated]  # noqa: E731
    train(model, optimizer, optimizer.batches(RAGGED), after=step)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8, 0.02 / 8]
    assert_same(model, large(windows_of(RAGGED, 3), schedule=0.5))


@pytest.mark.parametrize("way", ["state dict", "pickle", "copy"])
def test_a_checkpoint_in_the_middle_of_a_window_goes_on_there(way, tmp_path):
    model, optimizer = wrapped(clip_grad_norm=0.3)
    train(model, optimizer, RAGGED[:4], weigh=by_rows)
    if way == "state dict":
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "file")
        states = torch.load(tmp_path / "file", weights_only=True)
        assert len(states[1]["optimizers"]) == 2
        model, optimizer = wrapped(network(seed=9), clip_grad_norm=0.3)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    else:
        both = model, optimizer
        model, optimizer = copy.deepcopy(both) if way == "copy" else pickle.loads(pickle.dumps(both))
    assert optimizer.micro_batches == 1
    train(model, optimizer, RAGGED[4:], weigh=by_rows)
    optimizer.flush()
    assert_same(model, large(windows_of(RAGGED, 3), 0.3))


def test_a_group_is_added_to_one_of_them():
    model, optimizer = wrapped(steps=2)
    added = nn.Parameter(torch.ones(3))
    with refused(r"belongs to one of them.*optimizer.inner\[0\].add_param_group", model, error=ValueError):
        optimizer.add_param_group({"params": [added]})
    optimizer.inner[1].add_param_group({"params": [added]})
    for batch in RAGGED[:2]:
        optimizer.zero_grad()
        (mse(model, *batch) + added.square().sum()).backward()
        optimizer.step()
    assert relative_error([added.grad], [2 * torch.ones(3)]) <= FLOAT64


def test_what_does_not_fit_is_named():
    model, optimizer = wrapped()
    for state, says in (
        ({"state": {}, "param_groups": []}, "wraps 2 optimizers, and the state dict is of one optimizer"),
        ({"optimizers": optimizer.state_dict()["optimizers"][:1]}, "is of 1 optimizers"),
    ):
        with refused(says, model, error=ValueError):
            optimizer.load_state_dict(state)
    alone = gradaccum.torch.optim.SGD(model.parameters(), lr=0.1, steps=2)
    with refused("of 2 optimizers, and this optimizer wraps one", model, error=ValueError):
        alone.load_state_dict(optimizer.state_dict())
    sgd, lbfgs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())
    for optimizers, says in (
        ([], "an empty list"),
        ([sgd, torch.optim.Adam(model.parameters())], "in optimizer 0 and in optimizer 1"),
        ([sgd, lbfgs], "LBFGS re-evaluates its closure: it can't be one of several"),
        ([optimizer, sgd], "wrapped already"),
    ):
        with pytest.raises(ValueError, match=says):
            gradaccum.torch.optim.Optimizer(optimizers, steps=2)
