"""The command line: exit codes 0, 1 and 2, one line for bad input, no traceback."""

import dataclasses
import functools
import gzip
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

import gradaccum
from gradaccum.cli import commands
from gradaccum.demo import experiment, processes
from tests.demo import fashion_mnist
from tests.report.disks import full_disk


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fashion_mnist.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def without_text(monkeypatch):
    """Tests of the command in this process train no attention network; tests/demo/test_text.py does."""
    monkeypatch.setattr("gradaccum.demo.text.perform", lambda setup, progress: None)


def command(*arguments, **options):
    """`python -m gradaccum ...`, as a user runs it."""
    line = [sys.executable, "-W", "error", "-m", "gradaccum", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(line, text=True, timeout=120, **pipes | options)


def assert_one_clear_line(result, *parts):
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert all(part in line for part in parts), line


@pytest.fixture(scope="module")
def demonstration(folder, tmp_path_factory):
    """The demo as it is, on few rows."""
    out = tmp_path_factory.mktemp("out")
    arguments = ["--data", folder, "--batch-size", 32, "--epochs", 2, "--dtype", "float64", "--show", "guide"]
    arguments += ["--out", "new/folder"]
    return command("demo", *arguments, cwd=out), out / "new" / "folder"


def test_the_demo_shows_the_large_batch_and_the_accumulated_one_equal(demonstration):
    result, _ = demonstration
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    (summary,) = [line for line in lines if line.startswith("(a) and (b) are equal")]
    assert "6 updates" in summary
    gradients, parameters = (float(part.split()[0]) for part in summary.split("at most ")[1:])
    assert gradients <= 1e-12
    assert parameters <= 1e-12
    (row,) = [line for line in lines if line.startswith("(b) 4 x batch 8")]
    assert float(row.split()[-1]) <= 1e-12


def test_the_demo_writes_a_picture_and_a_report_and_ends_with_their_paths(demonstration):
    result, out = demonstration
    assert result.stdout.splitlines()[-2:] == [str(out / "report.png"), str(out / "report.html")]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "(b) 4 x batch 8" in page
    assert page.count("data:image/svg+xml") == 8, "four pictures, light and dark"


def test_the_demo_says_what_it_does_in_plain_lines_where_there_is_no_terminal(demonstration, folder):
    result, _ = demonstration
    lines = result.stderr.splitlines()
    assert lines[0] == f"FashionMNIST from {folder}: 90 rows to train, 40 to test"
    assert [line.partition(":")[0] for line in lines[1:]] == ["(a) batch 32", "(b) 4 x batch 8", "(c) batch 8"]
    assert "\x1b" not in result.stdout + result.stderr


def test_a_difference_is_exit_code_1(folder, tmp_path, monkeypatch):
    def broken(setup, data, plan, progress):
        parameters = [p + (plan.key == "b") for p in experiment.initial_parameters(data.features, setup.seed)]
        return experiment.Run(plan, [experiment.Epoch(2.0, 2.0, 0.1)], 1.0, 3, parameters)

    monkeypatch.setattr(experiment, "in_a_process", broken)
    result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path)])
    assert result.exit_code == 1, result.output
    assert "(a) and (b) DIFFER" in result.stdout
    assert (tmp_path / "report.html").is_file()


def test_the_verdict_is_float32s_and_float64s_unless_told(folder, tmp_path, monkeypatch):
    def off(setup, data, plan, progress):
        """Off by what float32 may be, and float64 may not."""
        parameters = [np.ones(2) + (1e-7 if plan.key == "b" else 0.0)]
        seen.append((plan.key, setup.dtype, setup.epochs))
        return experiment.Run(plan, [experiment.Epoch(2.0, 2.0, 0.1)], 1.0, 3, parameters)

    monkeypatch.setattr(experiment, "in_a_process", off)
    arguments = ["demo", "--data", str(folder), "--out", str(tmp_path), "--epochs", "3"]
    codes = {}
    for dtype in ("both", "float32"):
        seen = []
        codes[dtype] = CliRunner().invoke(commands, [*arguments, *(["--dtype", dtype] * (dtype != "both"))]).exit_code
        three = [(key, "float32", 3) for key in "abc"]
        assert seen == three + [(key, "float64", 1) for key in "ab"] * (dtype == "both")
    assert codes == {"both": 1, "float32": 0}


