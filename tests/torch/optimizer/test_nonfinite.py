"""NaN under each policy; overflows, and scales that move, under GradScaler.

The random programs (tests/fuzz) have NaN and infinity in any micro-batch, under each policy and under scalers, in
windows that are saved, clipped, weighed and flushed: what is left of each window, its loss, and one halving for each
overflow.
"""

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, refused, resumed, scaler_of, step, train, wrapped
from tests.torch.problems import Operations, hooked, mse, network

pytestmark = pytest.mark.usefixtures("float64")

FOUR, ALIKE = parts([2, 3, 1, 4]), parts([2] * 4)


@pytest.mark.parametrize(
    ("nonfinite", "bad", "left", "said"),
    [
        ("propagate", [2], None, ""),  # as in a plain loop
        ("skip_window", [2], [], "the gradient of this window is not finite"),
    ],
)
def test_what_is_skipped_is_logged_and_with_nothing_left_there_is_no_update(nonfinite, bad, left, said, caplog):
    model, optimizer = wrapped(steps=4, nonfinite=nonfinite)
    batches = [(x * (float("nan") if index in bad else 1), y) for index, (x, y) in enumerate(FOUR)]
    train(model, optimizer, optimizer.batches(batches))
    assert said in caplog.text
    assert optimizer.updated == (left != [])
    if left is None:
        assert all(p.isnan().all() for p in model.parameters())
    else:
        assert_same(model, large([[FOUR[i] for i in left]] if left else []))


def test_a_micro_batch_whose_loss_is_not_finite_is_left_out_by_its_weight():
    """What `nonfinite="skip_micro_batch"` did, which is refused."""
    with pytest.raises(ValueError, match=r"backward\(loss, weight=n if loss.isfinite\(\) else 0\)"):
        wrapped(steps=4, nonfinite="skip_micro_batch")
    model, optimizer = wrapped(steps=4)
    batches = [(x * (float("nan") if index == 2 else 1), y) for index, (x, y) in enumerate(FOUR)]
    for x, y in batches:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        optimizer.backward(loss, weight=len(x) if loss.isfinite() else 0)
        optimizer.step()
    assert optimizer.updated
    assert_same(model, large([[FOUR[i] for i in (0, 1, 3)]]))


def test_skip_window_keeps_a_gradient_that_is_finite_where_its_norm_overflows():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float32))
    inner = torch.optim.SGD([parameter], lr=1e-25)
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=2, nonfinite="skip_window")
    for scale in (1e25, 3e25):
        (parameter * scale).sum().backward()
        optimizer.step()
    assert optimizer.updated
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -2.0, dtype=torch.float32))


def operators_of_an_update(layers, nonfinite, dtype):
    """The last micro-batch's, in a window that is not compared by value."""
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=dtype) for _ in range(layers)))
    _, optimizer = wrapped(model=model, steps=1, nonfinite=nonfinite)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        with Operations() as operators:
            optimizer.step()
    assert optimizer.updates == 3
    return len(operators.seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_skip_window_looks_at_many_gradients_with_as_many_operators_as_at_a_few(dtype):
    few, many = (
        operators_of_an_update(layers, "skip_window", dtype) - operators_of_an_update(layers, "propagate", dtype)
        for layers in (1, 12)
    )
    assert few == many <= 6


# `scaler.step` and `scaler.update` on every micro-batch, as in the plain loop.


@pytest.mark.parametrize(("clips", "says"), [(True, "edited"), (False, "closes_next")])
def test_unscaling_before_clipping_or_inside_an_open_window_is_named(clips, says):
    (model, optimizer), scaler = wrapped(steps=2), scaler_of(8.0)

    def unscale():
        if optimizer.closes_next or not clips:
            scaler.unscale_(optimizer)
            assert not clips or nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    with refused(says, model):
        train(model, optimizer, FOUR, scaler=scaler, before_step=unscale)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_window_without_a_gradient_goes_through_a_grad_scaler_in_any_dtype(dtype):
    """GradScaler wants a gradient to look at, and is shown a zero in the dtype of the sum."""
    model = nn.Linear(2, 1)
    optimizer = gradaccum.torch.optim.SGD(model.parameters(), lr=0.1, steps=2, accumulate_dtype=dtype)
    scaler, before = scaler_of(16.0), model.weight.clone()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 2)).mean())
        step(optimizer, scaler)
    assert optimizer.updates == 1
    assert torch.equal(model.weight, before)


