"""What a proof leaves as it was."""

import pytest
import torch
from torch import nn

from gradaccum.core.proof import NEARBY
from gradaccum.on_torch.adapter.arrays import bits_flipped
from gradaccum.on_torch.state import evaluated
from gradaccum.torch import TrainStep
from gradaccum.torch.buffers import ModuleState


class Quantised(torch.Tensor):
    """Eight bits and a scale, as torchao has them: nothing is defined on it but what a linear layer needs."""

    def __new__(cls, weight, scale):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=scale.dtype)

    def __init__(self, weight, scale):
        self.weight, self.scale = weight, scale

    def __tensor_flatten__(self):
        return ["weight", "scale"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight = args[:2]
            return x @ (weight.weight.to(x) * weight.scale).T
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].weight, args[0].scale)
        raise NotImplementedError(f"Quantised has no {function}.")


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        weight = Quantised(torch.randint(-9, 9, (3, 4), dtype=torch.int8), torch.rand(()))
        self.base = nn.Parameter(weight, requires_grad=False)
        self.adapter = nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.linear(x, self.base) + self.adapter(x)


def test_weights_of_a_class_that_can_be_neither_compared_nor_copied_are_held_by_what_is_inside():
    model = Adapted()
    state, before = ModuleState({"": model}), model.base.weight.clone()
    model.base.weight.add_(1)
    state.put_back()
    assert torch.equal(model.base.weight, before)
    assert {"base.weight", "base.scale"} <= state.tensors().keys()


def test_an_adapter_on_such_weights_is_proven_and_exact(caplog):
    model, plain, x, y = Adapted(), Adapted(), torch.randn(7, 4), torch.randn(7, 3)
    nn.functional.mse_loss(plain(x), y).backward()
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
    TrainStep(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=3).backward(x, y)
    assert not caplog.messages  # nothing "could not be proven"
    torch.testing.assert_close(model.adapter.weight.grad, plain.adapter.weight.grad)


def test_layers_that_pack_their_weights_for_good_in_evaluation_stay_in_training():
    packing = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})(2, 2)
    model = nn.Sequential(packing, nn.Dropout())
    with evaluated(list(model.modules()), torch.device("cpu")):
        assert [module.training for module in model.modules()] == [False, True, False]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_changing_the_last_bits_of_parameters_turns_a_sign_that_rounding_decides_and_is_undone(dtype):
    torch.manual_seed(0)
    parameter = torch.randn(1000, dtype=dtype)
    before, total = parameter.clone(), parameter.sum()
    signs = []
    for seed in range(NEARBY):
        with bits_flipped([parameter, parameter], seed):
            assert 500 < (parameter != before).sum() < 1000
            signs.append((parameter - before).sum().real > 0)
    assert torch.equal(parameter, before)
    assert parameter.sum() == total
    assert 2 <= sum(signs) <= NEARBY - 2
