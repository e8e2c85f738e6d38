"""What a window ends with: the stages that were asked for, in their order, and what each does to the gradients."""

import pytest
import torch
from torch import nn

from gradaccum.on_torch.foreach import clip_value_
from gradaccum.on_torch.grad_buffer import GradientBuffer
from gradaccum.on_torch.noise import NoiseMeter
from gradaccum.on_torch.stages import Unscale, WindowTotal, gradient_stages, run_stages
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, train, wrapped
from tests.torch.problems import sgd

pytestmark = pytest.mark.usefixtures("float64")

CLIPS = {"clip_grad_norm": 1.0, "clip_grad_value": 1.0}
EVERYTHING = {"skip_nonfinite": True, "noise": NoiseMeter(), "accumulates_wide": True, **CLIPS}
ASKED_FOR = {
    "a plain loop": ([], {}, "Divide"),
    "a GradScaler": ([Unscale()], {}, "Unscale Divide"),
    "clipping": ([], CLIPS, "Divide ClipNorm ClipValue"),
    "skip_window and bfloat16": ([], {"skip_nonfinite": True, "accumulates_wide": True}, "Divide Finite Cast"),
    "everything": ([Unscale()], EVERYTHING, "Unscale Divide Finite MeasureNoise ClipNorm ClipValue Cast"),
}


@pytest.mark.parametrize(("first", "asked", "names"), ASKED_FOR.values(), ids=ASKED_FOR)
def test_the_list_holds_what_was_asked_for_in_one_order(first, asked, names):
    assert " ".join(type(stage).__name__ for stage in gradient_stages(*first, **asked)) == names


def test_a_stage_that_finds_nothing_to_update_with_ends_the_list():
    seen = []
    total = WindowTotal(GradientBuffer(list), 1.0)
    stages = [lambda total: not seen.append(1), lambda total: False, lambda total: not seen.append(2)]
    assert not run_stages(stages, total)
    assert seen == [1]
    assert not run_stages(gradient_stages(), WindowTotal(GradientBuffer(list), 1.0, weight=0))
    assert not run_stages([Unscale()], WindowTotal(GradientBuffer(list), 1.0, overflow=torch.tensor(True)))


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
