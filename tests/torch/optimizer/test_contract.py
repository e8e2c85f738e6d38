"""An epoch of windows makes the updates of the large batches: every optimizer, every kind of window."""

import inspect

import pytest
import torch
from torch import nn

import gradaccum.torch
from scripts.stubs import path_of, stub
from tests.reference import FLOAT32, FLOAT64, WINDOWS, relative_error, torch_updates, windows_of
from tests.torch.optimizer.loops import assert_same, wrapped
from tests.torch.problems import adam, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

INNER = {
    "SGD with momentum": sgd,
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": adam,
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.1),
}


def accumulate(model, optimizer, micro_batches, epochs=2, loss=mse):
    for _ in range(epochs):
        for batch in optimizer.batches(micro_batches):
            optimizer.zero_grad()
            loss(model, *batch).backward()
            optimizer.step()


def large(model, optimizer, micro_batches, steps, epochs=2, loss=mse):
    batches = [join(window) for window in windows_of(micro_batches, steps)] * epochs
    torch_updates(model, optimizer, batches, loss)
    return len(batches)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
@pytest.mark.parametrize("window", WINDOWS)
def test_an_epoch_of_windows_matches_the_large_batches(window, make, dtype, bound):
    torch.set_default_dtype(dtype)
    sizes, steps = WINDOWS[window]
    micro_batches = split(regression(sum(sizes)), sizes)
    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(make(accumulated.parameters()), steps=steps)
    accumulate(accumulated, optimizer, micro_batches)
    updates = large(expected, make(expected.parameters()), micro_batches, steps)
    assert optimizer.updates == updates
    assert optimizer.epoch == 2
    assert relative_error(accumulated.parameters(), expected.parameters()) <= bound


TORCH_OPTIMIZERS = sorted(
    name
    for name, member in vars(torch.optim).items()
    if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
)


@pytest.mark.parametrize("steps_first", [True, False])
@pytest.mark.parametrize("name", sorted({*TORCH_OPTIMIZERS} - {"LBFGS", "SparseAdam"}))
def test_every_torch_optimizer_by_name_matches_the_large_batches(name, steps_first, float64):
    sizes = [3, 1, 4, 2]
    micro_batches = split(regression(sum(sizes)), sizes)
    accumulated, expected = network(), network()
    if name == "Muon":  # takes matrices only
        accumulated, expected = (nn.Sequential(nn.Linear(5, 3, bias=False)) for _ in "ab")
        expected.load_state_dict(accumulated.state_dict())
    wrapped = getattr(gradaccum.torch.optim, name)
    parameters = accumulated.parameters()
    optimizer = wrapped(3, parameters, lr=0.01) if steps_first else wrapped(parameters, lr=0.01, steps=3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer.inner, getattr(torch.optim, name))
    accumulate(accumulated, optimizer, micro_batches)
    large(expected, getattr(torch.optim, name)(expected.parameters(), lr=0.01), micro_batches, 3)
    assert_same(accumulated, expected)


def test_every_torch_optimizer_is_there():
    assert set(TORCH_OPTIMIZERS) <= set(dir(gradaccum.torch.optim))
    for name in TORCH_OPTIMIZERS:
        assert "steps" in inspect.signature(getattr(gradaccum.torch.optim, name)).parameters
    with pytest.raises(AttributeError, match="NotThere"):
        gradaccum.torch.optim.NotThere  # noqa: B018


def test_a_callable_schedule_is_asked_with_epoch_and_update(float64):
    asked = []

    def steps(epoch, update):
        asked.append((epoch, update))
        return 1 + update

    model, optimizer = wrapped(steps=steps)
    accumulate(model, optimizer, split(regression(12), [2] * 6))
    # windows of 1, 2 and 3 in the first epoch; then 4, and the 2 that are left of a window of 5
    assert optimizer.updates == 5
    assert list(dict.fromkeys(asked)) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]


# Optimizers that are wrapped by name show the arguments of the inner one, to people and to type checkers.


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS"])
def test_a_signature_shows_the_inner_optimizers_arguments_then_the_wrappers(name):
    found = inspect.signature(getattr(gradaccum.torch.optim, name)).parameters
    inner = inspect.signature(getattr(torch.optim, name)).parameters
    assert list(found)[: len(inner)] == list(inner)
    assert list(found)[len(inner)] == "steps"
    assert {"reduction", "clip_grad_norm", "accumulate_dtype"} <= found.keys()
    assert all(found[name].default == inner[name].default for name in inner)


def test_the_stubs_are_what_torchs_own_signatures_make():
    """Otherwise: `python -m scripts.stubs`."""
    face = "gradaccum.torch.optim"
    written = path_of(face).read_text(encoding="utf-8")
    if f"torch {torch.__version__.partition('+')[0]}:" not in written:
        pytest.skip("made from another version")
    assert written == stub(face)
