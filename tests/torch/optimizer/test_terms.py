"""Losses that come by name: the window's update is that of the sum of their means, each over its own weights.

Windows that go on from checkpoints, under a GradScaler whose scale moves or finds an overflow in one of the losses, and
clipped ones are the random programs' (tests/fuzz: `way="names"`).
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error
from tests.torch.optimizer.loops import assert_same, heads, scaler_of, wrapped
from tests.torch.problems import join, mse, regression, sgd
from tests.torch.train_step.test_terms import Tagger, batches, losses

pytestmark = pytest.mark.usefixtures("float64")


DATA = [batches(1, rows)[0] for rows in (4, 7, 2, 5, 6)]
DATA[1][1].fill_(-100)  # no token of it counts


def with_heads(make=sgd, steps=3, **keywords):
    """A model, its wrapped optimizer, and the losses of a micro-batch."""
    model, optimizer = wrapped(make, Tagger(), steps=steps, **keywords)
    return model, optimizer, losses(model, *DATA[0])


def test_a_sum_for_each_loss_but_the_first_and_none_for_one():
    def numbers(value):
        nested = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return value.numel() if isinstance(value, torch.Tensor) else sum(map(numbers, nested))

    model, optimizer, found = with_heads()
    size = sum(p.numel() for p in model.parameters())
    empty = numbers(optimizer.state_dict()["gradaccum"])
    for terms, copies in ((found, 3), ({"z": losses(model, *DATA[0])["z"]}, 1)):
        optimizer.backward(terms)
        optimizer.step()
        assert numbers(optimizer.state_dict()["gradaccum"]) - empty <= copies * size + 10
        optimizer.discard()
        assert numbers(optimizer.state_dict()["gradaccum"]) == empty


@pytest.mark.parametrize("first", [True, False])
def test_detached_losses_are_averaged_beside_others(first):
    """In a micro-batch in which the losses that train weigh nothing, too."""

    def some(model, *batch):
        found = losses(model, *batch)
        metric = {"metric": (found["z"][0].detach(), len(batch[0]))}
        return {**(metric if first else {}), "tokens": found["tokens"], **metric}

    (model, optimizer, _), reference = with_heads(steps=len(DATA)), Tagger()
    expected = some(reference, *join(DATA))
    expected["tokens"][0].backward()
    sgd(reference.parameters()).step()
    for batch in [DATA[1], DATA[0], *DATA[2:]]:  # in the first one "tokens" weighs nothing
        optimizer.backward(some(model, *batch))
        optimizer.step()
    assert_same(model, reference)
    assert set(optimizer.losses) == set(expected)
    for name, mean in optimizer.losses.items():
        assert relative_error([mean], [expected[name][0]]) <= FLOAT64


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_one_loss_looks_a_table_up_and_another_uses_the_whole_of_it(names):
    """One sum is sparse, the other dense."""
    torch.manual_seed(0)
    table, plain = (nn.Embedding(9, 3, sparse=True) for _ in range(2))
    plain.load_state_dict(table.state_dict())

    def terms(table, index):
        found = {"a": (table(index).square().mean(), len(index)), "b": (table.weight.square().sum(), len(index))}
        return {name: found[name] for name in names}

    optimizer = wrapped(lambda parameters: torch.optim.SGD(parameters, lr=0.1), table, steps=2)[1]
    data = torch.randint(9, (12, 4))
    for index in data.split([1, 3, 4, 4]):
        optimizer.backward(terms(table, index))
        optimizer.step()
        optimizer.zero_grad()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for index in data.split([4, 8]):
        other.zero_grad()
        sum(loss for loss, _ in terms(plain, index).values()).backward()
        other.step()
    assert_same(table, plain)


def test_the_graph_is_gone_after_the_last_of_them():
    _, optimizer, found = with_heads()
    optimizer.backward(found)
    for loss, _ in found.values():
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


WAYS = {
    "terms": lambda model, optimizer: optimizer.backward(losses(model, *DATA[0])),
    "single": lambda model, optimizer: optimizer.backward(losses(model, *DATA[0])["z"][0], weight=4),
    "plain": lambda model, optimizer: losses(model, *DATA[0])["z"][0].backward(),
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

    def only(model, x, *_):
        return {"rows": (sum(head.square().mean() for head in model(x)), len(x))}

    (model, optimizer, _), reference = with_heads(), Tagger()
    unscaled(optimizer, only(model, *DATA[0]))
    only(reference, *DATA[0])["rows"][0].backward()
    sgd(reference.parameters()).step()
    assert_same(model, reference)


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


def test_a_parameter_that_nothing_reaches_has_no_gradient_in_a_window_that_goes_on_under_a_grad_scaler():
    """The scaler asks for a gradient to look at, which isn't there in `p.grad` of the first micro-batch then."""

    def trained(saves):
        torch.manual_seed(0)
        model, optimizer = wrapped(sgd, heads(3), steps=2)
        scaler = scaler_of(4.0)
        for update, head in enumerate([0, 1, 2, 1]):  # in the second window nothing leads to head 0
            x, y = regression(3, seed=update)
            optimizer.zero_grad()
            loss = scaler.scale(mse(model[head], x.double(), y.double()))
            optimizer.backward({head: (loss, 3)})
            scaler.step(optimizer)
            scaler.update()
            if saves and not optimizer.updated:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.discard()
                optimizer = wrapped(sgd, model, steps=2)[1]
                optimizer.load_state_dict(state)
        return model

    assert_same(trained(saves=True), trained(saves=False))
