"""What a window ends with: the stages that were asked for, in their order, and what each does to the gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradaccum.on_torch.clip_value import ClipValue
from gradaccum.on_torch.grad_buffer import GradientBuffer, WindowTotal
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, scaler_of, train, wrapped
from tests.torch.problems import mse, network, sgd

pytestmark = pytest.mark.usefixtures("float64")

CLIPS = {"clip_grad_norm": 1.0, "clip_grad_value": 1.0}


def of_a_wrapper(scaler=None, named=False, **options):
    """The stages of a wrapped optimizer, after a window."""
    model, optimizer = wrapped(steps=2, **options)

    def loss(model, x, y):
        return {"mean": (mse(model, x, y), len(x)), "size": (model(x).square().mean(), len(x))}

    train(model, optimizer, parts([3, 1]), scaler=scaler, **{"loss": loss, "weigh": lambda x, y: None} if named else {})
    return optimizer._windows.current.stages


def of_ranks(**options):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(network())
        return Optimizer(sgd(model.parameters()), 2, model=model, **options)._windows.current.stages
    finally:
        dist.destroy_process_group()


def of_a_train_step(**options):
    model = network()
    return TrainStep(model, sgd(model.parameters()), loss_fn=nn.MSELoss(), **options).update.stages


SKIPS = {"nonfinite": "skip_window", "noise_scale": True, "accumulate_dtype": torch.float32}
STAGES = {
    "a plain loop": (of_a_wrapper, {}, "Divide"),
    "a GradScaler": (lambda: of_a_wrapper(scaler_of(4.0)), {}, "Divide Unscale"),
    "named losses": (of_a_wrapper, {"named": True}, "_fold Divide"),
    "DDP, clipped": (of_ranks, CLIPS, "_reduce Divide Unscale ClipNorm ClipValue"),
    "skip_window, noise, wide sums": (of_a_wrapper, SKIPS, "Divide Finite MeasureNoise Cast"),
    "skip_micro_batch": (of_a_wrapper, {"nonfinite": "skip_micro_batch"}, "_screen Divide"),
    "TrainStep": (of_a_train_step, {}, "Divide"),
    "TrainStep, whose scaler unscales in its step": (lambda: of_a_train_step(scaler=scaler_of(4.0)), {}, "Divide"),
    "TrainStep, a GradScaler, clipped": (
        lambda: of_a_train_step(scaler=scaler_of(4.0), noise_scale=True, **CLIPS),
        {},
        "Divide Unscale MeasureNoise ClipNorm ClipValue",
    ),
}


@pytest.mark.parametrize(("stages", "options", "names"), STAGES.values(), ids=STAGES)
def test_the_list_holds_what_was_asked_for_in_one_order(stages, options, names):
    assert " ".join(getattr(stage, "__name__", type(stage).__name__) for stage in stages(**options)) == names


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
