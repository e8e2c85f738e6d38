"""`TrainStep.backward`: the finished gradient for a loop that clips, logs and steps by itself."""

import copy

import pytest
import torch
from torch import nn

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import classes, network, sgd
from tests.torch.train_step.test_train_step import left_as_it_was, plain_loss, step_of

pytestmark = pytest.mark.usefixtures("float64")


def rows(number=13):
    x, y = classes(number)
    return x.double(), y


def plain_updates(model, updates, clip):
    torch_updates(model, sgd(model.parameters()), [rows()] * updates, plain_loss, clip_grad_norm=clip)


@pytest.mark.parametrize("size", [1, 4, 64, "auto"])
def test_a_loop_clips_and_steps_on_the_finished_gradient_as_after_loss_backward(size):
    model = network()
    expected = copy.deepcopy(model)
    plain_updates(expected, 3, 0.1)
    optimizer = sgd(model.parameters())
    step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=size)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(rows()[0]), rows()[1])
        optimizer.zero_grad()
        found = step.backward(*rows())
        assert relative_error([found], [loss]) <= FLOAT64
        assert not found.requires_grad
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64
    assert step.updates == 0


def test_a_scaler_finds_its_scale_in_the_gradients():
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = sgd(model.parameters())
    step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=4, scaler=scaler)
    step.backward(*rows())
    scaled = [p.grad.clone() for p in model.parameters()]
    expected = copy.deepcopy(model)
    nn.functional.cross_entropy(expected(rows()[0]), rows()[1]).backward()
    assert relative_error(scaled, [1024.0 * p.grad for p in expected.parameters()]) <= FLOAT64
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    fresh = network()
    plain_updates(fresh, 1, 0.1)
    assert relative_error(model.parameters(), fresh.parameters()) <= FLOAT64


def test_a_batch_that_weighs_nothing_leaves_no_gradient():
    model = network()
    step = TrainStep(model, sgd(model.parameters()), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=4)
    x, y = rows()
    assert step.backward(x, torch.full_like(y, -100)).isnan()
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_across_rows_is_refused_with_everything_as_it_was():
    model = network()
    step = step_of(model, compute_loss=lambda model, x, y: model(x).std(), micro_batch_size=4, verify=True)
    with left_as_it_was(model, NotEquivalentError):
        step.backward(*rows())
    assert all(p.grad is None for p in model.parameters())
    assert not step.proving


def test_a_loss_can_tell_passes_that_only_prove_something():
    seen = []
    model = network()

    def loss(model, x, y):
        seen.append((step.proving, len(x)))
        return nn.functional.cross_entropy(model(x), y)

    step = TrainStep(model, sgd(model.parameters()), compute_loss=loss, micro_batch_size=5)
    step.backward(*rows())
    assert [size for proving, size in seen if not proving] == [5, 4, 4]
    assert any(proving for proving, _ in seen)
