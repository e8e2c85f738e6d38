"""Epochs: the last micro-batch closes its window; nothing leaks from one epoch into the next."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error, torch_updates, windows_of
from tests.torch.problems import adam, join, mse, network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()


def expected_after(micro_batch_windows, make=sgd):
    model = network()
    torch_updates(model, make(model.parameters()), [join(window) for window in micro_batch_windows], mse)
    return model


def test_batches_are_yielded_unchanged_and_in_order():
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    given = [{"x": torch.zeros(2, 5), "name": "a"}, {"x": torch.zeros(1, 5), "name": "b"}]
    assert all(a is b for a, b in zip(optimizer.batches(given), given, strict=True))
    assert len(optimizer.batches(given)) == 2


@pytest.mark.parametrize("how", ["in the loop", "in a hook"])
def test_an_update_after_the_loop_is_told_to_who_steps_a_schedule_in_it(how, caplog):
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rate = optimizer.param_groups[0]["lr"]
    if how == "in a hook":
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    batches = split(regression(5), [1, 1, 1, 1, 1])
    for number, (x, y) in enumerate(optimizer.batches(batches)):
        if number == 4:
            continue  # the fourth closes its window after the loop
        train(model, optimizer, [(x, y)])
        if how == "in the loop" and optimizer.updated:
            schedule.step()
    assert optimizer.updates == 2
    missed = how == "in the loop"
    assert optimizer.param_groups[0]["lr"] == rate * (0.5 if missed else 0.25)
    assert ("An update was made after the loop" in caplog.text) == missed


def test_a_generator_of_unknown_length_closes_its_last_window():
    micro_batches = split(regression(11), [2, 3, 1, 4, 1])
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    for _ in range(2):
        train(model, optimizer, optimizer.batches(batch for batch in micro_batches))
        assert optimizer.updated
        assert optimizer.micro_batches == 0
    expected = expected_after(windows_of(micro_batches, 3) * 2)
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_a_real_data_loader_with_workers_and_a_ragged_end():
    x, y = regression(23)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, num_workers=1)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(adam(model.parameters()), steps=4)
    train(model, optimizer, optimizer.batches(loader))
    expected = network()
    torch_updates(expected, adam(expected.parameters()), [(x[:16], y[:16]), (x[16:], y[16:])], mse)
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_flush_closes_the_short_window_of_a_plain_loop():
    micro_batches = split(regression(10), [2] * 5)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
    for _ in range(2):
        train(model, optimizer, micro_batches)
        assert optimizer.flush() is True
        assert optimizer.updated
        assert optimizer.flush() is False
        assert not optimizer.updated
    assert optimizer.epoch == 2
    expected = expected_after(windows_of(micro_batches, 4) * 2)
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_flush_leaves_no_gradient_for_a_loop_that_zeroes_after_its_step():
    micro_batches = split(regression(10), [2] * 5)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
    for _ in range(2):
        for x, y in micro_batches:
            mse(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
    expected = expected_after(windows_of(micro_batches, 4) * 2)
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_a_schedule_by_epoch_goes_by_batches_or_by_flush():
    micro_batches = split(regression(12), [2] * 6)
    windows = windows_of(micro_batches, 6) + windows_of(micro_batches, 2) * 2
    expected = expected_after(windows)
    for plain in (True, False):
        model = network()
        optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps={0: 6, 1: 2})
        for _ in range(3):
            train(model, optimizer, micro_batches if plain else optimizer.batches(micro_batches))
            if plain:
                optimizer.flush()
        assert optimizer.steps == 2
        assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_closes_next_and_micro_batches_tell_where_the_window_stands():
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    seen = []
    for x, y in optimizer.batches(split(regression(5), [1] * 5)):
        optimizer.zero_grad()
        seen.append((optimizer.micro_batches, optimizer.closes_next))
        mse(model, x, y).backward()
        optimizer.step()
        seen[-1] += (optimizer.updated, optimizer.updates)
    first, second, short = (
        [(0, False, False, 0), (1, True, True, 1)],
        [(0, False, False, 1), (1, True, True, 2)],
        [(0, True, True, 3)],
    )
    assert seen == [*first, *second, *short]


def test_a_skipped_micro_batch_leaves_the_others_exact():
    micro_batches = split(regression(12), [2, 3, 1, 2, 4])
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    for index, (x, y) in enumerate(optimizer.batches(micro_batches)):
        if index in (1, 4):
            continue
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    assert optimizer.updates == 1
    expected = expected_after([[micro_batches[i] for i in (0, 2, 3)]])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_a_window_cut_short_by_a_skipped_last_micro_batch_is_flushed():
    micro_batches = split(regression(6), [2, 3, 1])
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    for index, (x, y) in enumerate(optimizer.batches(micro_batches)):
        if index == 2:
            continue
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    assert optimizer.updated
    expected = expected_after([micro_batches[:2]])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_breaking_out_discards_the_open_window_with_a_line(caplog):
    micro_batches = split(regression(10), [2] * 5)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    with caplog.at_level("INFO", "gradaccum"):
        for index, (x, y) in enumerate(optimizer.batches(micro_batches)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if index == 2:
                break
    assert "Discarding an open window of 1 of 2 micro-batches" in caplog.text
    assert (optimizer.micro_batches, optimizer.epoch) == (0, 1)
    train(model, optimizer, optimizer.batches(micro_batches))
    expected = expected_after([micro_batches[:2], *windows_of(micro_batches, 2)])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_flush_before_the_break_keeps_the_open_window():
    micro_batches = split(regression(6), [2] * 3)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    for index, (x, y) in enumerate(optimizer.batches(micro_batches)):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
        if index == 0:
            assert optimizer.flush()
            break
    assert (optimizer.updates, optimizer.epoch) == (1, 1)
    expected = expected_after([micro_batches[:1]])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_an_empty_loader_is_refused():
    optimizer = gradaccum.torch.optim.Optimizer(sgd(network().parameters()), steps=2)
    with pytest.raises(ValueError, match="yielded no batch"):
        list(optimizer.batches([]))
    with pytest.raises(TypeError, match="iterable"):
        optimizer.batches(3)


class Flaky:
    """A loader that raises once, before its third batch; it starts over, or goes on, as iterators do."""

    def __init__(self, batches):
        self.batches, self.position, self.raised = batches, 0, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 3 and not self.raised:
            self.raised = True
            raise OSError("disk on fire")
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]


def test_an_iterator_that_raises_midway_can_be_gone_on_with():
    micro_batches = split(regression(10), [2] * 5)
    model, loader = network(), Flaky(micro_batches)
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
    with pytest.raises(OSError, match="disk on fire"):
        train(model, optimizer, optimizer.batches(loader))
    assert (optimizer.micro_batches, optimizer.updates) == (3, 0)
    train(model, optimizer, optimizer.batches(loader))
    assert optimizer.epoch == 1
    expected = expected_after(windows_of(micro_batches, 4))
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_a_loader_that_raises_midway_can_be_started_over():
    micro_batches = split(regression(10), [2] * 5)

    class Loader:
        raised = False

        def __iter__(self):
            for index, batch in enumerate(micro_batches):
                if index == 3 and not self.raised:
                    self.raised = True
                    raise OSError("disk on fire")
                yield batch

    model, loader = network(), Loader()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
    with pytest.raises(OSError, match="disk on fire"):
        train(model, optimizer, optimizer.batches(loader))
    train(model, optimizer, optimizer.batches(loader))
    assert optimizer.epoch == 1
    expected = expected_after(windows_of(micro_batches, 4))
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_an_exception_in_the_loop_discards_the_window_when_the_next_loop_begins():
    micro_batches = split(regression(8), [2] * 4)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=4)
    kept = None
    try:
        for x, y in optimizer.batches(micro_batches):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if optimizer.micro_batches == 2:
                raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        kept = error  # its traceback keeps the abandoned loop alive
    train(model, optimizer, optimizer.batches(micro_batches))
    del kept
    expected = expected_after([micro_batches])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_what_a_plain_loop_leaves_open_is_flushed_before_batches_begin():
    micro_batches = split(regression(6), [2] * 3)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=3)
    train(model, optimizer, micro_batches[:2])
    train(model, optimizer, optimizer.batches(micro_batches))
    expected = expected_after([micro_batches[:2], micro_batches])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64


def test_rows_that_disagree_ask_for_a_weight():
    optimizer = gradaccum.torch.optim.Optimizer(sgd(network().parameters()), steps=2)
    boxes = ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)], {"boxes": torch.zeros(5, 4)})
    with pytest.raises(ValueError, match=r"batch\[1\]\['boxes'\]  shape \(5, 4\)(.|\n)*Pass weight="):
        next(iter(optimizer.batches([boxes])))
    assert next(iter(optimizer.batches([boxes], weight=lambda batch: len(batch[0])))) is boxes


def test_a_batch_without_tensors_asks_for_a_weight():
    optimizer = gradaccum.torch.optim.Optimizer(sgd(network().parameters()), steps=2)
    with pytest.raises(ValueError, match="Pass weight="):
        next(iter(optimizer.batches([["a sentence", "another"]])))


def test_a_backward_pass_without_a_step_is_named():
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    with pytest.raises(WindowError, match=r"Call step\(\) after"):
        for index, (x, y) in enumerate(optimizer.batches(split(regression(8), [2] * 4))):
            mse(model, x, y).backward()
            if index % 2:  # the hand-written loop's if-statement, left in place
                optimizer.step()


class TestTwoOptimizersInOneLoop:
    """A GAN's: windows of different lengths, one loader, each parameter in exactly one optimizer."""

    def run(self, nested):
        torch.manual_seed(0)
        g, d = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        opt_g = gradaccum.torch.optim.Adam(g.parameters(), lr=0.01, steps=3)
        opt_d = gradaccum.torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9, steps=2)
        sizes = [2, 3, 1, 2, 2]
        data = split(regression(sum(sizes)), sizes)
        trace = []
        for index, (x, _) in enumerate(opt_g.batches(opt_d.batches(data)) if nested else data):
            opt_d.zero_grad()
            d_loss = (d(x[:, :3]) - 1).square().mean() + d(g(x[:, :3].tanh()).detach()).square().mean()
            opt_d.backward(d_loss, weight=len(x))
            opt_d.step()
            if not nested and index == len(data) - 1:
                opt_d.flush()
            d.requires_grad_(False)
            opt_g.zero_grad()
            opt_g.backward((d(g(x[:, :3].tanh())) - 1).square().mean(), weight=len(x))
            opt_g.step()
            d.requires_grad_(True)
            trace.append((opt_d.updated, opt_g.updated))
        opt_g.flush()
        return g, d, trace

    def test_each_closes_its_own_windows_on_the_shared_last_batch(self):
        g, d, trace = self.run(nested=True)
        assert trace == [(False, False), (True, False), (False, True), (True, False), (True, True)]
        plain_g, plain_d, _ = self.run(nested=False)
        assert relative_error(g.parameters(), plain_g.parameters()) <= FLOAT64
        assert relative_error(d.parameters(), plain_d.parameters()) <= FLOAT64

    @pytest.mark.parametrize(("sizes", "said"), [([2, 3, 1, 2], 1), ([2, 2, 2, 2], 0), ([2, 2, 3, 3], 0)])
    @pytest.mark.parametrize("weighed", [False, True])
    def test_one_outside_of_batches_is_told_where_its_micro_batches_are_not_alike(self, sizes, said, weighed):
        left = [gradaccum.torch.optim.Optimizer(sgd(network().parameters()), steps=2) for _ in range(8)]
        stopped = [iter(optimizer.batches(split(regression(4), [2, 2]))) for optimizer in left]
        for loop in stopped:  # loops that nobody goes on with
            next(loop)
        first, second = network(), network()
        inside = gradaccum.torch.optim.Optimizer(sgd(first.parameters()), steps=2)
        outside = gradaccum.torch.optim.Optimizer(sgd(second.parameters()), steps=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for x, y in inside.batches(split(regression(sum(sizes)), sizes)):
                    for model, optimizer in ((first, inside), (second, outside)):
                        optimizer.zero_grad()
                        if weighed:
                            optimizer.backward(mse(model, x, y), weight=len(x))
                        else:
                            mse(model, x, y).backward()
                        optimizer.step()
        told = [warning for warning in caught if "a.batches(b.batches(loader))" in str(warning.message)]
        assert len(told) == (0 if weighed else said)
        assert all(warning.filename == __file__ for warning in told)
        exact = relative_error(first.parameters(), second.parameters()) <= FLOAT64
        assert exact == (weighed or not said)

    def test_the_same_optimizer_twice_is_refused(self):
        optimizer = gradaccum.torch.optim.Optimizer(sgd(network().parameters()), steps=2)
        with pytest.raises(ValueError, match="already"):
            optimizer.batches(optimizer.batches([]))

    def test_a_loss_that_reaches_the_other_ones_parameters_is_named(self):
        d = nn.Linear(3, 1)
        optimizer = gradaccum.torch.optim.SGD(d.parameters(), lr=0.1, steps=2)
        d(torch.ones(2, 3)).mean().backward()
        optimizer.step()
        d(torch.ones(2, 3)).square().mean().backward()  # the generator's loss, d not frozen
        with pytest.raises(WindowError, match=r"requires_grad_\(False\)"):
            optimizer.zero_grad()


def test_an_island_of_batches_can_be_cut_short_by_islice():
    micro_batches = split(regression(8), [2] * 4)
    model = network()
    optimizer = gradaccum.torch.optim.Optimizer(sgd(model.parameters()), steps=2)
    train(model, optimizer, itertools.islice(optimizer.batches(micro_batches), 2))
    assert (optimizer.updates, optimizer.micro_batches) == (1, 0)
    train(model, optimizer, optimizer.batches(micro_batches))
    expected = expected_after([micro_batches[:2], *windows_of(micro_batches, 2)])
    assert relative_error(model.parameters(), expected.parameters()) <= FLOAT64
