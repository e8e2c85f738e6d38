"""`runai.ga.torch`, as Run:AI's readme and the guide print it."""

import copy
import gc
import pickle
import runpy
import sys
import weakref

import pytest
import torch
from torch import nn

import runai.ga.torch
from tests.documents import ROOT
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, large, parts, refused, train
from tests.torch.problems import mse

ga = runai.ga.torch.optim
BATCHES = parts([4] * 4)


def network():
    torch.manual_seed(0)
    return nn.Linear(5, 3, dtype=torch.float64)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MAKES = {
    "keyword": lambda m: ga.Optimizer(sgd(m), steps=2),
    "positional": lambda m: ga.Optimizer(sgd(m), 2),
    "named": lambda m: ga.SGD(m.parameters(), lr=0.1, momentum=0.9, steps=2),
    "named, steps first": lambda m: ga.SGD(2, m.parameters(), lr=0.1, momentum=0.9),
    "summed": lambda m: ga.Optimizer(sgd(m), steps=2, reduction="sum"),
    "named, summed": lambda m: ga.SGD(steps=2, params=m.parameters(), lr=0.1, momentum=0.9, reduction="sum"),
}


@pytest.mark.parametrize("how", MAKES)
def test_windows_are_the_large_batch_and_the_line_says_whether_gradients_are_averaged(how, capsys):
    """Summed, as in the original, whose scripts divide their losses."""
    model, summed = network(), how.endswith("summed")
    optimizer, reduced = MAKES[how](model), "summed" if summed else "averaged"
    said = f"Wrapping 'SGD' PyTorch optimizer with GA of 2 steps (gradients are {reduced})\n"
    assert capsys.readouterr().out == said
    train(model, optimizer, BATCHES, loss=lambda *batch: mse(*batch) / (2 if summed else 1))
    assert_same(model, large(windows_of(BATCHES, 2), lambda _: sgd(plain), model=(plain := network())))


