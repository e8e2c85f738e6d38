"""What a micro-batch weighs: rows, class weights, tokens, sums; and the losses that are reported."""

import pytest
import torch
from torch import nn

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import adam, classes, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 5]


def check(loss, weight, *, data=None, plain_loss=None, make=sgd, **options):
    """Windows of 3 and 2 micro-batches, weighed by `weight(*batch)`, against the two large batches."""
    micro_batches = split(data or classes(sum(SIZES)), SIZES)
    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(make(accumulated.parameters()), steps=3, **options)
    for batch in optimizer.batches(micro_batches):
        optimizer.zero_grad()
        optimizer.backward(loss(accumulated, *batch), weight=weight(*batch))
        optimizer.step()
    large = [join(micro_batches[:3]), join(micro_batches[3:])]
    losses = torch_updates(expected, make(expected.parameters()), large, plain_loss or loss)
    assert relative_error(accumulated.parameters(), expected.parameters()) <= FLOAT64
    assert optimizer.loss.item() == pytest.approx(losses[-1], rel=1e-12)
    assert not optimizer.loss.requires_grad
    return optimizer


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("make", [sgd, adam])
def test_class_weights_weigh_a_micro_batch_by_their_sum(make):
    check(
        lambda m, x, y: nn.functional.cross_entropy(m(x), y, weight=CLASS_WEIGHTS),
        lambda x, y: CLASS_WEIGHTS[y].sum(),
        make=make,
    )


def test_ignored_targets_weigh_nothing():
    x, y = classes(sum(SIZES))
    y[[1, 4, 5, 9]] = -100
    check(
        lambda m, x, y: nn.functional.cross_entropy(m(x), y),
        lambda x, y: int((y != -100).sum()),
        data=(x, y),
    )


@pytest.mark.parametrize("ignored", [slice(0, 3), slice(3, 4), slice(10, 15)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("through", ["backward", "batches"])
def test_an_all_ignored_micro_batch_is_skipped_though_its_loss_is_nan(ignored, through):
    x, y = classes(sum(SIZES))
    y[ignored] = -100
    micro_batches = split((x, y), SIZES)
    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(accumulated.parameters()), steps=3)

    def valid(batch):
        return (batch[1] != -100).sum().item()

    for batch in optimizer.batches(micro_batches, weight=valid if through == "batches" else None):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(accumulated(batch[0]), batch[1])
        if through == "backward":
            optimizer.backward(loss, weight=valid(batch))
        else:
            loss.backward()
        optimizer.step()
    large = [join(micro_batches[:3]), join(micro_batches[3:])]
    torch_updates(expected, sgd(expected.parameters()), large, lambda m, x, y: nn.functional.cross_entropy(m(x), y))
    assert relative_error(accumulated.parameters(), expected.parameters()) <= FLOAT64


def test_a_window_that_weighs_nothing_makes_no_update(caplog):
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    before = [p.clone() for p in model.parameters()]
    with caplog.at_level("INFO", "gradaccum"):
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(2, 5)).sum() * float("nan"), weight=0)
            optimizer.step()
    assert not optimizer.updated
    assert optimizer.updates == 0
    assert "weighs nothing" in caplog.text
    optimizer.backward(model(torch.ones(2, 5)).mean(), weight=0)
    optimizer.step()
    assert optimizer.flush() is False
    assert relative_error(model.parameters(), before) == 0
    assert not optimizer.inner.state


def test_sums_are_divided_by_the_total_weight():
    check(
        lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="sum"),
        lambda x, y: len(y),
        plain_loss=lambda m, x, y: nn.functional.cross_entropy(m(x), y),
        reduction="sum",
    )


@pytest.mark.parametrize("through", ["backward", "loss.backward"])
def test_sums_without_weights_are_divided_by_nothing(through):
    micro_batches = split(regression(6), [2, 3, 1])

    def loss(model, x, y):
        return nn.functional.mse_loss(model(x), y, reduction="sum") / 100

    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(accumulated.parameters()), steps=3, reduction="sum")
    for batch in optimizer.batches(micro_batches):
        optimizer.zero_grad()
        value = loss(accumulated, *batch)
        optimizer.backward(value) if through == "backward" else value.backward()
        optimizer.step()
    (expected_loss,) = torch_updates(expected, sgd(expected.parameters()), [join(micro_batches)], loss)
    assert relative_error(accumulated.parameters(), expected.parameters()) <= FLOAT64
    if through == "backward":
        assert optimizer.loss.item() == pytest.approx(expected_loss, rel=1e-12)
    else:
        assert optimizer.loss is None


def test_sums_are_divided_by_the_weights_of_batches():
    micro_batches = split(classes(10), [4, 1, 5])
    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(accumulated.parameters()), steps=3, reduction="sum")
    for x, y in optimizer.batches(micro_batches, weight=lambda batch: len(batch[1])):
        optimizer.zero_grad()
        nn.functional.cross_entropy(accumulated(x), y, reduction="sum").backward()
        optimizer.step()
    torch_updates(
        expected,
        sgd(expected.parameters()),
        [join(micro_batches)],
        lambda m, x, y: nn.functional.cross_entropy(m(x), y),
    )
    assert relative_error(accumulated.parameters(), expected.parameters()) <= FLOAT64


