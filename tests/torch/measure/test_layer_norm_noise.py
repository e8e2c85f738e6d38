"""noise_scale="layer_norm": the noise of rows, as normalization layers see it."""

import copy
import functools
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradaccum.torch
from gradaccum.torch import TrainStep
from tests.torch.optimizer.loops import by_rows, scaler_of, train
from tests.torch.problems import sgd

pytestmark = pytest.mark.usefixtures("float64")

loss_fn = nn.MSELoss()
BY_LAYERS = {"noise_scale": "layer_norm"}


class GemmaRMSNorm(nn.RMSNorm):
    """As in transformers: what it multiplies with is one more than its weight."""

    def forward(self, hidden):
        return nn.functional.rms_norm(hidden, self.normalized_shape, 1 + self.weight, self.eps)


def twice(model, x):
    for _ in range(2):  # the first is called twice
        x = x + torch.tanh(model.inner(model.first(x)))
    return model.last(model.second(x))


def without_a_call(model, x):
    """One layer's weight is used without a call of the layer."""
    return model.last.forward(model.second(x))


def on_no_row(model, x):
    """One layer is called on no row, as an expert without any."""
    return torch.cat([model.second(x), model.first(x[:0])])


def sideways(model, x):
    """Rows come second in its layers."""
    return model.first(x.transpose(0, 1)).transpose(0, 1)


class Network(nn.Module):
    def __init__(self, between=twice):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.first, self.second, self.last = nn.LayerNorm(8), nn.RMSNorm([5, 8]), GemmaRMSNorm(8)
        self.first.bias.requires_grad_(False)
        self.between = between

    def forward(self, x):
        return self.head(self.between(self, self.stem(x)).mean(1))


def weights(model):
    layers = (model.first, model.second, model.last)
    return [p for layer in layers for p in layer.parameters() if p.requires_grad]


def second_weight(model):
    return [model.second.weight]


def square(model, x, y, of=weights):
    return sum(g.square().sum().item() for g in torch.autograd.grad(loss_fn(model(x), y), of(model)))


def assert_measured(noise_scale, model, x, y, first, of=weights):
    """The mean over single rows of the first micro-batch, and the whole window."""
    (measured,) = noise_scale.measured
    single = [square(model, x[i : i + 1], y[i : i + 1], of) for i in range(first)]
    assert measured.small == pytest.approx(sum(single) / first, rel=1e-12)
    assert measured.large == pytest.approx(square(model, x, y, of), rel=1e-12)
    return measured.small_size, measured.large_size


def data(rows=20):
    torch.manual_seed(1)
    return torch.randn(rows, 5, 6), torch.randn(rows, 1)


def over(model, steps, parameters=None, **options):
    inner = sgd(parameters or model.parameters())
    return gradaccum.torch.optim.Optimizer(inner, steps, model=model, **{**BY_LAYERS, **options})


def cut(x, y, size):
    """Micro-batches of so many rows."""
    return list(zip(x.split(size), y.split(size), strict=True))


def wrapped(model, x, y, size, by="optimizer", **options):
    optimizer, batches = over(model, 3, **options), cut(x, y, size)
    if by == "backward":
        train(model, optimizer, batches, weigh=by_rows)
    else:
        train(model, optimizer, optimizer.batches(batches), scaler=scaler_of(1024.0, 1) if by == "scaler" else None)
    return optimizer


def by_step(model, x, y, size, **options):
    step = TrainStep(model, sgd(model.parameters()), loss_fn=loss_fn, micro_batch_size=size, **{**BY_LAYERS, **options})
    step(x, y)
    return step


WAYS = {by: functools.partial(wrapped, by=by) for by in ("optimizer", "backward", "scaler")} | {"TrainStep": by_step}


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1e-3}], ids=["plain", "clipped"])
@pytest.mark.parametrize("way", WAYS)
def test_it_measures_the_gradient_of_each_row_of_the_first_micro_batch_and_that_of_the_window(way, options):
    (x, y), model = data(), Network()  # windows of 8, 8 and 4, or 7, 7 and 6
    reference = copy.deepcopy(model)
    found = WAYS[way](model, x, y, 8, **options)
    assert assert_measured(found.noise_scale, reference, x, y, 7 if way == "TrainStep" else 8) == (1, 20)


