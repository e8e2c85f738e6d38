"""`python -m examples.demo`: what it prints and writes, exit codes, one line for bad input."""

import functools
import gzip
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from examples.demo import guide, processes
from examples.demo.__main__ import main

from tests.cli import results
from tests.cli.results import assert_one_clear_line, full_disk
from tests.demo import fashion_mnist
from tests.demo.test_experiment import as_if
from tests.documents import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fashion_mnist.write(tmp_path_factory.mktemp("data"))


@pytest.fixture
def trained(monkeypatch):
    """Runs without training; the list of them."""
    runs = []

    def run(setup, data, plan, progress):
        runs.append(plan.key)
        return guide.Run(plan, [guide.Epoch(2.0, 2.0, 0.1)], 1.0, 3, [np.ones(2)])

    def text(setup, progress):
        runs.append("text")
        return as_if(1e-16)

    monkeypatch.setattr(guide, "in_a_process", run)
    monkeypatch.setattr("examples.demo.text.perform", text)
    return runs


def demo(*arguments, **options):
    """The demo as a user runs it from the checkout."""
    line = [sys.executable, "-W", "error", "-m", "examples.demo", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, text=True, timeout=240, capture_output=True, **options)


def invoke(*arguments):
    return results.invoke(*arguments, main=main)


def test_the_demo_shows_both_equal_writes_a_picture_and_a_report_and_progress_in_plain_lines(folder, tmp_path):
    """The whole demo, on few rows."""
    out = tmp_path / "new" / "folder"
    result = demo("--data", folder, "--batch-size", 32, "--epochs", 2, "--out", out)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    (summary,) = [line for line in lines if line.startswith("FashionMNIST: (a) and (b) are equal")]
    assert "6 updates" in summary
    gradients, parameters = (float(part.split()[0].rstrip(".,")) for part in summary.split(" by ")[1:])
    assert max(gradients, parameters) <= 1e-12
    (row,) = [line for line in lines if line.startswith("(b) 4 x 8, gradaccum")]
    assert float(row.split()[-1]) <= 1e-12
    assert lines[next(i for i, line in enumerate(lines) if line.startswith("===")) + 1].startswith("Attention network")

    assert lines[-2:] == [str(out / "report.png"), str(out / "report.html")]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "(b) 4 x 8, gradaccum" in page
    assert page.count("data:image/svg+xml") == 10, "five pictures, light and dark"

    lines = [line for line in result.stderr.splitlines() if not re.search(r": \d+%(, |$)(?!.*s$)", line)]
    assert [line.partition(":")[0] for line in lines] == [
        "attention network on text ...", "attention network on text", "The first part's pictures",
        f"FashionMNIST from {folder}", "(a) batch 32 ...", "(a) batch 32",
        "(b) 4 x 8, gradaccum ...", "(b) 4 x 8, gradaccum", "(c) 4 x 8, by hand ...", "(c) 4 x 8, by hand",
    ]  # fmt: skip
    assert lines[2].endswith(str(out / "report.html"))
    assert "\x1b" not in result.stdout + result.stderr


