"""What an ordinary window costs, in calls: Python and C together, as `sys.setprofile` counts them. No clock.

The first thing to see after a change to the window. A count is that of the wrapped loop minus that of the loop by hand.
"""

import functools
import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn

import gradaccum.torch
from tests.torch.problems import Operations, hooked

STEPS, WARM = 4, 8
"""Windows 1, 2, 4 and 8 look at all gradients; the next seven don't."""


@pytest.fixture(autouse=True)
def undisturbed():
    """No garbage of other tests is collected meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Calls:
    """Counts calls while it is entered, of the code in a folder and by it, where one is named."""

    def __init__(self, folder=""):
        self.names, self._folder = Counter(), folder

    def __enter__(self):
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        del self.names[self.__exit__.__qualname__], self.names["setprofile"]

    def _called(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self._folder):
            return
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


def by_hand(model, optimizer, batches, clips=False):
    """Calls of each micro-batch: backward, and at the end of four the update."""
    parameters = [*model.parameters()]
    for i, (x, y) in enumerate(batches):
        loss = model(x, y)
        with Calls() as calls:
            if i % STEPS == 0:
                optimizer.zero_grad()
            loss.backward()
            if i % STEPS == STEPS - 1:
                if clips:
                    nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        yield calls.names


def split_by_hand(model, optimizer, batches):
    """Calls of each window: a large batch in four parts, and the update. What compares with TrainStep."""
    for x, y in batches:
        with Calls() as calls:
            optimizer.zero_grad()
            for rows, targets in zip(x.split(3), y.split(3)):
                (model(rows, targets) / STEPS).backward()
            optimizer.step()
        yield calls.names


def in_train_step(model, optimizer, batches, **options):
    step = gradaccum.torch.TrainStep(
        model, optimizer, compute_loss=lambda model, x, y: model(x, y), micro_batch_size=3, **options
    )
    for x, y in batches:
        with Calls() as calls:
            step(x, y)
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


def scaled(model, optimizer, batches):
    """Under a GradScaler, which itself goes through all gradients at each step: calls of ours alone, and hooks."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for x, y in batches:
        loss = model(x, y)
        with Calls(gradaccum.__path__[0]) as calls:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        calls.names["hooks on gradients"] = hooked(model)
        yield calls.names


WAYS = {"plain": plain, "batches()": with_batches, "backward(loss, weight)": with_weights}


def beyond(parameters, way, **options):
    """Calls beyond the loop by hand of an open micro-batch, the first of a window, and a closing one."""
    expected = [names.total() for names in counted(parameters, by_hand, wrapped=False)]
    found = [names.total() - e for names, e in zip(counted(parameters, WAYS[way], **options), expected, strict=True)]
    return max(found[1:-1]), found[0], found[-1]


MOST = {"plain": (13, 39), "batches()": (18, 44), "backward(loss, weight)": (-1, 25)}
"""Of an open micro-batch, and of a closing one. `loss.backward()` makes some twenty calls before the engine runs."""


SCALED = (88, 146)
"""The same under a GradScaler, the calls of `zero_grad()` and `step()` themselves and three hooks included."""
CLOSING = [({"clip_grad_norm": 1.0}, 133), ({"clip_grad_value": 1.0}, 76), ({"nonfinite": "skip_window"}, 101)]
"""Of a closing micro-batch with ten parameters; lists for `_foreach` operators grow with them."""
TRAIN_STEP = 38
"""Of a window of four micro-batches in all."""


def beyond_split(parameters, **options):
    """Calls of a window of TrainStep beyond those of a loop that splits the batch by hand."""
    found = []
    for way in (split_by_hand, functools.partial(in_train_step, **options)):
        torch.manual_seed(0)
        model = Deep(parameters)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        batches = [(torch.randn(12, 2), torch.randn(12)) for _ in range(WARM + 5)]
        found.append(max(names.total() for names in [*way(model, optimizer, batches)][WARM + 1 : WARM + 3]))
    return found[1] - found[0]


