"""Checkpoints: in the middle of a window; a plain optimizer's, and another's.

The random programs (tests/fuzz) save anywhere in an epoch and resume bit for bit, with and without
`batches().state_dict()`; tests/torch/distributed/test_checkpoints.py goes on in fresh processes.
"""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import torch_updates
from tests.torch.optimizer.loops import assert_same, by_rows, heads, parts, refused, resumed, scaler_of, train, wrapped
from tests.torch.problems import adam, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

PARTS = parts([2, 3, 1, 4, 2, 3])


def start(make=adam, steps=4, done=0, **options):
    """A wrapped optimizer that has trained on so many micro-batches."""
    model, optimizer = wrapped(make, steps=steps, **options)
    train(model, optimizer, PARTS[:done], weigh=by_rows)
    return model, optimizer


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_snapshot_in_memory_does_not_move_with_the_window_nor_with_the_one_that_loads_it():
    def gradients(state):
        return [*state["gradaccum"]["gradients"].values()]

    model, optimizer = start(done=5)
    snapshot = optimizer.state_dict()
    before = copy.deepcopy(snapshot)
    train(model, optimizer, PARTS[1:3], weigh=by_rows)
    assert all(map(torch.equal, gradients(snapshot), gradients(before)))
    given = copy.deepcopy(before)
    again, other = start()
    other.load_state_dict(given)
    train(again, other, PARTS[1:4], weigh=by_rows)
    assert other.updates == 2
    assert all(map(torch.equal, gradients(given), gradients(before)))
    assert all(torch.equal(given["state"][i]["exp_avg"], s["exp_avg"]) for i, s in before["state"].items())


def test_the_usual_keys_are_a_plain_optimizers_and_its_state_dict_loads():
    model, optimizer = start(steps=3, done=3)
    plain_model = network()
    plain = adam(plain_model.parameters())
    plain_model.load_state_dict(model.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    again, other = start(steps=3)
    again.load_state_dict(plain_model.state_dict())
    other.load_state_dict(plain.state_dict())
    train(again, other, PARTS[3:], weigh=by_rows)
    assert other.updated
    torch_updates(plain_model, plain, [tuple(map(torch.cat, zip(*PARTS[3:])))], mse)
    assert_same(again, plain_model)


def test_loading_replaces_an_open_window_which_is_watched_from_there_on(caplog):
    model, optimizer = start(sgd)
    states = []
    for _ in range(2):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        train(model, optimizer, PARTS[:2], weigh=by_rows)
    for (weights, state), held in zip(states, (0, 2), strict=True):
        optimizer.discard()
        train(model, optimizer, PARTS[:1], weigh=by_rows)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert optimizer.micro_batches == held
        assert held or all(p.grad is None for p in model.parameters())
    model, optimizer = resumed(model, optimizer, sgd, steps=4)
    train(model, optimizer, PARTS[2:3], weigh=by_rows)
    assert "Parameters were changed" not in caplog.text, "by loading them"
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.warns(UserWarning, match="Hyperparameters changed"):
        train(model, optimizer, PARTS[3:4], weigh=by_rows)


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


@pytest.mark.parametrize("make", [adam, sgd])
def test_get_state_dict_and_set_state_dict_take_the_wrapper_for_an_optimizer(make):
    model, optimizer = start(make, steps=3, done=3)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, PARTS[3:])
    again, other = start(make, steps=3)
    get_state_dict(again, other)  # as torch.distributed.checkpoint wants it: makes the inner optimizer's state
    assert other.micro_batches == other.updates == 0
    set_state_dict(again, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(again, other, PARTS[3:])
    assert_same(again, model, 0)


# States that don't fit: nothing is loaded. A signal handler saves whenever it is called.


def narrow(done):
    torch.manual_seed(0)
    model, optimizer = wrapped(adam, nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), steps=4)
    train(model, optimizer, PARTS[:done])
    return optimizer.state_dict()


def opened(**changes):
    """The state of a window of 4 with 2 micro-batches in it, with other entries; None takes an entry away."""
    state = start(done=2)[1].state_dict()
    own = {name: value for name, value in (state["gradaccum"] | changes).items() if value is not None}
    return {**state, "gradaccum": own}


BAD = {
    "another number of parameters": (
        lambda: wrapped(adam, nn.Linear(5, 3), steps=4)[1].state_dict(),
        (ValueError, "another model.*2.*4"),
    ),
    "other shapes": (lambda: narrow(4), (ValueError, r"another model.*\(6, 5\).*\(7, 5\)")),
    "other shapes in a window": (lambda: narrow(3), (ValueError, r"another model.*\(6, 5\).*\(7, 5\)")),
    "a model's": (lambda: network().state_dict(), (ValueError, "no optimizer's state dict")),
    "None": (lambda: None, (TypeError, r"must be a dict, as state_dict\(\) returns it")),
    "a group without parameters": (lambda: {**opened(), "param_groups": [{}]}, (ValueError, "a group has no 'params'")),
    "no window": (lambda: opened(window=None), (ValueError, "window is missing")),
    "no gradients": (lambda: opened(gradients=None), (ValueError, "gradients is")),
    "no steps": (
        lambda: opened(window={"micro_batches": 0}),
        (ValueError, r"window\['steps'\] is missing under 'grad"),
    ),
    "a number": (
        lambda: {**opened(), "gradaccum": 1},
        (ValueError, "incomplete: epoch, updates, in_epoch, window is missing"),
    ),
    "a window of other steps": (opened, (WindowError, r"window of 4 steps \(2 of them done\).*steps=2")),
    "means, not sums": (opened, (WindowError, 'reduction="mean", and this optimizer has reduction="sum"')),
}