def mixed(how, weights=None, **options):
    """Micro-batches that come through a GradScaler ("s"), or not ("p"), or have no backward pass ("-")."""
    (model, optimizer), scaler = wrapped(steps=len(how), **options), scaler_of(16.0)
    batches = parts([2] * len(how))
    for batch, kind, weight in zip(batches, how, weights or [None] * len(how), strict=True):
        used = scaler if kind == "s" else None
        if kind == "-":
            step(optimizer)
        else:
            train(model, optimizer, [batch], scaler=used, weigh=lambda *_, weight=weight: weight)
    return model, optimizer, batches


@pytest.mark.parametrize("how", ["ps", "sp", "pps", "sps", "psp", "-ps"])
def test_a_window_of_scaled_and_unscaled_micro_batches_is_refused(how):
    with pytest.raises(WindowError, match=r"came through a GradScaler's step.*different scales.*enabled=False"):
        mixed(how)


@pytest.mark.parametrize("weightless", [False, True])
def test_after_a_window_that_was_refused_for_its_scales_training_goes_on(weightless):
    """Also where the micro-batch that was unscaled weighs nothing."""
    (model, optimizer), scaler = wrapped(steps=2), scaler_of(16.0)
    train(model, optimizer, ALIKE[:1])
    unscales = lambda: weightless and scaler.unscale_(optimizer)  # noqa: E731
    weigh = lambda *batch: 0 if weightless else None  # noqa: E731
    with refused("different scales", model):
        train(model, optimizer, ALIKE[:1], scaler=scaler, weigh=weigh, before_step=unscales)
    optimizer.discard()
    scaler.update()
    train(model, optimizer, ALIKE[:2], scaler=scaler)
    assert_same(model, large([ALIKE[:2]]))


@pytest.mark.parametrize(
    ("how", "weights", "options"),
    [
        # A micro-batch that weighs nothing has no say in the scale,
        *(("ps", [2, 0], {}), ("sp", [0, 2], {}), ("sp", [2, 0], {}), ("ps", [0, 2], {})),
        *(("pspp", [2, 0, 2, 2], {}), ("spps", [2, 0, 0, 2], {})),
        # and a step without a backward pass has no scale.
        *(("s-ss", None, {}), ("-ss", None, {}), ("ss-", None, {})),
    ],
)
def test_micro_batches_whose_scales_may_differ_make_the_large_batchs_update(how, weights, options):
    model, optimizer, micro_batches = mixed(how, weights, **options)
    assert optimizer.updates == 1
    counted = zip(micro_batches, how, weights or [1] * len(how), strict=True)
    total, kept = sum(weights or [1] * len(how)), [(batch, w) for batch, kind, w in counted if kind != "-" and w]

    def mean(model, *window):
        return sum(mse(model, *batch) * weight / total for batch, weight in kept)

    assert_same(model, large([micro_batches], loss=mean))


@pytest.mark.parametrize("when", ["before step", "before update", "after update"])
def test_gradients_that_autograd_grad_asks_for_meanwhile_do_not_keep_the_sum_from_the_next_scale(when):
    (model, optimizer), scaler = wrapped(steps=4), scaler_of(8.0, 1)
    for x, y in parts([2] * 4):
        optimizer.zero_grad()
        scaler.scale(mse(model, x, y)).backward()
        for now, do in (("before step", lambda: scaler.step(optimizer)), ("before update", scaler.update), ("", None)):
            if now == when or (not now and when == "after update"):
                torch.autograd.grad(mse(model, x, y), list(model.parameters()))
            if do is not None:
                do()
    assert optimizer.updates == 1
    assert_same(model, large([parts([2] * 4)]))


ORDERS = {
    # What a loop does in each micro-batch, "zero" between windows too; whether ordinary windows need hooks for it.
    "zero backward step update": False,
    "backward step update zero": False,
    "zero weighed step update": False,
    "update zero backward step": False,
    "weighed step update": True,
    "backward step update": True,
    "backward step zero update": True,
    "zero update backward step": True,
    "zero zero backward step update": False,
    "zero side update backward step": True,  # a backward pass before update(), and one behind it
    "zero update side weighed step": True,
    "zero backward update step": True,
}


class Scaler(torch.amp.GradScaler):
    """Its scale grows with each step. However often update() is called, it counts once per step."""

    stepped = False

    def __init__(self):
        super().__init__("cpu", init_scale=8.0, growth_interval=1)

    def step(self, optimizer):
        super().step(optimizer)
        self.stepped = True

    def update(self):
        if self.stepped:
            super().update()
        self.stepped = False