@pytest.mark.parametrize("through_batches", [True, False])
def test_a_masked_loss_is_weighed_by_its_tokens(through_batches):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(10, 6, 5, generator=generator), torch.randint(3, (10, 6), generator=generator)
    lengths = torch.tensor([6, 1, 2, 6, 1, 1, 5, 3, 1, 6])
    mask = torch.arange(6) < lengths[:, None]
    micro_batches = split((x, y, mask), [2, 4, 1, 3])

    def loss(model, x, y, mask):
        each = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(adam(accumulated.parameters()), steps=4)
    weight = (lambda batch: batch[2].sum()) if through_batches else None
    for batch in optimizer.batches(micro_batches, weight=weight):
        optimizer.zero_grad()
        value = loss(accumulated, *batch)
        value.backward() if through_batches else optimizer.backward(value, weight=batch[2].sum())
        optimizer.step()
    torch_updates(expected, adam(expected.parameters()), [join(micro_batches)], loss)
    assert relative_error(accumulated.parameters(), expected.parameters()) <= FLOAT64


def test_several_losses_of_one_micro_batch_count_it_once():
    micro_batches = split(regression(9), [2, 4, 3])

    def l1(model, x, y):
        return nn.functional.l1_loss(model(x), y)

    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(accumulated.parameters()), steps=3)
    for x, y in micro_batches:
        optimizer.zero_grad()
        optimizer.backward(mse(accumulated, x, y), weight=len(x))
        optimizer.backward(l1(accumulated, x, y))  # the same rows: the same weight
        optimizer.backward(l1(accumulated, x, y) * 2, weight=len(x))
        optimizer.step()
    (loss,) = torch_updates(
        expected,
        sgd(expected.parameters()),
        [join(micro_batches)],
        lambda m, x, y: mse(m, x, y) + 3 * l1(m, x, y),
    )
    assert optimizer.updates == 1
    assert relative_error(accumulated.parameters(), expected.parameters()) <= FLOAT64
    assert optimizer.loss.item() == pytest.approx(loss, rel=1e-12)


def test_different_weights_in_one_micro_batch_are_refused():
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    optimizer.backward(model(torch.ones(4, 5)).mean(), weight=4)
    with pytest.raises(ValueError, match="weight=3 after 4.*come by name: backward"):
        optimizer.backward(model(torch.ones(4, 5)).mean(), weight=3)


def test_the_remedy_for_two_denominators_is_the_large_batchs_update():
    """As the error says it: a masked loss and one per row, which divide by different counts."""

    def losses(model, x, y):
        squares = (model(x) - y).square().sum(1)
        return squares[x[:, 0] > 0], squares.sqrt()

    accumulated, expected = network(), network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(accumulated.parameters()), steps=3, reduction="sum")
    micro_batches = split(regression(9), [2, 4, 3])
    a_in_window, b_in_window = (len(each) for each in losses(expected, *join(micro_batches)))
    assert a_in_window not in (0, b_in_window)
    for x, y in micro_batches:
        optimizer.zero_grad()
        a, b = losses(accumulated, x, y)
        optimizer.backward(a.sum() / a_in_window + b.sum() / b_in_window)
        optimizer.step()
    torch_updates(
        expected,
        sgd(expected.parameters()),
        [join(micro_batches)],
        lambda model, x, y: sum(each.mean() for each in losses(model, x, y)),
    )
    assert optimizer.updates == 1
    assert relative_error(accumulated.parameters(), expected.parameters()) <= FLOAT64


@pytest.mark.parametrize(
    ("weight", "error"),
    [(-1, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("4", TypeError), (True, TypeError)],
)
def test_a_wrong_weight_is_refused_before_anything_happens(weight, error):
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    loss = model(torch.ones(2, 5)).mean()
    with pytest.raises(error, match="weight="):
        optimizer.backward(loss, weight=weight)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(error, match="weight="):
        next(iter(optimizer.batches([torch.ones(2, 5)], weight=lambda batch: weight)))


def test_a_loss_that_is_no_scalar_is_refused():
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    with pytest.raises(ValueError, match=r"scalar.*\(2, 3\)"):
        optimizer.backward(model(torch.ones(2, 5)), weight=2)


def test_half_precision_sums_survive_large_token_counts():
    """30000 tokens times a gradient of 4 would overflow float16; as multiples of the first micro-batch they are few."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = gradaccum.torch.optim.SGD([parameter], lr=1.0, steps=2)
    for tokens in (30000, 15000):
        optimizer.zero_grad()
        optimizer.backward((parameter * 4).sum(), weight=tokens)
        optimizer.step()
    assert parameter.item() == -3.0
