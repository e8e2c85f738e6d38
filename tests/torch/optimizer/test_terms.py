"""Losses that come by name: the window's update is that of the sum of their means, each over its own weights.

Windows that go on from checkpoints, under a GradScaler whose scale moves or finds an overflow in one of the losses, and
clipped ones are the random programs' (tests/fuzz: `way="names"`).
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error
from tests.torch.optimizer.loops import assert_same, parts, scaler_of, wrapped
from tests.torch.problems import join, sgd

pytestmark = pytest.mark.usefixtures("float64")


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 7)
        self.a, self.b = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.a(hidden), self.b(hidden)


DATA = [(x, y.argmax(1)) for x, y in parts([4, 7, 2, 5, 6])]
DATA[1][1].fill_(1)  # the first loss ignores all of it


def losses(model, x, y):
    a, b = model(x)
    return {
        "ignores 1": (F.cross_entropy(a, y, ignore_index=1), (y != 1).sum()),
        "rows": (b.square().mean(), len(x)),
        "rare": (3 * F.cross_entropy(b, y, ignore_index=0), int((y != 0).sum())),
    }


def with_heads(make=sgd, steps=3, **keywords):
    """A model, its wrapped optimizer, and the losses of a micro-batch."""
    model, optimizer = wrapped(make, Heads(), steps=steps, **keywords)
    return model, optimizer, losses(model, *DATA[0])


def plain(model, optimizer, window, losses=losses):
    """An ordinary step on the window's rows. Returns its losses."""
    x, y = join(window)
    optimizer.zero_grad()
    found = {name: loss for name, (loss, weight) in losses(model, x, y).items() if weight > 0}
    trained = sum(loss for loss in found.values() if loss.requires_grad)
    (trained + 0 * sum(outputs.sum() for outputs in model(x))).backward()  # what weighs nothing is 0
    optimizer.step()
    return {name: loss.detach() for name, loss in found.items()}


def test_a_sum_for_each_loss_but_the_first_and_none_for_one():
    def numbers(value):
        nested = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return value.numel() if isinstance(value, torch.Tensor) else sum(map(numbers, nested))

    model, optimizer, found = with_heads()
    size = sum(p.numel() for p in model.parameters())
    empty = numbers(optimizer.state_dict()["gradaccum"])
    for terms, copies in ((found, 3), ({"rows": losses(model, *DATA[0])["rows"]}, 1)):
        optimizer.backward(terms)
        optimizer.step()
        assert numbers(optimizer.state_dict()["gradaccum"]) - empty <= copies * size + 10
        optimizer.discard()
        assert numbers(optimizer.state_dict()["gradaccum"]) == empty


@pytest.mark.parametrize("window", [DATA[:2], DATA[1:2]])
def test_losses_that_weigh_nothing_and_those_of_one_graph_one_after_the_other(window):
    model, optimizer, _ = with_heads(steps=len(window))
    before = Heads()
    for x, _ in window:
        optimizer.backward({"ignores 1": losses(model, x, torch.ones(len(x), dtype=torch.long))["ignores 1"]})
        optimizer.step()
    assert not optimizer.updated
    assert_same(model, before, 0)
    plain(before, sgd(before.parameters()), window)
    for x, y in window:
        for name, term in losses(model, x, y).items():
            optimizer.backward({name: term}, retain_graph=True)
        optimizer.step()
    assert_same(model, before)


@pytest.mark.parametrize("first", [True, False])
def test_detached_losses_are_averaged_beside_others(first):
    """In a micro-batch in which the losses that train weigh nothing, too."""

    def some(model, x, y):
        found = losses(model, x, y)
        metric = {"metric": (found["rows"][0].detach(), len(x))}
        return {**(metric if first else {}), "ignores 1": found["ignores 1"], **metric}

    (model, optimizer, _), reference = with_heads(steps=len(DATA)), Heads()
    x, y = join(DATA)
    expected = some(reference, x, y)
    expected["ignores 1"][0].backward()
    sgd(reference.parameters()).step()
    for batch in [DATA[1], DATA[0], *DATA[2:]]:  # in the first one "ignores 1" weighs nothing
        optimizer.backward(some(model, *batch))
        optimizer.step()
    assert_same(model, reference)
    assert set(optimizer.losses) == set(expected)
    for name, mean in optimizer.losses.items():
        assert relative_error([mean], [expected[name][0]]) <= FLOAT64


