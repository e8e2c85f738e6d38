"""The estimate of what a micro-batch, and each way of making an update, needs agrees with what it really takes."""

import copy
import pathlib
import runpy

import pytest
import torch
from torch import nn

from gradaccum.core.sizes import process_memory
from gradaccum.torch import BlockStep, TrainStep
from gradaccum.torch.layers import estimate_ways
from gradaccum.torch.loss.objective import Objective
from gradaccum.torch.measure.estimates import estimate_size, suggest_micro_batch_size
from gradaccum.torch.measure.fake_memory import LiveBytes, bytes_of, micro_batch_peak, optimizer_bytes
from tests.torch.distributed.processes import fresh_process
from tests.torch.layers.problems import Layer
from tests.torch.problems import Does

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "torch" / "large_models.py"
LOSS = {"loss_fn": nn.CrossEntropyLoss()}


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def cnn():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Linear(128, 10))


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (4, 16)), nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(64, 10))


class Routed(nn.Sequential):
    """Asks for values."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() < 1 else super().forward(x) * 2


def batch(rows=64):
    return torch.zeros(rows, 64), torch.zeros(rows, dtype=torch.long)


def subject(model, rows=64):
    objective = Objective(model, **LOSS)
    return objective, objective.batch(batch(rows))


def measured(model, rows):
    """Peak bytes of the tensors that a micro-batch really makes, the gradients of one before it included."""
    objective, micro_batch = subject(copy.deepcopy(model), rows)
    with LiveBytes() as live:
        for _ in range(2):
            objective.forward(micro_batch)[0].backward()
    return live.peak


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (mlp, 64),
        (mlp, 1),
        (cnn, 17),
        (transformer, 17),
        (lambda: Routed(*mlp()), 9),  # which is measured really
    ],
)
def test_fake_tensors_take_what_real_ones_take_and_leave_everything_as_it_was(make, rows):
    model = make()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    peak = micro_batch_peak(*subject(model), rows)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert peak == pytest.approx(measured(model, rows), rel=0.02)


@pytest.mark.parametrize("make", [mlp, cnn, transformer])
def test_the_suggested_size_fits_and_a_little_more_does_not(make):
    model = make()
    constant = 3 * bytes_of(model.parameters()) + bytes_of(model.buffers()) + bytes_of(batch())
    limit = constant + measured(model, 30)
    size = suggest_micro_batch_size(model, batch(), memory_limit=limit, margin=0.0, **LOSS)
    assert constant + measured(model, size) <= limit
    assert 29 <= size <= 30


def real_and_estimated(found):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    objective, many = subject(model, 4096)
    estimate = micro_batch_peak(objective, many, 4096) - bytes_of(model.parameters())
    for _ in range(2):
        objective.forward(many.take(slice(0, 2)))[0].backward()
    before = process_memory()["VmRSS"]
    objective.forward(many)[0].backward()
    found.write_text(str((process_memory()["VmHWM"] - before) / estimate))


def test_the_estimate_agrees_with_the_memory_of_a_real_process(tmp_path):
    fresh_process(real_and_estimated, tmp_path / "found").join(100)
    assert float((tmp_path / "found").read_text()) == pytest.approx(1.0, abs=0.15)


def test_everything_fits_into_plenty_and_one_row_must_fit():
    assert suggest_micro_batch_size(mlp(), batch(), memory_limit="1TiB", **LOSS) == 64
    assert suggest_micro_batch_size(mlp(), batch(), **LOSS) == 64
    with pytest.raises(ValueError, match="Not even a micro-batch of one row"):
        suggest_micro_batch_size(mlp(), batch(), memory_limit="100 kB", **LOSS)
    with pytest.raises(ValueError, match="at least one row.*Received: 0 rows"):
        estimate_size(mlp(), batch(0), memory_limit="1GiB", **LOSS)


def test_the_optimizers_state_counts():
    parameters = list(mlp().parameters())
    size, sgd = bytes_of(parameters), torch.optim.SGD
    assert optimizer_bytes(None, parameters) == 2 * size
    assert optimizer_bytes(sgd(parameters, lr=0.1), parameters) == 0
    assert optimizer_bytes(sgd(parameters, lr=0.1, momentum=0.9), parameters) == size
    assert optimizer_bytes(torch.optim.Adam(parameters), parameters) == pytest.approx(2 * size, rel=0.01)


# Ways of making an update.


def large(device="cpu"):
    """Blocks between an embedding and a large head, whose weights are tied."""

    def run(model, ids):
        x = model.embedding(ids)
        shared = torch.cat([x, x], -1)
        for layer in model.layers:
            x, shared = layer(x, shared)
        return model.head(x)

    layers = nn.ModuleList(Layer(16) for _ in range(4))
    model = Does(run, embedding=nn.Embedding(64, 16), layers=layers, head=nn.Linear(16, 64, bias=False)).to(device)
    model.head.weight = model.embedding.weight
    return model


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


WAYS = {
    "plain": {"micro_batch_size": 24},
    "accumulated": {},
    "layer by layer": {"kind": BlockStep},
    "updated in backward": {"kind": BlockStep, "update": "in_backward"},
}


def peak_of_an_update(kind=TrainStep, **options):
    """Beyond what is there."""
    model, ids = large(), torch.zeros(24, 6, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = kind(model, optimizer, compute_loss=loss_of, verify=False, **{"micro_batch_size": 4, **options})
    step(ids)
    for parameter in model.parameters():
        parameter.grad = None
    with LiveBytes() as live:
        step(ids)
    return live.peak


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "meta"])
def test_the_predicted_peaks_are_those_of_the_updates(device, monkeypatch):
    model, ids = large(device), torch.zeros(24, 6, dtype=torch.long, device=device)
    constant = bytes_of(model.parameters()) + ids.nbytes
    monkeypatch.setattr("gradaccum.torch.layers.estimates.largest_size", lambda peak, rows, allowed: (4, peak(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = estimate_ways(model, ids, compute_loss=loss_of, memory_limit="1GiB", optimizer=optimizer)
    peaks = {way.name: way.peak - constant for way in found.ways}
    for name, options in WAYS.items():
        assert peaks[name] == pytest.approx(peak_of_an_update(**options), rel=0.02), name
    freed, block = peaks["updated in backward, offloaded"], bytes_of(model.layers[0].parameters())
    assert freed < peaks["updated in backward"]
    assert freed - peaks["parameters on the host"] == 4 * block - 2 * block  # two are there
    assert all(p.grad is None for p in model.parameters())


def test_the_example_s_large_models_are_shapes_alone():
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLE))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model, ids, keywords = example["large_model"](layers=2, hidden_size=32, intermediate_size=64, **heads)
    assert {p.device.type for p in model.parameters()} == {ids.device.type} == {"meta"}
    ways = {way.name: way for way in estimate_ways(model, ids[:8, :8], **keywords, memory_limit="1GiB").ways}
    assert list(ways) == [*WAYS, "updated in backward, offloaded", "parameters on the host"]
    assert all(way.fits and way.micro_batch_size == 8 for way in ways.values())
    parameters = sum(p.numel() for p in example["seven_billion"]()[0].parameters())
    assert parameters == pytest.approx(6.7e9, rel=0.01)