def in_order(order, model, optimizer, scaler, batches):
    """A loop in this order, but for a window's first micro-batch, before which update() comes as in a plain loop."""
    for x, y in batches:
        if not optimizer.micro_batches:
            scaler.update()
            optimizer.zero_grad()
        for word in order.split():
            if word == "zero" and optimizer.micro_batches:
                optimizer.zero_grad()
            elif word == "update":
                scaler.update()
            elif word == "step":
                scaler.step(optimizer)
            elif word in ("backward", "side", "weighed"):
                part = 0.5 if "side" in order else 1.0
                loss = scaler.scale(mse(model, x, y) * part)
                optimizer.backward(loss) if word == "weighed" else loss.backward()


@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_in_any_order_makes_the_large_batches_updates_while_the_scale_grows(order):
    """Windows 3 and 5 are ordinary: where zero_grad() comes in time, they have three hooks at most."""
    (model, optimizer), scaler, found = wrapped(steps=3), Scaler(), []
    batches = parts([2, 2, 2] * 5)
    for batch in batches:
        in_order(order, model, optimizer, scaler, [batch])
        found.append(hooked(model))
    assert optimizer.updates == 5
    assert_same(model, large(windows_of(batches, 3)))
    in_ordinary = [*found[6:8], *found[12:14]]
    assert max(found[3:5]) > 3  # in a window that looks
    assert (max(in_ordinary) > 3) == ORDERS[order]


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("other", [order for order, hooks in ORDERS.items() if hooks])
def test_an_update_of_the_scale_that_comes_in_another_order_than_before_is_named_unless_the_window_looks(other, looks):
    (model, optimizer), scaler = wrapped(steps=3), Scaler()
    windows = windows_of(parts([2] * 18), 3)
    usual, one, last = windows[: 3 if looks else 2], windows[4], windows[5]
    for window in (*usual, one[:1]):
        in_order("zero backward step update", model, optimizer, scaler, window)
    if not looks:
        with refused(r"update\(\) came behind.*Keep one order.*discard", model):
            in_order(other, model, optimizer, scaler, one[1:])
        with refused("came behind", model):
            in_order("step update", model, optimizer, scaler, one[1:])
        optimizer.discard()
    in_order(other, model, optimizer, scaler, [*one[1 if looks else 0 :], *last])  # any order from now on
    assert optimizer.updates == len(usual) + 2
    assert_same(model, large([*usual, one, last]))


def test_a_backward_pass_that_rarely_comes_before_backward_loss_joins_in_the_sums_scale():
    (model, optimizer), scaler, batches = wrapped(steps=3), Scaler(), parts([2] * 9)
    for i, batch in enumerate(batches):
        in_order("side weighed step update" if i == 7 else "weighed step update", model, optimizer, scaler, [batch])
    assert_same(model, large(windows_of(batches, 3)))


def test_two_scalers_in_a_window_are_refused():
    (model, optimizer), (x, y) = wrapped(steps=3), ALIKE[0]
    train(model, optimizer, ALIKE[:1], scaler=scaler_of(8.0))
    other = scaler_of(2.0)
    optimizer.zero_grad()
    other.scale(mse(model, x, y)).backward()
    with refused("Two GradScalers", model):
        other.step(optimizer)


@pytest.mark.parametrize(("windows", "clear"), [(0, "before"), (0, "never"), (2, "before")])
def test_parameters_may_join_in_a_window_whose_scale_moves(windows, clear):
    (model, optimizer), scaler = wrapped(lambda p: torch.optim.SGD(list(p)[:2], lr=0.1), steps=3), scaler_of(8.0, 1)
    added = [*model.parameters()][2:]
    for window in windows_of(parts([2] * 3 * windows), 3):
        train(model, optimizer, window, scaler=scaler, clear="before")
    before, batches = network(), parts([2] * 3, seed=2)
    before.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    train(model, optimizer, batches[:1], scaler=scaler, clear=clear)
    for parameter in added:
        parameter.grad = None
    optimizer.add_param_group({"params": added})
    train(model, optimizer, batches[1:], scaler=scaler, clear=clear)

    def mean(model, first):
        """The first micro-batch counts for none of the parameters that were added."""
        return sum(mse(model, *batch) for batch in (batches if first else batches[1:])) / 3

    expected = [torch.autograd.grad(mean(before, first), list(before.parameters())) for first in (True, False)]
    gradients = [*expected[0][:2], *expected[1][2:]]
    for parameter, old, gradient in zip(model.parameters(), before.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old.detach() - 0.1 * gradient)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_window_that_is_resumed_may_go_on_with_a_scaler_or_without(before, after):
    scaler, model, optimizer = scaler_of(16.0), *wrapped(steps=4)
    train(model, optimizer, ALIKE[:2], scaler=scaler if before else None)
    model, optimizer = resumed(model, optimizer, steps=4)
    train(model, optimizer, ALIKE[2:], scaler=scaler if after else None)
    assert optimizer.updates == 1
    assert_same(model, large([ALIKE]))