def test_a_run_that_fails_is_no_success(folder, tmp_path, monkeypatch):
    def failing(*arguments):
        raise processes.RunError("Run (a) failed: out of memory")

    monkeypatch.setattr(experiment, "in_a_process", failing)
    result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path)])
    assert result.exit_code == 3
    assert "Error: Run (a) failed: out of memory" in result.stderr


def test_a_truncated_file_is_named_in_one_line(tmp_path):
    folder = fashion_mnist.write(tmp_path / "data")
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:500])
    result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path / "out")])
    assert_one_clear_line(result, str(path), "truncated")
    path.write_bytes(gzip.compress(b"<html>"))
    result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path / "out")])
    assert_one_clear_line(result, str(path), "not an IDX file")
    assert not (tmp_path / "out").exists(), "it left an empty folder behind"


def test_a_truncated_file_has_no_traceback_in_a_shell(tmp_path):
    folder = fashion_mnist.write(tmp_path / "data")
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:20])
    result = command("demo", "--data", folder, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {path}: broken or truncated")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--data", "/nonexistent"], "/nonexistent: no such folder"),
        (["--batch-size", "64", "--steps", "3"], "--batch-size must be a multiple of --steps. Received: 64 and 3"),
        (["--steps", "0"], "0 is not in the range x>=1"),
        (["--steps", "2.5"], "'2.5' is not a valid integer range"),
        (["--epochs", "-1"], "-1 is not in the range x>=1"),
        (["--dtype", "float16"], "'float16' is not one of"),
        (["--dataset", "mnist"], "'mnist' is not one of"),
        (["--framework", "mxnet"], "'mxnet' is not one of"),
        (["--out", __file__], "is a file"),
        (["--nonsense"], "No such option"),
        (["surplus"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, part, tmp_path):
    result = CliRunner().invoke(commands, ["demo", "--out", str(tmp_path), *arguments])
    assert_one_clear_line(result, part)


def test_an_unknown_command_is_one_clear_line():
    assert_one_clear_line(CliRunner().invoke(commands, ["demonstrate"]), "No such command 'demonstrate'")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ["demo", "--dataset", "digits", "--out", str(tmp_path / "file" / "out")]
    result = CliRunner().invoke(commands, arguments)
    assert_one_clear_line(result, "--out", "file/out")


@pytest.fixture
def trained(monkeypatch):
    """Runs without training; the list of them."""
    runs = []

    def run(setup, data, plan, progress):
        runs.append(plan.key)
        return experiment.Run(plan, [experiment.Epoch(2.0, 2.0, 0.1)], 1.0, 3, [np.ones(2)])

    monkeypatch.setattr(experiment, "in_a_process", run)
    return runs


def test_a_disk_that_takes_no_report_is_told_before_training(folder, tmp_path, trained):
    (tmp_path / "report.png").mkdir()
    for out, reason in (("/proc/self", ""), (tmp_path, "Is a directory")):
        result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(out)])
        assert_one_clear_line(result, f"--out {out}/report.png: {reason}")
    with full_disk():
        result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path / "full")])
    assert_one_clear_line(result, "--out", "full/report.png")
    assert trained == []


def test_a_folder_that_a_link_keeps_from_being_made_is_told_before_training(folder, tmp_path, trained):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "into").symlink_to("file/nowhere")
    for name in ("loop", "into", 300 * "x"):
        result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path / name)])
        assert_one_clear_line(result, f"--out {tmp_path / name}/report.png: ")
    assert trained == []


def test_more_rows_than_there_are_are_told_before_training(folder, tmp_path, trained):
    arguments = ["--data", str(folder), "--out", str(tmp_path), "--batch-size", "92"]
    result = CliRunner().invoke(commands, ["demo", *arguments])
    assert_one_clear_line(result, "--batch-size must be at most the 90 rows of FashionMNIST. Received: 92.")
    assert trained == []


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_an_output_that_takes_no_more_is_one_line():
    with open("/dev/full", "w") as full:
        result = command("--version", stdout=full)
    assert result.returncode == 3
    assert result.stderr == "Error: [Errno 28] No space left on device\n"


