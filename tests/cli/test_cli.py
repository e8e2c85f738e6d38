"""The command line: exit codes 0, 1 and 2, one line for bad input, no traceback."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import gradaccum
from gradaccum.cli import commands


def command(*arguments, **options):
    """`python -m gradaccum ...`, as a user runs it."""
    line = [sys.executable, "-W", "error", "-m", "gradaccum", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(line, text=True, timeout=120, **pipes | options)


def test_an_unknown_command_is_one_clear_line():
    result = CliRunner().invoke(commands, ["demo"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "Error: No such command 'demo'.\n")


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


def test_click_missing_is_one_line_with_the_extra(tmp_path):
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('No module', name='click')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gradaccum.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", program, "size"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [result.stderr.strip()]
    assert 'pip install "gradaccum[cli]"' in result.stderr


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_is_there_and_the_version(arguments):
    assert CliRunner().invoke(commands, ["--version"]).stdout == f"gradaccum, version {gradaccum.__version__}\n"
    result = CliRunner().invoke(commands, arguments)
    assert "Usage: " in result.output
    assert "check" in result.output
    assert "..." not in result.output.split("Commands:")[-1]  # each command's sentence is there to its end


def test_an_error_of_its_own_is_exit_code_3_and_never_the_one_for_different(tmp_path, monkeypatch):
    def broken(file):
        raise AssertionError("a bug")

    monkeypatch.setattr("gradaccum.report.run.read", broken)
    result = CliRunner().invoke(commands, ["report", str(tmp_path / "run.jsonl")])
    assert result.exit_code == 3
    assert "AssertionError: a bug" in result.stderr
