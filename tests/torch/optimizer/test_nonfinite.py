"""NaN in the first, middle and last micro-batch, under each policy; overflows under GradScaler."""

import itertools

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error
from tests.torch.optimizer.loops import assert_same, by_rows, large, step, train, wrapped
from tests.torch.problems import Operations, adam, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [2, 3, 1, 4, 2, 2, 1, 3]
POSITIONS = pytest.mark.parametrize("bad", [0, 1, 3], ids=["first", "middle", "last"])


def eight():
    return split(regression(sum(SIZES)), SIZES)


def without(bad):
    """The windows of four, without a micro-batch of the first."""
    return [[batch for index, batch in enumerate(eight()[:4]) if index != bad], eight()[4:]]


def run(bad, *, value=float("nan"), make=sgd, explicit=True, **options):
    """Two windows of four; micro-batch `bad` of the first has a poisoned loss."""
    model, optimizer = wrapped(make, steps=4, **options)
    updated = []
    for index, (x, y) in enumerate(optimizer.batches(eight())):
        optimizer.zero_grad()
        loss = mse(model, x, y) * (value if index == bad else 1.0)
        optimizer.backward(loss, weight=len(x)) if explicit else loss.backward()
        optimizer.step()
        updated.append(optimizer.updated)
    return model, optimizer, updated


@POSITIONS
def test_propagate_does_what_a_plain_loop_does(bad):
    model, optimizer, _ = run(bad)
    assert optimizer.updates == 2
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@POSITIONS
def test_skip_window_makes_no_update_and_forgets_the_poison(bad, value, caplog):
    model, optimizer, updated = run(bad, value=value, nonfinite="skip_window", make=adam)
    assert [index for index, made in enumerate(updated) if made] == [7]
    assert optimizer.updates == 1
    assert "not finite" in caplog.text
    assert_same(model, large([eight()[4:]], adam))


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
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=1, nonfinite=nonfinite)
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


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@POSITIONS
def test_skip_micro_batch_keeps_the_other_rows_exact_and_reports_their_loss(bad, value, explicit, caplog):
    model, optimizer, _ = run(bad, value=value, nonfinite="skip_micro_batch", make=adam, explicit=explicit)
    assert optimizer.updates == 2
    assert "Left out 1 of 4 micro-batches" in caplog.text
    assert_same(model, large(without(bad), adam))
    if explicit:
        model, optimizer = wrapped(steps=4, nonfinite="skip_micro_batch")
        poisoned = [(x * (value if index == bad else 1), y) for index, (x, y) in enumerate(eight()[:4])]
        train(model, optimizer, poisoned, weigh=by_rows)
        assert optimizer.loss.item() == pytest.approx(mse(network(), *join(without(bad)[0])).item(), rel=1e-12)


def test_skip_micro_batch_with_nothing_left_makes_no_update():
    model, optimizer = wrapped(steps=2, nonfinite="skip_micro_batch")
    train(model, optimizer, [regression(3)] * 2, loss=lambda *batch: mse(*batch) * float("nan"))
    assert not optimizer.updated
    assert relative_error(model.parameters(), network().parameters()) == 0


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("order", [["a", "bad b", "a"], ["bad b", "a", "a"], ["bad b", "a", "b"], ["b", "bad b", "a"]])
def test_what_only_a_left_out_micro_batch_reaches_has_no_gradient(order, saved):
    """As without its rows: weight decay and momentum leave it alone."""
    heads, alone = (nn.ModuleDict({"a": network(), "b": network()}) for _ in range(2))
    optimizer = gradaccum.torch.optim.Optimizer(adam(heads.parameters()), steps=3, nonfinite="skip_micro_batch")
    inner = adam(alone.parameters())
    parts = split(regression(9), [2, 3, 4])
    for index, (name, (x, y)) in enumerate(zip(order, parts, strict=True)):
        optimizer.zero_grad()
        head = heads[name[-1]]
        optimizer.backward(mse(head, x * float("nan") if "bad" in name else x, y), weight=len(x))
        optimizer.step()
        if saved and index < 2:
            again = gradaccum.torch.optim.Optimizer(adam(heads.parameters()), steps=3, nonfinite="skip_micro_batch")
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
    rows = sum(len(x) for name, (x, _) in zip(order, parts, strict=True) if "bad" not in name)
    for name, (x, y) in zip(order, parts, strict=True):
        if "bad" not in name:
            (mse(alone[name], x, y) * (len(x) / rows)).backward()
    inner.step()
    assert [p.grad is None for p in heads.parameters()] == [p.grad is None for p in alone.parameters()]
    assert_same(heads, alone)


def test_dense_sums_are_refused_where_the_inner_optimizer_takes_sparse_gradients():
    with pytest.raises(ValueError, match="SparseAdam doesn't take"):
        wrapped(torch.optim.SparseAdam, steps=2, nonfinite="skip_micro_batch")