def test_what_scripts_read_and_that_the_inner_optimizer_does_not_keep_the_wrapped_one_alive():
    model = network()
    inner = sgd(model)
    optimizer = ga.Optimizer(inner, steps=3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer is inner
    for step in range(4):
        assert (optimizer.runai.steps, optimizer.runai.step) == (3, step)
        train(model, optimizer, BATCHES[:1])
    there = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert there() is None
    finally:
        gc.enable()


class ReadsTheWindow(torch.optim.SGD):
    """A custom optimizer for the original, which finds the window in itself."""

    def step(self, closure=None):
        self.seen, self.at = self.runai.steps, self.runai.step
        return super().step(closure)


def test_a_custom_inner_optimizer_finds_the_window_in_itself():
    optimizer = ga.Optimizer(ReadsTheWindow(network().parameters(), lr=0.1), steps=2)
    for wrapped in (optimizer, pickle.loads(pickle.dumps(optimizer))):
        train(wrapped.param_groups[0]["params"], wrapped, [()] * 2, loss=lambda parameters: parameters[0].sum())
        assert (wrapped.optimizer.seen, wrapped.optimizer.at, wrapped.optimizer.runai.step) == (2, 1, 2)


class FilesItself(ReadsTheWindow):
    """Puts all that it has into files, as scripts for the original do, and takes its step from them."""

    def __getstate__(self):
        return dict(vars(self))


def test_what_the_inner_optimizer_finds_goes_into_files_as_numbers():
    optimizer = ga.Optimizer(FilesItself(network().parameters(), lr=0.1), steps=2)
    train(optimizer.param_groups[0]["params"], optimizer, [()], loss=lambda parameters: parameters[0].sum())
    inner, whole = (pickle.loads(pickle.dumps(each)) for each in (optimizer.optimizer, optimizer))
    assert (inner.runai.steps, inner.runai.step) == (2, 1)
    whole.runai.step = inner.runai.step
    assert whole.flush()
    assert (whole.optimizer.runai.step, whole.optimizer.seen) == (2, 2)
    assert optimizer.flush()


def test_setting_the_step_shortens_the_next_window_and_an_open_one_is_refused():
    model, updated = network(), []
    optimizer = ga.Optimizer(sgd(model), steps=2)
    train(model, optimizer, BATCHES)
    optimizer.runai.step = 8
    optimizer.runai.steps = 3
    assert (optimizer.steps, optimizer.runai.step) == (3, 8)
    optimizer.runai.step = 10  # 1 into a window of 3
    train(model, optimizer, BATCHES[:1] * 5, after=lambda: updated.append(optimizer.updated))
    assert updated == [False, True, False, False, True]
    assert (optimizer.runai.steps, optimizer.runai.step) == (3, 15)
    train(model, optimizer, BATCHES)
    with refused(r"holds the gradients of 1 micro-batches. Received: runai.step=21", model):
        optimizer.runai.step = 21


# The claims of Run:AI's own tests (tests/test_ga_torch.py there).


class Dry(torch.optim.Optimizer):
    """Notes at which step it is called. Its methods have the signatures of PyTorch 1.5."""

    def __init__(self):
        super().__init__(params=[torch.empty(3, 2)], defaults={})
        self.log_step, self.log_zero_grad = [], []

    def step(self, closure=None):
        self.log_step.append(self.runai.step)
        return None if closure is None else closure()

    def zero_grad(self):
        self.log_zero_grad.append(self.runai.step)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_windows_without_a_backward_pass_count_and_reach_the_inner_optimizer_once_each(steps, caplog):
    wrapped, closure = ga.Optimizer(Dry(), steps), ga.Optimizer(Dry(), steps)
    assert (wrapped.runai.steps, wrapped.runai.step) == (steps, 0)
    iterations = 5 * steps + 3
    for _ in range(iterations):
        wrapped.zero_grad()
        wrapped.step()
        assert closure.step(lambda: 13) == 13
    assert wrapped.log_step == closure.log_step == list(range(steps - 1, iterations, steps))
    assert wrapped.log_zero_grad == list(range(0, iterations, steps))
    assert wrapped.runai.step == iterations
    assert "backward" not in caplog.text


@pytest.mark.parametrize("through", [pickle, torch], ids=["pickle", "torch.save"])
def test_the_state_is_in_the_state_dict_and_in_files(through, tmp_path):
    wrapped, again = ga.Optimizer(Dry(), 3), ga.Optimizer(Dry(), 3)
    wrapped.runai.step = 17
    state = wrapped.state_dict()
    assert state["state"]["runai"] == wrapped.runai
    if through is pickle:
        loaded = pickle.loads(pickle.dumps(state))
    else:
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (loaded["state"]["runai"].steps, loaded["state"]["runai"].step) == (3, 17)
    again.load_state_dict(loaded)
    assert again.runai.step == 17
    again.step()  # the last one of that window
    assert again.log_step == [17]


def test_a_state_dict_of_the_original_goes_on_where_it_was():
    """Its wrapped optimizer was of the inner one's class, and had the numbers beside the parameters' state."""
    model = network()
    plain, optimizer = sgd(model), ga.Optimizer(sgd(network()), steps=2)
    train(model, plain, BATCHES[:1])
    numbers = b"}(X\x05\x00\x00\x00stepsK\x02X\x04\x00\x00\x00stepK\x07u"
    state = pickle.loads(b"\x80\x02crunai.ga.torch.optim\nState\n)\x81" + numbers + b"b.")
    saved = plain.state_dict()
    optimizer.load_state_dict({**saved, "state": {**saved["state"], "runai": state}})
    assert (optimizer.runai.step, optimizer.closes_next) == (7, True)
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], saved["state"][0]["momentum_buffer"])


NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "SGD", "Rprop", "RMSprop")


def test_every_torch_optimizer_is_there_and_pickles_and_wrong_steps_are_refused():
    for name in NAMES:
        named = getattr(ga, name)(4, network().parameters())
        assert type(pickle.loads(pickle.dumps(named))) is type(named)
        assert type(copy.deepcopy(named).optimizer) is getattr(torch.optim, name)
    assert {*NAMES} <= set(dir(ga))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = ga.Nothing
    for steps in (0, {}):
        with pytest.raises(ValueError, match="Received: steps="):
            ga.Optimizer(sgd(network()), steps=steps)


def test_the_example_that_the_readme_names_learns(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mnist.py", "--quick"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runpy.run_path(str(ROOT / "examples" / "torch" / "mnist.py"), run_name="__main__")
    torch.set_num_threads(threads)
    assert float(capsys.readouterr().out.split()[-1].rstrip("%")) > 50
