"""Clipping by value, once per window. What else a window ends with, and in which order, the random programs tell."""

import pytest
import torch
from torch import nn

from gradaccum.on_torch.foreach import clip_value_
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, train, wrapped
from tests.torch.problems import sgd

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("norm", [torch.inf, 0.3])
def test_clipping_by_value_sees_the_finished_gradient_once(norm):
    def clipped(parameters):
        optimizer = sgd(parameters := [*parameters])
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, norm) and None)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, 0.01))
        return optimizer

    micro_batches = parts([3, 1, 4, 2, 2])
    model, optimizer = wrapped(steps=3, clip_grad_value=0.01, clip_grad_norm=None if norm == torch.inf else norm)
    train(model, optimizer, optimizer.batches(micro_batches))
    assert_same(model, large(windows_of(micro_batches, 3), clipped))


def test_clipping_by_value_takes_sparse_gradients():
    dense = torch.tensor([[0.0, 0.0], [3.0, -0.5]])
    sparse = dense.to_sparse()
    clip_value_([sparse, dense], 1.0)
    assert torch.equal(sparse.to_dense(), dense)
    assert dense[1].tolist() == [1.0, -0.5]
