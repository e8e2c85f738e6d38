"""What a micro-batch weighs: rows, class weights, tokens, sums, nothing; and the losses that are reported."""

import copy

import pytest
import torch
from torch import nn

from gradaccum import WindowError
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error, windows_of
from tests.torch.optimizer.loops import (
    assert_same,
    by_rows,
    heads,
    large,
    parts,
    scaler_of,
    step,
    train,
    values,
    wrapped,
)
from tests.torch.problems import Does, adam, join, mse, network, regression, sgd

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("weight", "error", "says"),
    [
        *((weight, ValueError, "weight=") for weight in (-1, float("nan"), float("inf"))),
        *((weight, TypeError, "weight=") for weight in ("4", True)),
        *((weight, ValueError, "A weight must be") for weight in (1e-320, 9e307, 10**400)),  # a total would overflow
    ],
    ids=lambda value: "10**400" if value == 10**400 else None,
)
def test_a_wrong_weight_is_refused_before_anything_happens(weight, error, says):
    model, optimizer = wrapped(steps=2)
    with pytest.raises(error, match=says):
        optimizer.backward(model(torch.ones(2, 5)).mean(), weight=weight)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(error, match=says):
        next(iter(optimizer.batches([torch.ones(2, 5)], weight=lambda batch: weight)))
    step = TrainStep(
        model, sgd(model.parameters()), compute_loss=lambda m, x: (m(x).mean(), weight), micro_batch_size=1
    )
    with pytest.raises(error, match="eight"):
        step(torch.ones(2, 5))


def test_different_weights_in_one_micro_batch_are_refused():
    model, optimizer = wrapped(steps=2)
    optimizer.backward(model(torch.ones(4, 5)).mean(), weight=4)
    with pytest.raises(ValueError, match="weight=3 after 4.*a denominator each use gradaccum.torch.TrainStep"):
        optimizer.backward(model(torch.ones(4, 5)).mean(), weight=3)


# Micro-batches that weigh nothing: they change nothing, whatever else goes on in their window.


def test_a_window_that_weighs_nothing_makes_no_update(caplog):
    model, optimizer = wrapped(steps=2)
    before = values(model)
    with caplog.at_level("INFO", "gradaccum"):
        train(model, optimizer, [regression(2)] * 2, loss=lambda *b: mse(*b) * float("nan"), weigh=lambda *batch: 0)
    assert (optimizer.updated, optimizer.updates) == (False, 0)
    assert "the total weight of this window" in caplog.text
    train(model, optimizer, [regression(2)], weigh=lambda *batch: 0)
    assert optimizer.flush() is False
    assert relative_error(model.parameters(), before) == 0
    assert not optimizer.inner.state


def table():
    """A model of indices, whose gradient is sparse."""
    torch.manual_seed(0)
    return Does(look_up, table=nn.Embedding(30, 3, sparse=True))


def look_up(model, index):
    return model.table(index).sum(1)


def over_rows(model, index, mask):
    """NaN over none, and its gradient, too."""
    return (model(index).square().mean(1) * mask).sum() / mask.sum()


def add_gradients(optimizer, loss, weight):
    (group,) = optimizer.param_groups
    optimizer.add_gradients(torch.autograd.grad(loss, group["params"], allow_unused=True), weight)


IN_TURN = {
    "batches": lambda optimizer, loss, weight: loss.backward(),
    "backward": lambda optimizer, loss, weight: optimizer.backward(loss, weight=weight),
    "added": add_gradients,
}


@pytest.mark.parametrize("way", IN_TURN)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_parameter_that_only_rows_of_weight_0_reach_has_no_gradient_from_that_window(way, scaled):
    """AdamW leaves it as it is; the large batch's gradient is zero there, and its weight would decay."""
    model, optimizer = wrapped(adam, heads(2), steps=3)
    plain, before, scaler = (
        copy.deepcopy(model),
        values(model[1]),
        torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled),
    )
    data = [(*batch, head) for batch, head in zip(parts(SIZES[:3]), (0, 1, 0), strict=True)]

    def weight(batch):
        return len(batch[0]) if batch[2] == 0 else 0

    for x, y, head in optimizer.batches(data, weight=weight) if way == "batches" else data:
        optimizer.zero_grad()
        loss = mse(model[head], x, y) * (float("nan") if head else 1.0)
        IN_TURN[way](optimizer, scaler.scale(loss), weight((x, y, head)))
        step(optimizer, scaler)
    assert optimizer.updates == 1
    assert all(p.grad is None for p in model[1].parameters())
    assert all(map(torch.equal, model[1].parameters(), before))
    assert_same(model[0], large([[data[0][:2], data[2][:2]]], adam, model=plain[0]))


def smoothed(model, index, mask):
    """Some rows add a penalty on the whole table, whose gradient is dense."""
    dense = (index == 8).any(1)
    loss = over_rows(model, index, mask)
    return loss + (dense * mask).sum() / mask.sum() * model.table.weight.square().sum() if dense.any() else loss


@pytest.mark.parametrize("way", IN_TURN)
def test_a_table_is_looked_up_in_some_micro_batches_and_used_whole_in_others(way):
    def make(parameters):
        return torch.optim.SGD([*parameters][:1], lr=0.1)

    model, optimizer = wrapped(make, table(), steps=3)
    torch.manual_seed(1)
    data = [(torch.randint(8, (2, 4)), torch.rand(2)) for _ in range(12)]
    for number in (1, 3, 8, 11):
        data[number][0][0, 0] = 8
    data[3][1].fill_(0)
    data[10][1].fill_(0)
    for batch in optimizer.batches(data, weight=lambda batch: batch[1].sum()) if way == "batches" else data:
        optimizer.zero_grad()
        IN_TURN[way](optimizer, smoothed(model, *batch), batch[1].sum())
        optimizer.step()
    assert_same(model, large(windows_of(data, 3), make, smoothed, table()))