@pytest.mark.parametrize(("state", "error"), BAD.values(), ids=BAD)
def test_a_state_that_does_not_fit_is_named_and_nothing_loaded(state, error, request):
    options = {"a window of other steps": {"steps": 2}, "means, not sums": {"reduction": "sum"}}
    model, optimizer = start(done=3, **options.get(request.node.callspec.id, {}))
    before = str([optimizer.state_dict(), model.state_dict()])
    with pytest.raises(error[0], match=error[1]):
        optimizer.load_state_dict(state())
    assert str([optimizer.state_dict(), model.state_dict()]) == before


def test_another_steps_between_windows_is_fine():
    _, optimizer = resumed(*start(steps=2, done=2), adam, steps=3)
    assert (optimizer.steps, optimizer.updates) == (3, 1)


@pytest.mark.parametrize("save", [lambda o: o.state_dict(), copy.deepcopy], ids=["state_dict", "deepcopy"])
@pytest.mark.parametrize("how", ["loss.backward()", "optimizer.backward()"])
def test_a_checkpoint_between_backward_and_step_is_refused_in_an_open_window(save, how):
    model, optimizer = wrapped(steps=4)
    weigh = None if how == "loss.backward()" else by_rows
    train(model, optimizer, PARTS[:1], weigh=weigh)
    with refused(r"state_dict\(\) was called between the backward pass.*Call it after step", model):
        train(model, optimizer, PARTS[1:2], weigh=weigh, before_step=lambda: save(optimizer))


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_checkpoint_before_the_step_of_rows_that_weigh_nothing_has_nothing_of_them(in_batches):
    model, optimizer = wrapped(sgd, heads(2), steps=3)
    weights = iter([1.0, 0.0])
    batches = optimizer.batches(PARTS[:2], weight=lambda *_: next(weights)) if in_batches else PARTS[:2]
    for head, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = mse(model[head], x, y)
        if in_batches:
            loss.backward()
        else:
            optimizer.backward(loss, weight=next(weights))
        saved = optimizer.state_dict()
        optimizer.step()
        if head == 0:
            expected = optimizer.state_dict()["gradaccum"]["gradients"]
    assert all(p.grad is None for p in model[1].parameters())
    assert [*saved["gradaccum"]["gradients"]] == [*expected]


@pytest.mark.parametrize("save", [lambda o: o.state_dict(), pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("end", ["gone", "discard"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_window_that_was_saved_is_not_called_lost_but_what_came_after_is(save, end, more, caplog):
    model, optimizer = start(sgd, steps=3, done=1)
    saved = save(optimizer)
    train(model, optimizer, PARTS[1 : 1 + more], weigh=by_rows)
    if end == "discard":
        optimizer.discard()
    del optimizer
    assert ("open window" in caplog.text) == bool(more)
    assert not more or "2 of 3 micro-batches" in caplog.text
    del saved


# Files that version 0.1 wrote in the middle of a window.

FILES = Path(__file__).parent.parent / "data" / "v0_1"
OPTIMIZERS = {
    "plain": lambda p: gradaccum.torch.optim.Optimizer(adam(p), steps=4),
    "named": lambda p: gradaccum.torch.optim.SGD(p, lr=0.1, momentum=0.9, steps={0: 4, 1: 2}),
    "screened": lambda p: gradaccum.torch.optim.Optimizer(sgd(p), steps=4, clip_grad_norm=0.5),
    "scaled": lambda p: gradaccum.torch.optim.Optimizer(adam(p), steps=4, reduction="sum"),
}
"""What made the files: each trained on the first two of six micro-batches, then on the others."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("form", ["state dict", "pickle"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_file_of_0_1_goes_on_exactly(name, form):
    saved = torch.load(FILES / f"{name}.pt", weights_only=True)
    if form == "pickle":
        model, optimizer = pickle.loads((FILES / f"{name}.pickle").read_bytes())
    else:
        model = network(seed=99)
        optimizer = OPTIMIZERS[name](model.parameters())
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    scaled = name == "scaled"
    assert optimizer.micro_batches == 2
    loss = (lambda model, x, y: mse(model, x, y) * len(x)) if scaled else mse
    rest = split(regression(15), [2, 3, 1, 4, 2, 3])[2:]
    train(model, optimizer, rest, loss=loss, weigh=by_rows, scaler=scaler_of(2.0**10) if scaled else None)
    optimizer.flush()
    assert optimizer.updates == 2
    torch.testing.assert_close([*model.parameters()], saved["end"], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("updates", value) for value in (float("nan"), -1, "3", None)),
        *(("window.steps", 0), ("window.weight", float("nan")), ("window.unit", "rows"), ("window.micro_batches", 1.5)),
        *(("gradients", [1]), ("gradients", {0: 1.0}), ("losses", 3)),
    ],
)
def test_a_damaged_window_of_a_checkpoint_is_named_and_nothing_is_loaded(name, value):
    model, optimizer = start(sgd, steps=3, done=1)
    state = copy.deepcopy(optimizer.state_dict())
    *outer, key = name.split(".")
    (state["gradaccum"][outer[0]] if outer else state["gradaccum"])[key] = value
    with refused(f"window is damaged: {name} is ", model, error=ValueError):
        optimizer.load_state_dict(state)
    assert (optimizer.micro_batches, optimizer.updates) == (1, 0)


def test_the_state_of_another_kind_of_optimizer_is_refused():
    model, optimizer = wrapped(torch.optim.Adam, steps=2)
    other = wrapped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), model, steps=2)[1]
    with refused(r"its groups have \['betas'\], and those of SGD \['momentum'\]", model, error=ValueError):
        other.load_state_dict(optimizer.state_dict())
