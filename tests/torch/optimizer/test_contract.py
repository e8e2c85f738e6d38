"""An epoch of windows makes the updates of the large batches: every optimizer, every kind of window.

Any split into any windows, by any schedule of steps, is the random programs' (tests/fuzz).
"""

import inspect
import itertools

import pytest
import torch
from torch import nn

import gradaccum.torch
from scripts.stubs import path_of, stub
from tests.reference import FLOAT32, FLOAT64, WINDOWS, windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, train, wrapped
from tests.torch.problems import adam, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("window", WINDOWS)
def test_an_epoch_of_windows_matches_the_large_batches(window, make, dtype, bound):
    torch.set_default_dtype(dtype)
    sizes, steps = WINDOWS[window]
    micro_batches = split(regression(sum(sizes)), sizes)
    model, optimizer = wrapped(make, steps=steps)
    for _ in range(2):
        train(model, optimizer, optimizer.batches(micro_batches))
    windows = windows_of(micro_batches, steps) * 2
    assert (optimizer.updates, optimizer.epoch) == (len(windows), 2)
    assert_same(model, large(windows, make), bound)


TORCH_OPTIMIZERS = sorted(
    name
    for name, member in vars(torch.optim).items()
    if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
)


@pytest.mark.parametrize("steps_first", [True, False])
@pytest.mark.parametrize("name", sorted({*TORCH_OPTIMIZERS} - {"LBFGS", "SparseAdam"}))
def test_every_torch_optimizer_by_name_matches_the_large_batches(name, steps_first):
    def model():
        torch.manual_seed(0)
        matrix = nn.Linear(5, 3, bias=False)  # Muon takes nothing else
        return matrix if name == "Muon" else nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    plain, by_name, accumulated = getattr(torch.optim, name), getattr(gradaccum.torch.optim, name), model()
    parameters = accumulated.parameters()
    optimizer = by_name(3, parameters, lr=0.01) if steps_first else by_name(parameters, lr=0.01, steps=3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer.inner, plain)
    micro_batches = parts([3, 1, 4, 2])
    train(accumulated, optimizer, itertools.chain(*(optimizer.batches(micro_batches) for _ in range(2))))
    assert_same(accumulated, large(windows_of(micro_batches, 3) * 2, lambda p: plain(p, lr=0.01), model=model()))


def test_every_torch_optimizer_is_there():
    assert set(TORCH_OPTIMIZERS) <= set(dir(gradaccum.torch.optim))
    for name in TORCH_OPTIMIZERS:
        assert "steps" in inspect.signature(getattr(gradaccum.torch.optim, name)).parameters
    with pytest.raises(AttributeError, match="NotThere"):
        gradaccum.torch.optim.NotThere  # noqa: B018


# Optimizers that are wrapped by name show the arguments of the inner one, to people and to type checkers.


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS"])
def test_a_signature_shows_the_inner_optimizers_arguments_then_the_wrappers(name):
    found = inspect.signature(getattr(gradaccum.torch.optim, name)).parameters
    inner = inspect.signature(getattr(torch.optim, name)).parameters
    assert list(found)[: len(inner) + 1] == [*inner, "steps"]
    assert {"reduction", "clip_grad_norm", "accumulate_dtype"} <= found.keys()
    assert all(found[name].default == inner[name].default for name in inner)


def test_the_stubs_are_what_torchs_own_signatures_make():
    """Otherwise: `python -m scripts.stubs`."""
    face = "gradaccum.torch.optim"
    written = path_of(face).read_text(encoding="utf-8")
    if f"torch {torch.__version__.partition('+')[0]}:" not in written:
        pytest.skip("made from another version")
    assert written == stub(face)
