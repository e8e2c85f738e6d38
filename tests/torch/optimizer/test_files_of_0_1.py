"""Files that version 0.1 wrote in the middle of a window: they load, and training goes on exactly."""

import pickle
from pathlib import Path

import pytest
import torch

import gradaccum.torch
from tests.torch.problems import adam, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

FILES = Path(__file__).parent.parent / "data" / "v0_1"

OPTIMIZERS = {
    "plain": lambda p: gradaccum.torch.optim.Optimizer(adam(p), steps=4),
    "named": lambda p: gradaccum.torch.optim.SGD(p, lr=0.1, momentum=0.9, steps={0: 4, 1: 2}),
    "screened": lambda p: gradaccum.torch.optim.Optimizer(
        sgd(p), steps=4, nonfinite="skip_micro_batch", clip_grad_norm=0.5
    ),
    "scaled": lambda p: gradaccum.torch.optim.Optimizer(adam(p), steps=4, reduction="sum"),
}
"""What made the files: each trained on the first two micro-batches of the six in `finish`, then on the others."""


def finish(name, model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if name == "scaled" else None
    assert optimizer.micro_batches == 2
    for x, y in split(regression(15), [2, 3, 1, 4, 2, 3])[2:]:
        optimizer.zero_grad()
        loss = mse(model, x, y) * (len(x) if name == "scaled" else 1)
        optimizer.backward(loss if scaler is None else scaler.scale(loss), weight=len(x))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    optimizer.flush()
    assert optimizer.updates == 2
    return list(model.parameters())


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["state_dict", "pickle"])
def test_a_file_of_0_1_goes_on_exactly(kind, name):
    saved = torch.load(FILES / f"{name}.pt", weights_only=True)
    if kind == "pickle":
        model, optimizer = pickle.loads((FILES / f"{name}.pickle").read_bytes())
    else:
        model = network(seed=99)
        optimizer = OPTIMIZERS[name](model.parameters())
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    torch.testing.assert_close(finish(name, model, optimizer), saved["end"], rtol=1e-12, atol=0)
