"""What a micro-batch weighs: rows, class weights, tokens, sums, nothing; and the losses that are reported."""

import itertools

import pytest
import torch
from torch import nn

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, torch_updates, windows_of
from tests.torch.optimizer.loops import assert_same, by_rows, large, train, wrapped
from tests.torch.problems import adam, classes, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 5]


def cross_entropy(m, x, y, **options):
    return nn.functional.cross_entropy(m(x), y, **options)


def check(loss, weight, *, data=None, plain_loss=None, make=sgd, through="backward", sizes=SIZES, **options):
    """Windows of 3 and 2 micro-batches, weighed by `weight(*batch)`, against the two large batches."""
    micro_batches = split(data or classes(sum(sizes)), sizes)
    model, optimizer = wrapped(make, steps=3, **options)
    if through == "backward":
        train(model, optimizer, optimizer.batches(micro_batches), loss=loss, weigh=weight)
    else:
        weigh = None if weight is None else lambda batch: weight(*batch)
        train(model, optimizer, optimizer.batches(micro_batches, weight=weigh), loss=loss)
    expected = network()
    batches = [join(window) for window in windows_of(micro_batches, 3)]
    losses = torch_updates(expected, make(expected.parameters()), batches, plain_loss or loss)
    assert_same(model, expected)
    if through == "backward":
        assert optimizer.loss.item() == pytest.approx(losses[-1], rel=1e-12)
        assert not optimizer.loss.requires_grad
    else:
        assert optimizer.loss is None


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("make", [sgd, adam])
def test_class_weights_weigh_a_micro_batch_by_their_sum(make):
    check(lambda *b: cross_entropy(*b, weight=CLASS_WEIGHTS), lambda x, y: CLASS_WEIGHTS[y].sum(), make=make)


IGNORED = {"some": [1, 4, 5, 9], "first": slice(0, 3), "middle": slice(3, 4), "last": slice(10, 15)}


@pytest.mark.parametrize("ignored", IGNORED.values(), ids=IGNORED)
@pytest.mark.parametrize("through", ["backward", "batches"])
def test_ignored_targets_weigh_nothing_though_the_loss_of_nothing_else_is_nan(ignored, through):
    x, y = classes(sum(SIZES))
    y[ignored] = -100
    check(cross_entropy, lambda x, y: int((y != -100).sum()), data=(x, y), through=through)


def test_a_window_that_weighs_nothing_makes_no_update(caplog):
    model, optimizer = wrapped(steps=2)
    before = [p.clone() for p in model.parameters()]
    with caplog.at_level("INFO", "gradaccum"):
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(2, 5)).sum() * float("nan"), weight=0)
            optimizer.step()
    assert not optimizer.updated
    assert optimizer.updates == 0
    assert "the total weight of this window" in caplog.text
    optimizer.backward(model(torch.ones(2, 5)).mean(), weight=0)
    optimizer.step()
    assert optimizer.flush() is False
    assert relative_error(model.parameters(), before) == 0
    assert not optimizer.inner.state


@pytest.mark.parametrize("through", ["backward", "batches"])
def test_sums_are_divided_by_the_total_weight(through):
    summed = lambda *b: cross_entropy(*b, reduction="sum")  # noqa: E731
    check(summed, by_rows, plain_loss=cross_entropy, reduction="sum", through=through)


@pytest.mark.parametrize("through", ["backward", "batches"])
def test_sums_without_weights_are_divided_by_nothing(through):
    def loss(model, x, y):
        return nn.functional.mse_loss(model(x), y, reduction="sum") / 100

    weight = (lambda x, y: None) if through == "backward" else None
    check(loss, weight, data=regression(6), sizes=[2, 3, 1], reduction="sum", through=through)


@pytest.mark.parametrize("through", ["backward", "batches"])
def test_a_masked_loss_is_weighed_by_its_tokens(through):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(10, 6, 5, generator=generator), torch.randint(3, (10, 6), generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 1, 2, 6, 1, 1, 5, 3, 1, 6])[:, None]

    def loss(model, x, y, mask):
        each = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    data = x.double(), y, mask
    check(loss, lambda x, y, mask: mask.sum(), data=data, sizes=[2, 4, 1, 3], make=adam, through=through)


def test_different_weights_in_one_micro_batch_are_refused():
    model, optimizer = wrapped(steps=2)
    optimizer.backward(model(torch.ones(4, 5)).mean(), weight=4)
    with pytest.raises(ValueError, match="weight=3 after 4.*need names: backward"):
        optimizer.backward(model(torch.ones(4, 5)).mean(), weight=3)


def test_the_remedy_for_two_denominators_is_the_large_batchs_update():
    """As the error says it: a masked loss and one per row, which divide by different counts."""

    def losses(model, x, y):
        squares = (model(x) - y).square().sum(1)
        return squares[x[:, 0] > 0], squares.sqrt()

    model, optimizer = wrapped(steps=3, reduction="sum")
    micro_batches = split(regression(9), [2, 4, 3])
    a_in_window, b_in_window = (len(each) for each in losses(network(), *join(micro_batches)))
    assert a_in_window not in (0, b_in_window)
    for x, y in micro_batches:
        optimizer.zero_grad()
        a, b = losses(model, x, y)
        optimizer.backward(a.sum() / a_in_window + b.sum() / b_in_window)
        optimizer.step()
    assert optimizer.updates == 1
    assert_same(model, large([micro_batches], loss=lambda *batch: sum(each.mean() for each in losses(*batch))))


@pytest.mark.parametrize(
    ("weight", "error"),
    [(-1, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("4", TypeError), (True, TypeError)],
)
def test_a_wrong_weight_is_refused_before_anything_happens(weight, error):
    model, optimizer = wrapped(steps=2)
    loss = model(torch.ones(2, 5)).mean()
    with pytest.raises(error, match="weight="):
        optimizer.backward(loss, weight=weight)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(error, match="weight="):
        next(iter(optimizer.batches([torch.ones(2, 5)], weight=lambda batch: weight)))


def test_a_loss_that_is_no_scalar_is_refused():
    model, optimizer = wrapped(steps=2)
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


# Micro-batches that weigh nothing: they change nothing, whatever else goes on in their window.


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