# `scaler.step` and `scaler.update` on every micro-batch, as in the plain loop.


def scaler_of(scale, growth_interval=1000):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def run_scaled(scaler, *, overflow=None, steps=4, make=sgd, explicit=False, before_step=lambda *_: None, **options):
    model, optimizer = wrapped(make, steps=steps, **options)
    scales = []
    for index, (x, y) in enumerate(optimizer.batches(eight())):
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        loss = scaler.scale(mse(model, x, y) * (float("inf") if index == overflow else 1.0))
        optimizer.backward(loss) if explicit else loss.backward()
        before_step(scaler, optimizer)
        step(optimizer, scaler)
    return model, optimizer, [*scales, scaler.get_scale()]


@POSITIONS
def test_an_overflow_costs_one_window_and_one_halving_also_while_the_scale_grows(bad):
    for growth_interval, make in ((1000, adam), (2, sgd)):
        model, optimizer, scales = run_scaled(scaler_of(1024.0, growth_interval), overflow=bad, make=make)
        assert sum(after < before for before, after in itertools.pairwise(scales)) == 1
        assert growth_interval == 2 or scales[-1] == 512
        assert optimizer.updates == 1
        assert_same(model, large([eight()[4:]], make))


@POSITIONS
def test_skip_micro_batch_costs_one_micro_batch_and_one_halving(bad):
    model, _, scales = run_scaled(scaler_of(1024.0), overflow=bad, nonfinite="skip_micro_batch")
    assert scales[-1] == 512
    assert_same(model, large(without(bad)))


def test_unscaling_as_the_window_closes_is_exact_and_inside_an_open_window_is_named():
    def unscale(scaler, optimizer):
        if optimizer.closes_next:
            scaler.unscale_(optimizer)

    assert_same(run_scaled(scaler_of(8.0, 3), before_step=unscale)[0], large(without(None)))
    with pytest.raises(WindowError, match="closes_next"):
        run_scaled(scaler_of(8.0), before_step=lambda scaler, optimizer: scaler.unscale_(optimizer))


def test_clipping_sees_the_unscaled_mean():
    model, optimizer, _ = run_scaled(scaler_of(512.0), clip_grad_norm=0.1)
    assert_same(model, large(without(None), clip_grad_norm=0.1))
    assert optimizer.grad_norm > 0.1


def test_a_window_whose_first_micro_batch_weighs_nothing_has_no_gradient_to_look_at():
    model, optimizer = wrapped(steps=4)
    numbers = itertools.cycle([0, 1, 1, 1])
    train(model, optimizer, eight(), weigh=lambda x, y: len(x) * next(numbers), scaler=scaler_of(8.0, 2))
    assert_same(model, large([eight()[1:4], eight()[5:]]))


def test_a_skipped_micro_batch_after_an_overflow_does_not_halve_again():
    model, optimizer = wrapped(steps=4)
    scaler, factors, weights = scaler_of(1024.0), iter([float("inf"), 1, 1, 1]), iter([2, 0, 2, 2])
    parts = split(regression(8), [2] * 4)
    loss = lambda *batch: mse(*batch) * next(factors)  # noqa: E731
    train(model, optimizer, parts, loss=loss, weigh=lambda *_: next(weights), scaler=scaler)
    assert scaler.get_scale() == 512
    assert optimizer.updates == 0


def mixed(how, weights=None, **options):
    """Micro-batches that come through a GradScaler ("s"), or not ("p"), or have no backward pass ("-")."""
    micro_batches = split(regression(2 * len(how)), [2] * len(how))
    model, optimizer = wrapped(steps=len(how), **options)
    scaler = scaler_of(16.0)
    for index, ((x, y), kind) in enumerate(zip(micro_batches, how, strict=True)):
        optimizer.zero_grad()
        loss = mse(model, x, y)
        if kind != "-":
            optimizer.backward(scaler.scale(loss) if kind == "s" else loss, weight=weights and weights[index])
        step(optimizer, scaler if kind == "s" else None)
    return model, optimizer, micro_batches


@pytest.mark.parametrize("how", ["ps", "sp", "pps", "sps", "psp", "-ps"])
def test_a_window_of_scaled_and_unscaled_micro_batches_is_refused(how):
    with pytest.raises(WindowError, match=r"came through a GradScaler's step.*different scales.*enabled=False"):
        mixed(how)


