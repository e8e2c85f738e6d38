"""The runs on pictures and on text: that they are what they say, and that a difference would be seen."""

import dataclasses
import multiprocessing
import os
import types

import numpy as np
import pytest
import torch
from examples.demo import processes, text_torch
from examples.demo.findings import findings
from examples.demo.guide import Epoch, Outcome, Run, Setup, initial_parameters, perform, plans
from examples.demo.guide_torch import train
from examples.demo.processes import RunError
from examples.demo.progress import Progress
from examples.demo.text import LARGE, OURS, WRITTEN, Loop, TextOutcome, TextSetup, python_text
from examples.demo.text_torch import Decoder, loss_of, padded

from gradaccum.report import Bars, Curves, Table, Text
from tests.demo import fashion_mnist
from tests.reference import FLOAT64, relative_error, torch_updates


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


def oracle(data, setup):
    """How plain SGD on the large batches moves the experiment's network, written out."""
    initial = initial_parameters(data.features, setup.seed)
    w = [torch.nn.Parameter(torch.tensor(p, dtype=torch.float64)) for p in initial]

    def loss(_, x, y):
        hidden = torch.relu(torch.relu(x @ w[0] + w[1]) @ w[2] + w[3])
        return torch.nn.functional.cross_entropy(hidden @ w[4] + w[5], y)

    x, y = torch.tensor(data.train_x, dtype=torch.float64) / 255, torch.tensor(data.train_y)
    large = list(zip(x.split(setup.batch_size), y.split(setup.batch_size), strict=True)) * setup.epochs
    model = types.SimpleNamespace(parameters=lambda: w)
    torch_updates(model, torch.optim.SGD(w, lr=setup.learning_rate), large, loss)
    return len(large), [new.detach() - torch.tensor(old) for new, old in zip(w, initial, strict=True)]


def test_the_loop_by_hand_leaves_the_large_batch_where_an_epoch_ends_inside_a_window(data):
    setup = Setup(batch_size=32, steps=4, epochs=1)
    large, accumulated, by_hand = (run(setup, data, key) for key in "abc")
    assert relative_error(accumulated.parameters, large.parameters) <= FLOAT64
    whole = dataclasses.replace(data, train_x=data.train_x[:64], train_y=data.train_y[:64])
    assert relative_error(run(setup, whole, "c").parameters, run(setup, whole, "a").parameters) <= FLOAT64
    assert relative_error(by_hand.parameters, large.parameters) > 1e-3
    assert by_hand.peak_bytes == pytest.approx(accumulated.peak_bytes, rel=0.05)


@pytest.mark.parametrize("key", ["a", "b"])
def test_each_run_makes_the_oracles_updates_and_learns(data, key):
    """90 rows: two windows of 32, and a last one of 26 = 8 + 8 + 8 + 2."""
    setup = Setup(batch_size=32, steps=4, epochs=2, dtype="float64", learning_rate=0.05)
    actual = run(setup, data, key)
    updates, expected = oracle(data, setup)
    assert actual.updates == updates
    moved = [new - old for new, old in zip(actual.parameters, initial_parameters(784, 0), strict=True)]
    assert relative_error(moved, expected) <= FLOAT64
    learning = run(Setup(batch_size=32, steps=4, epochs=20, learning_rate=0.1), data, key).epochs
    assert learning[-1].train_loss < 0.7 * learning[0].train_loss
    assert learning[-1].accuracy > 0.5


def test_the_peak_holds_parameters_and_gradients(data):
    setup = Setup(batch_size=32, steps=4, epochs=1, dtype="float32")
    large, accumulated = (run(setup, data, key) for key in "ab")
    parameters = 4 * sum(p.size for p in large.parameters)
    for each in (large, accumulated):
        assert each.peak_bytes > 2 * parameters
    assert accumulated.peak_bytes < 3 * parameters, "a second copy of the gradients"


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
                Run(plan, epochs, 1.0, 100, own, None, 9000), **changes | dict(of_b if plan.key == "b" else ())
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


COLUMNS = ["run", "accuracy", "loss", "updates", "seconds", "peak, MiB", "differs from (a)"]


