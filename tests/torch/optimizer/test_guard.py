"""What is done to an open window behind the wrapper's back is seen wherever gradients really arrive."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.torch.optimizer.loops import wrapped
from tests.torch.problems import adam, mse, network, regression, sgd

pytestmark = pytest.mark.usefixtures("float64")


class WithSpare(nn.Module):
    """A network, and layers around it that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.front = nn.Linear(3, 3)
        self.network = network()
        self.pooler = nn.Linear(3, 3)

    def forward(self, x):
        return self.network(x)


def unused_ends():
    return WithSpare()


def frozen_ends():
    model = WithSpare()
    model.pooler.requires_grad_(False)
    model.front.requires_grad_(False)
    model.network[0].requires_grad_(False)
    return model


def frozen_at_first():
    model = WithSpare()
    model.requires_grad_(False)
    return model


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("make", [unused_ends, frozen_ends, frozen_at_first])
@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (lambda model: model.zero_grad(), "cleared or replaced"),
        (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01), "edited inside"),
    ],
    ids=["model.zero_grad()", "clipping"],
)
def test_tampering_is_seen_where_the_last_parameter_gets_no_gradient(window, make, tamper, named):
    model = make()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    if make is frozen_at_first:
        model.network.requires_grad_(True)
    for _ in range(3 * (window - 1)):
        optimizer.zero_grad()
        mse(model, *regression(2)).backward()
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(WindowError, match=named):
        for _ in range(3):
            optimizer.zero_grad()
            mse(model, *regression(2)).backward()
            tamper(model)
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_window_whose_gradients_arrive_at_other_parameters_is_watched_there():
    heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(6))
    optimizer = gradaccum.torch.optim.Optimizer(sgd(heads.parameters()), steps=2)

    def train(head, tamper=lambda: None):
        for _ in range(2):
            optimizer.zero_grad()
            mse(heads[head], *regression(2)).backward()
            optimizer.step()
            if not optimizer.updated:
                tamper()

    for _ in range(4):
        train(0)
    train(4)
    with pytest.raises(WindowError, match="cleared"):
        train(3, tamper=lambda: heads.zero_grad())


@pytest.mark.parametrize("plain", range(1, 6))
def test_a_loss_without_a_weight_beside_one_with_a_weight_is_seen_on_any_head(plain):
    heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(6))
    optimizer = gradaccum.torch.optim.Optimizer(sgd(heads.parameters()), steps=2)
    with pytest.raises(WindowError, match=r"backward\(loss, weight=\.\.\.\)"):
        for rows in (4, 2):
            optimizer.zero_grad()
            optimizer.backward(mse(heads[0], *regression(rows)), weight=rows)
            mse(heads[plain], *regression(rows)).backward()
            optimizer.step()


def test_clearing_is_called_clearing_even_if_the_new_gradient_has_the_old_ones_address():
    model, optimizer = wrapped(steps=20)
    for _ in range(10):
        mse(model, *regression(2)).backward()
        optimizer.step()
        model.zero_grad()
        mse(model, *regression(2)).backward()
        with pytest.raises(WindowError, match="cleared or replaced"):
            optimizer.step()
        optimizer.discard()


def hooks_of(parameter):
    return len(parameter._post_accumulate_grad_hooks or ()) + len(parameter._backward_hooks or ())


def test_a_wrapper_leaves_the_model_as_it_found_it():
    model = network()
    for _ in range(5):
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(mse(model, *regression(2))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert sum(map(hooks_of, model.parameters()))
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    assert sum(map(hooks_of, model.parameters())) == 0


def test_a_wrapper_that_is_gone_leaves_the_gradients_dtype_as_it_was():
    model = network(dtype=torch.bfloat16)
    before = [p.grad_dtype for p in model.parameters()]
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2, accumulate_dtype=torch.float32)
    model(torch.ones(2, 5, dtype=torch.bfloat16)).mean().backward()
    optimizer.step()
    del optimizer
    assert [p.grad_dtype for p in model.parameters()] == before
    model(torch.ones(2, 5, dtype=torch.bfloat16)).mean().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_a_new_wrapper_keeps_its_dtype_when_the_one_before_goes():
    model = network(dtype=torch.bfloat16)
    inner = sgd(model.parameters())
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=2, accumulate_dtype=torch.float32)
    optimizer = gradaccum.torch.optim.Optimizer(optimizer.inner, steps=4, accumulate_dtype=torch.float32)
    gc.collect()
    model(torch.ones(2, 5, dtype=torch.bfloat16)).mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    optimizer.step()


def test_backward_of_what_is_no_tensor_says_so():
    optimizer = gradaccum.torch.optim.Optimizer(adam(network().parameters()), steps=2)
    with pytest.raises(TypeError, match="`loss` must be a tensor. Received: loss=None"):
        optimizer.backward(None)
    assert optimizer.micro_batches == 0
