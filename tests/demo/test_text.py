"""The attention network on text: ours is the large batch, the loop that people write is not, and that is shown."""

import dataclasses

import pytest
import torch
from examples.demo.findings import findings
from examples.demo.progress import Progress
from examples.demo.text import LARGE, OURS, WRITTEN, Loop, TextOutcome, TextSetup, perform, python_text
from examples.demo.text_torch import Decoder, loss_of, padded, train

from gradaccum.report import Bars, Curves, Table
from tests.demo.test_experiment import outcome
from tests.reference import FLOAT64

# 40 rows: a window of 32 and a last one of 8, which is 4 micro-batches
SETUP = TextSetup(rows=40, batch_size=32, epochs=2, length=48, width=8)


@pytest.fixture(scope="module")
def loops():
    threads = torch.get_num_threads()
    rows = python_text(SETUP.length)
    seen = []
    found = train(SETUP, rows[:40], rows[40:48], seen.append)
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


def test_the_rows_are_pythons_own_names_and_paragraphs_each_once():
    rows = python_text(30)
    assert len(rows) == len(set(rows)) > TextSetup.rows + 32
    assert {"ArgumentParser", "deepcopy"} & set(rows)
    assert max(map(len, rows)) == 30
    assert rows == python_text(30)


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


def test_it_runs_in_a_process_of_its_own(capsys):
    small = dataclasses.replace(SETUP, epochs=1, rows=16, batch_size=16)
    with Progress() as progress:
        assert perform(small, progress).ok
    assert "times less memory" in capsys.readouterr().err
