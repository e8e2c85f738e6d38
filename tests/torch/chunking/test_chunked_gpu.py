"""On a CUDA device: its random state, autocast with float16, and boundary activations in host memory."""

import copy

import pytest
import torch
from torch import nn

from gradaccum.torch import chunked
from tests.reference import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = 23


def gradients(module):
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("keep", [0, 1])
def test_dropout_on_the_device_is_replayed(keep, float64):
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).cuda()
    small, x = chunked(copy.deepcopy(module), 4, keep=keep), torch.randn(ROWS, 5, device="cuda")
    torch.manual_seed(0)
    torch.cat([module(rows) for rows in torch.split(x, [4, 4, 4, 4, 4, 3])]).std().backward()
    drawn = torch.rand(2, device="cuda")
    torch.manual_seed(0)
    small(x).std().backward()
    assert torch.equal(torch.rand(2, device="cuda"), drawn)
    assert relative_error(gradients(small), gradients(module)) <= 1e-11


def test_float16_autocast_is_the_same_in_both_passes():
    module, x, seen = nn.Linear(5, 3).cuda(), torch.randn(ROWS, 5, device="cuda"), []
    module.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cuda", torch.float16):
        loss = chunked(module, 4, verify=False)(x).float().std()
    loss.backward()
    assert len(seen) == 12
    assert set(seen) == {torch.float16}


@pytest.mark.parametrize("offload", [False, True])
def test_exact_batch_norm_with_activations_in_host_memory(offload, float64):
    layers = [nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, bias=False)]
    module = nn.Sequential(*layers, nn.BatchNorm2d(4), nn.Flatten()).cuda()
    small = chunked(copy.deepcopy(module), 16, batch_norm="exact", offload=offload)
    x = torch.randn(512, 2, 12, 12, device="cuda")
    peaks = []
    for m in (module, small):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        m(x).logsumexp((0, 1)).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert relative_error(gradients(small), gradients(module)) <= 1e-11
    assert relative_error(small.buffers(), module.buffers()) <= 1e-11
    if offload:
        assert peaks[1] < peaks[0] / 2
