"""Epochs: the last micro-batch closes its window, and nothing leaks into the next. Loaders as people have them.

The random programs (tests/fuzz) loop over lists, generators, iterators, DataLoaders, streams and loaders with a state
or an error, leave loops, skip, flush and load checkpoints in them, and share them among optimizers.
"""

import contextlib
import copy
import dataclasses
import itertools
import re

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import gradaccum.torch
import gradaccum.torch.optimizer.batches as batches_module
from gradaccum import WindowError
from tests.reference import FLOAT64, relative_error, windows_of
from tests.torch.optimizer.loops import assert_same, backward, large, parts, refused, train, warned, wrapped
from tests.torch.problems import mse, network, regression

pytestmark = pytest.mark.usefixtures("float64")

PAIRS = parts([2] * 5)
SIX = parts([2] * 6)


def test_batches_are_yielded_unchanged_and_in_order():
    _, optimizer = wrapped(steps=2)
    given = [{"x": torch.zeros(2, 5), "name": "a"}, {"x": torch.zeros(1, 5), "name": "b"}]
    assert all(a is b for a, b in zip(optimizer.batches(given), given, strict=True))
    assert len(optimizer.batches(given)) == 2


@pytest.mark.parametrize("in_hook", [False, True])
def test_an_update_after_the_loop_is_told_to_who_steps_a_schedule_in_it(in_hook, caplog):
    model, optimizer = wrapped(steps=3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rate = optimizer.param_groups[0]["lr"]
    if in_hook:
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    but_the_last = (batch for number, batch in enumerate(optimizer.batches(PAIRS)) if number != 4)
    train(model, optimizer, but_the_last, after=lambda: optimizer.updated and not in_hook and schedule.step())
    assert optimizer.updates == 2
    assert optimizer.param_groups[0]["lr"] == rate * (0.25 if in_hook else 0.5)
    assert ("An update was made after the loop" in caplog.text) == (not in_hook)


def test_a_loop_of_batches_closes_what_a_plain_loop_left_open_as_flush_does():
    model, optimizer = wrapped(steps=4)
    train(model, optimizer, PAIRS[:2])
    train(model, optimizer, optimizer.batches(PAIRS[:3]))
    train(model, optimizer, PAIRS)
    assert [(optimizer.flush(), optimizer.updated) for _ in range(2)] == [(True, True), (False, False)]
    assert_same(model, large([PAIRS[:2], PAIRS[:3], *windows_of(PAIRS, 4)]))


class Flaky(list):
    """Raises once, if it is told to, before its fourth batch."""

    raises = False

    def __iter__(self):
        yield from self[:3]
        if self.raises:
            self.raises = False
            raise OSError
        yield from self[3:]


@pytest.mark.parametrize("how", ["break", "islice", "flush, then break", "an error in its body", "the loader's error"])
def test_leaving_the_loop_discards_the_open_window_with_a_line_unless_it_is_flushed(how, caplog):
    """After an error, when the next loop begins: it is the same epoch's."""
    (model, optimizer), kept, loader, error = wrapped(steps=2), how.startswith("flush"), Flaky(PAIRS), None
    loader.raises, loop = how == "the loader's error", optimizer.batches(loader)
    loop = itertools.islice(loop, 3) if how == "islice" else iter(loop) if "body" in how else loop  # as one is kept
    try:
        for index, batch in enumerate(loop):
            train(model, optimizer, [batch])
            if index == 2 and how == "an error in its body":
                raise OSError
            if index == 2 and how.endswith("break"):
                assert not kept or optimizer.flush()
                break
    except OSError as raised:
        error = raised
    assert (optimizer.micro_batches, optimizer.epoch) == ((1, 0) if error else (0, 1))
    train(model, optimizer, optimizer.batches(loader))
    assert optimizer.epoch == (1 if error else 2)
    assert ("Discarding an open window of 1 of 2 micro-batches" in caplog.text) == (not kept)
    assert_same(model, large([PAIRS[:2], *([PAIRS[2:3]] if kept else []), *windows_of(PAIRS, 2)]))


@pytest.mark.parametrize("weigh", [None, lambda *batch: None], ids=["loss.backward()", "optimizer.backward()"])
@pytest.mark.parametrize("windows", range(4))
def test_a_backward_pass_before_which_the_loop_is_left_is_no_part_of_the_next_one(windows, weigh):
    """In loops that clear gradients after their step."""
    model, optimizer = wrapped(steps=2)
    for number, batch in enumerate(optimizer.batches(SIX + SIX)):
        if number == 2 * windows:
            backward(model, optimizer, batch, weigh=weigh)
            break
        train(model, optimizer, [batch], clear="after", weigh=weigh)
    train(model, optimizer, optimizer.batches(PAIRS), clear="after")
    assert_same(model, large([*windows_of(SIX[: 2 * windows], 2), *windows_of(PAIRS, 2)]))


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_breaking_off_and_going_on_with_the_same_iterator_loses_no_batch(after):
    _, optimizer = wrapped(steps=1)
    stream, seen = iter(range(6)), []
    for stop in (after, None):
        for index in itertools.islice(optimizer.batches(stream, weight=lambda item: 1), stop):
            optimizer.step()
            seen.append(index)
    assert seen == list(range(6))
    assert [*optimizer.batches(iter(PAIRS[:2]))] == PAIRS[:2], "another iterator has its own"


def test_a_checkpoint_that_is_loaded_after_an_error_has_ended_a_loop_is_what_the_next_loop_goes_on_with():
    (model, optimizer), batches = wrapped(steps=2), parts([2, 2, 2])
    saved = None
    with contextlib.suppress(KeyError):
        for batch in optimizer.batches(batches):
            if saved is not None:
                raise KeyError
            train(model, optimizer, [batch])
            saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    train(model, optimizer, optimizer.batches(batches[1:]))
    assert_same(model, large(windows_of(batches, 2)))


def ahead(batches):
    """As a prefetcher does: the next batch is fetched before one is handed on."""
    batches = iter(batches)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


def inside_another_loop(model, optimizer):
    for _ in optimizer.batches(PAIRS):
        train(model, optimizer, [*optimizer.batches(PAIRS)][:1])


def with_its_if_statement(model, optimizer):
    """The hand-written loop's."""
    for index, batch in enumerate(optimizer.batches(PAIRS)):
        train(model, optimizer, [batch]) if index % 2 else backward(model, optimizer, batch)


def halves(batches):
    return ((t[part] for t in batch) for batch in batches for part in (slice(1), slice(1, None)))


BOXES = ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)], {"boxes": torch.zeros(5, 4)})
IMAGES = [torch.randn(3, 8, 9), torch.randn(3, 7, 5)]
AHEAD = r"fetches ahead.*optimizer\.batches\(prefetched\(loader\)\).*discard\(\) forgets the loop"
LOOPS = {  # and what is said of them; with ValueErrors, of loaders
    "fetched ahead": (lambda m, o: train(m, o, ahead(o.batches(PAIRS))), AHEAD),
    "listed": (lambda m, o: train(m, o, [*o.batches(PAIRS)]), AHEAD),
    "inside another loop": (inside_another_loop, r"another loop over the same optimizer's batches\(\)"),
    "split again": (lambda m, o: train(m, o, halves(o.batches(PAIRS))), r"step\(\) was called twice for one batch"),
    "with its if-statement": (with_its_if_statement, r"Call step\(\) after"),
    "batches() of batches()": (lambda m, o: o.batches(o.batches([])), r"Optimizer\(\[a, b\], steps=4\)", ValueError),
    "another one's batches()": (lambda m, o: o.batches(wrapped(steps=2)[1].batches([])), "one loop fills", ValueError),
    "no loader": (lambda m, o: o.batches(3), "iterable", TypeError),
    "no batch": ([], "yielded no batch"),
    "boxes": ([BOXES], r"batch\[1\]\['boxes'\]  shape \(5, 4\)(.|\n)*Pass weight="),
    "sentences": ([["a sentence", "another"]], "Pass weight="),
    "images": ([IMAGES, IMAGES], r"images of different sizes.*\nPass weight= to batches"),
    "images of one size": ([[torch.randn(3, 8, 8)] * 16], r"may be as many images.*\nPass weight= to batches"),
    "images and targets": ([(IMAGES, torch.zeros(3))], r"images of different sizes.*\nPass weight= to batches"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_or_a_loader_is_refused_and_what_to_do_is_said(name):
    (run, says, *error), (model, optimizer) = LOOPS[name], wrapped(steps=3)
    error = *error, ValueError if isinstance(run, list) else WindowError
    too_late = name == "fetched ahead"  # its first window is closed by then
    with refused(says, *([] if too_late else [model]), error=error[0]):
        [*optimizer.batches(run)] if isinstance(run, list) else run(model, optimizer)
    optimizer.discard()
    plain = PAIRS[:3] if name == "listed" else []
    train(model, optimizer, plain)
    train(model, optimizer, optimizer.batches(ahead(PAIRS)))
    expected = large([*windows_of(plain, 3), *windows_of(PAIRS, 3)])
    assert too_late or relative_error(model.parameters(), expected.parameters()) <= FLOAT64
    for odd in (BOXES, IMAGES):
        assert next(iter(optimizer.batches([odd], weight=lambda batch: 2))) is odd


@pytest.mark.parametrize("before", [True, False])
def test_a_state_of_batches_whose_batch_is_not_counted_yet_is_warned_of(before, caplog):
    model, optimizer = wrapped(steps=3)
    batches = optimizer.batches(PAIRS)
    for x, y in batches:
        if before:
            batches.state_dict()
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
        batches.state_dict()
    assert caplog.text.count("before step() has counted the batch in hand") == before


def test_states_of_batches_are_named_where_they_are_none_and_batches_are_not_copied():
    batches = wrapped(steps=3)[1].batches([regression(2)])
    for state in ({}, None, {"batches": 1}):
        with pytest.raises(ValueError, match=r"This is no state of batches\(\): 'batches' and 'loader' must"):
            batches.load_state_dict(state)
    with pytest.raises(ValueError, match=r"has no load_state_dict\(\). Received: loader of type list"):
        batches.load_state_dict({"batches": 1, "loader": {"place": 3}})
    for copied in (copy.deepcopy, lambda b: b.__reduce_ex__(4)):
        with pytest.raises(TypeError, match=r"can't be copied or pickled. Save their state_dict\(\)"):
            copied(batches)
    assert len(list(batches)) == 1


# The next batch is fetched while one is in use.


def refilled(kind):
    """A loader that hands out one buffer again and again; None: two in turn, which is fine."""
    buffers = [tuple(t.clone() for t in SIX[0]) for _ in range(1 if kind else 2)]
    arrays, held, batch = [t.numpy() for t in buffers[0]], [None, None], {}
    for index, (x, y) in enumerate(SIX):
        if kind == "a dict":
            batch.update(x=x, y=y)
            yield batch
        elif kind == "a list":
            held[:] = x, y
            yield held
        elif kind in ("NumPy's memory", "NumPy's arrays"):
            arrays[0][:], arrays[1][:] = x.numpy(), y.numpy()
            yield tuple(map(torch.from_numpy, arrays)) if kind == "NumPy's memory" else arrays[0]
        else:
            for buffer, new in zip(buffers[index % len(buffers)], (x, y), strict=True):
                buffer.copy_(new)
            yield buffers[index % len(buffers)]


@pytest.mark.parametrize("kind", ["tensors", "a dict", "a list", "NumPy's memory", "NumPy's arrays"])
def test_a_loader_that_refills_what_is_in_use_is_named_before_anything_is_trained_on(kind):
    model, optimizer = wrapped(steps=3)
    with refused("Fetching the next batch changed the one in use", model, error=ValueError):
        train(model, optimizer, optimizer.batches(refilled(kind)))


def test_two_buffers_in_turn_and_batches_that_share_memory_and_stay_as_they_are_are_fine():
    model, optimizer = wrapped(steps=3)
    train(model, optimizer, optimizer.batches(refilled(None)))
    assert_same(model, large([SIX[:3], SIX[3:]]))
    x, y = regression(12)
    interleaved = [(x[i::6], y[i::6], torch.ones(2, 3)) for i in range(6)]
    for loader in [[SIX[0]] * 4, interleaved, torch.utils.data.DataLoader(x, 4), torch.arange(24.0).split(6), x]:
        _, optimizer = wrapped(steps=2)
        assert len([optimizer.step() for _ in optimizer.batches(loader)]) == len(loader)


def test_a_loader_is_compared_with_its_copies_ever_less_often_over_all_its_epochs(monkeypatch):
    found = []
    original = batches_module._contents_changed
    monkeypatch.setattr(batches_module, "_contents_changed", lambda *both: found.append(1) or original(*both))
    loader, (_, optimizer) = torch.utils.data.DataLoader(torch.arange(20.0).view(10, 2)), wrapped(steps=2)
    for _ in range(3):
        for _ in optimizer.batches(loader):
            optimizer.step()
    assert len(found) == 5  # fetches 1, 2, 4, 8 of the first epoch, and 16


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def sequences(lengths):
    return [torch.randn(length, 5) for length in lengths]


IN_FRONT = [[torch.randn(rows, 8, 9), torch.randn(rows, 7, 9)] for rows in (5, 5, 3)]  # with a short last batch
KINDS = {
    "dataclasses": ([Pair(*part) for part in parts([4, 1, 3])], [4, 1, 3]),
    "packed sequences": ([(pack_sequence(sequences(n), enforce_sorted=False),) for n in ([3, 1], [1, 2, 2])], [2, 3]),
    "jagged tensors": ([torch.nested.nested_tensor(sequences([1, 4, 2]), layout=torch.jagged)], [3]),
    "sequences in front": (IN_FRONT, [5, 5, 3]),
    "lists of rows": ([[(torch.zeros(3, 8, 8), 1)] * n for n in (16, 5)], [16, 5]),
    "lists of rows with labels in tensors": ([[(torch.zeros(7), torch.tensor(1))] * n for n in (4, 3)], [4, 3]),
    "lists of rows by name": ([[{"x": torch.zeros(7), "y": 1.0}] * n for n in (4, 3)], [4, 3]),
    "rows that are zipped": ([tuple(zip(*[(torch.zeros(3, 8, 8), 1)] * n)) for n in (16, 5)], [16, 5]),
    "pairs of batches": ([[(torch.zeros(6, 2), torch.zeros(6)), (torch.zeros(6, 2), torch.zeros(6))]], [6]),
}


@pytest.mark.parametrize(("batches", "rows"), KINDS.values(), ids=KINDS)
def test_batches_are_weighed_by_their_rows_also_where_they_are(batches, rows):
    assert [*map(batches_module.BatchWeight(), batches)] == rows


# Several optimizers in one loop, each parameter in exactly one.


def test_weights_that_reach_another_optimizers_window_are_named():
    model, loader = network(), parts([3, 1, 4, 2, 2])
    one, two = (wrapped(model=layer, steps=3)[1] for layer in (model[0], model[2]))
    with warned() as caught:
        for x, y in loader:
            one.zero_grad(), two.zero_grad()
            one.backward(mse(model, x, y), weight=len(x) ** 2)
            one.step(), two.step()
    (said,) = caught
    assert re.search(r"also reached parameters of another wrapped one.*Optimizer\(\[a, b\]", str(said.message))


def test_a_loss_that_reaches_the_other_ones_parameters_is_named():
    model, optimizer = wrapped(steps=2)
    train(model, optimizer, PAIRS[:1])
    model(torch.ones(2, 5)).square().mean().backward()  # the generator's loss, the discriminator not frozen
    with pytest.raises(WindowError, match=r"requires_grad_\(False\)"):
        optimizer.zero_grad()


def test_batches_are_shown_by_their_loader_and_what_was_handed_out():
    optimizer = gradaccum.torch.optim.Optimizer(torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1), steps=2)
    batches = optimizer.batches([torch.ones(2, 3)] * 3)
    assert repr(batches) == "<batches of a list, 0 handed out>"


@pytest.mark.parametrize("loader", ["the whole", "its rest", "an iterator"])
def test_a_checkpoint_whose_place_in_the_loader_is_not_loaded_is_told_at_the_next_loop(loader, caplog):
    model, optimizer = wrapped(steps=3)
    batches = optimizer.batches(SIX)
    for number, batch in enumerate(batches):
        train(model, optimizer, [batch])
        if number == 1:
            saved = copy.deepcopy((optimizer.state_dict(), batches.state_dict()))
            break
    _, optimizer = wrapped(model=model, steps=3)
    optimizer.load_state_dict(saved[0])
    caplog.clear()
    again = optimizer.batches(iter(SIX[2:]) if loader == "an iterator" else SIX)
    if loader == "its rest":
        again.load_state_dict(saved[1])
    train(model, optimizer, again)
    assert ("call batches.load_state_dict()" in caplog.text) == (loader == "the whole")
