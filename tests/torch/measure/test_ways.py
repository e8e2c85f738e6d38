"""What each way of making an update needs is predicted on fake tensors."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import Blocks, TrainStep
from gradaccum.torch.measure import estimate_ways
from gradaccum.torch.measure.fake_memory import LiveBytes, bytes_of
from tests.torch.layers.problems import Layer

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "torch" / "large_models.py"


class Network(nn.Module):
    """Blocks between an embedding and a large head, whose weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(4))
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = shared = self.embedding(ids)
        shared = torch.cat([shared, shared], -1)
        for layer in self.layers:
            x, shared = layer(x, shared)
        return self.head(x)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"micro_batch_size": 24},
    "accumulated": {},
    "layer by layer": {"blocks": "auto"},
    "updated in backward": {"blocks": Blocks("auto", update="in_backward")},
}


def measured(**options: Any) -> int:
    """The peak of an update beyond what is there."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = TrainStep(model, optimizer, compute_loss=loss_of, verify=False, **{"micro_batch_size": 4, **options})
    ids = torch.zeros(24, 6, dtype=torch.long)
    step(ids)
    for parameter in model.parameters():
        parameter.grad = None
    with LiveBytes() as live:
        step(ids)
    return live.peak


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "meta"])
def test_the_predicted_peaks_are_those_of_the_updates(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Network().to(device)
    model.head.weight = model.embedding.weight
    ids = torch.zeros(24, 6, dtype=torch.long, device=device)
    constant = bytes_of(model.parameters()) + ids.nbytes
    monkeypatch.setattr("gradaccum.torch.measure.estimates.largest_size", lambda peak, rows, allowed: (4, peak(4)))
    found = estimate_ways(
        model, ids, compute_loss=loss_of, memory_limit="1GiB", optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
    )
    peaks = {way.name: way.peak - constant for way in found.ways}
    for name, options in WAYS.items():
        assert peaks[name] == pytest.approx(measured(**options), rel=0.02), name
    assert peaks["updated in backward, offloaded"] < peaks["updated in backward"]
    block = bytes_of(model.layers[0].parameters())
    assert (
        peaks["updated in backward, offloaded"] - peaks["parameters on the host"] == 4 * block - 2 * block
    )  # two are there
    assert all(p.grad is None for p in model.parameters())


def test_the_example_s_large_models_are_shapes_alone() -> None:
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLE))
    model, ids, keywords = example["large_model"](
        layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2
    )
    assert {p.device.type for p in model.parameters()} == {ids.device.type} == {"meta"}
    ways = {way.name: way for way in estimate_ways(model, ids[:8, :8], **keywords, memory_limit="1GiB").ways}
    assert list(ways) == [
        "plain", "accumulated", "layer by layer", "updated in backward", "updated in backward, offloaded",
        "parameters on the host",
    ]  # fmt: skip
    assert all(way.fits and way.micro_batch_size == 8 for way in ways.values())
    parameters = sum(p.numel() for p in example["seven_billion"]()[0].parameters())
    assert parameters == pytest.approx(6.7e9, rel=0.01)
