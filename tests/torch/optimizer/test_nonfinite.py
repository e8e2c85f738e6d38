"""NaN in the first, middle and last micro-batch, under each policy; overflows under GradScaler."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import Operations, adam, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [2, 3, 1, 4, 2, 2, 1, 3]
POSITIONS = pytest.mark.parametrize("bad", [0, 1, 3], ids=["first", "middle", "last"])


def expected_after(windows, make=sgd):
    model = network()
    torch_updates(model, make(model.parameters()), [join(window) for window in windows], mse)
    return model


def run(bad, *, value=float("nan"), make=sgd, epochs=1, **options):
    """Two windows of four; micro-batch `bad` of the first has a poisoned loss."""
    micro_batches = split(regression(sum(SIZES)), SIZES)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(make(model.parameters()), steps=4, **options)
    updated = []
    for index, (x, y) in enumerate(optimizer.batches(micro_batches)):
        optimizer.zero_grad()
        optimizer.backward(mse(model, x, y) * (value if index == bad else 1.0), weight=len(x))
        optimizer.step()
        updated.append(optimizer.updated)
    return model, optimizer, micro_batches, updated


@POSITIONS
def test_propagate_does_what_a_plain_loop_does(bad):
    model, optimizer, _, _ = run(bad)
    assert optimizer.updates == 2
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@POSITIONS
def test_skip_window_makes_no_update_and_forgets_the_poison(bad, value, caplog):
    model, optimizer, micro_batches, updated = run(bad, value=value, nonfinite="skip_window", make=adam)
    assert [index for index, made in enumerate(updated) if made] == [7]
    assert optimizer.updates == 1
    assert "not finite" in caplog.text
    assert relative_error(model.parameters(), expected_after([micro_batches[4:]], adam).parameters()) <= FLOAT64


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@POSITIONS
def test_skip_micro_batch_keeps_the_other_rows_exact(bad, value, caplog):
    model, optimizer, micro_batches, _ = run(bad, value=value, nonfinite="skip_micro_batch", make=adam)
    assert optimizer.updates == 2
    assert "Left out 1 of 4 micro-batches" in caplog.text
    good = [batch for index, batch in enumerate(micro_batches[:4]) if index != bad]
    expected = expected_after([good, micro_batches[4:]], adam)
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64
    assert optimizer.loss.isfinite()


def test_skip_micro_batch_reports_the_loss_of_the_rows_that_count():
    micro_batches = split(regression(6), [2, 3, 1])
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3, nonfinite="skip_micro_batch")
    for index, (x, y) in enumerate(micro_batches):
        optimizer.zero_grad()
        optimizer.backward(mse(model, x, y) * (float("nan") if index == 1 else 1), weight=len(x))
        optimizer.step()
    good = join([micro_batches[0], micro_batches[2]])
    assert optimizer.loss.item() == pytest.approx(mse(network(), *good).item(), rel=1e-12)


def test_skip_micro_batch_with_nothing_left_makes_no_update():
    model = network()
    before = [p.clone() for p in model.parameters()]
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2, nonfinite="skip_micro_batch")
    for _ in range(2):
        optimizer.zero_grad()
        (mse(model, *regression(3)) * float("nan")).backward()
        optimizer.step()
    assert not optimizer.updated
    assert relative_error(model.parameters(), before) == 0


def test_skip_micro_batch_with_plain_backward_and_ragged_batches():
    micro_batches = split(regression(sum(SIZES)), SIZES)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4, nonfinite="skip_micro_batch")
    for index, (x, y) in enumerate(optimizer.batches(micro_batches)):
        optimizer.zero_grad()
        (mse(model, x, y) * (float("inf") if index == 2 else 1.0)).backward()
        optimizer.step()
    expected = expected_after([[micro_batches[i] for i in (0, 1, 3)], micro_batches[4:]])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


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
    assert relative_error(heads.parameters(), alone.parameters()) <= FLOAT64


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="skip_window.*Received: nonfinite='ignore'"):
        gradaccum.torch.optim.Optimizer(sgd(network().parameters()), steps=2, nonfinite="ignore")


class TestGradScaler:
    """`scaler.step` and `scaler.update` on every micro-batch, as in the plain loop."""

    @staticmethod
    def run(scaler, *, overflow=None, steps=4, update=True, make=sgd, explicit=False, before_step=None, **options):
        micro_batches = split(regression(sum(SIZES)), SIZES)
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(make(model.parameters()), steps=steps, **options)
        scales = []
        for index, (x, y) in enumerate(optimizer.batches(micro_batches)):
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            loss = scaler.scale(mse(model, x, y) * (float("inf") if index == overflow else 1.0))
            optimizer.backward(loss) if explicit else loss.backward()
            if before_step is not None:
                before_step(scaler, optimizer)
            scaler.step(optimizer)
            if update:
                scaler.update()
        scales.append(scaler.get_scale())
        return model, optimizer, micro_batches, scales

    @pytest.mark.parametrize("explicit", [True, False])
    def test_windows_survive_a_scale_that_grows_inside_them(self, explicit):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        model, optimizer, micro_batches, scales = self.run(scaler, explicit=explicit)
        assert scales == [8, 8, 8, 16, 16, 16, 32, 32, 32]
        assert optimizer.updates == 2
        expected = expected_after([micro_batches[:4], micro_batches[4:]])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64
        if explicit:
            fresh = expected_after([micro_batches[:4]])
            assert optimizer.loss.item() == pytest.approx(mse(fresh, *join(micro_batches[4:])).item(), rel=1e-12)

    @POSITIONS
    def test_an_overflow_costs_one_window_and_one_halving(self, bad):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        model, optimizer, micro_batches, scales = self.run(scaler, overflow=bad, make=adam)
        assert scales[-1] == 512
        assert optimizer.updates == 1
        expected = expected_after([micro_batches[4:]], adam)
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    @POSITIONS
    def test_an_overflow_while_the_scale_grows(self, bad):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        model, optimizer, micro_batches, scales = self.run(scaler, overflow=bad)
        assert sum(after < before for before, after in itertools.pairwise(scales)) == 1
        assert optimizer.updates == 1
        expected = expected_after([micro_batches[4:]])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    @POSITIONS
    def test_skip_micro_batch_costs_one_micro_batch_and_one_halving(self, bad):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        model, _, micro_batches, scales = self.run(scaler, overflow=bad, nonfinite="skip_micro_batch")
        assert scales[-1] == 512
        good = [batch for index, batch in enumerate(micro_batches[:4]) if index != bad]
        expected = expected_after([good, micro_batches[4:]])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    def test_one_step_windows_are_the_plain_loop(self):
        model, optimizer, micro_batches, _ = self.run(
            torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), steps=1, overflow=3
        )
        assert optimizer.updates == len(SIZES) - 1
        expected = expected_after([[b] for index, b in enumerate(micro_batches) if index != 3])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    def test_unscaling_as_the_window_closes_is_exact(self):
        def unscale(scaler, optimizer):
            if optimizer.closes_next:
                scaler.unscale_(optimizer)

        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        model, _, micro_batches, _ = self.run(scaler, before_step=unscale)
        expected = expected_after([micro_batches[:4], micro_batches[4:]])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    def test_unscaling_inside_an_open_window_is_named(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with pytest.raises(WindowError, match="closes_next"):
            self.run(scaler, before_step=lambda scaler, optimizer: scaler.unscale_(optimizer))

    def test_clipping_sees_the_unscaled_mean(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        model, optimizer, micro_batches, _ = self.run(scaler, clip_grad_norm=0.1)
        expected = network()
        large = [join(micro_batches[:4]), join(micro_batches[4:])]
        torch_updates(expected, sgd(expected.parameters()), large, mse, clip_grad_norm=0.1)
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64
        assert optimizer.grad_norm > 0.1

    def test_a_window_whose_first_micro_batch_weighs_nothing_has_no_gradient_to_look_at(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        micro_batches = split(regression(sum(SIZES)), SIZES)
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
        for index, (x, y) in enumerate(micro_batches):
            optimizer.zero_grad()
            optimizer.backward(scaler.scale(mse(model, x, y)), weight=len(x) if index % 4 else 0)
            scaler.step(optimizer)
            scaler.update()
        optimizer.flush()
        expected = expected_after([micro_batches[1:4], micro_batches[5:]])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    def test_a_skipped_micro_batch_after_an_overflow_does_not_halve_again(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
        for index, (x, y) in enumerate(split(regression(8), [2] * 4)):
            optimizer.zero_grad()
            value = float("inf") if index == 0 else 1.0
            optimizer.backward(scaler.scale(mse(model, x, y) * value), weight=0 if index == 1 else 2)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512
        assert optimizer.updates == 0

    def test_a_disabled_scaler_changes_nothing(self):
        model, _, micro_batches, _ = self.run(torch.amp.GradScaler("cpu", enabled=False))
        expected = expected_after([micro_batches[:4], micro_batches[4:]])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    @staticmethod
    def mixed(how, weights=None, **options):
        """Micro-batches that come through a GradScaler ("s"), or not ("p"), or have no backward pass ("-")."""
        micro_batches = split(regression(2 * len(how)), [2] * len(how))
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=len(how), **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for index, ((x, y), kind) in enumerate(zip(micro_batches, how, strict=True)):
            optimizer.zero_grad()
            loss = mse(model, x, y)
            if kind != "-":
                optimizer.backward(scaler.scale(loss) if kind == "s" else loss, weight=weights and weights[index])
            if kind == "s":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        return model, optimizer, micro_batches

    @pytest.mark.parametrize("how", ["ps", "sp", "pps", "sps", "psp", "-ps"])
    def test_a_window_of_scaled_and_unscaled_micro_batches_is_refused(self, how):
        with pytest.raises(WindowError, match=r"came through a GradScaler's step.*different scales.*enabled=False"):
            self.mixed(how)

    def test_after_a_window_that_was_refused_for_its_scales_training_goes_on(self):
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        micro_batches = split(regression(4), [2, 2])
        mse(model, *micro_batches[0]).backward()
        optimizer.step()
        scaler.scale(mse(model, *micro_batches[0])).backward()
        with pytest.raises(WindowError, match="different scales"):
            scaler.step(optimizer)
        optimizer.discard()
        scaler.update()
        for x, y in micro_batches:
            optimizer.zero_grad()
            scaler.scale(mse(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert relative_error(model.parameters(), expected_after([micro_batches]).parameters()) <= FLOAT64

    @pytest.mark.parametrize(
        ("how", "weights"),
        [
            ("ps", [2, 0]),
            ("sp", [0, 2]),
            ("sp", [2, 0]),
            ("ps", [0, 2]),
            ("pspp", [2, 0, 2, 2]),
            ("spps", [2, 0, 0, 2]),
        ],
    )
    def test_a_micro_batch_that_weighs_nothing_has_no_say_in_the_scale(self, how, weights):
        model, optimizer, micro_batches = self.mixed(how, weights)
        assert optimizer.updates == 1
        expected = expected_after([[batch for batch, weight in zip(micro_batches, weights, strict=True) if weight]])
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64

    def test_unscaling_in_a_micro_batch_that_weighs_nothing_is_refused_where_the_others_came_without_a_scaler(self):
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        mse(model, *regression(2)).backward()
        optimizer.step()
        optimizer.backward(scaler.scale(mse(model, *regression(2))), weight=0)
        scaler.unscale_(optimizer)
        with pytest.raises(WindowError, match="different scales"):
            scaler.step(optimizer)

    @pytest.mark.parametrize("when", ["before step", "before update", "after update"])
    def test_gradients_that_autograd_grad_asks_for_meanwhile_do_not_keep_the_sum_from_the_next_scale(self, when):
        micro_batches = split(regression(8), [2] * 4)
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
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
        assert relative_error(model.parameters(), expected_after([micro_batches]).parameters()) <= FLOAT64

    @pytest.mark.parametrize("how", ["s-ss", "-ss", "ss-"])
    def test_a_step_without_a_backward_pass_has_no_scale(self, how):
        model, _, micro_batches = self.mixed(how)
        plain = network()
        optimizer = sgd(plain.parameters())
        for (x, y), kind in zip(micro_batches, how, strict=True):
            if kind == "s":
                (mse(plain, x, y) / len(how)).backward()
        optimizer.step()
        assert relative_error(model.parameters(), plain.parameters()) <= FLOAT64

    def test_skip_micro_batch_unscales_each_one_by_itself_so_they_may_differ(self):
        model, _, micro_batches = self.mixed("psps", nonfinite="skip_micro_batch")
        assert relative_error(model.parameters(), expected_after([micro_batches]).parameters()) <= FLOAT64

    @pytest.mark.parametrize("first", [True, False])
    def test_a_window_that_is_resumed_may_go_on_with_a_scaler_or_without(self, first):
        micro_batches = split(regression(8), [2] * 4)
        model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=16.0)
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
        for index, (x, y) in enumerate(micro_batches):
            if index == 2:
                state = optimizer.state_dict()
                optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            if first == (index < 2):
                scaler.scale(mse(model, x, y)).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                mse(model, x, y).backward()
                optimizer.step()
        assert optimizer.updates == 1
        assert relative_error(model.parameters(), expected_after([micro_batches]).parameters()) <= FLOAT64

    def test_a_window_resumes_under_a_scaler_bit_for_bit(self):
        micro_batches = split(regression(8), [2] * 4)

        def start():
            model = network()
            optimizer = gradaccum.torch.optim.Optimizer(adam(model.parameters()), steps=4)
            return model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def train(model, optimizer, scaler, batches):
            for x, y in batches:
                optimizer.zero_grad()
                scaler.scale(mse(model, x, y)).backward()
                scaler.step(optimizer)
                scaler.update()

        straight = start()
        train(*straight, micro_batches)
        first = start()
        train(*first, micro_batches[:2])  # the scale has just doubled
        resumed = start()
        for new, old in zip(resumed, first, strict=True):
            new.load_state_dict(old.state_dict())
        train(*resumed, micro_batches[2:])
        assert resumed[1].updates == 1
        assert relative_error(resumed[0].parameters(), straight[0].parameters()) == 0

    def test_a_resumed_window_can_be_flushed_at_once(self):
        micro_batches = split(regression(4), [2, 2])
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
        for x, y in micro_batches:
            scaler.scale(mse(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        other = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
        other.load_state_dict(optimizer.state_dict())
        assert other.flush()
        assert relative_error(model.parameters(), expected_after([micro_batches]).parameters()) <= FLOAT64

    def test_the_scaler_does_not_keep_the_wrapper_alive(self):
        model, optimizer, _, _ = self.run(torch.amp.GradScaler("cpu", init_scale=8.0))
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
        mse(model, *regression(2)).backward()

    def test_an_overflow_survives_a_resume(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
        x, y = regression(2)
        scaler.scale(mse(model, x, y) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        other = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
        other.load_state_dict(optimizer.state_dict())
        other.zero_grad()
        scaler.scale(mse(model, x, y)).backward()
        scaler.step(other)
        scaler.update()
        assert not other.updated
        assert other.micro_batches == 0
        assert relative_error(model.parameters(), network().parameters()) == 0

    def test_an_overflow_that_was_saved_makes_no_update_when_the_window_is_flushed_at_once(self):
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(mse(model, *regression(2)) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        resumed = network()
        other = gradaccum.torch.optim.Optimizer(sgd(resumed.parameters()), steps=3)
        other.load_state_dict(optimizer.state_dict())
        before = [p.detach().clone() for p in resumed.parameters()]
        assert not other.flush()
        assert all(map(torch.equal, resumed.parameters(), before))