@pytest.mark.parametrize("parameters", [10, 1000])
@pytest.mark.parametrize("way", MOST)
def test_an_ordinary_micro_batch_makes_few_calls_whatever_the_number_of_parameters(way, parameters):
    opened, first, closing = beyond(parameters, way)
    assert max(opened, first) <= MOST[way][0]
    assert closing <= MOST[way][1]


def test_under_a_grad_scaler_an_ordinary_window_has_three_hooks_and_as_many_calls_for_any_number_of_parameters():
    few, many = (counted(parameters, scaled) for parameters in (10, 1000))
    assert {names["hooks on gradients"] for names in (*few, *many)} == {3}
    assert many[:-1] == few[:-1]
    assert max(names.total() for names in few[:-1]) <= SCALED[0]
    assert few[-1].total() <= SCALED[1]
    assert {*(many[-1] - few[-1])} == {"append"}  # lists for `_foreach` operators


def test_a_window_that_looks_compares_by_foreach_operators_and_hooks_only_count():
    """The first window's second micro-batch: nothing in it but the counting of arrivals grows with the parameters."""
    few, many = (looked(parameters) for parameters in (10, 110))
    grown = {name: count - few[name] for name, count in many.items() if count > few[name]}
    assert "_Watched._hook.<locals>.arrived" in grown
    assert {name for name in grown if name.startswith("_foreach") or name in ("norm", "sum", "max")} == set()


@pytest.mark.parametrize(("option", "most"), CLOSING)
def test_an_option_adds_calls_to_a_windows_end_alone(option, most):
    opened, first, closing = beyond(10, "plain", **option)
    assert max(opened, first) <= MOST["plain"][0]
    assert closing <= most


@pytest.mark.parametrize("parameters", [10, 1000])
def test_a_window_of_train_step_makes_few_calls_whatever_the_number_of_parameters(parameters):
    assert beyond_split(parameters) <= TRAIN_STEP


def operators(loop, rows, micro_batches, wrapped=False):
    """The operators of an ordinary window, forward and backward passes included."""
    torch.manual_seed(0)
    model = Deep(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = gradaccum.torch.optim.Optimizer(optimizer, steps=STEPS) if wrapped else optimizer
    batches = [(torch.randn(rows, 2), torch.randn(rows)) for _ in range(micro_batches * (WARM + 3))]
    loop = loop(model, optimizer, batches)
    for _ in range(micro_batches * (WARM + 1)):
        next(loop)
    with Operations() as seen:
        for _ in range(micro_batches):
            next(loop)
    return Counter(name.split(".")[1] for name in seen.seen)


OPERATORS = {
    "plain": {"_foreach_mul_": 1},  # divides by four
    "batches()": {"_foreach_mul_": 1},
    "backward(loss, weight)": {"_foreach_div_": 1, "full_like": 3, "detach": 4},  # weights, and the window's loss
}
OF_TRAIN_STEP = {"slice": 8, "detach": 4, "scalar_tensor": 1, "abs": 2, "amin": 2, "_local_scalar_dense": 6}
"""In place of `split`, and of dividing the loss; two looks for zeros and NaN in small batches; the loss as a number."""


@pytest.mark.parametrize("way", OPERATORS)
def test_an_ordinary_window_runs_the_operators_of_the_loop_by_hand_and_divides_the_sum(way):
    assert operators(WAYS[way], 3, STEPS, wrapped=True) - operators(by_hand, 3, STEPS) == OPERATORS[way]


def test_an_ordinary_window_of_train_step_runs_the_operators_of_a_loop_that_splits_by_hand():
    assert operators(in_train_step, 12, 1) - operators(split_by_hand, 12, 1) == OF_TRAIN_STEP


def looked(parameters):
    torch.manual_seed(0)
    model = Deep(parameters)
    optimizer = gradaccum.torch.optim.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), steps=STEPS)
    return list(plain(model, optimizer, [(torch.randn(3, 2), torch.randn(3)) for _ in range(STEPS)]))[1]


if __name__ == "__main__":
    for name, way in WAYS.items():
        print(name, *(beyond(n, name) for n in (10, 1000)))
        if len(sys.argv) > 1:
            expected = counted(10, by_hand, wrapped=False)
            for place in (0, 1, 3):
                print("   ", place, dict((counted(10, way)[place] - expected[place]).most_common()))
