"""`gradaccum size file.py:make --memory 16GiB`: an estimate, its margin, and exit codes."""

import textwrap

import pytest
from click.testing import CliRunner

from gradaccum.cli.main import commands

MAKE = """
    import torch
    from torch import nn

    def make():
        print("noise of the user's own")
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        return model, (torch.zeros(512, 64), torch.zeros(512, dtype=torch.long)), nn.CrossEntropyLoss()

    def with_optimizer():
        model, batch, loss_fn = make()
        return model, batch, {"loss_fn": loss_fn, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MAKE), encoding="utf-8")
    return path


def size(target, *arguments):
    return CliRunner().invoke(commands, ["size", str(target), *arguments])


def test_the_size_its_estimate_and_its_margin_are_printed(file):
    result = size(f"{file}:make", "--memory", "1500 kB")
    assert result.exit_code == 0, result.output
    first, second, third = result.stdout.splitlines()
    rows = int(first.removeprefix("micro_batch_size: ").split()[0])
    assert 1 < rows < 512
    assert "estimated peak" in second
    assert "10 % of it left free" in third
    less = size(f"{file}:with_optimizer", "--memory", "1500 kB", "--margin", "0.2")
    assert "20 %" in less.stdout


def test_a_limit_that_not_even_one_row_fits_is_exit_code_1(file):
    result = size(f"{file}:make", "--memory", "10 kB")
    assert result.exit_code == 1
    assert "Not even a micro-batch of one row fits" in result.stdout


@pytest.mark.parametrize("arguments", [("--memory", "lots"), ("--margin", "1")])
def test_bad_input_is_one_clear_line_and_exit_code_2(file, arguments):
    result = size(f"{file}:make", *arguments)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.strip().splitlines() if "own" not in line]
    assert line.startswith("Error: ")


def test_a_file_that_is_not_there_is_told():
    result = size("absent.py:make")
    assert result.exit_code == 2
    assert "absent.py" in result.stderr
