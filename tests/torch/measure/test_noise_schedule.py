"""Windows of the wrapped optimizer that follow the noise scale, on a problem whose noise scale is known."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum import NoiseSchedule, WindowError
from gradaccum.torch.optim import Adam, Optimizer
from tests.reference import FLOAT64, relative_error
from tests.torch.measure.test_noise_scale import GRADIENT, NOISE, Linear

ROWS = 4
NOISY = 40.0
"""Rows' noise, as a multiple of that problem's."""


def rows(count: int, generator: torch.Generator, noise: float = NOISY) -> Tensor:
    draws = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return GRADIENT + draws * (NOISE * noise).sqrt()


def batches(count: int, noise: float = NOISY, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [rows(ROWS, generator, noise) for _ in range(count)]


def trained(optimizer: Any, model: nn.Module, data: Any) -> list[int]:
    """The length of every window."""
    lengths, count = [], 0
    for x in data:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        count += 1
        if optimizer.updated:
            lengths.append(count)
            count = 0
    return lengths


def test_windows_grow_where_the_gradient_is_noise_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Linear()
    schedule = NoiseSchedule(2, 8, every=30)
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), schedule)
    with caplog.at_level(logging.INFO, logger="gradaccum"):
        lengths = trained(optimizer, model, optimizer.batches(batches(600)))
    assert lengths[0] == 2
    assert 8 in lengths
    assert sorted(lengths[:-1]) == lengths[:-1]  # the last window is the epoch's rest
    assert "Windows of 4 micro-batches instead of 2 from here on: noise scale" in caplog.text
    assert optimizer.steps == schedule.steps == 8
    assert repr(optimizer).startswith("Optimizer(NoiseSchedule(2, 8, every=30) steps, SGD")
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), NoiseSchedule(2, 16, every=30))
    assert set(trained(optimizer, model, optimizer.batches(batches(100, noise=1e-3)))) == {2}  # a row says it all


def test_the_update_is_the_plain_one_at_the_scaled_hyperparameters() -> None:
    model = Linear()
    reference = copy.deepcopy(model)
    optimizer = Adam(
        model.parameters(), lr=0.01, betas=(0.8, 0.9), steps=NoiseSchedule(2, 8, every=30, scale_learning_rate="sqrt")
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    data = batches(200)
    lengths = trained(optimizer, model, optimizer.batches(data))
    assert len(set(lengths)) > 1
    inner, rate = torch.optim.Adam(reference.parameters()), 0.01
    start = 0
    for index, length in enumerate(lengths):
        planned = length if index < len(lengths) - 1 else optimizer.steps
        inner.param_groups[0].update(lr=rate * (planned / 2) ** 0.5, betas=(0.8 ** (planned / 2), 0.9 ** (planned / 2)))
        inner.zero_grad()
        reference(torch.cat(data[start : start + length])).mean().backward()
        inner.step()
        start, rate = start + length, rate * 0.99
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)  # the smallest window's, as scheduled
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_the_inner_optimizer_see_its_own_learning_rate(before: bool, tensor: bool) -> None:
    """A warm-up before the step, or a scheduler that goes on from what it finds behind it: neither finds it scaled."""
    model = Linear()
    reference = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01) if tensor else 0.01)
    schedule = NoiseSchedule(2, 8, scale_learning_rate="linear")
    schedule.load_state_dict({"steps": 4, "updates": 0})
    seen: list[float] = []

    def warm_up(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        seen.append(float(group["lr"]))
        if tensor:
            group["lr"].mul_(1.5)
        else:
            group["lr"] *= 1.5

    (inner.register_step_pre_hook if before else inner.register_step_post_hook)(warm_up)
    optimizer = Optimizer(inner, schedule)
    data = batches(12)
    trained(optimizer, model, optimizer.batches(data))
    plain = torch.optim.SGD(reference.parameters(), lr=0.01)
    rates = [0.01 * 1.5 ** (update + before) for update in range(3)]
    for update, rate in enumerate(rates):
        plain.param_groups[0]["lr"] = 2 * rate
        plain.zero_grad()
        reference(torch.cat(data[4 * update : 4 * update + 4])).mean().backward()
        plain.step()
    assert relative_error(model.parameters(), reference.parameters()) <= (1e-6 if tensor else FLOAT64)
    assert seen == pytest.approx([0.01, 0.015, 0.0225])
    assert float(inner.param_groups[0]["lr"]) == pytest.approx(0.01 * 1.5**3)


@pytest.mark.parametrize("stop", [40, 101, 163])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(stop: int) -> None:
    """Between decisions, in open windows, too."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return model, Optimizer(inner, NoiseSchedule(2, 16, every=30, scale_learning_rate="linear"))

    data = batches(400)
    model, optimizer = make()
    trained(optimizer, model, data[:stop])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    trained(optimizer, model, data[stop:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, other = make()
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    trained(other, resumed, data[stop:])
    assert (other.updates, other.steps) == (optimizer.updates, optimizer.steps)
    assert other.steps > 2
    for one, two in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_copy_of_the_optimizer_follows_its_own_schedule() -> None:
    model = Linear()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), NoiseSchedule(2, 8, every=30))
    copied_model, copied = copy.deepcopy((model, optimizer))
    trained(copied, copied_model, copied.batches(batches(400)))
    assert copied.steps > 2
    assert optimizer.steps == 2


def test_other_steps_end_it() -> None:
    model = Linear()
    schedule = NoiseSchedule(2, 8, every=30, scale_learning_rate="linear")
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), schedule)
    trained(optimizer, model, optimizer.batches(batches(100)))
    assert optimizer.steps > 2
    optimizer.steps = 2
    before = [p.detach().clone() for p in model.parameters()]
    data = batches(2, seed=3)
    trained(optimizer, model, optimizer.batches(data))
    mean = torch.cat(data).mean(0)
    assert (
        relative_error([b - p for b, p in zip(before, model.parameters(), strict=True)], [mean[:3], mean[3:]])
        <= FLOAT64
    )


def test_a_window_of_another_length_is_refused_without_its_schedule() -> None:
    model = Linear()
    schedule = NoiseSchedule(2, 8)
    schedule.steps = 8
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), schedule)
    model(batches(1)[0]).mean().backward()
    optimizer.step()
    state = optimizer.state_dict()
    plain = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2, noise_scale=True)
    with pytest.raises(WindowError, match="taken inside a window of 8 steps"):
        plain.load_state_dict(state)
