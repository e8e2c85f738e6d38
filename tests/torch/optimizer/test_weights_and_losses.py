"""What a micro-batch weighs: rows, class weights, tokens, sums, nothing; and the losses that are reported."""

import copy
import itertools

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error, torch_updates, windows_of
from tests.torch.optimizer.loops import assert_same, by_rows, large, parts, scaler_of, train, values, wrapped
from tests.torch.problems import adam, classes, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [3, 1, 4, 2, 5]
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


def cross_entropy(m, x, y, **options):
    return nn.functional.cross_entropy(m(x), y, **options)


def weighed_by_class(m, x, y):
    return cross_entropy(m, x, y, weight=CLASS_WEIGHTS)


def masked(model, x, y, mask):
    each = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


def tokens():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(15, 6, 5, generator=generator), torch.randint(3, (15, 6), generator=generator)
    lengths = torch.tensor([6, 1, 2, 6, 1, 1, 5, 3, 1, 6, 2, 4, 1, 1, 6])
    return x, y, torch.arange(6) < lengths[:, None]


def ignoring(rows):
    x, y = classes(sum(SIZES))
    y[rows] = -100
    return x, y


def valid(x, y):
    return int((y != -100).sum())


def a_hundredth(model, x, y):
    return nn.functional.mse_loss(model(x), y, reduction="sum") / 100


LOSSES = {
    # name: (loss, weight, data, keywords)
    "class weights": (weighed_by_class, lambda x, y: CLASS_WEIGHTS[y].sum(), classes, {}),
    "a mask over tokens": (masked, lambda x, y, mask: mask.sum(), tokens, {}),
    **{  # a micro-batch of nothing else has a loss of NaN
        f"ignored targets, {name}": (cross_entropy, valid, lambda rows=rows: ignoring(rows), {})
        for name, rows in {
            "some": [1, 4, 5, 9],
            "first": slice(3),
            "middle": slice(3, 4),
            "last": slice(10, 15),
        }.items()
    },
    "sums, divided by the total weight": (
        lambda *batch: cross_entropy(*batch, reduction="sum"),
        by_rows,
        classes,
        {"reduction": "sum", "plain_loss": cross_entropy},
    ),
    "sums without weights, divided by nothing": (a_hundredth, None, regression, {"reduction": "sum"}),
}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("through", ["backward", "batches"])
@pytest.mark.parametrize(("loss", "weight", "data", "keywords"), LOSSES.values(), ids=LOSSES)
def test_a_window_is_the_large_batchs_update_under(loss, weight, data, keywords, through, make):
    options = {**keywords}
    plain_loss = options.pop("plain_loss", loss)
    micro_batches = split(data(sum(SIZES)) if data in (classes, regression) else data(), SIZES)
    model, optimizer = wrapped(make, steps=3, **options)
    if through == "backward":
        weigh = weight or (lambda *batch: None)
        train(model, optimizer, optimizer.batches(micro_batches), loss=loss, weigh=weigh)
    else:
        weigh = None if weight is None else lambda batch: weight(*batch)
        train(model, optimizer, optimizer.batches(micro_batches, weight=weigh), loss=loss)
    expected = network()
    batches = [join(window) for window in windows_of(micro_batches, 3)]
    losses = torch_updates(expected, make(expected.parameters()), batches, plain_loss)
    assert_same(model, expected)
    if through == "batches":
        assert optimizer.loss is None
    else:
        assert optimizer.loss.item() == pytest.approx(losses[-1], rel=1e-12)
        assert not optimizer.loss.requires_grad


