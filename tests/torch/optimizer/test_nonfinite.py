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
from tests.torch.optimizer.loops import assert_same, large, parts, refused, resumed, scaler_of, step, train, wrapped
from tests.torch.problems import Operations, mse

pytestmark = pytest.mark.usefixtures("float64")

FOUR, ALIKE = parts([2, 3, 1, 4]), parts([2] * 4)


@pytest.mark.parametrize(
    ("nonfinite", "bad", "left", "said"),
    [
        ("propagate", [2], None, ""),  # as in a plain loop
        ("skip_window", [2], [], "the gradient of this window is not finite"),
        ("skip_micro_batch", [2], [0, 1, 3], "Left out 1 of 4 micro-batches"),
        ("skip_micro_batch", [0, 1, 2, 3], [], "Left out 4 of 4 micro-batches"),
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
        # where micro-batches are screened, each is unscaled by itself,
        ("psps", None, {"nonfinite": "skip_micro_batch"}),
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


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_window_that_is_resumed_may_go_on_with_a_scaler_or_without(before, after):
    scaler, model, optimizer = scaler_of(16.0), *wrapped(steps=4)
    train(model, optimizer, ALIKE[:2], scaler=scaler if before else None)
    model, optimizer = resumed(model, optimizer, steps=4)
    train(model, optimizer, ALIKE[2:], scaler=scaler if after else None)
    assert optimizer.updates == 1
    assert_same(model, large([ALIKE]))
