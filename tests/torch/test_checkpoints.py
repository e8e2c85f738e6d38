"""Checkpoints run their modules once more in backward, which move their buffers once more, as in the large batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from gradaccum.torch import TrainStep, chunked
from tests.reference import FLOAT64, relative_error
from tests.torch.problems import Does, Empties, sgd

pytestmark = pytest.mark.parametrize("reentrant", [False, True])


def average(m, x):
    x = m.linear(x)
    outputs = x - m.center
    with torch.no_grad():
        m.center.mul_(0.9).add_(0.1 * x.mean(0))
    return outputs


def made(m, x):
    if getattr(m, "center", None) is None:
        m.register_buffer("center", torch.zeros(6, dtype=x.dtype))
    return average(m, x)


def begun(m, x):
    """The first call takes where it begins from a buffer, which it deletes."""
    if "init" in m._buffers:
        with torch.no_grad():
            m.center.copy_(m.init)
        del m.init
    return average(m, x)


def statistics():
    norm = nn.BatchNorm1d(6)
    norm.running_mean.fill_(0.3)
    norm.running_var.fill_(2.0)
    return nn.Sequential(nn.Linear(6, 6, bias=False), norm)


MOVING = {
    "a power iteration": lambda: spectral_norm(nn.Linear(6, 6)),
    "a moving average": lambda: Does(average, linear=nn.Linear(6, 6), center=torch.zeros(6)),
}
ONCE_MADE = {
    "a moving average, made by the first pass": lambda: Does(made, linear=nn.Linear(6, 6)),
    "one that begins with another, which it deletes": lambda: Does(
        begun, linear=nn.Linear(6, 6), center=torch.zeros(6), init=torch.full((6,), 0.3)
    ),
    "one that was None": lambda: Empties(made, linear=nn.Linear(6, 6), center=None),
}
moving = pytest.mark.parametrize("make", MOVING.values(), ids=MOVING)


def checkpointed(inside, reentrant, norm=None):
    again = Does(lambda m, x: checkpoint(m.inside, x, use_reentrant=reentrant), inside=inside)
    layers = [nn.Linear(4, 6), nn.Tanh(), norm or nn.Identity(), again, nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def batch():
    return torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))


def assert_same(model, plain):
    assert relative_error([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]) <= FLOAT64
    assert relative_error([*model.parameters()], [*plain.parameters()]) <= FLOAT64
    assert relative_error([*model.buffers()], [*plain.buffers()]) <= FLOAT64


@moving
@pytest.mark.parametrize("place", [0, 1, 2])
def test_micro_batches_of_a_torch_nn_loss_that_weigh_nothing_run_again_too(make, reentrant, place):
    plain = checkpointed(make(), reentrant)
    model = copy.deepcopy(plain)
    step = TrainStep(model, sgd(model.parameters()), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=4)
    other = sgd(plain.parameters())
    for _ in range(3):
        x, y = batch()
        y[4 * place : 4 * place + 4] = -100
        step(x, y)
        other.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        other.step()
        assert_same(model, plain)


@moving
@pytest.mark.parametrize("counts", [[0, 1, 1], [1, 0, 0], [1, 0, 1]], ids=str)
def test_a_loss_that_weighs_nothing_runs_none_again_to_which_another_leads(make, reentrant, counts):
    def two(model, x, y):
        outputs, valid = model(x), (y >= 0).sum()
        entropy = F.cross_entropy(outputs, y, reduction="sum") / valid
        return {"entropy": (entropy, valid), "norm": (outputs.square().mean(), len(x))}

    plain = checkpointed(make(), reentrant)
    model = copy.deepcopy(plain)
    step = TrainStep(model, sgd(model.parameters()), micro_batch_size=4, compute_loss=two)
    other = sgd(plain.parameters())
    for update in range(3):
        x, y = batch()
        if update:
            y[torch.tensor(counts).repeat_interleave(4) == 0] = -100
        step(x, y)
        other.zero_grad()
        sum(loss for loss, _ in two(plain, x, y).values()).backward()
        other.step()
        assert_same(model, plain)


@moving
def test_exact_batch_norm_leaves_them_as_they_are(make, reentrant):
    plain = checkpointed(make(), reentrant, nn.BatchNorm1d(6))
    model = copy.deepcopy(plain)
    options = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 4, "batch_norm": "exact"}
    step, other = TrainStep(model, sgd(model.parameters()), **options), sgd(plain.parameters())
    for _ in range(3):
        x, y = batch()
        step(x, y)
        other.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        other.step()
        assert_same(model, plain)


IN_CHUNKS = {**MOVING, **ONCE_MADE, "frozen statistics": statistics}


@pytest.mark.parametrize("make", IN_CHUNKS.values(), ids=IN_CHUNKS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_chunked_modules_run_them_again_from_where_the_large_batch_does(make, reentrant, nested, calls):
    plain = checkpointed(make(), reentrant)
    model = copy.deepcopy(plain)
    small, optimizers = chunked(model, 4, batch_norm="frozen"), [sgd(m.parameters()) for m in (model, plain)]
    small = chunked(small, 8, batch_norm="frozen") if nested else small
    for layer in plain.modules():
        layer.train(not isinstance(layer, nn.BatchNorm1d))
    for _ in range(3):
        xs = [batch()[0] for _ in range(calls)]
        for optimizer, module in zip(optimizers, (small, plain), strict=True):
            optimizer.zero_grad()
            torch.cat([module(x) for x in xs]).std().backward()
            optimizer.step()
        assert_same(model, plain)


def test_exact_batch_norm_cuts_none_that_hide_their_graph(reentrant):
    plain = checkpointed(statistics(), reentrant)
    model, (x, y) = copy.deepcopy(plain), batch()
    options = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 4, "batch_norm": "exact", "verify": False}
    step = TrainStep(model, sgd(model.parameters()), **options)
    if reentrant:
        with pytest.raises(ValueError, match="(?s)can't be cut at its BatchNorm.*pass use_reentrant=False"):
            step(x, y)
        return
    step(x, y)
    F.cross_entropy(plain(x), y).backward()
    assert relative_error([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]) <= FLOAT64
