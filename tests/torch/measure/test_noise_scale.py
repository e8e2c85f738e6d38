"""The noise scale, measured while training on a problem whose noise scale is known, and windows that follow it."""

import math

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.torch.optimizer.loops import train

GRADIENT = torch.tensor([1.0, -0.5, 0.25, 0.0, 0.5], dtype=torch.float64)
NOISE = torch.tensor([4.0, 1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
TRUE = float(NOISE.sum() / GRADIENT.square().sum())
"""A row's gradient is a draw from N(GRADIENT, NOISE), wherever the parameters are."""
UPDATES = 400
FEW = 30
"""Updates of the same rows that are measured in another way: what they find is the same number."""
SIZES = 3, 2, 4, 1


class Linear(nn.Module):
    """Its mean output over rows has those rows' mean as gradient."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.head, self.tail = nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2, dtype=dtype))

    def forward(self, x):
        x = x.to(self.head.dtype)
        return x[:, :3] @ self.head + x[:, 3:] @ self.tail


def rows(sizes, seed=0, noise=1.0):
    """Micro-batches of so many rows each, whose noise is that multiple."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(size, 5, dtype=torch.float64, generator=generator) for size in sizes]
    return [GRADIENT + own * (NOISE * noise).sqrt() for own in draws]


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


def by_optimizer(updates, sizes=SIZES, *, weighed=True, in_batches=False, scaler=None, dtype=torch.float64, **options):
    model, loss = Linear(dtype), total if options.get("reduction") == "sum" else mean
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), len(sizes), noise_scale=True, **options)
    batches = [(x,) for x in rows(sizes * updates)]
    batches = optimizer.batches(batches) if in_batches else batches
    train(model, optimizer, batches, loss=loss, weigh=len if weighed else None, scaler=scaler)
    return optimizer.noise_scale


def mean(model, x):
    return model(x).mean()


def total(model, x):
    return model(x).sum()


def by_step(updates, compute_loss=mean, scaler=None, **keywords):
    model, scaler = Linear(), scaler and torch.amp.GradScaler("cpu", init_scale=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keywords = {"compute_loss": compute_loss, "scaler": scaler, "micro_batch_size": 3, "noise_scale": True, **keywords}
    train_step = TrainStep(model, optimizer, **keywords)
    for x in rows([10] * updates):
        train_step(x)
    return train_step.noise_scale


UNWEIGHED = {"weighed": False, "sizes": (3, 3, 3, 3)}


@pytest.mark.parametrize(
    ("way", "keywords", "factor"),
    [
        (by_optimizer, {}, 1.0),
        (by_optimizer, {"weighed": False, "in_batches": True}, 1.0),
        (by_optimizer, UNWEIGHED, 3.0),
        (by_optimizer, {**UNWEIGHED, "reduction": "sum"}, 3.0),
        (by_step, {}, 1.0),
    ],
    ids=["weighed", "under batches()", "in micro-batches", "sums in micro-batches", "TrainStep"],
)
def test_it_is_measured_in_rows_or_in_micro_batches_which_it_says(way, keywords, factor):
    scale = way(UPDATES, **keywords)
    assert_measured(scale, factor=factor)
    assert (scale.unit, scale.batch_size) == (("rows", 10.0) if factor == 1.0 else ("micro-batches", 4.0))
    assert ("To measure it in rows" in scale.advice()) == (factor != 1.0)


def test_a_loss_scale_that_grows_inside_windows_does_not_bend_it():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=50)
    scale = by_optimizer(UPDATES, (3, 3, 3), scaler=scaler, dtype=torch.float32)
    assert scaler.get_scale() > 2.0**10
    assert_measured(scale)


ALIKE = {
    "sum": (by_optimizer, {"reduction": "sum"}),
    "clipped": (by_optimizer, {"clip_grad_norm": 0.1}),
    "skip_window": (by_optimizer, {"nonfinite": "skip_window"}),
    "TrainStep, clipped": (by_step, {"clip_grad_norm": 0.1}),
    "TrainStep, sum": (by_step, {"compute_loss": total, "reduction": "sum"}),
    "TrainStep, weighed sum": (by_step, {"compute_loss": total, "reduction": "sum", "weight": len}),
    "TrainStep, sum and weight": (by_step, {"compute_loss": lambda m, x: (total(m, x), len(x)), "reduction": "sum"}),
    "TrainStep, mean and weight": (by_step, {"compute_loss": lambda m, x: (mean(m, x), len(x))}),
    "TrainStep, by name": (by_step, {"compute_loss": lambda m, x: dict.fromkeys("ab", (mean(m, x) / 2, len(x)))}),
    "TrainStep, weighed": (by_step, {"weight": lambda x: 7.0 * len(x)}),
    "TrainStep, scaled": (by_step, {"scaler": 2.0**10}),
}


@pytest.mark.parametrize(("way", "keywords"), ALIKE.values(), ids=ALIKE)
def test_what_the_loss_is_and_options_leave_what_is_measured(way, keywords):
    assert same(way(FEW, **keywords), way(FEW))


def test_the_train_step_leaves_out_rows_that_weigh_nothing():
    model = nn.Linear(5, 2).double()
    sgd, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    train_step = TrainStep(model, sgd, loss_fn=loss_fn, micro_batch_size=2, noise_scale=True)
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.tensor([-100, -100, 0, 1, 1, 0, -100, 1])
    for _ in range(5):
        train_step(x, y)
    assert train_step.noise_scale.updates == 5
    assert math.isfinite(train_step.noise_scale.squared_gradient)


def test_it_is_measured_only_where_asked():
    model = Linear()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert by_optimizer(5, (5,)).updates == 0  # windows of one micro-batch tell nothing
    for source in (optimizer, TrainStep(model, optimizer.inner, compute_loss=mean)):
        with pytest.raises(ValueError, match="noise_scale=True"):
            _ = source.noise_scale
    for make in (lambda: TrainStep(model, optimizer.inner, compute_loss=mean, noise_scale="layer_norm"),
                 lambda: Optimizer(optimizer.inner, 2, noise_scale="layer_norm")):  # fmt: skip
        with pytest.raises(ValueError, match="must be True or False. Received: noise_scale='layer_norm'"):
            make()


def test_a_discarded_window_leaves_nothing_behind():
    model = Linear()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2, noise_scale=True)
    outlier, *others = [(x,) for x in (torch.full((2, 5), 1e6, dtype=torch.float64), *rows([2] * 100))]
    train(model, optimizer, [outlier], loss=mean, weigh=len)
    optimizer.discard()
    train(model, optimizer, others, loss=mean, weigh=len)
    assert optimizer.noise_scale.updates == 50
    assert optimizer.noise_scale.trace < 100


def test_windows_follow_it_where_the_loop_sets_their_length():
    """As docs/noise_scale.md has it."""
    model = Linear()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2, noise_scale=True)
    for x in optimizer.batches(rows([4] * 400, noise=40.0)):
        optimizer.zero_grad()
        mean(model, x).backward()
        optimizer.step()
        if optimizer.updated and optimizer.updates % 30 == 0:
            low, _ = optimizer.noise_scale.last(30, 0.8).interval
            if low > 2 * 4 * optimizer.steps:
                optimizer.steps = min(2 * optimizer.steps, 8)
    assert optimizer.steps >= 4
