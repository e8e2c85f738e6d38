"""Activations that wait elsewhere, and blocks that live in host memory: here that is the CPU, each comes as a copy."""

import os
import resource
import shutil
import signal

import pytest
import torch
from torch import nn

from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.torch.layers import problems
from tests.torch.layers.problems import OPTIMIZERS, Layer, assert_same_updates, batches, network, unchanged


def build(model, **options):
    return problems.build(model, **{"blocks": "layers", "on": "cpu", **options})


def test_a_block_comes_once_per_forward_pass_and_once_in_backward_and_its_own_parameters_stay_where_they_are():
    model, copied = network(), []
    step, places = build(model, verify=False, update="in_backward"), [id(p) for p in model.parameters()]
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
    step, own = build(model, verify=False), [id(p) for p in model.parameters()]

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
    step = build(model, on=None, update="in_backward", offload=tmp_path, verify=False)
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
