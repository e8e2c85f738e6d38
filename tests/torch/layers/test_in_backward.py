"""Blocks that are updated in the backward pass, that live in host memory, and activations that wait elsewhere."""

import copy
import os
import resource
import shutil
import signal
import weakref

import pytest
import torch
from torch import nn

from gradaccum.errors import WindowError
from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.reference import FLOAT64, relative_error
from tests.torch.layers import problems
from tests.torch.layers.problems import (
    OPTIMIZERS,
    Layer,
    assert_same_updates,
    batches,
    loss_of,
    network,
    unchanged,
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


# Elsewhere: here that is the CPU, and each comes as a copy.


def build_on_cpu(model, **options):
    return problems.build(model, **{"blocks": "layers", "on": "cpu", **options})


def test_a_block_comes_once_per_forward_pass_and_once_in_backward_and_its_own_parameters_stay_where_they_are():
    model, copied = network(), []
    step, places = build_on_cpu(model, verify=False, update="in_backward"), [id(p) for p in model.parameters()]
    offloaded = step._layers.offloaded
    copies = offloaded._copies
    offloaded._copies = lambda place: copied.append(place) or copies(place)
    step(*batches(rows=15)[0])
    assert [copied.count(place) for place in range(3)] == [5 + 1] * 3  # five forward passes, and one turn
    assert [id(p) for p in model.parameters()] == places
    assert all(type(layer) is Layer for layer in model.layers)


@pytest.mark.parametrize("grad", [False, True])
def test_an_error_in_a_block_leaves_it_at_home(grad):
    model = network()
    step, own = build_on_cpu(model, verify=False), [id(p) for p in model.parameters()]

    def fail(layer, args):
        if torch.is_grad_enabled() == grad:
            raise RuntimeError("on purpose")

    hook = model.layers[1].register_forward_pre_hook(fail)
    with unchanged(model), pytest.raises(RuntimeError, match="on purpose"):
        step(*batches()[0])
    hook.remove()
    assert [id(p) for p in model.parameters()] == own
    assert step(*batches()[0]).isfinite()


def test_offloaded_activations_make_the_same_update_and_leave_no_files(tmp_path):
    seen, model = [], network()
    model.layers[2].register_forward_hook(lambda *_: seen.append(len(os.listdir(tmp_path))))
    options = {"make": OPTIMIZERS["adam"], "size": 3, "update": "in_backward"}
    assert_same_updates(model, batches(), offload=str(tmp_path), **options)
    assert max(seen) >= 6  # of three blocks and three micro-batches
    assert os.listdir(tmp_path) == []


def test_what_waits_in_files_takes_no_memory(tmp_path):
    peaks = []
    for offload in (tmp_path, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Sequential(*(nn.Tanh() for _ in range(9)), nn.Linear(64, 2)))
        options = {"loss_fn": nn.MSELoss(), "compute_loss": None, "micro_batch_size": 8, "verify": False}
        step = problems.build(model, blocks=list(model[1]), offload=offload, **options)
        with LiveBytes() as live:
            step(torch.randn(64, 4), torch.randn(64, 2))
        peaks.append(live.peak)
    assert peaks[0] < 0.4 * peaks[1]


def test_a_folder_without_room_is_an_error_that_names_it_and_nothing_is_updated(tmp_path):
    model = network()
    step = build_on_cpu(model, on=None, update="in_backward", offload=tmp_path, verify=False)
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        full = rf"could not be written to the folder of\s+offload='{tmp_path}'"
        with unchanged(model), pytest.raises(OSError, match=full):
            step(*batches()[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    shutil.rmtree(tmp_path)
    with unchanged(model), pytest.raises(OSError, match="it is gone"):
        step(*batches()[0])
    tmp_path.mkdir()
    torch.manual_seed(0)
    assert step(*batches()[0]).isfinite()
