"""What an ordinary window costs, in calls: Python and C together, as `sys.setprofile` counts them. No clock.

The first thing to see after a change to the window. A count is that of the wrapped loop minus that of the loop by hand.
"""

import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum.torch import TrainStep
from gradaccum.torch.window import RUNNING

STEPS, WARM = 4, 8
"""Windows 1, 2, 4 and 8 look at all gradients; the next seven don't."""


@pytest.fixture(autouse=True)
def undisturbed():
    """No garbage of other tests is collected meanwhile, and none of their loops runs on."""
    gc.collect()
    gc.disable()
    RUNNING.clear()
    yield
    gc.enable()


class Calls:
    """Counts calls while it is entered."""

    def __init__(self):
        self.names = Counter()

    def __enter__(self):
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        del self.names[self.__exit__.__qualname__], self.names["setprofile"]

    def _called(self, frame, event, argument):
        if event == "call":
            self.names[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call":
            self.names[argument.__name__] += 1


class Deep(nn.Module):
    """Small layers, one after the other: two parameters each."""

    def __init__(self, parameters):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(parameters // 2))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (x.sum(1) - y).square().mean()


def by_hand(model, optimizer, batches):
    """Calls of each micro-batch: backward, and at the end of four the update."""
    for i, (x, y) in enumerate(batches):
        loss = model(x, y)
        with Calls() as calls:
            if i % STEPS == 0:
                optimizer.zero_grad()
            loss.backward()
            if i % STEPS == STEPS - 1:
                optimizer.step()
        yield calls.names


def plain(model, optimizer, batches):
    for x, y in batches:
        loss = model(x, y)
        with Calls() as calls:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield calls.names


def with_batches(model, optimizer, batches):
    iterator = iter(optimizer.batches(batches))
    for _ in batches:
        with Calls() as calls:
            x, y = next(iterator)
        loss = model(x, y)
        with calls:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        calls.names["next"] -= 1
        yield calls.names


def with_weights(model, optimizer, batches):
    for i, (x, y) in enumerate(batches):
        loss = model(x, y)
        with Calls() as calls:
            optimizer.zero_grad()
            optimizer.backward(loss, weight=3 + i % 7)  # no two windows are divided by the same
            optimizer.step()
        yield calls.names


def counted(parameters, way, wrapped=True, **options):
    """For each place in an ordinary window: the largest number of calls."""
    torch.manual_seed(0)
    model = Deep(parameters)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=STEPS, **options) if wrapped else inner
    batches = [(torch.randn(3, 2), torch.randn(3)) for _ in range(STEPS * (WARM + 5))]
    found = list(way(model, optimizer, batches))[STEPS * (WARM + 1) : STEPS * (WARM + 3)]
    return [max(found[i::STEPS], key=Counter.total) for i in range(STEPS)]


WAYS = {"plain": plain, "batches()": with_batches, "backward(loss, weight)": with_weights}


def beyond(parameters, way, **options):
    """Calls beyond the loop by hand of an open micro-batch, the first of a window, and a closing one."""
    expected = [names.total() for names in counted(parameters, by_hand, wrapped=False)]
    found = [names.total() - e for names, e in zip(counted(parameters, WAYS[way], **options), expected, strict=True)]
    return max(found[1:-1]), found[0], found[-1]


MOST = {"plain": (13, 39), "batches()": (18, 44), "backward(loss, weight)": (-1, 25)}
"""Of an open micro-batch, and of a closing one. `loss.backward()` makes some twenty calls before the engine runs."""


@pytest.mark.parametrize("parameters", [10, 1000])
@pytest.mark.parametrize("way", MOST)
def test_an_ordinary_micro_batch_makes_few_calls_whatever_the_number_of_parameters(way, parameters):
    opened, first, closing = beyond(parameters, way)
    assert max(opened, first) <= MOST[way][0]
    assert closing <= MOST[way][1]


def test_a_window_that_looks_compares_by_foreach_operators_and_hooks_only_count():
    """The first window's second micro-batch: nothing in it but the counting of arrivals grows with the parameters."""
    few, many = (looked(parameters) for parameters in (10, 110))
    grown = {name: count - few[name] for name, count in many.items() if count > few[name]}
    assert "_Watched._hook.<locals>.arrived" in grown
    assert {name for name in grown if name.startswith("_foreach") or name in ("norm", "sum", "max")} == set()


def looked(parameters):
    torch.manual_seed(0)
    model = Deep(parameters)
    optimizer = gradaccum.torch.optim.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), steps=STEPS)
    return list(plain(model, optimizer, [(torch.randn(3, 2), torch.randn(3)) for _ in range(STEPS)]))[1]


# TrainStep: both passes of four micro-batches, and the update.

LOSS, ROWS, MICRO = nn.CrossEntropyLoss(), 16, 4


def split(model, optimizer):
    return TrainStep(model, optimizer, loss_fn=LOSS, micro_batch_size=MICRO)


def split_by_hand(model, optimizer):
    def run(x, y):
        optimizer.zero_grad()
        for rows in (slice(start, start + MICRO) for start in range(0, ROWS, MICRO)):
            (LOSS(model(x[rows]), y[rows]) / (ROWS // MICRO)).backward()
        optimizer.step()

    return run


def of_a_window(layers, make):
    """Calls of the seventh window, which looks at nothing."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    run = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(ROWS, 4), torch.randint(4, (ROWS,))
    for _ in range(6):
        run(*batch)
    with Calls() as found:
        run(*batch)
    return found.names.total()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are calls or not by version")
def test_an_ordinary_window_of_four_makes_so_many_calls_beyond_the_loop_by_hand():
    few, many = (of_a_window(layers, split) - of_a_window(layers, split_by_hand) for layers in (2, 300))
    assert few == many
    assert few <= 86


if __name__ == "__main__":
    for name, way in WAYS.items():
        print(name, *(beyond(n, name) for n in (10, 1000)))
        if len(sys.argv) > 1:
            expected = counted(10, by_hand, wrapped=False)
            for place in (0, 1, 3):
                print("   ", place, dict((counted(10, way)[place] - expected[place]).most_common()))
