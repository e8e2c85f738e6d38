"""The three runs: that they are what they say, and that a difference would be seen."""

import dataclasses
import multiprocessing
import os

import numpy as np
import pytest
import torch
from examples.demo import processes
from examples.demo.data import load
from examples.demo.findings import findings
from examples.demo.guide import Epoch, Outcome, Run, Setup, initial_parameters, perform, plans
from examples.demo.guide_torch import train
from examples.demo.processes import RunError
from examples.demo.progress import Progress

from gradaccum.report import Bars, Curves, Table, Text
from tests.demo import fashion_mnist
from tests.reference import FLOAT32, FLOAT64, relative_error, torch_updates


@pytest.fixture(scope="module")
def data():
    return fashion_mnist.data()


@pytest.fixture(autouse=True)
def one_thread_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(setup, data, key):
    plan = next(plan for plan in plans(setup) if plan.key == key)
    return train(setup, data, plan, initial_parameters(data.features, setup.seed), lambda epoch: None)


class Oracle:
    """The experiment's network, written out."""

    def __init__(self, dtype, seed=0):
        self.initial = initial_parameters(784, seed)
        self.weights = [torch.nn.Parameter(torch.tensor(p, dtype=getattr(torch, dtype))) for p in self.initial]

    def parameters(self):
        return self.weights

    def hidden(self, x):
        """What goes into the ReLUs."""
        first = x @ self.weights[0] + self.weights[1]
        return first, torch.relu(first) @ self.weights[2] + self.weights[3]

    def loss(self, x, y):
        outputs = torch.relu(self.hidden(x)[1]) @ self.weights[4] + self.weights[5]
        return torch.nn.functional.cross_entropy(outputs, y)

    def movement(self, large, learning_rate):
        """How plain SGD on these large batches moves the parameters."""
        torch_updates(self, torch.optim.SGD(self.weights, lr=learning_rate), large, Oracle.loss)
        return [new.detach().double() - torch.tensor(old) for new, old in zip(self.weights, self.initial, strict=True)]


def batches(data, rows, dtype):
    x, y = torch.tensor(data.train_x, dtype=getattr(torch, dtype)) / 255, torch.tensor(data.train_y)
    return list(zip(x.split(rows), y.split(rows), strict=True))


@pytest.mark.parametrize("key", ["a", "b"])
def test_each_run_makes_the_oracles_updates_and_learns(data, key):
    """90 rows: two windows of 32, and a last one of 26 = 8 + 8 + 8 + 2."""
    actual = run(Setup(batch_size=32, steps=4, epochs=2, dtype="float64", learning_rate=0.05), data, key)
    large = 2 * batches(data, 32, "float64")
    expected = Oracle("float64").movement(large, 0.05)
    assert actual.updates == len(large)
    moved = [new - old for new, old in zip(actual.parameters, initial_parameters(784, 0), strict=True)]
    assert relative_error(moved, expected) <= FLOAT64
    learning = run(Setup(batch_size=32, steps=4, epochs=20, learning_rate=0.1), data, key).epochs
    assert learning[-1].train_loss < 0.7 * learning[0].train_loss
    assert learning[-1].accuracy > 0.5


@pytest.mark.parametrize("rows", [32, 26], ids=["8 + 8 + 8 + 8", "8 + 8 + 8 + 2"])
def test_an_update_in_float32_is_the_oracles_where_no_relu_is_at_its_edge(data, rows):
    """A unit whose input is within float32's rounding of 0 fires or not as the sum happens to round.

    One that flips changes the first layer's gradient by a tenth, and the updates after it grow apart. Of 90 rows that
    happens to one or the other unit on most machines, so the window is made of rows that stay clear of it.
    """
    x = batches(data, 90, "float64")[0][0]
    closest = torch.cat(Oracle("float64").hidden(x), dim=1).abs().amin(dim=1)
    clear = closest.argsort(descending=True)[:rows].numpy()
    assert closest[clear].min() > 1e-5, "of values around 0.3"
    clear_data = dataclasses.replace(data, train_x=data.train_x[clear], train_y=data.train_y[clear])

    actual = run(Setup(batch_size=32, steps=4, epochs=1, dtype="float32", learning_rate=1.0), clear_data, "b")
    oracle = Oracle("float32")
    moved = [new - old for new, old in zip(actual.parameters, oracle.initial, strict=True)]
    expected = oracle.movement(batches(clear_data, rows, "float32"), 1.0)
    assert relative_error(moved, expected) <= FLOAT32
    assert relative_error(actual.first_gradients, [weight.grad for weight in oracle.weights]) <= FLOAT32


