"""What a window ends with: clipping sees the finished gradient, divided and unscaled, first its norm, then values.

The other stages' order: the random programs (tests/fuzz), and what tests/torch/measure finds beside clipping.
"""

import pytest
import torch
from torch import nn

from gradaccum.on_torch.clip_value import ClipValue
from gradaccum.on_torch.grad_buffer import GradientBuffer, WindowTotal
from gradaccum.torch import TrainStep
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, scaler_of, train, wrapped
from tests.torch.problems import network, sgd

pytestmark = pytest.mark.usefixtures("float64")


def clipped(norm):
    """SGD that clips by norm, then by value, as a plain loop does."""

    def make(parameters):
        optimizer = sgd(parameters := [*parameters])
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, norm) and None)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, 0.01))
        return optimizer

    return make


@pytest.mark.parametrize("norm", [torch.inf, 0.3])
def test_clipping_by_value_sees_the_finished_gradient_once(norm):
    micro_batches = parts([3, 1, 4, 2, 2])
    model, optimizer = wrapped(steps=3, clip_grad_value=0.01, clip_grad_norm=None if norm == torch.inf else norm)
    train(model, optimizer, optimizer.batches(micro_batches))
    assert_same(model, large(windows_of(micro_batches, 3), clipped(norm)))


def test_a_train_step_clips_what_its_scaler_has_unscaled():
    batches, model, scaler = parts([5, 7]), network(), scaler_of(1024.0)
    options = {"clip_grad_norm": 0.3, "clip_grad_value": 0.01, "micro_batch_size": 2}
    step = TrainStep(model, sgd(model.parameters()), loss_fn=nn.MSELoss(), scaler=scaler, **options)
    for batch in batches:
        step(*batch)
    assert step.grad_norm < 100
    assert_same(model, large([[batch] for batch in batches], clipped(0.3)))


def test_clipping_by_value_takes_sparse_gradients():
    dense = torch.tensor([[0.0, 0.0], [3.0, -0.5]])
    sparse = dense.to_sparse()
    total = WindowTotal(GradientBuffer(list), None)
    total.buffer.attach(lambda: [sparse, dense])
    assert ClipValue(1.0)(total)
    assert torch.equal(sparse.to_dense(), dense)
    assert dense[1].tolist() == [1.0, -0.5]