def test_half_precision_sums_survive_large_token_counts():
    """30000 tokens times a gradient of 4 would overflow float16; as multiples of the first micro-batch they are few."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
    model = nn.ParameterList([parameter])
    _, optimizer = wrapped(lambda p: torch.optim.SGD(p, lr=1.0), model, steps=2)
    for tokens_ in (30000, 15000):
        optimizer.zero_grad()
        optimizer.backward((parameter * 4).sum(), weight=tokens_)
        optimizer.step()
    assert parameter.item() == -3.0


def test_true_and_false_in_a_batch_are_targets_as_any_others():
    def loss(model, x, y):
        return nn.functional.mse_loss(model(x)[:, 0], y.to(x.dtype))

    (x, y), model = classes(12), network()
    sgd_ = torch.optim.SGD(model.parameters(), lr=0.1)
    TrainStep(model, sgd_, compute_loss=loss, micro_batch_size=5)(x, y > 0)
    assert_same(model, large([[(x, y > 0)]], lambda p: torch.optim.SGD(p, lr=0.1), loss))


# Weights and losses that are none.


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


@pytest.mark.parametrize(
    ("loss", "error", "says"),
    [
        (lambda model: model(torch.ones(2, 5)), ValueError, r"scalar.*\(2, 3\)"),
        (lambda model: None, TypeError, "`loss` must be a tensor. Received: loss=None"),
    ],
)
def test_what_is_no_loss_is_refused(loss, error, says):
    model, optimizer = wrapped(steps=2)
    with pytest.raises(error, match=says):
        optimizer.backward(loss(model), weight=2)
    assert optimizer.micro_batches == 0


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


class Scripted(torch.amp.GradScaler):
    """A GradScaler whose scale follows a script."""

    def __init__(self, scales):
        super().__init__("cpu", init_scale=scales[0])
        self.script = itertools.cycle(scales)
        next(self.script)

    def update(self, new_scale=None):
        super().update(new_scale=next(self.script))


GROWS, SHRINKS = [2.0, 4.0, 8.0, 2.0], [8.0, 8.0, 2.0]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "scales"),
    [
        *(("loss.backward()", GROWS), ("optimizer.backward()", SHRINKS), ("no backward", GROWS)),
        pytest.param("loss.backward()", SHRINKS, marks=SLOW),
        pytest.param("optimizer.backward()", GROWS, marks=SLOW),
        pytest.param("no backward", SHRINKS, marks=SLOW),
    ],
)
def test_a_scale_that_changes_while_the_sum_is_detached_is_applied_to_it(how, scales):
    sizes = [3, 2, 1, 4, 2, 4]
    for weightless in itertools.product([False, True], repeat=4):
        (model, optimizer), scaler = wrapped(steps=6), Scripted(scales)
        batches = [(*part, torch.tensor(i < 4 and weightless[i])) for i, part in enumerate(parts(sizes))]
        for x, y, skipped in optimizer.batches(batches, weight=lambda part: 0 if part[2] else len(part[0])):
            optimizer.zero_grad()
            loss = scaler.scale(mse(model, x, y))
            if how == "optimizer.backward()":
                optimizer.backward(loss)
            elif not (skipped and how == "no backward"):
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        assert_same(model, large([[part[:2] for part in batches if not part[2]]]))


def test_an_overflow_in_a_weightless_micro_batch_costs_no_update_and_no_halving():
    (model, optimizer), scaler = wrapped(steps=2), scaler_of(8.0)
    batches = parts([2, 3])
    batches[1][0][0] = float("nan")
    weight = lambda part: 0 if part[0].isnan().any() else len(part[0])  # noqa: E731
    train(model, optimizer, optimizer.batches(batches, weight=weight), scaler=scaler)
    assert optimizer.updates == 1
    assert scaler.get_scale() == 8.0


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


@pytest.mark.parametrize("make", ["backward", "TrainStep"])
def test_a_hook_that_writes_to_a_losss_gradient_writes_to_that_alone(make):
    model, optimizer = wrapped(steps=2)

    def doubled(model, x, y):
        loss = mse(model, x, y)
        loss.register_hook(lambda gradient: gradient.mul_(2))
        return loss

    if make == "TrainStep":
        step = TrainStep(model, sgd(model.parameters()), compute_loss=doubled, micro_batch_size=2)
    for window in windows_of(parts([2] * 6), 2):
        if make == "TrainStep":
            step(*join(window))
        else:
            train(model, optimizer, window, loss=doubled, weigh=by_rows)
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


def test_gradients_by_hand_that_weigh_nothing_are_zeros_for_the_parameters_they_reach():
    model, optimizer = wrapped(steps=2)
    reached, *others = model.parameters()
    nothing = {reached: torch.full_like(reached, float("nan"))}
    for gradients, weight in (({p: torch.ones_like(p) for p in others[:1]}, 2), (nothing, 0)):
        optimizer.add_gradients(gradients, weight)
        optimizer.step()
    assert reached.grad.count_nonzero() == 0
    assert all(p.grad is None for p in others[1:])