def test_a_page_is_there_after_the_first_part_and_a_difference_is_exit_code_1(folder, tmp_path, trained, monkeypatch):
    def failing(*arguments):
        raise processes.RunError("Run (a) failed: out of memory")

    def broken(setup, data, plan, progress):
        parameters = [p + (plan.key == "b") for p in guide.initial_parameters(data.features, setup.seed)]
        return guide.Run(plan, [guide.Epoch(2.0, 2.0, 0.1)], 1.0, 3, parameters)

    monkeypatch.setattr(guide, "in_a_process", failing)
    result = invoke("--data", folder, "--out", tmp_path)
    assert result.exit_code == 3, "a run that fails is no success"
    assert "Error: Run (a) failed: out of memory" in result.stderr
    assert "15.0 times less memory" in (tmp_path / "report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(guide, "in_a_process", broken)
    result = invoke("--data", folder, "--out", tmp_path)
    assert result.exit_code == 1, result.output
    assert "(a) and (b) DIFFER" in result.stdout
    assert "DIFFER" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_broken_data_is_named_in_one_line(tmp_path):
    folder = fashion_mnist.write(tmp_path / "data")
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:500])
    assert_one_clear_line(invoke("--data", folder, "--out", tmp_path / "out"), str(path), "truncated")
    path.write_bytes(gzip.compress(b"<html>"))
    assert_one_clear_line(invoke("--data", folder, "--out", tmp_path / "out"), str(path), "not an IDX file")
    assert not (tmp_path / "out").exists(), "it left an empty folder behind"
    shell = demo("--data", folder)
    assert (shell.returncode, shell.stdout, len(shell.stderr.splitlines())) == (2, "", 1)


BAD = {
    "--data /nonexistent": "/nonexistent: no such folder",
    "--batch-size 64 --steps 3": "--batch-size must be a multiple of --steps. Received: 64 and 3",
    "--steps 0": "0 is not in the range x>=1",
    "--steps 2.5": "'2.5' is not a valid integer range",
    "--epochs -1": "-1 is not in the range x>=1",
    "--dtype float16": "'float16' is not one of",
    "--dataset mnist": "'mnist' is not one of",
    "--framework mxnet": "'mxnet' is not one of",
    f"--out {__file__}": "is a file",
    "--nonsense": "No such option",
    "surplus": "unexpected extra argument",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, tmp_path):
    assert_one_clear_line(invoke("--out", tmp_path, *arguments.split()), BAD[arguments])


def test_what_keeps_a_report_from_being_written_is_named_before_training_and_a_disk_that_fills_later_costs_it_alone(
    folder, tmp_path, trained, monkeypatch
):
    with full_disk():
        result = invoke("--data", folder, "--out", tmp_path / "full")
    assert_one_clear_line(result, "--out", "full/report.png")
    result = invoke("--data", folder, "--out", tmp_path / "out", "--batch-size", 92)
    assert_one_clear_line(result, "--batch-size must be at most the 90 rows of FashionMNIST. Received: 92.")
    assert trained == []
    monkeypatch.setattr("examples.demo.__main__.checked_output", lambda *arguments: None)
    with full_disk():
        result = invoke("--framework", "keras", "--data", folder, "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert "(a) and (b) are equal" in result.stdout
    assert result.stderr.splitlines()[-1] == f"Error: {tmp_path}/out/report.png: File too large."
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_ctrl_c_while_processes_start_is_one_line(tmp_path):
    """A terminal sends it to all processes."""
    arguments = f"--dataset digits --framework keras --out {tmp_path / 'out'}"
    line = [sys.executable, "-m", "examples.demo", *arguments.split()]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # in a shell's background it is ignored
    how = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": heard}
    how["env"] = os.environ | {"KERAS_BACKEND": "torch"}  # TensorFlow writes lines of its own as it is imported
    with subprocess.Popen(line, cwd=ROOT, **how) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("digits from")
        time.sleep(0.3)
        os.killpg(running.pid, signal.SIGINT)
        rest = running.stderr.read()
    assert (running.returncode, rest.split()) == (130, ["(a)", "batch", "64", "...", "Aborted."])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "library", ["matplotlib", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rich", "sklearn", "jinja2"))]
)
def test_what_is_missing_is_reported_with_the_extra_before_training(library, tmp_path, monkeypatch):
    (tmp_path / f"{library}.py").write_text(f"raise ModuleNotFoundError('No module', name='{library}')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = demo("--dataset", "digits", "--epochs", "1", "--out", tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [result.stderr.strip()]
    assert library in result.stderr
    assert 'pip install "gradaccum[cli]"' in result.stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_one_clear_line(invoke("--framework", "keras"), "keras is not installed", 'pip install "gradaccum[keras]"')
