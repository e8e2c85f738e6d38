"""Micro-batches that weigh nothing: they change nothing, whatever else goes on in their window."""

import itertools

import pytest
import torch

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.optimizer.loops import assert_same, large, train, wrapped
from tests.torch.problems import join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")


class Scaler(torch.amp.GradScaler):
    """A GradScaler whose scale follows a script."""

    def __init__(self, scales):
        super().__init__("cpu", init_scale=scales[0])
        self.script = itertools.cycle(scales)
        next(self.script)

    def update(self, new_scale=None):
        super().update(new_scale=next(self.script))


GROWS, SHRINKS = [2.0, 4.0, 8.0, 2.0], [8.0, 8.0, 2.0]


@pytest.mark.parametrize(
    ("how", "scales"),
    [
        *(("loss.backward()", GROWS), ("optimizer.backward()", SHRINKS), ("no backward", GROWS)),
        pytest.param("loss.backward()", SHRINKS, marks=pytest.mark.slow),
        pytest.param("optimizer.backward()", GROWS, marks=pytest.mark.slow),
        pytest.param("no backward", SHRINKS, marks=pytest.mark.slow),
    ],
)
def test_a_scale_that_changes_while_the_sum_is_detached_is_applied_to_it(how, scales):
    data, sizes = regression(16), [3, 2, 1, 4, 2, 4]
    for weightless in itertools.product([False, True], repeat=4):
        model, alone = network(), network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=6)
        scaler = Scaler(scales)
        parts = [
            (*part, torch.tensor(index < 4 and weightless[index])) for index, part in enumerate(split(data, sizes))
        ]
        for x, y, skipped in optimizer.batches(parts, weight=lambda part: 0 if part[2] else len(part[0])):
            optimizer.zero_grad()
            loss = scaler.scale(mse(model, x, y))
            if how == "optimizer.backward()":
                optimizer.backward(loss)
            elif not (skipped and how == "no backward"):
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        torch_updates(alone, sgd(alone.parameters()), [join([p[:2] for p in parts if not p[2]])], mse)
        assert relative_error(model.parameters(), alone.parameters()) <= FLOAT64, weightless


@pytest.mark.parametrize("how", ["loss.backward()", "optimizer.backward()"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip_window", "skip_micro_batch"])
@pytest.mark.parametrize("weights", [[0, 3, 2], [3, 0, 2], [3, 2, 0], [0, 0, 4]])
def test_a_weightless_micro_batch_does_not_count_wherever_it_stands_though_its_loss_is_nan(how, nonfinite, weights):
    """In windows that look at all gradients and in ordinary ones."""
    model, optimizer = wrapped(steps=3, nonfinite=nonfinite)
    window = [(*regression(weight or 5, seed=index), weight) for index, weight in enumerate(weights)]

    def loss(model, x, y, weight):
        return mse(model, x, y) * (1.0 if weight else float("nan"))

    weigh = (lambda *batch: None) if how == "optimizer.backward()" else None
    train(model, optimizer, optimizer.batches(window * 6, weight=lambda part: part[2]), loss=loss, weigh=weigh)
    assert optimizer.updates == 6
    assert_same(model, large([[part[:2] for part in window if part[2]]] * 6))


def test_an_overflow_in_a_weightless_micro_batch_costs_no_update_and_no_halving():
    model, optimizer = wrapped(steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parts = [regression(2), regression(3)]
    parts[1][0][0] = float("nan")
    for x, y in optimizer.batches(parts, weight=lambda part: 0 if part[0].isnan().any() else len(part[0])):
        optimizer.zero_grad()
        scaler.scale(mse(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.updates == 1
    assert scaler.get_scale() == 8.0