def test_a_window_of_one_micro_batch_is_measured_and_weights_may_count_tokens():
    (x, y), model = data(8), Network()
    expected, optimizer = square(model, x, y), over(model, 1)
    for _ in range(2):
        train(model, optimizer, [(x, y)], weigh=lambda *batch: 40)
    first, _ = optimizer.noise_scale.measured
    assert (first.small_size, first.large_size) == (5, 40)
    assert first.large == pytest.approx(expected, rel=1e-12)


def test_a_layer_that_is_not_called_and_other_optimizers_weights_count_in_neither_of_the_two_gradients():
    """Others' gradients are not divided at the window's end."""
    (x, y), model = data(8), Network(without_a_call)
    reference = copy.deepcopy(model)
    assert_measured(by_step(model, x, y, 4).noise_scale, reference, x, y, 4, second_weight)
    model = Network()
    reference, own = copy.deepcopy(model), [*model.stem.parameters(), *model.second.parameters()]
    optimizer = over(model, 2, own)
    train(model, optimizer, cut(x, y, 4))
    assert_measured(optimizer.noise_scale, reference, x, y, 4, second_weight)


def test_windows_to_which_another_backward_pass_has_added_are_left_out_with_a_line(caplog):
    (x, y), model = data(8), Network()
    optimizer = over(model, 2)
    for others in (slice(0), slice(4, 8), slice(0, 8), slice(0)):  # of another pass: none, as many, other ones, none
        for half in (slice(0, 4), slice(4, 8)):
            optimizer.zero_grad()
            if others.stop and half.start == 0:
                torch.autograd.grad(loss_fn(model(x[others]), y[others]), weights(model))
            loss_fn(model(x[half]), y[half]).backward()
            optimizer.step()
    assert optimizer.noise_scale.updates == 2
    assert "2 of 4 windows are left out of the noise scale" in caplog.text


def test_it_leaves_the_model_as_it_was_and_copies_and_pickles_tell_nobody():
    (x, y), model = data(8), Network()
    optimizer = over(model, 2)
    train(model, optimizer, [(x, y)])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_fn(other(x), y).backward()
    train(model, optimizer, [(x, y)])
    assert optimizer.noise_scale.updates == 1
    del optimizer
    gc.collect()
    assert not any(module._forward_hooks for module in model.modules())


def sharded():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        TrainStep(model := fully_shard(Network()), sgd(model.parameters()), loss_fn=loss_fn, **BY_LAYERS)
    finally:
        dist.destroy_process_group()


SKIPS = {"nonfinite": "skip_micro_batch"}
REFUSED = {
    "rows second": (lambda: by_step(Network(sideways), *data(), 8), "Received: 5 there, and a micro-batch of 7 rows"),
    "no row": (lambda: by_step(Network(on_no_row), *data(8), 4), "0 there, and 4 in another layer"),
    "under batches()": (
        lambda: wrapped(Network(sideways), *data(), 8),
        "Received: 5 there, and a micro-batch of 8 rows",
    ),
    "no layer": (lambda: by_step(nn.Linear(6, 1), *data(), 8), "the model has no LayerNorm or RMSNorm"),
    "a word": (lambda: over(Network(), 2, noise_scale="rows"), "must be a bool or 'layer_norm'. Received"),
    "no model": (lambda: gradaccum.torch.optim.Optimizer(sgd(Network().parameters()), 2, **BY_LAYERS), "Pass `model`"),
    "skip_micro_batch": (lambda: over(Network(), 2, **SKIPS), '"skip_micro_batch" keeps the sum elsewhere'),
    "sharded": (sharded, "in a sharded model each rank has only a part"),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_measure_is_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said):
        make()