def test_the_losses_are_means_over_all_rows(data):
    setup = Setup(batch_size=32, steps=4, epochs=1, dtype="float64", learning_rate=0.0)
    runs = [run(setup, data, key) for key in "ab"]
    first = [run.first_gradients for run in runs]
    assert relative_error(first[1], first[0]) <= FLOAT64
    losses = {round(run.epochs[0].train_loss, 12) for run in runs}
    assert len(losses) == 1, "with learning rate 0 every run sees the same rows with the same parameters"


def test_activations_grow_with_the_rows_and_the_peak_holds_parameters_and_gradients(data):
    setup = Setup(batch_size=32, steps=4, epochs=1, dtype="float32")
    large, accumulated = (run(setup, data, key) for key in "ab")
    # A row, two hidden layers' outputs, ten log-probabilities, in float32; a label in int64; and the loss.
    row = 4 * (784 + 512 + 512 + 10) + 8
    assert large.activation_bytes == pytest.approx(32 * row, abs=64)
    assert accumulated.activation_bytes == pytest.approx(8 * row, abs=64)
    parameters = 4 * sum(p.size for p in large.parameters)
    for each in (large, accumulated):
        assert each.peak_bytes > 2 * parameters
    assert accumulated.peak_bytes < 3 * parameters, "a second copy of the gradients"