@pytest.mark.parametrize("weightless", [False, True])
def test_after_a_window_that_was_refused_for_its_scales_training_goes_on(weightless):
    """Also where the micro-batch that was unscaled weighs nothing."""
    model, optimizer = wrapped(steps=2)
    scaler, micro_batches = scaler_of(16.0), split(regression(4), [2, 2])
    mse(model, *micro_batches[0]).backward()
    optimizer.step()
    optimizer.backward(scaler.scale(mse(model, *micro_batches[0])), weight=0 if weightless else None)
    if weightless:
        scaler.unscale_(optimizer)
    with pytest.raises(WindowError, match="different scales"):
        scaler.step(optimizer)
    optimizer.discard()
    scaler.update()
    train(model, optimizer, micro_batches, scaler=scaler)
    assert_same(model, large([micro_batches]))


@pytest.mark.parametrize(
    ("how", "weights"),
    [("ps", [2, 0]), ("sp", [0, 2]), ("sp", [2, 0]), ("ps", [0, 2]), ("pspp", [2, 0, 2, 2]), ("spps", [2, 0, 0, 2])],
)
def test_a_micro_batch_that_weighs_nothing_has_no_say_in_the_scale(how, weights):
    model, optimizer, micro_batches = mixed(how, weights)
    assert optimizer.updates == 1
    assert_same(model, large([[batch for batch, weight in zip(micro_batches, weights, strict=True) if weight]]))


@pytest.mark.parametrize("when", ["before step", "before update", "after update"])
def test_gradients_that_autograd_grad_asks_for_meanwhile_do_not_keep_the_sum_from_the_next_scale(when):
    model, optimizer = wrapped(steps=4)
    scaler, micro_batches = scaler_of(8.0, 1), split(regression(8), [2] * 4)
    for x, y in micro_batches:
        optimizer.zero_grad()
        scaler.scale(mse(model, x, y)).backward()
        for now in ("before step", "before update", "after update"):
            if now == "before update":
                scaler.step(optimizer)
            elif now == "after update":
                scaler.update()
            if now == when:
                torch.autograd.grad(mse(model, x, y), list(model.parameters()))
    assert optimizer.updates == 1
    assert_same(model, large([micro_batches]))


@pytest.mark.parametrize("how", ["s-ss", "-ss", "ss-"])
def test_a_step_without_a_backward_pass_has_no_scale(how):
    model, _, micro_batches = mixed(how)
    plain = network()
    optimizer = sgd(plain.parameters())
    for (x, y), kind in zip(micro_batches, how, strict=True):
        if kind == "s":
            (mse(plain, x, y) / len(how)).backward()
    optimizer.step()
    assert_same(model, plain)


def test_skip_micro_batch_unscales_each_one_by_itself_so_they_may_differ():
    model, _, micro_batches = mixed("psps", nonfinite="skip_micro_batch")
    assert_same(model, large([micro_batches]))


# Windows under a scaler that are saved and go on.


@pytest.mark.parametrize("first", [True, False])
def test_a_window_that_is_resumed_may_go_on_with_a_scaler_or_without(first):
    micro_batches, scaler = split(regression(8), [2] * 4), scaler_of(16.0)
    model, optimizer = wrapped(steps=4)
    train(model, optimizer, micro_batches[:2], scaler=scaler if first else None)
    _, resumed = wrapped(steps=4, model=model)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, resumed, micro_batches[2:], scaler=None if first else scaler)
    assert resumed.updates == 1
    assert_same(model, large([micro_batches]))


def test_a_window_resumes_under_a_scaler_bit_for_bit():
    micro_batches = split(regression(8), [2] * 4)
    straight, first, resumed = ((*wrapped(adam, steps=4), scaler_of(8.0, 2)) for _ in range(3))
    train(*straight[:2], micro_batches, scaler=straight[2])
    train(*first[:2], micro_batches[:2], scaler=first[2])  # the scale has just doubled
    for new, old in zip(resumed, first, strict=True):
        new.load_state_dict(old.state_dict())
    train(*resumed[:2], micro_batches[2:], scaler=resumed[2])
    assert resumed[1].updates == 1
    assert relative_error(resumed[0].parameters(), straight[0].parameters()) == 0


@pytest.mark.parametrize("goes_on", ["flush", "a micro-batch"])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_window_that_was_saved_with_or_without_an_overflow_ends_so_when_it_is_resumed(overflows, goes_on):
    micro_batches, scaler = split(regression(6), [2] * 3), scaler_of(8.0)
    model, optimizer = wrapped(steps=3)
    factor = float("inf") if overflows else 1.0
    train(model, optimizer, micro_batches[:2], loss=lambda *batch: mse(*batch) * factor, scaler=scaler)
    _, other = wrapped(steps=3, model=model)
    other.load_state_dict(optimizer.state_dict())
    if goes_on == "flush":
        assert other.flush() is not overflows
    else:
        train(model, other, micro_batches[2:], scaler=scaler)
        assert (other.updated, other.micro_batches) == (not overflows, 0)
    counted = micro_batches[: 2 if goes_on == "flush" else 3]
    assert_same(model, network() if overflows else large([counted]), 0.0 if overflows else FLOAT64)
