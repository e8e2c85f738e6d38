"""Compiled windows on a CUDA device, with and without its graphs."""

import copy

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("size", [4, 1], ids=["a window", "each micro-batch"])
@pytest.mark.parametrize("compile", [True, {"mode": "reduce-overhead"}], ids=["compiled", "CUDA graphs"])
def test_compiled_updates_on_a_device_are_the_large_batchs(compile, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to("cuda", torch.float64)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, reference)]
    step = TrainStep(model, optimizers[0], loss_fn=nn.CrossEntropyLoss(), micro_batch_size=size, compile=compile)
    losses = []
    for _ in range(6):
        x, y = torch.randn(20, 5, device="cuda", dtype=torch.float64), torch.randint(3, (20,), device="cuda")
        losses.append((step(x, y), nn.CrossEntropyLoss()(reference(x), y)))
        optimizers[1].zero_grad()
        losses[-1][1].backward()
        optimizers[1].step()
        assert step.compiled
    for loss, expected in losses:  # those of earlier updates have not been overwritten since
        assert relative_error([loss], [expected]) < FLOAT64
    assert relative_error(model.parameters(), reference.parameters()) < FLOAT64
