"""The estimate of what a micro-batch needs agrees with what it really takes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum.core.sizes import process_memory
from gradaccum.torch.loss.objective import Objective
from gradaccum.torch.measure.estimates import estimate_size, suggest_micro_batch_size
from gradaccum.torch.measure.fake_memory import LiveBytes, bytes_of, micro_batch_peak, optimizer_bytes
from tests.torch.distributed.processes import fresh_process


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Linear(128, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (4, 16)), nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(64, 10))


def batch(rows: int = 64) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 64), torch.zeros(rows, dtype=torch.long)


def measured(model: nn.Module, rows: int) -> int:
    """Peak bytes of the tensors that a micro-batch really makes, the gradients of one before it included."""
    objective = Objective(copy.deepcopy(model), loss_fn=nn.CrossEntropyLoss())
    micro_batch = batch(rows)
    with LiveBytes() as live:
        for _ in range(2):
            objective.forward(objective.batch(micro_batch))[0].backward()
    return live.peak


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (mlp, 64),
        (mlp, 1),
        (cnn, 17),
        (transformer, 17),
        *(pytest.param(model, rows, marks=pytest.mark.slow) for model in (cnn, transformer) for rows in (1, 64)),
        pytest.param(mlp, 17, marks=pytest.mark.slow),
    ],
)
def test_fake_tensors_take_what_real_ones_take(model: Any, rows: int) -> None:
    network = model()
    before, generator = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    objective = Objective(network, loss_fn=nn.CrossEntropyLoss())
    peak = micro_batch_peak(objective, objective.batch(batch()), rows)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), network.state_dict().values(), strict=True))
    assert all(p.grad is None for p in network.parameters())
    assert peak == pytest.approx(measured(network, rows), rel=0.02)


@pytest.mark.parametrize("model", [mlp, cnn, transformer])
def test_the_suggested_size_fits_and_a_little_more_does_not(model: Any) -> None:
    network = model()
    constant = 3 * bytes_of(network.parameters()) + bytes_of(network.buffers()) + bytes_of(batch())
    limit = constant + measured(network, 30)
    size = suggest_micro_batch_size(network, batch(), loss_fn=nn.CrossEntropyLoss(), memory_limit=limit, margin=0.0)
    assert constant + measured(network, size) <= limit
    assert 29 <= size <= 30


def real_and_estimated(found: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    objective = Objective(model, loss_fn=nn.CrossEntropyLoss())
    many = objective.batch((torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.long)))
    estimate = micro_batch_peak(objective, many, 4096) - bytes_of(model.parameters())
    for _ in range(2):
        objective.forward(many.take(slice(0, 2)))[0].backward()
    before = process_memory()["VmRSS"]
    objective.forward(many)[0].backward()
    found.write_text(str((process_memory()["VmHWM"] - before) / estimate))


def test_the_estimate_agrees_with_the_memory_of_a_real_process(tmp_path: Path) -> None:
    fresh_process(real_and_estimated, tmp_path / "found").join(100)
    assert float((tmp_path / "found").read_text()) == pytest.approx(1.0, abs=0.15)


def test_models_that_ask_for_values_are_measured_really() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum().item() < 1 else self.inner(x) * 2

    network = Routed()
    objective = Objective(network, loss_fn=nn.CrossEntropyLoss())
    assert micro_batch_peak(objective, objective.batch(batch()), 9) == pytest.approx(
        measured(network.inner, 9), rel=0.02
    )
    assert all(p.grad is None for p in network.parameters())


def test_everything_fits_into_plenty_and_one_row_must_fit() -> None:
    keywords: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss()}
    assert suggest_micro_batch_size(mlp(), batch(), memory_limit="1TiB", **keywords) == 64
    assert suggest_micro_batch_size(mlp(), batch(), **keywords) == 64
    with pytest.raises(ValueError, match="Not even a micro-batch of one row"):
        suggest_micro_batch_size(mlp(), batch(), memory_limit="100 kB", **keywords)


def test_a_batch_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row.*Received: 0 rows"):
        estimate_size(nn.Linear(3, 1), (torch.ones(0, 3), torch.ones(0, 1)), loss_fn=nn.MSELoss(), memory_limit="1GiB")


def test_the_optimizers_state_counts() -> None:
    model = mlp()
    size = bytes_of(model.parameters())
    parameters = list(model.parameters())
    assert optimizer_bytes(None, parameters) == 2 * size
    assert optimizer_bytes(torch.optim.SGD(parameters, lr=0.1), parameters) == 0
    assert optimizer_bytes(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), parameters) == size
    assert optimizer_bytes(torch.optim.Adam(parameters), parameters) == pytest.approx(2 * size, rel=0.01)


def test_the_estimate_and_its_margin_are_printed() -> None:
    text = str(estimate_size(mlp(), batch(), loss_fn=nn.CrossEntropyLoss(), memory_limit="16GiB"))
    assert "64 of 64 rows" in text
    assert "16.0 GiB" in text
    assert "10 %" in text
