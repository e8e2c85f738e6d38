"""Loaders as people have them: reused buffers, iterators that go on, loaders with a state, batches of odd shapes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from tests.torch.optimizer.loops import assert_same, large, train, wrapped
from tests.torch.problems import network, regression, sgd, split

pytestmark = pytest.mark.usefixtures("float64")

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
