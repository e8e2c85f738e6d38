"""Epochs: the last micro-batch closes its window, and nothing leaks into the next. Loaders as people have them."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import gradaccum.torch
import gradaccum.torch.optimizer.batches as batches_module
from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error, windows_of
from tests.torch.optimizer.loops import assert_same, large, train, wrapped
from tests.torch.problems import mse, network, regression, sgd, split

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


# Loaders as people have them: reused buffers, iterators that go on, loaders with a state, batches of odd shapes.


PARTS = split(tuple(t.double() for t in regression(12)), [2] * 6)


# The next batch is fetched while one is in use.


def one_buffer():
    x, y = (t.clone() for t in PARTS[0])
    for new_x, new_y in PARTS:
        x.copy_(new_x)
        y.copy_(new_y)
        yield x, y


def one_array():
    x, y = (t.clone().numpy() for t in PARTS[0])
    for new_x, new_y in PARTS:
        x[:], y[:] = new_x.numpy(), new_y.numpy()
        yield torch.from_numpy(x), torch.from_numpy(y)


def one_list():
    batch = [None, None]
    for x, y in PARTS:
        batch[:] = x, y
        yield batch


def one_of_numpys_arrays():
    batch = np.zeros((2, 5))
    for x, _ in PARTS:
        batch[:] = x.numpy()
        yield batch


def one_dict():
    batch = {}
    for x, y in PARTS:
        batch["x"], batch["y"] = x, y
        yield batch


@pytest.mark.parametrize("loader", [one_dict, one_buffer, one_array, one_list, one_of_numpys_arrays])
def test_a_loader_that_refills_what_is_in_use_is_named_before_anything_is_trained_on(loader):
    model, optimizer = wrapped(steps=3)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="Fetching the next batch changed the one in use"):
        for batch in optimizer.batches(loader()):
            train(model, optimizer, [batch])
    assert all(map(torch.equal, model.parameters(), before))


def test_batches_that_share_memory_and_stay_as_they_are_are_fine():
    x, y = regression(12)
    shared = torch.ones(2, 3)
    interleaved = [(x[i::6], y[i::6], shared) for i in range(6)]
    for loader in [[PARTS[0]] * 4, interleaved, torch.utils.data.DataLoader(x, 4), torch.arange(24.0).split(6)]:
        _, optimizer = wrapped(steps=2)
        assert len([optimizer.step() for _ in optimizer.batches(loader)]) == len(loader)


def test_two_buffers_in_turn_are_fine():
    buffers = [tuple(t.clone() for t in PARTS[0]) for _ in range(2)]

    def in_turn():
        for index, (new_x, new_y) in enumerate(PARTS):
            x, y = buffers[index % 2]
            x.copy_(new_x)
            y.copy_(new_y)
            yield x, y

    model, optimizer = wrapped(steps=3)
    train(model, optimizer, optimizer.batches(in_turn()))
    assert_same(model, large([PARTS[:3], PARTS[3:]]))


# Loops that are left and taken up again.


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_breaking_off_and_going_on_with_the_same_iterator_loses_no_batch(after):
    model, optimizer = wrapped(steps=1)
    stream, seen = iter(enumerate(PARTS)), []
    for index, batch in optimizer.batches(stream, weight=lambda item: 1):
        train(model, optimizer, [batch])
        seen.append(index)
        if len(seen) == after:
            break
    for index, batch in optimizer.batches(stream, weight=lambda item: 1):
        train(model, optimizer, [batch])
        seen.append(index)
    assert seen == list(range(6))


def test_another_iterator_does_not_get_what_was_fetched_from_the_first():
    _, optimizer = wrapped(steps=1)
    for _ in optimizer.batches(iter(PARTS)):
        optimizer.step()
        break
    assert len([optimizer.step() for _ in optimizer.batches(iter(PARTS[:2]))]) == 2


class Stateful:
    """A loader with a state of its own, which counts what it has yielded."""

    def __init__(self):
        self.yielded = 0

    def __iter__(self):
        while self.yielded < len(PARTS):
            self.yielded += 1
            yield PARTS[self.yielded - 1]
        self.yielded = 0

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.yielded = state["yielded"]


@pytest.mark.parametrize("make_loader", [Stateful, lambda: PARTS, lambda: torch.utils.data.DataLoader(range(6), 1)])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_batches_resume_behind_the_last_one_that_was_handed_out(make_loader, after):
    whole = list(make_loader())
    _, optimizer = wrapped(steps=2)
    batches = optimizer.batches(make_loader(), weight=lambda batch: 1)
    for number, _ in enumerate(batches, 1):
        optimizer.step()
        if number == after:
            saved = batches.state_dict()
            window = optimizer.state_dict()
            break
    assert saved["batches"] == after
    _, resumed = wrapped(steps=2)
    again = resumed.batches(make_loader(), weight=lambda batch: 1)
    again.load_state_dict(saved)
    resumed.load_state_dict(window)
    rest = []
    for batch in again:
        rest.append(batch)
        resumed.step()
    assert len(rest) == 6 - after
    for got, expected in zip(rest, whole[after:], strict=True):
        assert all(map(torch.equal, got, expected))
    assert resumed.epoch == 1
    assert resumed.steps == 2
    assert len([resumed.step() for _ in again]) == 6, "the next epoch is a whole one"


# Rows that cannot be told from the first dimension.


def test_images_of_different_sizes_are_not_counted_by_their_channels():
    for batch in [
        [torch.randn(3, 8, 9), torch.randn(3, 7, 5)],
        ([torch.randn(3, 8, 9), torch.randn(3, 7, 5)], torch.zeros(3)),
    ]:
        _, optimizer = wrapped(steps=3)
        with pytest.raises(ValueError, match=r"images of different sizes.*\nPass weight= to batches\(\)"):
            next(iter(optimizer.batches([batch, batch])))
        assert next(iter(optimizer.batches([batch, batch], weight=lambda batch: 2))) is batch


def test_sequences_in_front_and_a_short_last_batch_are_counted_by_their_rows():
    batches = [[torch.randn(rows, 8, 9), torch.randn(rows, 7, 9)] for rows in (5, 5, 3)]
    _, optimizer = wrapped(steps=3)
    assert len([optimizer.step() for _ in optimizer.batches(batches)]) == 3


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def test_a_batch_that_is_no_container_of_python_s_is_counted_by_its_rows():
    model, optimizer = wrapped(steps=2)
    parts = split(tuple(t.double() for t in regression(10)), [4, 1, 3, 2])
    for pair in optimizer.batches([Pair(*parts[0]), parts[1], Pair(*parts[2]), Pair(*parts[3])]):
        train(model, optimizer, [(pair.x, pair.y) if isinstance(pair, Pair) else pair])
    assert_same(model, large(windows_of(parts, 2)))


def test_a_packed_batch_is_counted_by_its_sequences():
    def packed(lengths):
        return pack_sequence([torch.randn(length, 5) for length in lengths], enforce_sorted=False)

    torch.manual_seed(0)
    lengths = [[3, 1], [1, 2, 2], [4]]
    parts = [(packed(each), torch.randn(len(each), 3)) for each in lengths]
    (model, optimizer), alone = wrapped(steps=3), network()

    def loss(model, x, y):
        last = nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0].sum(1)
        return nn.functional.mse_loss(model(last), y)

    for x, y in optimizer.batches(parts):
        loss(model, x, y).backward()
        optimizer.step()
    inner = sgd(alone.parameters())
    (sum(loss(alone, x, y) * len(y) for x, y in parts) / 6).backward()
    inner.step()
    assert_same(model, alone)
    assert next(iter(optimizer.batches([parts[0][0]] * 2))) is parts[0][0]


def test_a_jagged_batch_is_counted_by_its_rows():
    torch.manual_seed(0)
    parts = [
        torch.nested.nested_tensor([torch.randn(n, 5) for n in lengths], layout=torch.jagged)
        for lengths in ([2, 3], [1, 4, 2], [3])
    ]
    (model, optimizer), alone = wrapped(steps=3), network()

    def loss(model, x):
        return torch.stack([model(row).mean() for row in x.unbind()]).mean()

    for x in optimizer.batches(parts):
        loss(model, x).backward()
        optimizer.step()
    inner = sgd(alone.parameters())
    torch.stack([alone(row).mean() for x in parts for row in x.unbind()]).mean().backward()
    inner.step()
    assert_same(model, alone)


def test_a_loader_is_compared_with_its_copies_ever_less_often_over_all_its_epochs(monkeypatch):
    found = []
    original = batches_module._contents_changed
    monkeypatch.setattr(batches_module, "_contents_changed", lambda *both: found.append(1) or original(*both))
    loader = torch.utils.data.DataLoader(torch.arange(20.0).view(10, 2))
    optimizer = gradaccum.torch.optim.Optimizer(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1), steps=2)
    for _ in range(3):
        for x in optimizer.batches(loader):
            optimizer.zero_grad()
            (optimizer.param_groups[0]["params"][0] * x).sum().backward()
            optimizer.step()
    assert len(found) == 5  # fetches 1, 2, 4, 8 of the first epoch, and 16