def test_the_graph_is_gone_after_the_last_of_them():
    _, optimizer, found = with_heads()
    optimizer.backward(found)
    for loss, _ in found.values():
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


# What is refused, or named.


WAYS = {
    "terms": lambda model, optimizer: optimizer.backward(losses(model, *DATA[0])),
    "single": lambda model, optimizer: optimizer.backward(losses(model, *DATA[0])["rows"][0], weight=4),
    "plain": lambda model, optimizer: losses(model, *DATA[0])["rows"][0].backward(),
}


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(("first", "second"), [("terms", "single"), ("terms", "plain"), ("terms", "terms")])
@pytest.mark.parametrize("turned", [False, True])
def test_single_losses_and_losses_by_name_in_one_window_are_refused(first, second, turned, stepped, watched):
    model, optimizer, _ = with_heads()
    for _ in range(0 if watched else 2 * optimizer.steps):
        WAYS["plain"](model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    first, second = (WAYS[second], WAYS[first]) if turned else (WAYS[first], WAYS[second])
    refused = pytest.raises(WindowError, match="others as a single loss")
    if first is second:
        refused = nullcontext() if stepped else pytest.raises(ValueError, match="came twice in one micro-batch")
    with refused:
        first(model, optimizer)
        if stepped:
            optimizer.step()
        second(model, optimizer)
        optimizer.step()
    optimizer.discard()
    second(model, optimizer)
    optimizer.step()


def unscaled(optimizer, found, steps=1):
    scaler, optimizer.steps = scaler_of(512.0), steps
    for _ in range(steps):
        optimizer.backward({n: (scaler.scale(loss), weight) for n, (loss, weight) in found.items()}, retain_graph=True)
        if optimizer.closes_next:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def in_batches(optimizer, found):
    for _ in optimizer.batches(DATA, weight=lambda batch: 3):
        optimizer.backward(found)


@pytest.mark.parametrize(
    ("keywords", "run", "error", "says"),
    [
        ({"nonfinite": "skip_micro_batch"}, None, ValueError, "it can't be combined with sharded models"),
        ({"noise_scale": True}, None, ValueError, "it can't be combined with sharded models"),
        ({}, lambda optimizer, found: optimizer.backward(found, weight=4), ValueError, "pass no other weight"),
        ({}, in_batches, ValueError, "pass no other weight to backward"),
        ({}, unscaled, WindowError, "Named losses have several sums of gradients"),
        ({}, lambda *given: unscaled(*given, steps=3), WindowError, "Named losses have several sums of gradients"),
    ],
    ids=["skip_micro_batch", "noise_scale", "a weight", "a weight of batches()", "unscale_", "unscale_ after others"],
)
def test_losses_by_name_are_refused_with(keywords, run, error, says):
    _, optimizer, found = with_heads(**keywords)
    with pytest.raises(error, match=says):
        run(optimizer, found) if run else optimizer.backward(found)


def test_one_loss_by_name_may_be_unscaled_in_the_first_micro_batch():
    """Before the wrapper has seen the scaler's scale."""

    def only(model, x, y):
        return {"rows": (sum(head.square().mean() for head in model(x)), len(x))}

    model, optimizer, _ = with_heads()
    reference = Heads()
    unscaled(optimizer, only(model, *DATA[0]))
    plain(reference, sgd(reference.parameters()), DATA[:1], only)
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


def test_a_micro_batch_of_nothing_but_detached_losses_is_named(caplog):
    _, optimizer, found = with_heads()
    optimizer.backward({name: (loss.detach(), weight) for name, (loss, weight) in found.items()})
    optimizer.step()
    assert "whose loss reached none of the parameters" in caplog.text


def test_an_edit_of_the_open_sum_is_seen():
    model, optimizer, found = with_heads()
    optimizer.backward(found)
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.backward(losses(model, *DATA[2]))
    with pytest.raises(WindowError, match="edited"):
        optimizer.step()
