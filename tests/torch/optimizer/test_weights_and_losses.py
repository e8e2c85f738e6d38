"""What a micro-batch weighs: rows, class weights, tokens, sums, nothing; and the losses that are reported."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error, windows_of
from tests.torch.optimizer.loops import assert_same, by_rows, large, parts, scaler_of, step, train, values, wrapped
from tests.torch.problems import Does, join, mse, network, regression, sgd

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 5]


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
@pytest.mark.parametrize(
    ("weight", "error", "says"),
    [
        *((weight, ValueError, "weight=") for weight in (-1, float("nan"), float("inf"))),
        *((weight, TypeError, "weight=") for weight in ("4", True)),
        *((weight, ValueError, "A weight must be") for weight in (1e-320, 9e307, 10**400)),  # a total would overflow
    ],
    ids=lambda value: "10**400" if value == 10**400 else None,
)
def test_a_wrong_weight_is_refused_before_anything_happens(weight, error, says, nonfinite):
    model, optimizer = wrapped(steps=2, nonfinite=nonfinite)
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
    with pytest.raises(ValueError, match="weight=3 after 4.*need names: backward"):
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


def looked_up(run, **table):
    """A model of indices: `run` looks them up in a table, whose gradient is sparse."""

    def model():
        torch.manual_seed(0)
        return Does(run, table=nn.Embedding(30, 3, sparse=True, **table), bag=nn.EmbeddingBag(30, 3, sparse=True))

    return model


def look_up(model, index):
    return model.table(index).sum(1)


def bags(model, index):
    return model.bag(index)


def either(model, index):
    """Few rows look at the other table."""
    high = (index > 26).any(1)
    outputs = model.table(index).sum(1)
    return outputs.index_add(0, high.nonzero()[:, 0], model.bag(index[high])) if high.any() else outputs


def reentrant(run, index):
    return checkpoint(run, index, torch.ones((), requires_grad=True), use_reentrant=True)


TABLES = {
    "an embedding": looked_up(look_up),
    "with padding": looked_up(look_up, padding_idx=2),
    "a bag": looked_up(bags),
    "a table that few rows look at": looked_up(either),
    "checkpointed": looked_up(lambda model, i: checkpoint(look_up, model, i, use_reentrant=False)),
    "checkpointed, reentrant": looked_up(lambda model, i: reentrant(lambda i, one: look_up(model, i) * one, i)),
    "gathered": looked_up(
        lambda model, i: torch.gather(model.table.weight, 0, i[:, :1].expand(-1, 3), sparse_grad=True).tanh()
    ),
}


def over_rows(model, index, mask):
    """NaN over none, and its gradient, too."""
    return (model(index).square().mean(1) * mask).sum() / mask.sum()


def add_gradients(optimizer, loss, weight):
    (group,) = optimizer.param_groups
    optimizer.add_gradients(torch.autograd.grad(loss, group["params"], allow_unused=True), weight)


IN_TURN = {
    "batches": lambda optimizer, loss, weight: loss.backward(),
    "backward": lambda optimizer, loss, weight: optimizer.backward(loss, weight=weight),
    "by name": lambda optimizer, loss, weight: optimizer.backward({"a": (loss, weight)}),
    "added": add_gradients,
}


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled, and cleared to zeros"])
@pytest.mark.parametrize(
    ("table", "way"),
    sorted({*itertools.product(TABLES, IN_TURN)} - {("checkpointed, reentrant", "added")}),  # torch refuses it
)
def test_rows_that_weigh_nothing_are_in_a_sparse_gradient_as_in_the_large_batchs(table, way, scaled):
    """SparseAdam's moments decay in the rows that the gradient has, of which some are zero."""

    def sparse_adam(parameters):
        return torch.optim.SparseAdam(parameters, lr=0.1)

    model, optimizer = wrapped(sparse_adam, TABLES[table](), steps=3)
    torch.manual_seed(1)
    data = [(torch.randint(30, (rows, 4)), torch.rand(rows)) for rows in (9, 3, 2) * 4]
    for number in (3, 7, 11, 10):  # a window's first micro-batch, its second, its last two
        data[number][1].fill_(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    for batch in optimizer.batches(data, weight=lambda batch: batch[1].sum()) if way == "batches" else data:
        optimizer.zero_grad(set_to_none=not scaled)
        IN_TURN[way](optimizer, scaler.scale(over_rows(model, *batch)), batch[1].sum())
        step(optimizer, scaler)
    assert_same(model, large(windows_of(data, 3), sparse_adam, over_rows, TABLES[table]()))


def smoothed(model, index, mask):
    """Some rows add a penalty on the whole table, whose gradient is dense."""
    dense = (index == 8).any(1)
    loss = over_rows(model, index, mask)
    return loss + (dense * mask).sum() / mask.sum() * model.table.weight.square().sum() if dense.any() else loss


@pytest.mark.parametrize("way", IN_TURN)
def test_a_table_is_looked_up_in_some_micro_batches_and_used_whole_in_others(way):
    def make(parameters):
        return torch.optim.SGD([*parameters][:1], lr=0.1)

    model, optimizer = wrapped(make, TABLES["an embedding"](), steps=3)
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
    assert_same(model, large(windows_of(data, 3), make, smoothed, TABLES["an embedding"]()))


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


@pytest.mark.parametrize("by_name", [False, True])
def test_a_windows_first_micro_batch_that_is_cleared_and_run_again_counts_once(by_name):
    (model, optimizer), batches = wrapped(steps=2), parts([2, 3] * 4)
    for window in windows_of(batches, 2):
        before = values(model)
        for number, batch in enumerate((window[0], *window)):
            optimizer.zero_grad()
            loss, weight = mse(model, *batch), len(batch[0])
            optimizer.backward({"a": (loss, weight)} if by_name else loss, None if by_name else weight)
            if number:
                optimizer.step()
        plain = network()
        plain.load_state_dict(dict(zip(plain.state_dict(), before, strict=True)))
        assert relative_error([optimizer.loss], [mse(plain, *join(window))]) <= FLOAT64
