"""Parameters that come and go: between windows as in a plain loop, inside of an open one by add_param_group alone."""

import copy

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.torch.optimizer.loops import assert_same, by_rows, train
from tests.torch.problems import join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 2, 5]


def two_groups(model):
    return sgd([{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.05}])


def _replace(model, groups):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    groups[0]["params"][0] = model[0].weight


EDITS = {
    "cleared": (lambda model, groups: groups.clear(), "4 of 4 were removed"),
    "a group removed": (lambda model, groups: groups.pop(0), "2 of 4 were removed, 0 came"),
    "a parameter removed": (lambda model, groups: groups[0]["params"].pop(), "1 of 4 were removed, 0 came"),
    "emptied": (lambda model, groups: groups[1].update(params=[]), "2 of 4 were removed, 0 came"),
    "a group appended": (
        lambda model, groups: groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(2))]}),
        "0 of 4 were removed, 1 came",
    ),
    "groups reordered": (lambda model, groups: groups.reverse(), "their order"),
    "parameters reordered": (lambda model, groups: groups[0]["params"].reverse(), "their order"),
    "a parameter replaced": (_replace, "1 of 4 were removed, 1 came"),
}


@pytest.mark.parametrize(("edit", "how"), EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("then", ["step", "flush", "state_dict"])
def test_parameters_that_change_inside_an_open_window_are_an_error_that_updates_nothing(edit, how, then):
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(two_groups(model), steps=3)
    before = [*model.parameters()], copy.deepcopy([*model.parameters()])
    with pytest.raises(WindowError, match=f"parameters changed inside an open window: {how}"):
        for index, (x, y) in enumerate(split(regression(sum(SIZES)), SIZES)):
            optimizer.zero_grad()
            optimizer.backward(mse(model, x, y), weight=len(x))
            optimizer.step()
            if index == 1:
                edit(model, optimizer.param_groups)
                if then != "step":
                    getattr(optimizer, then)()
    assert optimizer.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(*before, strict=True))
    optimizer.discard()
    assert optimizer.micro_batches == 0


@pytest.mark.parametrize("how", ["weights", "restored", "by name", "by name, restored"])
def test_a_group_that_joins_an_open_window_has_its_part_of_it_from_there_on(how):
    """After a checkpoint was loaded, and beside sums of losses by name, which are kept in the parameters' order."""
    model, plain = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model[0].parameters()), steps=3)
    micro_batches = split(regression(8), [3, 1, 4])
    for index, (x, y) in enumerate(micro_batches):
        optimizer.zero_grad()
        loss = mse(model, x, y)
        if "by name" in how:
            optimizer.backward({"a": (loss / 2, len(x)), "b": (loss / 2, len(x))}, retain_graph=True)
        else:
            optimizer.backward(loss, weight=len(x))
        optimizer.step()
        if index == 1:
            if "restored" in how:
                optimizer.load_state_dict(optimizer.state_dict())
            model[2].zero_grad()
            optimizer.add_param_group({"params": [*model[2].parameters()]})
    inner = sgd(plain.parameters())
    mse(plain, *micro_batches[2]).backward()
    for p in plain[2].parameters():
        p.grad *= 4 / 8
    plain[0].zero_grad()
    whole = mse(plain, *join(micro_batches))
    for p, gradient in zip(plain[0].parameters(), torch.autograd.grad(whole, [*plain[0].parameters()]), strict=True):
        p.grad = gradient
    inner.step()
    assert_same(model, plain)


def test_a_group_that_joins_the_inner_optimizer_between_windows_follows_the_loss_scale():
    """The parameters that were there are frozen by then: no gradient of theirs says that a backward pass starts."""
    model, plain = network(), network()
    inner, plain_inner = sgd(model[0].parameters()), sgd(plain[0].parameters())
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    micro_batches = split(regression(sum(SIZES)), SIZES)
    for window in (micro_batches[:3], micro_batches[3:]):
        train(model, optimizer, window, weigh=by_rows, scaler=scaler)
        plain_inner.zero_grad()
        mse(plain, *join(window)).backward()
        plain_inner.step()
        for m, i in ((model, inner), (plain, plain_inner)):
            m.requires_grad_(False)
            m[2].requires_grad_(True)
            m.zero_grad()
            if len(i.param_groups) == 1:
                i.add_param_group({"params": [*m[2].parameters()]})
    assert optimizer.updates == 2
    assert_same(model, plain)