@pytest.mark.parametrize("first", ["by hand", "plain"])
def test_the_loss_is_of_this_windows_losses_where_its_first_micro_batch_told_none(first):
    (model, optimizer), batches = wrapped(steps=2), parts([2, 2, 2, 2])
    train(model, optimizer, batches[:2], weigh=lambda x, y: 1)
    optimizer.zero_grad()
    if first == "plain":
        mse(model, *batches[2]).backward()
    else:
        optimizer.add_gradients(torch.autograd.grad(mse(model, *batches[2]), [*model.parameters()]), weight=1)
    optimizer.step()
    loss = mse(model, *batches[3])
    optimizer.backward(loss, weight=1)
    optimizer.step()
    assert torch.equal(optimizer.loss, loss.detach())


def test_gradients_by_hand_follow_a_loss_scale_that_grows_with_each_micro_batch():
    """No backward pass of the model says that another one begins."""
    (model, optimizer), scaler = wrapped(steps=len(SIZES)), scaler_of(8.0, 1)
    for batch in parts(SIZES):
        twin = copy.deepcopy(model)
        gradients = torch.autograd.grad(scaler.scale(mse(twin, *batch)), [*twin.parameters()])
        optimizer.add_gradients(gradients, weight=len(batch[0]))
        scaler.step(optimizer)
        scaler.update()
    assert_same(model, large([parts(SIZES)]))


def test_a_hook_that_writes_to_a_losss_gradient_writes_to_that_alone():

    def doubled(model, x, y):
        loss = mse(model, x, y)
        loss.register_hook(lambda gradient: gradient.mul_(2))
        return loss

    model, optimizer = wrapped(steps=2)
    train(model, optimizer, parts([2] * 6), loss=doubled, weigh=by_rows)
    assert_same(model, large(windows_of(parts([2] * 6), 2), loss=lambda *batch: 2 * mse(*batch)))


@pytest.mark.parametrize("own", [0, 7])
def test_a_weight_that_comes_with_the_loss_takes_the_place_of_that_of_batches(own):
    model, optimizer = wrapped(steps=2)
    for x, y in optimizer.batches(parts(SIZES), weight=lambda _: own):
        optimizer.backward(mse(model, x, y), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, large(windows_of(parts(SIZES), 2)))


def test_a_windows_first_micro_batch_that_is_cleared_and_run_again_counts_once():
    (model, optimizer), batches = wrapped(steps=2), parts([2, 3] * 4)
    for window in windows_of(batches, 2):
        before = values(model)
        for number, batch in enumerate((window[0], *window)):
            optimizer.zero_grad()
            optimizer.backward(mse(model, *batch), len(batch[0]))
            if number:
                optimizer.step()
        plain = network()
        plain.load_state_dict(dict(zip(plain.state_dict(), before, strict=True)))
        assert relative_error([optimizer.loss], [mse(plain, *join(window))]) <= FLOAT64


@pytest.mark.parametrize("begins", ["in batches()", "in a plain loop"])
def test_a_window_that_is_resumed_with_weights_of_another_kind_is_refused(begins):
    """Rows under `batches()`, 1 in a plain loop."""
    model, optimizer = wrapped(steps=4)
    batches = parts([2, 3, 4, 3])
    plain = begins == "in a plain loop"
    for number, batch in enumerate(batches if plain else optimizer.batches(batches)):
        train(model, optimizer, [batch])
        if number == 1:
            state = copy.deepcopy(optimizer.state_dict())
            break
    optimizer = wrapped(model=model, steps=4)[1]
    optimizer.load_state_dict(state)
    with pytest.raises(WindowError, match="weigh their rows, under batches.*count as 1"):
        train(model, optimizer, optimizer.batches(iter(batches[2:])) if plain else batches[2:])
    optimizer = wrapped(model=model, steps=4)[1]
    optimizer.load_state_dict(state)
    train(model, optimizer, batches[2:] if plain else optimizer.batches(iter(batches[2:])))
    assert optimizer.updates == 1


@pytest.mark.parametrize(("factor", "told"), [(1.0, 1), (0.0, 0), (float("nan"), 0)])
def test_weight_0_for_a_loss_that_is_not_0_is_told_once(factor, told, caplog):
    model, optimizer = wrapped(steps=2)
    batches = parts([2, 2, 2])
    train(model, optimizer, batches, loss=lambda *batch: mse(*batch) * factor, weigh=lambda *batch: 0)
    assert caplog.text.count("weight=max(1, n)") == told


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("divisor", "told"), [(4, 1), (3, 0), (None, 0)])
def test_a_loss_that_is_still_divided_by_steps_is_told_once(divisor, told, scaled, caplog):
    (model, optimizer), scaler = wrapped(steps=4), scaler_of(8.0) if scaled else None

    def loss(*batch):
        return mse(*batch) if divisor is None else mse(*batch) / divisor

    train(model, optimizer, parts([2] * 8), loss=loss, weigh=by_rows, scaler=scaler)
    assert caplog.text.count("just before backward()") == told
