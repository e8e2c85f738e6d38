"""Real memory, really running out."""

import copy

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from gradaccum.torch.loss.objective import Objective
from gradaccum.torch.measure.fake_memory import bytes_of, micro_batch_peak
from tests.torch.train_step.steps import assert_same_state, by_hand, step_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LOSS, ROWS = nn.CrossEntropyLoss(), 2048


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(64, 8192), nn.Tanh(), nn.Linear(8192, 8192), nn.Tanh(), nn.Linear(8192, 10)
    return nn.Sequential(*layers).to("cuda", dtype)


def batch(dtype=torch.float32):
    return torch.randn(ROWS, 64, device="cuda", dtype=dtype), torch.randint(10, (ROWS,), device="cuda")


@pytest.mark.parametrize("size", [ROWS, "auto"])
def test_a_real_out_of_memory_leaves_the_update_exact(size):
    model, data = network(torch.float64), [batch(torch.float64)]
    reference = copy.deepcopy(model)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    by_hand(reference, data, make=sgd)
    reference.zero_grad()
    step = TrainStep(model, sgd(model.parameters()), loss_fn=LOSS, micro_batch_size=size, memory_limit="1TiB")
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_allocated() + 2 * bytes_of(model.parameters()) + 300 * 2**20
    torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0))
    try:
        step(*data[0])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_state(model, reference)


def test_a_real_out_of_memory_in_the_first_step_of_an_optimizer_changes_nothing():
    model, (x, y) = network(), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    step = step_of(model, optimizer, micro_batch_size=64, verify=True)
    before = [value.detach().cpu().clone() for value in model.parameters()]
    step.backward(x, y)
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - 3 * bytes_of(model.parameters()) // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Adam\.step(.|\n)*are as they were"):
        step(x, y)
    del ballast
    assert all(torch.equal(value.cpu(), old) for value, old in zip(model.parameters(), before, strict=True))
    step(x, y)
    assert step.updates == 1


def test_the_loss_and_ignored_targets_need_no_synchronisation():
    model, (x, y) = network(), batch()
    y[::3] = -100
    y[:64] = -100
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=64, verify=True)
    step(x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.is_cuda
    assert loss.isfinite()


def test_fake_tensors_foretell_the_devices_peak():
    model, (x, y) = network(), batch()
    objective = Objective(model, loss_fn=LOSS)
    estimate = micro_batch_peak(objective, objective.batch((x, y)), ROWS)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        objective.forward(objective.batch((x, y)))[0].backward()
    gradients = bytes_of(model.parameters())
    assert torch.cuda.max_memory_allocated() - before + gradients == pytest.approx(estimate, rel=0.15)
