"""`runai.ga.torch`, as Run:AI's readme and the guide print it."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import gradaccum
import runai.ga.torch
from tests.reference import relative_error, torch_updates

x, y = torch.randn(16, 5, dtype=torch.float64), torch.randn(16, 3, dtype=torch.float64)


def network():
    torch.manual_seed(0)
    return nn.Linear(5, 3, dtype=torch.float64)


def train(model, optimizer, divide_by=1):
    for start in range(0, 16, 4):
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x[start : start + 4]), y[start : start + 4]) / divide_by).backward()
        optimizer.step()


def expected():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch_updates(model, optimizer, [(x[:8], y[:8]), (x[8:], y[8:])], lambda m, a, b: nn.functional.mse_loss(m(a), b))
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MAKES = {
    "keyword": lambda m: runai.ga.torch.optim.Optimizer(sgd(m), steps=2),
    "positional": lambda m: runai.ga.torch.optim.Optimizer(sgd(m), 2),
    "named": lambda m: runai.ga.torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, steps=2),
    "named, steps first": lambda m: runai.ga.torch.optim.SGD(2, m.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("how", MAKES)
def test_gradients_are_averaged_over_a_window_and_the_line_says_so(how, capsys):
    model = network()
    optimizer = MAKES[how](model)
    printed = capsys.readouterr().out
    assert printed == "Wrapping 'SGD' PyTorch optimizer with GA of 2 steps (gradients are averaged)\n"
    train(model, optimizer)
    assert relative_error(model.parameters(), expected().parameters()) <= 1e-12


def test_reduction_sum_is_the_originals(capsys):
    model = network()
    optimizer = runai.ga.torch.optim.Optimizer(sgd(model), steps=2, reduction="sum")
    assert capsys.readouterr().out.endswith("with GA of 2 steps (gradients are summed)\n")
    train(model, optimizer, divide_by=2)  # as the original's scripts do
    assert relative_error(model.parameters(), expected().parameters()) <= 1e-12


def test_what_scripts_read():
    model = network()
    inner = sgd(model)
    optimizer = runai.ga.torch.optim.Optimizer(inner, steps=3)
    assert optimizer.optimizer is inner
    assert optimizer.runai.steps == 3
    seen = []
    for _ in range(4):
        seen.append(optimizer.runai.step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[:4]), y[:4]).backward()
        optimizer.step()
    assert seen == [0, 1, 2, 0]
    assert isinstance(optimizer, torch.optim.Optimizer)


class ReadsTheWindow(torch.optim.SGD):
    """A custom optimizer for the original, which finds the window in itself."""

    def step(self, closure=None):
        self.seen = self.runai.steps
        return super().step(closure)


def test_a_custom_inner_optimizer_finds_the_window_in_itself():
    model = network()
    optimizer = runai.ga.torch.optim.Optimizer(ReadsTheWindow(model.parameters(), lr=0.1), steps=2)
    for wrapped in (optimizer, pickle.loads(pickle.dumps(optimizer))):
        (parameter,) = wrapped.param_groups[0]["params"][:1]
        for _ in range(2):
            wrapped.backward(parameter.sum())
            wrapped.step()
        assert wrapped.optimizer.seen == 2
        assert wrapped.optimizer.runai.step == 0


class FilesItself(ReadsTheWindow):
    """Puts all that it has into files, as scripts for the original do, and takes its step from them."""

    def __getstate__(self):
        return dict(vars(self))


def test_what_the_inner_optimizer_finds_goes_into_files_as_numbers():
    optimizer = runai.ga.torch.optim.Optimizer(FilesItself(network().parameters(), lr=0.1), steps=2)
    optimizer.backward(optimizer.param_groups[0]["params"][0].sum())
    optimizer.step()
    inner = pickle.loads(pickle.dumps(optimizer.optimizer))
    assert (inner.runai.steps, inner.runai.step) == (2, 1)
    whole = pickle.loads(pickle.dumps(optimizer))
    whole.runai.step = inner.runai.step
    assert whole.flush()
    assert (whole.optimizer.runai.step, whole.optimizer.seen) == (0, 2)
    assert optimizer.flush()


def test_the_inner_optimizer_does_not_keep_the_wrapped_one_alive():
    optimizer = runai.ga.torch.optim.Optimizer(sgd(network()), steps=2)
    there = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert there() is None
    finally:
        gc.enable()


def test_the_step_is_set_to_what_it_is_or_refused():
    model = network()
    optimizer = runai.ga.torch.optim.Optimizer(sgd(model), steps=2)
    train(model, optimizer)
    optimizer.runai.step = 0
    optimizer.runai.steps = 3
    assert optimizer.steps == 3
    with pytest.raises(gradaccum.WindowError, match=r"in the open window, 0\. Received: step=1\. .*flush"):
        optimizer.runai.step = 1


def test_every_torch_optimizer_is_there_and_pickles():
    model = network()
    adam = runai.ga.torch.optim.Adam(4, model.parameters())
    assert type(pickle.loads(pickle.dumps(adam))) is type(adam)
    assert type(copy.deepcopy(adam).optimizer) is torch.optim.Adam
    assert {"Adam", "AdamW", "RMSprop"} <= set(dir(runai.ga.torch.optim))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = runai.ga.torch.optim.Nothing


@pytest.mark.parametrize("steps", [0, {}])
def test_wrong_steps_are_refused(steps):
    with pytest.raises(ValueError, match="Received: steps="):
        runai.ga.torch.optim.Optimizer(sgd(network()), steps=steps)


def test_a_custom_inner_optimizer_reads_runai_while_it_steps():
    seen = []

    class Custom(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((self.runai.steps, self.runai.step))
            return super().step(closure)

    model = network()
    train(model, runai.ga.torch.optim.Optimizer(Custom(model.parameters(), lr=0.1, momentum=0.9), steps=2))
    assert seen == [(2, 2)] * 2
    assert relative_error(model.parameters(), expected().parameters()) <= 1e-12