def test_the_report_has_the_runs_side_by_side_with_memory_in_one_unit_or_without():
    report = findings(None, outcome(1e-13, peak_bytes=5 * 2**20))
    (table,) = shown(report, Table)
    assert list(table.columns) == COLUMNS
    assert [row[0] for row in table.rows] == ["(a) batch 64", "(b) 4 x 16, gradaccum", "(c) 4 x 16, by hand"]
    assert table.rows[1][-1] == "1.0e-13"
    assert [(figure.title, len(figure.curves)) for figure in shown(report, Curves)] == [
        ("Test loss, compared with (a)'s", 3), ("Test accuracy", 3),
    ]  # fmt: skip
    assert [row[5] for row in table.rows] == [5.0, 5.0, 5.0]
    assert "1.00 of the time of (c)" in report.summary
    without = findings(None, outcome(peak_bytes=None))
    assert list(shown(without, Table)[0].columns) == COLUMNS[:5] + COLUMNS[6:]


@pytest.mark.parametrize("higher", [True, False])
def test_what_needs_a_word_has_one(higher):
    """A higher peak of the accumulated run, and a framework's single precision, which is allowed for."""
    result = outcome(9e-5, "float64", {"peak_bytes": 9000 + 1000 * higher}, single_precision=higher)
    assert result.ok is higher
    texts = [b.text for b in shown(findings(None, result), Text)]
    assert any("why (b) has the higher peak" in text for text in texts) is higher
    assert any("multiplies matrices in float32" in text for text in texts) is higher


# The attention network on text: ours is the large batch, the loop that people write is not, and that is shown.

# 40 rows: a window of 32 and a last one of 8, which is 4 micro-batches
SETUP = TextSetup(rows=40, batch_size=32, epochs=2, length=48, width=8)


@pytest.fixture(scope="module")
def loops():
    threads, rows, seen = torch.get_num_threads(), python_text(SETUP.length), []
    found = text_torch.train(SETUP, rows[:40], rows[40:48], seen.append)
    torch.set_num_threads(threads)
    assert seen == [name for name in (LARGE, OURS, WRITTEN) for _ in range(SETUP.epochs)]
    return found


def test_ours_makes_the_large_batches_updates_in_less_memory_and_the_loop_that_people_write_does_not(loops):
    large, ours, written = loops
    assert [len(loop.losses) for loop in loops] == [4, 4, 4]
    assert large.distances == [0.0] * 4
    assert max(ours.distances) <= FLOAT64
    assert min(written.distances) > 0.05
    assert ours.losses == pytest.approx(large.losses, rel=FLOAT64)
    assert large.peak_bytes > 4 * ours.peak_bytes
    assert ours.peak_bytes == pytest.approx(written.peak_bytes, rel=0.1), "a second copy of something"


def test_a_row_is_predicted_from_its_past_and_padding_counts_for_nothing():
    torch.manual_seed(0)
    model = Decoder(SETUP).double()
    rows = ["append", "Return the number of occurrences"]
    (whole,) = padded(rows, 2)
    each = list(padded(rows, 1))
    counts = [len(row) - 1 for row in rows]
    means = [loss_of(model, *batch).item() for batch in each]
    expected = sum(count * mean for count, mean in zip(counts, means, strict=True)) / sum(counts)
    assert loss_of(model, *whole).item() == pytest.approx(expected, rel=FLOAT64)


def as_if(distance):
    """As if ours had ended this far from the large batch."""
    far = [("whole batch", 0.0, 30), ("ours", distance, 2), ("written", 0.3, 2)]
    loops = [Loop(name, [2.0, 1.0 + value], [value, value], size * 2**20) for name, value, size in far]
    return TextOutcome(TextSetup(), loops)


def test_the_memory_is_the_reports_first_number_and_its_bars_have_one_scale():
    report = findings(as_if(4e-16), outcome(1e-13))
    assert report.ok
    assert report.summary.startswith(
        "Attention network: 15.0 times less memory, the same training. A whole batch takes 30"
    )
    for each in (report, findings(as_if(4e-16))):  # the first part by itself, too
        assert [type(block) for block in each.blocks[:4]] == [Table, Bars, Curves, Curves]
    _, bars, distances, losses = report.blocks[:4]
    assert list(bars.values.values()) == [30.0, 2.0]
    assert [curve.y[-1] for curve in distances.curves] == pytest.approx([0.0, 4e-14, 30.0])
    assert losses.curves[2].y[-1] == pytest.approx(30.0)
    for distance in (1e-9, float("nan")):  # is the verdict
        report = findings(as_if(distance), outcome(1e-13))
        assert not report.ok
        assert "but ANOTHER training" in report.summary.splitlines()[0]
