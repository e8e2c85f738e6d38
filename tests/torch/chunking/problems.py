"""What the tests of chunked modules share: encoders, losses that look across rows, comparisons with the whole."""

import copy
import random

import numpy as np
import torch
from torch import nn

from gradaccum.torch import chunked
from tests.reference import FLOAT64, relative_error


def encoder():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))


def loss_of(outputs):
    return outputs.logsumexp((0, 1)) + outputs.std()


def gradients(*modules):
    return [p.grad for module in modules for p in module.parameters() if p.requires_grad]


def assert_same(found, expected, tolerance=FLOAT64):
    """Tensor by tensor, missing ones included; sparse ones stay so."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert relative_error([one], [other]) <= tolerance
            assert one.layout == other.layout


def assert_exact(module, loss, *inputs, size=4, tolerance=FLOAT64, passes=1, **options):
    """`loss(module, *inputs)` at once and with a chunked copy: what it returns, gradients of parameters and inputs,
    buffers, which stay the same tensors and which the recomputation doesn't move. Of several values that it returns,
    the first one is the loss."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    small = chunked(copy.deepcopy(module), size, **options)
    tensors = dict(small.named_buffers())
    for _ in range(passes):
        found = [loss(module, *inputs), loss(small, *own)]
        expected, actual = (one if isinstance(one, tuple) else (one,) for one in found)
        assert_same(actual, expected, tolerance)
        moved = [buffer.clone() for buffer in small.buffers()]
        expected[0].backward()
        actual[0].backward()
        torch.testing.assert_close([*small.buffers()], moved, rtol=0, atol=0)
    assert_same([*gradients(small), *(x.grad for x in own)], [*gradients(module), *(x.grad for x in inputs)], tolerance)
    assert relative_error(map(torch.nan_to_num, small.buffers()), map(torch.nan_to_num, module.buffers())) <= tolerance
    assert all(tensors[name] is buffer for name, buffer in small.named_buffers())
    return small


def seeded(seed=3):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the global generator is what a module draws from


def frozen(module, *layers):
    for layer in layers or [module]:
        layer.requires_grad_(False)
    return module
