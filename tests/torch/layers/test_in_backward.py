"""Blocks updated in the backward pass: the large batch's update, by the user's own optimizer."""

import copy
import weakref

import pytest
import torch
from torch import nn

from gradaccum.errors import WindowError
from tests.reference import FLOAT64, relative_error
from tests.torch.layers import problems
from tests.torch.layers.problems import (
    OPTIMIZERS,
    assert_same_updates,
    batches,
    loss_of,
    network,
)

IN_BACKWARD = {"update": "in_backward"}
RATES = {"Adafactor": {"lr": 0.1}, "ASGD": {"lr": 0.1}, "Rprop": {"lr": 0.01}}
NAMES = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip
if torch.optim.Adagrad([nn.Parameter(torch.ones(1))]).state:
    NAMES.remove("Adagrad")  # torch 2.10 makes its state beforehand: it is refused, by name


def build(model, optimizer=None, **options):
    optimizer = OPTIMIZERS["adam"](model.parameters()) if optimizer is None else optimizer
    return problems.build(model, optimizer, **IN_BACKWARD | options)


def of_torch(name, foreach):
    options = {"lr": 1e-2, **RATES.get(name, {}), "foreach": foreach}
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


def fused(parameters):
    listed = list(parameters)
    groups = [{"params": listed[:4], "lr": 0.1}, {"params": listed[4:]}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


MAKE = {f"{name}, foreach={n % 2 == 0}": of_torch(name, n % 2 == 0) for n, name in enumerate(NAMES)}
MAKE |= {f"{name}, foreach={each}": of_torch(name, each) for name in ("Adam", "SGD") for each in (False, True)}


@pytest.mark.parametrize("name", [*MAKE, "fused, of two groups"])
def test_in_backward_each_optimizer_of_torch_makes_the_large_batchs_update(name):
    make, verify = MAKE.get(name, fused), "fused" in name
    assert_same_updates(network(), batches(count=2), loss_of, make, 3, verify=verify, **IN_BACKWARD)


def test_in_backward_several_optimizers_make_the_large_batchs_update():
    model, reference = network(), network()
    of_both = []
    for either in (model, reference):
        listed = list(either.parameters())
        of_both.append([torch.optim.SGD(listed[::2], lr=0.1), torch.optim.Adam(listed[1::2], lr=0.01)])
    step = build(model, of_both[0])
    for batch in batches():
        step(*batch)
        loss_of(reference, *batch).backward()
        for optimizer in of_both[1]:
            optimizer.step()
            optimizer.zero_grad()
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


def test_in_backward_schedulers_hooks_and_counters_see_one_update():
    model, seen = network(), []
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS["adam"](parameters)
    scheduler, step = torch.optim.lr_scheduler.StepLR(optimizer, 1), build(model, optimizer)
    optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"])))
    groups = [*optimizer.param_groups]
    for batch in batches():
        step(*batch)
        scheduler.step()
    assert seen == [len(parameters)] * 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    assert len(optimizer.state_dict()["state"]) == len(parameters)
    assert all(p.grad is None for p in parameters)


def test_in_backward_no_more_gradients_are_alive_than_one_blocks_and_those_outside():
    model, alive = network(depth=5), []
    inside = [id(p) for p in model.layers.parameters()]

    def count(_):
        alive.append(sum(p.numel() for p in model.parameters() if p.grad is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    build(model, verify=False)(*batches()[0])
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    assert max(alive) <= outside + sum(p.numel() for p in model.layers[0].parameters())


def test_a_gradient_that_has_been_used_is_gone_before_the_next_block_runs():
    model, gradients, alive = network(), [], []

    def arrived(parameter):
        gradients[:] = [] if parameter.grad is None else [weakref.ref(parameter.grad)]

    def runs(*_):
        if torch.is_grad_enabled():
            alive.append(gradients[0]() is not None)

    model.layers[2].inner.weight.register_post_accumulate_grad_hook(arrived)
    model.layers[1].inner.register_forward_hook(runs)
    build(model, verify=False)(*batches()[0])
    assert alive == [False] * 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_in_backward_an_error_in_the_middle_says_what_has_been_updated(error):
    model = network()
    step, before = build(model, verify=False), copy.deepcopy(model)

    def fail(layer, args):
        if torch.is_grad_enabled():
            raise error("on purpose")

    model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises((torch.OutOfMemoryError, WindowError)) as raised:
        step(*batches()[0])
    assert "6 of 23 parameters have been updated with this batch" in str(raised.value)
    assert "those of the blocks 'layers.2'" in str(raised.value)
    assert isinstance(raised.value, torch.OutOfMemoryError) == (error is torch.OutOfMemoryError)
    for layer, changed in (("layers.0", False), ("layers.1", False), ("layers.2", True), ("norm", False)):
        found = relative_error(model.get_submodule(layer).parameters(), before.get_submodule(layer).parameters())
        assert (found > 0) == changed, layer
    assert step.updates == 0
    assert all(p.grad is None for p in model.parameters())
