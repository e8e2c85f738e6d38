"""The noise scale, measured while training on a problem whose noise scale is known in closed form."""

import math

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.torch.optimizer.loops import step

GRADIENT = torch.tensor([1.0, -0.5, 0.25, 0.0, 0.5], dtype=torch.float64)
NOISE = torch.tensor([4.0, 1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
TRUE = float(NOISE.sum() / GRADIENT.square().sum())
"""A row's gradient is a draw from N(GRADIENT, NOISE), wherever the parameters are."""
UPDATES = 400
FEW = 30
"""Updates of the same rows that are measured in another way: what they find is the same number."""


class Linear(nn.Module):
    """Its mean output over rows has those rows' mean as gradient."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.head, self.tail = nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2, dtype=dtype))

    def forward(self, x):
        x = x.to(self.head.dtype)
        return x[:, :3] @ self.head + x[:, 3:] @ self.tail


def rows(count, generator):
    return GRADIENT + torch.randn(count, 5, dtype=torch.float64, generator=generator) * NOISE.sqrt()


def windows(sizes, updates=UPDATES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[rows(size, generator) for size in sizes] for _ in range(updates)]


def assert_measured(scale, updates=UPDATES, factor=1.0):
    assert scale.updates == updates
    assert 0.75 < scale.value * factor / TRUE < 1.33
    low, high = scale.interval
    assert low * factor < TRUE < high * factor
    assert high < 1.8 * low


def same(scale, expected):
    assert (scale.updates, scale.batch_size) == (expected.updates, expected.batch_size)
    found, wanted = ((one.squared_gradient, one.trace, *one.interval) for one in (scale, expected))
    return found == pytest.approx(wanted, rel=1e-9)


def trained_by_optimizer(model, sizes, *, weighed, in_batches=False, scaler=None, updates=UPDATES, **options):
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), len(sizes), noise_scale=True, **options)
    is_sum = options.get("reduction") == "sum"
    micro_batches = [x for window in windows(sizes, updates) for x in window]
    for x in optimizer.batches(micro_batches) if in_batches else micro_batches:
        optimizer.zero_grad()
        loss = model(x).sum() if is_sum else model(x).mean()
        loss = loss if scaler is None else scaler.scale(loss)
        if weighed:
            optimizer.backward(loss, weight=len(x))
        else:
            loss.backward()
        step(optimizer, scaler)
    return optimizer


def test_the_optimizer_measures_it_on_ragged_weighted_windows():
    assert_measured(trained_by_optimizer(Linear(), (3, 2, 4, 1), weighed=True).noise_scale)


@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum"}, {"clip_grad_norm": 0.1}, {"nonfinite": "skip_micro_batch"}, {"nonfinite": "skip_window"}],
    ids=str,
)
def test_the_optimizers_options_leave_what_it_measures(options):
    plain, other = (
        trained_by_optimizer(Linear(), (3, 2, 4, 1), weighed=True, updates=FEW, **how).noise_scale
        for how in ({}, options)
    )
    assert same(other, plain)


def test_under_batches_the_optimizer_knows_the_rows():
    scale = trained_by_optimizer(Linear(), (3, 2, 4, 1), weighed=False, in_batches=True).noise_scale
    assert_measured(scale)
    assert (scale.unit, scale.batch_size) == ("rows", 10.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_rows_it_counts_in_micro_batches_and_says_so(reduction):
    scale = trained_by_optimizer(Linear(), (3, 3, 3, 3), weighed=False, reduction=reduction).noise_scale
    assert_measured(scale, factor=3.0)
    assert scale.unit == "micro-batches"
    assert "To measure it in rows" in scale.advice()


@pytest.mark.parametrize("weighed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loss_scale_that_grows_inside_windows_does_not_bend_it(weighed):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=50)
    scale = trained_by_optimizer(Linear(torch.float32), (3, 3, 3), weighed=weighed, scaler=scaler).noise_scale
    assert scaler.get_scale() > 2.0**10
    assert_measured(scale, factor=1.0 if weighed else 3.0)


def mean(model, x):
    return model(x).mean()


def trained_by_step(updates, **keywords):
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_step = TrainStep(model, optimizer, micro_batch_size=3, noise_scale=True, **keywords)
    for (x,) in windows((10,), updates):
        train_step(x)
    return train_step.noise_scale


def test_the_train_step_measures_it_in_rows():
    scale = trained_by_step(UPDATES, compute_loss=mean)
    assert_measured(scale)
    assert scale.batch_size == 10


@pytest.mark.parametrize(
    "keywords",
    [
        {"compute_loss": mean, "clip_grad_norm": 0.1},
        {"compute_loss": lambda model, x: model(x).sum(), "reduction": "sum"},
        {"compute_loss": lambda model, x: model(x).sum(), "reduction": "sum", "weight": len},
        {"compute_loss": lambda model, x: (model(x).sum(), len(x)), "reduction": "sum"},
        {"compute_loss": lambda model, x: (model(x).mean(), len(x))},
        {"compute_loss": mean, "weight": lambda x: 7.0 * len(x)},
        {"compute_loss": mean, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)},
    ],
    ids=["clipped", "sum", "weighed sum", "sum and weight", "mean and weight", "weighed", "scaled"],
)
def test_the_train_step_measures_it_in_rows_whatever_the_loss_is(keywords):
    assert same(trained_by_step(FEW, **keywords), trained_by_step(FEW, compute_loss=mean))


def test_the_train_step_leaves_out_rows_that_weigh_nothing():
    model = nn.Linear(5, 2).double()
    train_step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.CrossEntropyLoss(),
        micro_batch_size=2,
        noise_scale=True,
    )
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.tensor([-100, -100, 0, 1, 1, 0, -100, 1])
    for _ in range(5):
        train_step(x, y)
    assert train_step.noise_scale.updates == 5
    assert math.isfinite(train_step.noise_scale.squared_gradient)


def test_it_is_measured_only_where_asked():
    model = Linear()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    with pytest.raises(ValueError, match="noise_scale=True"):
        _ = optimizer.noise_scale
    with pytest.raises(ValueError, match="noise_scale=True"):
        _ = TrainStep(model, optimizer.inner, compute_loss=mean).noise_scale


def test_windows_of_one_micro_batch_tell_nothing():
    scale = trained_by_optimizer(Linear(), (5,), weighed=True, updates=5).noise_scale
    assert scale.updates == 0
    assert "Not measured yet" in scale.advice()


def test_a_discarded_window_leaves_nothing_behind():
    model = Linear()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2, noise_scale=True)
    for x in (torch.full((2, 5), 1e6, dtype=torch.float64), *(x for w in windows((2, 2), 50) for x in w)):
        optimizer.zero_grad()
        optimizer.backward(model(x).mean(), weight=2)
        optimizer.step()
        if x[0, 0] == 1e6:
            optimizer.discard()
    assert optimizer.noise_scale.updates == 50
    assert optimizer.noise_scale.trace < 100


def test_measuring_changes_no_update():
    def parameters(noise_scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = Optimizer(torch.optim.Adam(model.parameters()), 3, noise_scale=noise_scale)
        for x in optimizer.batches([torch.randn(n, 5, dtype=torch.float64) for n in (4, 3, 5, 2, 1)]):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    for a, b in zip(parameters(True), parameters(False), strict=True):
        assert torch.equal(a, b)