def test_an_output_that_nobody_reads_is_not_exit_code_1_which_means_different():
    read, write = os.pipe()
    os.close(read)
    result = command("--version", stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (3, "")


def test_the_report_is_written_before_the_results_are_shown(folder, tmp_path, trained, monkeypatch):
    def show(report):
        raise BrokenPipeError

    monkeypatch.setattr("gradaccum.report.Report.show", show)
    CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path)])
    assert trained == ["a", "b", "c", "a", "b"]
    assert (tmp_path / "report.html").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_ctrl_c_while_processes_start_is_one_line(tmp_path):
    """A terminal sends it to all processes."""
    line = [sys.executable, "-m", "gradaccum", "demo", "--dataset", "digits", "--show", "guide", "--out", "out"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # in a shell's background it is ignored
    how = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": heard}
    with subprocess.Popen(line, cwd=tmp_path, **how) as demo:
        assert demo.stderr is not None
        assert demo.stderr.readline().startswith("digits from")
        time.sleep(0.3)
        os.killpg(demo.pid, signal.SIGINT)
        rest = demo.stderr.read()
    assert (demo.returncode, rest.strip()) == (130, "Aborted.")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_while_it_trains_costs_the_report_alone(folder, tmp_path, trained, monkeypatch):
    monkeypatch.setattr("gradaccum.cli.demo.checked_output", lambda *arguments: None)
    with full_disk():
        result = CliRunner().invoke(commands, ["demo", "--data", str(folder), "--out", str(tmp_path / "out")])
    assert result.exit_code == 3
    assert "(a) and (b) are equal" in result.stdout
    assert result.stderr.splitlines()[-1] == f"Error: {tmp_path}/out/report.png: File too large."
    assert list((tmp_path / "out").iterdir()) == []


LATER = "rich", "numpy", "sklearn", "jinja2"
"""Libraries that are missed where matplotlib is: when the command runs."""


def test_a_framework_that_is_missing_is_told_with_its_extra(monkeypatch):
    monkeypatch.setattr("gradaccum.cli.group.importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(commands, ["demo", "--framework", "keras"])
    assert_one_clear_line(result, "keras is not installed", 'pip install "gradaccum[keras]"')


@pytest.mark.parametrize(
    "library", ["matplotlib", *(pytest.param(name, marks=pytest.mark.slow) for name in ("click", *LATER))]
)
def test_a_library_that_is_missing_is_told_with_the_extra_before_training(library, tmp_path):
    (tmp_path / f"{library}.py").write_text(f"raise ModuleNotFoundError('No module', name='{library}')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gradaccum.__main__ import main; main()"
    line = [sys.executable, "-c", program, "demo", "--dataset", "digits", "--epochs", "1"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [result.stderr.strip()]
    assert library in result.stderr
    assert 'pip install "gradaccum[cli]"' in result.stderr


def test_the_version_is_the_packages():
    assert CliRunner().invoke(commands, ["--version"]).stdout == f"gradaccum, version {gradaccum.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["demo", "--help"]])
def test_help_is_there(arguments):
    result = CliRunner().invoke(commands, arguments)
    assert "Usage: " in result.output
    assert "demo" in result.output
    assert "..." not in result.output.split("Commands:")[-1]  # each command's sentence is there to its end


def test_the_digits_take_more_epochs_unless_told(tmp_path, monkeypatch):
    setups = []

    def perform(setup, data, progress, **keys):
        setups.append(setup)
        raise processes.RunError("enough")

    monkeypatch.setattr(experiment, "perform", perform)
    for more in ([], ["--epochs", "3"]):
        CliRunner().invoke(commands, ["demo", "--dataset", "digits", "--out", str(tmp_path), *more])
    assert [setup.epochs for setup in setups] == [100, 3]
    assert dataclasses.replace(setups[0], epochs=6) == experiment.Setup()


def test_an_error_of_its_own_is_exit_code_3_and_never_the_one_for_different(tmp_path, monkeypatch):
    def broken(file):
        raise AssertionError("a bug")

    monkeypatch.setattr("gradaccum.report.run.read", broken)
    result = CliRunner().invoke(commands, ["report", str(tmp_path / "run.jsonl")])
    assert result.exit_code == 3
    assert "AssertionError: a bug" in result.stderr
