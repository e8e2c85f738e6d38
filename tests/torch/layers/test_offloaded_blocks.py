"""Activations that wait elsewhere, and blocks that live in host memory: here that is the CPU, each comes as a copy."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.reference import FLOAT64, relative_error
from tests.torch.layers import test_blocks
from tests.torch.layers.test_blocks import (
    OPTIMIZERS,
    Layer,
    assert_same_updates,
    batches,
    loss_of,
    network,
    trained,
    unchanged,
)

OFFLOADED: dict[str, Any] = {"blocks": "layers", "on": "cpu", "size": 3}


build: Any = functools.partial(test_blocks.build, blocks="layers", on="cpu")


def test_with_blocks_on_the_cpu_the_update_is_the_large_batchs(tmp_path: Path) -> None:
    tied = network()
    tied.layers[2].inner.weight = tied.layers[0].inner.weight
    frozen = network()
    frozen.layers[1].requires_grad_(False)
    for model, options in (
        (network(), {}),
        (tied, {"update": "in_backward", "offload": tmp_path}),
        (frozen, {"clip_grad_norm": 0.05}),
    ):
        assert_same_updates(model, batches(count=2), loss_of, **OFFLOADED, **options)
        assert_same_updates(model, batches(count=1), loss_of, OPTIMIZERS["adam"], **OFFLOADED, **options, verify=False)


def penalised(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    return loss_of(model, ids, labels) + model.layers[2].inner.weight.square().sum()


def test_what_the_loss_makes_of_a_blocks_weights_adds_up_with_what_comes_back() -> None:
    for options in ({"clip_grad_norm": 0.05}, {"update": "in_backward"}):
        assert_same_updates(network(), batches(count=1), penalised, **OFFLOADED, **options)


class Normed(Layer):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.batch_norm = nn.BatchNorm1d(size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> Any:
        self.calls = self.calls + 1
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2), shared, scale=scale)


def test_wide_sums_and_moving_buffers_are_those_of_accumulation() -> None:
    left, given = [], {"batch_norm": "micro", "verify": False, "data": batches(rows=6, count=2)}
    for options in ({}, {"on": "cpu"}, {"on": "cpu", "update": "in_backward", "accumulate_dtype": torch.float64}):
        model = network()
        model.layers = nn.ModuleList([Normed(6) for _ in range(3)]).double()
        left.append(trained(model, **given, **options))
    assert max(relative_error(found, left[0]) for found in left[1:]) <= FLOAT64
    half = [
        trained(network().bfloat16(), batches()[:1], accumulate_dtype=torch.float32, verify=False, on=on)
        for on in (None, "cpu")
    ]
    assert relative_error(*half) == 0.0


def test_a_block_comes_once_per_forward_pass_and_once_in_backward_and_its_own_parameters_stay_where_they_are() -> None:
    model = network()
    step, places = build(model, verify=False, update="in_backward"), [id(p) for p in model.parameters()]
    offloaded: Any = step._layers and step._layers.offloaded
    copies, copied = offloaded._copies, list[int]()
    offloaded._copies = lambda place: copied.append(place) or copies(place)
    step(*batches(rows=15)[0])
    assert [copied.count(place) for place in range(3)] == [5 + 1] * 3  # five forward passes, and one turn
    assert [id(p) for p in model.parameters()] == places
    assert all(type(layer) is Layer for layer in model.layers)


@pytest.mark.parametrize("grad", [False, True])
def test_an_error_in_a_block_leaves_it_at_home(grad: bool) -> None:
    model = network()
    step = build(model, verify=False)
    own = [id(p) for p in model.parameters()]

    def fail(layer: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() == grad:
            raise RuntimeError("on purpose")

    hook = model.layers[1].register_forward_pre_hook(fail)
    with unchanged(model), pytest.raises(RuntimeError, match="on purpose"):
        step(*batches()[0])
    hook.remove()
    assert [id(p) for p in model.parameters()] == own
    assert step(*batches()[0]).isfinite()


def test_blocks_that_cannot_live_in_host_memory_are_refused_by_name() -> None:
    tied = network()
    tied.layers[0].norm.weight = tied.norm.weight
    recurrent = network()
    recurrent.layers[1].add_module("rnn", nn.LSTM(2, 2))
    for model, options, words in (
        (network(), {"on": "/tmp"}, "`on` must be 'cpu' or None. Received: on='/tmp'"),
        (tied, {}, "layers.0.norm.weight is a weight of a module outside the blocks"),
        (recurrent, {}, "'layers.1' has a LSTM, which keeps references"),
        (network().to("meta"), {}, r"expects the blocks on the CPU. Received: layers.0.norm.weight on meta"),
    ):
        with pytest.raises(ValueError, match=words):
            build(model, **options)
    model = network()
    step = build(model)
    model.layers[1].inner.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"layers.1.inner.weight has a hook on its gradient"):
        step(*batches()[0])


def test_offloaded_activations_make_the_same_update_and_leave_no_files(tmp_path: Path) -> None:
    seen = []
    model = network()
    model.layers[2].register_forward_hook(lambda *_: seen.append(len(os.listdir(tmp_path))))
    assert_same_updates(model, batches(), loss_of, OPTIMIZERS["adam"], 3, offload=str(tmp_path), update="in_backward")
    assert max(seen) >= 6  # of three blocks and three micro-batches
    assert os.listdir(tmp_path) == []
    assert_same_updates(network(), batches(), loss_of, size=3, offload=True)


def test_what_waits_in_files_takes_no_memory(tmp_path: Path) -> None:
    def peak(offload: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Sequential(*(nn.Tanh() for _ in range(9)), nn.Linear(64, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(
            model,
            optimizer,
            loss_fn=nn.MSELoss(),
            micro_batch_size=8,
            blocks=list(model[1]),
            offload=offload,
            verify=False,
        )
        x, y = torch.randn(64, 4), torch.randn(64, 2)
        with LiveBytes() as live:
            step(x, y)
        return live.peak

    assert peak(tmp_path) < 0.4 * peak(False)


def test_offload_that_cannot_be() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for options, error, words in (
        ({"blocks": "auto", "offload": "/no/such/folder"}, ValueError, "a folder that exists"),
        ({"blocks": "auto", "offload": 3}, TypeError, "Received: offload=3"),
        ({"offload": "/tmp"}, ValueError, "or `blocks`"),
        ({"offload": "/tmp", "batch_norm": "exact"}, TypeError, "must be True or False"),
    ):
        with pytest.raises(error, match=words):
            TrainStep(model, optimizer, compute_loss=loss_of, **options)
