"""Epochs: the last micro-batch closes its window; nothing leaks from one epoch into the next."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error, windows_of
from tests.torch.optimizer.loops import assert_same, large, train, wrapped
from tests.torch.problems import mse, regression, split

pytestmark = pytest.mark.usefixtures("float64")

PAIRS = split(tuple(t.double() for t in regression(10)), [2] * 5)


def test_batches_are_yielded_unchanged_and_in_order():
    _, optimizer = wrapped(steps=2)
    given = [{"x": torch.zeros(2, 5), "name": "a"}, {"x": torch.zeros(1, 5), "name": "b"}]
    assert all(a is b for a, b in zip(optimizer.batches(given), given, strict=True))
    assert len(optimizer.batches(given)) == 2


@pytest.mark.parametrize("how", ["in the loop", "in a hook"])
def test_an_update_after_the_loop_is_told_to_who_steps_a_schedule_in_it(how, caplog):
    model, optimizer = wrapped(steps=3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rate = optimizer.param_groups[0]["lr"]
    if how == "in a hook":
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    for number, batch in enumerate(optimizer.batches(split(regression(5), [1] * 5))):
        if number == 4:
            continue  # the fourth closes its window after the loop
        train(model, optimizer, [batch])
        if how == "in the loop" and optimizer.updated:
            schedule.step()
    assert optimizer.updates == 2
    missed = how == "in the loop"
    assert optimizer.param_groups[0]["lr"] == rate * (0.5 if missed else 0.25)
    assert ("An update was made after the loop" in caplog.text) == missed


@pytest.mark.parametrize("zeroes", ["before backward", "after step"])
def test_flush_closes_the_short_window_of_a_plain_loop_and_leaves_no_gradient(zeroes):
    model, optimizer = wrapped(steps=4)
    for _ in range(2):
        if zeroes == "before backward":
            train(model, optimizer, PAIRS)
        else:
            for x, y in PAIRS:
                mse(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert (optimizer.flush(), optimizer.updated) == (True, True)
        assert (optimizer.flush(), optimizer.updated) == (False, False)
    assert optimizer.epoch == 2
    assert_same(model, large(windows_of(PAIRS, 4) * 2))


def test_closes_next_and_micro_batches_tell_where_the_window_stands():
    model, optimizer = wrapped(steps=2)
    seen = []
    for batch in optimizer.batches(split(regression(5), [1] * 5)):
        seen.append((optimizer.micro_batches, optimizer.closes_next))
        train(model, optimizer, [batch])
        seen[-1] += (optimizer.updated, optimizer.updates)
    first, second = [(0, False, False, 0), (1, True, True, 1)], [(0, False, False, 1), (1, True, True, 2)]
    assert seen == [*first, *second, (0, True, True, 3)]


@pytest.mark.parametrize("how", ["break", "islice"])
def test_breaking_out_discards_the_open_window_with_a_line(how, caplog):
    model, optimizer = wrapped(steps=2)
    if how == "islice":
        train(model, optimizer, itertools.islice(optimizer.batches(PAIRS), 3))
    else:
        for index, batch in enumerate(optimizer.batches(PAIRS)):
            train(model, optimizer, [batch])
            if index == 2:
                break
    assert "Discarding an open window of 1 of 2 micro-batches" in caplog.text
    assert (optimizer.micro_batches, optimizer.epoch) == (0, 1)
    train(model, optimizer, optimizer.batches(PAIRS))
    assert_same(model, large([PAIRS[:2], *windows_of(PAIRS, 2)]))


def test_flush_before_the_break_keeps_the_open_window():
    model, optimizer = wrapped(steps=2)
    for batch in optimizer.batches(PAIRS):
        train(model, optimizer, [batch])
        assert optimizer.flush()
        break
    assert (optimizer.updates, optimizer.epoch) == (1, 1)
    assert_same(model, large([PAIRS[:1]]))


def test_an_empty_loader_is_refused():
    _, optimizer = wrapped(steps=2)
    with pytest.raises(ValueError, match="yielded no batch"):
        list(optimizer.batches([]))
    with pytest.raises(TypeError, match="iterable"):
        optimizer.batches(3)


class Flaky:
    """A loader that raises once, before its fourth batch; it starts over, or goes on, as iterators do."""

    def __init__(self):
        self.position, self.raised = 0, False

    def __iter__(self):
        for index in range(len(PAIRS)):
            if index == 3 and not self.raised:
                self.raised = True
                raise OSError("disk on fire")
            yield PAIRS[index]


class FlakyIterator(Flaky):
    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 3 and not self.raised:
            self.raised = True
            raise OSError("disk on fire")
        if self.position == len(PAIRS):
            raise StopIteration
        self.position += 1
        return PAIRS[self.position - 1]


@pytest.mark.parametrize("make", [FlakyIterator, Flaky])
def test_a_loader_that_raises_midway_can_be_gone_on_with_or_started_over(make):
    loader = make()
    model, optimizer = wrapped(steps=4)
    with pytest.raises(OSError, match="disk on fire"):
        train(model, optimizer, optimizer.batches(loader))
    assert (optimizer.micro_batches, optimizer.updates) == (3, 0)
    train(model, optimizer, optimizer.batches(loader))
    assert optimizer.epoch == 1
    assert_same(model, large(windows_of(PAIRS, 4)))


def test_an_exception_in_the_loop_discards_the_window_when_the_next_loop_begins():
    model, optimizer = wrapped(steps=4)
    kept = None
    try:
        for batch in optimizer.batches(PAIRS):
            train(model, optimizer, [batch])
            if optimizer.micro_batches == 2:
                raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        kept = error  # its traceback keeps the abandoned loop alive
    train(model, optimizer, optimizer.batches(PAIRS[:4]))
    del kept
    assert_same(model, large([PAIRS[:4]]))


def test_what_a_plain_loop_leaves_open_is_flushed_before_batches_begin():
    model, optimizer = wrapped(steps=3)
    train(model, optimizer, PAIRS[:2])
    train(model, optimizer, optimizer.batches(PAIRS[:3]))
    assert_same(model, large([PAIRS[:2], PAIRS[:3]]))


def test_rows_that_disagree_or_are_not_there_ask_for_a_weight():
    _, optimizer = wrapped(steps=2)
    boxes = ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)], {"boxes": torch.zeros(5, 4)})
    with pytest.raises(ValueError, match=r"batch\[1\]\['boxes'\]  shape \(5, 4\)(.|\n)*Pass weight="):
        next(iter(optimizer.batches([boxes])))
    assert next(iter(optimizer.batches([boxes], weight=lambda batch: len(batch[0])))) is boxes
    with pytest.raises(ValueError, match="Pass weight="):
        next(iter(optimizer.batches([["a sentence", "another"]])))


def test_a_backward_pass_without_a_step_is_named():
    model, optimizer = wrapped(steps=2)
    with pytest.raises(WindowError, match=r"Call step\(\) after"):
        for index, (x, y) in enumerate(optimizer.batches(PAIRS)):
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
        data = split(regression(10), [2, 3, 1, 2, 2])
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
        return [*g.parameters(), *d.parameters()], trace

    def test_each_closes_its_own_windows_on_the_shared_last_batch(self):
        trained, trace = self.run(nested=True)
        assert trace == [(False, False), (True, False), (False, True), (True, False), (True, True)]
        assert relative_error(trained, self.run(nested=False)[0]) <= FLOAT64

    @pytest.mark.parametrize(("sizes", "said"), [([2, 3, 1, 2], 1), ([2, 2, 2, 2], 0), ([2, 2, 3, 3], 0)])
    @pytest.mark.parametrize("weighed", [False, True])
    def test_one_outside_of_batches_is_told_where_its_micro_batches_are_not_alike(self, sizes, said, weighed):
        left = [wrapped(steps=2)[1] for _ in range(8)]
        stopped = [iter(optimizer.batches(PAIRS[:2])) for optimizer in left]
        for loop in stopped:  # loops that nobody goes on with
            next(loop)
        first, inside = wrapped(steps=2)
        second, outside = wrapped(steps=2)
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
        _, optimizer = wrapped(steps=2)
        with pytest.raises(ValueError, match="already"):
            optimizer.batches(optimizer.batches([]))

    def test_a_loss_that_reaches_the_other_ones_parameters_is_named(self):
        model, optimizer = wrapped(steps=2)
        model(torch.ones(2, 5)).mean().backward()
        optimizer.step()
        model(torch.ones(2, 5)).square().mean().backward()  # the generator's loss, the discriminator not frozen
        with pytest.raises(WindowError, match=r"requires_grad_\(False\)"):
            optimizer.zero_grad()