def test_initial_parameters_are_those_of_the_seed_and_plans_have_the_same_effective_batch_size():
    first, again, other = (initial_parameters(784, seed) for seed in (0, 0, 1))
    assert [p.shape for p in first] == [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert np.abs(first[0]).max() <= 784**-0.5
    assert [(plan.micro_batch_size, plan.steps) for plan in plans(Setup(batch_size=64, steps=4))] == [(64, 1), (16, 4)]
    with pytest.raises(ValueError, match=r"must be a multiple of the steps. Received: 64 and 3"):
        Setup(batch_size=64, steps=3)


def test_a_run_whose_command_was_killed_ends_without_a_word(monkeypatch, capsys):
    monkeypatch.setattr("signal.signal", lambda *arguments: None)  # this process is no child
    here, there = multiprocessing.Pipe(duplex=False)
    here.close()
    with there, pytest.raises(SystemExit):
        processes._child(there, "nonesuch", "train", ())
    assert capsys.readouterr() == ("", "")


def _die(pipe, *arguments):
    os._exit(7)


def test_a_run_that_fails_or_whose_process_dies_is_reported(data, monkeypatch):
    setup = Setup(framework="nonesuch", epochs=1)  # type: ignore[arg-type]
    with Progress() as progress, pytest.raises(RunError, match=r"Run \(a\) batch 64 failed:\n(?s:.*)nonesuch"):
        perform(setup, data, progress)
    monkeypatch.setattr(processes, "_child", _die)
    with Progress() as progress, pytest.raises(RunError, match="ended early, with exit code 7"):
        perform(Setup(epochs=1), data, progress)


# What they show.


def outcome(difference=0.0, dtype="float64", of_b=(), **changes):
    """As if (b) had ended this far from (a), and the runs were so."""
    setup = Setup(epochs=2, dtype=dtype)
    parameters = [np.array([[1.0, -2.0]]), np.array([0.5])]
    runs = []
    for plan in plans(setup):
        own = [p + difference * 2.0 if plan.key == "b" and p.ndim == 2 else p for p in parameters]
        epochs = [Epoch(2.0, 1.9, 0.25), Epoch(1.5, 1.4, 0.5)]
        runs.append(
            dataclasses.replace(
                Run(plan, epochs, 1.0, 100, own, None, 1000, 9000), **changes | dict(of_b if plan.key == "b" else ())
            )
        )
    return Outcome(setup, "FashionMNIST", "here", 60000, runs)


VERDICTS = [
    (0.0, "float64", None, True), (1e-13, "float64", None, True), (1e-11, "float64", None, False),
    (9e-5, "float32", None, True), (2e-4, "float32", None, False), (float("nan"), "float32", None, False),
    # The first update's gradient decides in float32, both do in float64.
    (2e-2, "float32", 9e-7, True), (0.0, "float32", 2e-6, False), (0.0, "float32", float("nan"), False),
    (1e-13, "float64", 1e-11, False), (1e-11, "float64", 1e-13, False),
]  # fmt: skip


@pytest.mark.parametrize(("difference", "dtype", "gradient", "ok"), VERDICTS)
def test_the_verdict_depends_on_the_dtype(difference, dtype, gradient, ok):
    gradients = [[np.array([1.0 + (gradient or 0.0) * b])] if gradient is not None else None for b in (0, 1)]
    result = outcome(difference, dtype, {"first_gradients": gradients[1]}, first_gradients=gradients[0])
    assert result.difference == pytest.approx(difference, nan_ok=True)
    assert result.ok is ok
    report = findings(None, result)
    assert report.ok is ok
    assert ("DIFFER" in report.summary) is not ok


def shown(report, kind):
    return [block for block in report.blocks if isinstance(block, kind)]


COLUMNS = ["run", "accuracy", "loss", "updates", "seconds", "activations, MiB", "peak, MiB", "differs from (a)"]


def test_the_report_has_the_two_runs_side_by_side_with_memory_in_one_unit_or_without():
    report = findings(None, outcome(1e-13, activation_bytes=3 * 2**19, peak_bytes=5 * 2**20))
    (table,), (bars,) = shown(report, Table), shown(report, Bars)
    assert list(table.columns) == COLUMNS
    assert [row[0] for row in table.rows] == ["(a) batch 64", "(b) 4 x batch 16"]
    assert table.rows[1][-1] == "1.0e-13"
    assert [(figure.title, len(figure.curves)) for figure in shown(report, Curves)] == [
        ("Test loss", 2), ("Test accuracy", 2),
    ]  # fmt: skip
    assert [row[5] for row in table.rows] == list(bars.values.values()) == [1.5, 1.5]
    assert [row[6] for row in table.rows] == [5.0, 5.0]
    assert bars.unit == "MiB"
    without = findings(None, outcome(activation_bytes=None, peak_bytes=None))
    assert not shown(without, Bars)
    assert list(shown(without, Table)[0].columns) == COLUMNS[:5] + COLUMNS[7:]


@pytest.mark.parametrize("higher", [True, False])
def test_what_needs_a_word_has_one(higher):
    """A higher peak of the accumulated run, and a framework's single precision, which is allowed for."""
    result = outcome(9e-5, "float64", {"peak_bytes": 9000 + 1000 * higher}, single_precision=higher)
    assert result.ok is higher
    texts = [b.text for b in shown(findings(None, result), Text)]
    assert any("why (b) has the higher peak" in text for text in texts) is higher
    assert any("multiplies matrices in float32" in text for text in texts) is higher


def test_the_report_counts_what_was_made_and_one_of_neither_part_is_refused():
    result = outcome(updates=1)
    report = findings(None, dataclasses.replace(result, setup=dataclasses.replace(result.setup, epochs=1)))
    assert "after 1 update by" in report.summary
    assert " 1 epoch of 60,000 rows" in shown(report, Text)[0].text
    with pytest.raises(ValueError, match="one of the two parts"):
        findings(None)


def test_the_digits_are_trained_from_the_same_rows():
    with Progress() as progress:
        digits = load("digits", progress=progress)
    large, accumulated = (run(Setup(epochs=1, dtype="float64"), digits, key) for key in "ab")
    assert relative_error(accumulated.parameters, large.parameters) <= FLOAT64
