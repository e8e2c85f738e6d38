"""`gradaccum size file.py:make --memory 16GiB`: an estimate, its margin, and exit codes."""

import sys
import textwrap

import pytest
from click.testing import CliRunner

from gradaccum.cli import commands
from tests.documents import with_pytorch

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

    def deep():
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, (torch.zeros(16, 96), torch.zeros(16, 96)), {"loss_fn": nn.MSELoss(), "optimizer": optimizer}

    def shared():
        layer = nn.Linear(96, 96)
        return nn.Sequential(layer, layer), (torch.zeros(8, 96), torch.zeros(8, 96)), nn.MSELoss()

    def misfit():
        model, (x, y), loss_fn = make()
        return model, (x[:, :5], y), loss_fn

    class Net(nn.Linear):
        def forward(self, x):
            raise ValueError("no")

    def in_forward():
        return Net(64, 10), make()[1], nn.CrossEntropyLoss()

    class Keras(nn.Module):
        pass

    Keras.__module__ = "keras.src.models"

    def of_keras():
        return Keras(), make()[1], None
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MAKE), encoding="utf-8")
    return path


def size(target, *arguments):
    return CliRunner().invoke(commands, ["size", str(target), *arguments])


def test_the_best_way_its_peak_and_the_margin_are_printed_first(file):
    result = size(f"{file}:make", "--memory", "1500 kB")
    assert result.exit_code == 0, result.output
    first, second, _, title, *ways, _, note = result.stdout.splitlines()
    rows = int(first.removeprefix("Accumulated, ").split()[0])
    assert 1 < rows < 512
    assert first.endswith(f"{rows} rows at a time: pass micro_batch_size={rows} to TrainStep.")
    assert "that a margin of 10 % leaves of 1.4 MiB" in second
    assert title.startswith("update of 512 rows")
    assert [way.split()[0] for way in ways] == ["plain", "accumulated"]
    assert ways[0].endswith("does not fit")
    assert ways[1].endswith(f"micro_batch_size={rows}")
    assert note.startswith("No list of blocks was found")
    less = size(f"{file}:with_optimizer", "--memory", "1500 kB", "--margin", "0.2")
    assert "20 %" in less.stdout


def test_a_limit_that_only_updates_in_backward_fit_is_exit_code_0(file):
    result = size(f"{file}:deep", "--memory", "440 kB", "--margin", "0")
    assert result.exit_code == 0
    first, *_ = result.stdout.splitlines()
    assert first.startswith("Whole gradients, 218.2 KiB, don't fit with the rest. Updated in backward")
    (pasted,) = [line for line in result.stdout.splitlines() if line.startswith("updated in backward  ")]
    assert 'blocks=Blocks("auto", update="in_backward")' in pasted
    for misfit in ("accumulated", "layer by layer"):
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(misfit)]
        assert line.endswith("does not fit")
    assert (
        size(f"{file}:shared", "--memory", "1GiB").stdout.splitlines()[-1].startswith("Not layer by layer: The block")
    )


def test_nothing_fits_is_exit_code_1_and_everything_takes_an_ordinary_step(file):
    result = size(f"{file}:make", "--memory", "10 kB")
    assert result.exit_code == 1
    assert "Not even a micro-batch of one row fits" in result.stdout
    first, *_ = size(f"{file}:deep", "--memory", "1GiB").stdout.splitlines()
    assert first == "The whole batch of 16 rows fits into an ordinary step."


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("make", ["--memory", "lots"], ["Error: --memory"]),
        ("make", ["--margin", "1"], ["Error: ", "--margin"]),
        ("../absent.py:make", [], ["absent.py: no such file"]),
        ("in_forward", [], ["in_forward: the model or its loss raised ValueError: no (mine.py, line 29)"]),
        ("of_keras", [], ["of PyTorch and JAX, and this is a Keras model", 'micro_batched(model, "auto")']),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(file, name, arguments, parts):
    result = size(f"{file}:{name}", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert_one_line(result.stderr, parts)


def test_a_keras_model_is_told_to_be_one_where_there_is_no_pytorch(file, monkeypatch):
    monkeypatch.setattr("gradaccum.cli.group.importlib.util.find_spec", lambda name: None)
    for model, part in (
        (type("Model", (), {"__module__": "keras.src.models"})(), "this is a Keras model"),
        (object(), 'pip install "gradaccum[torch]"'),
    ):
        found = model, None, dict[str, object]()
        monkeypatch.setattr(sys.modules["gradaccum.cli.commands"], "subject", lambda target, found=found: found)
        result = size(f"{file}:make")
        assert result.exit_code == 2
        assert_one_line(result.stderr, [part])


def test_in_a_shell_there_is_no_log_of_pytorch_s(file):
    command = file.parent / "command.py"
    command.write_text(
        "from gradaccum.__main__ import main\ntry:\n    main()\nexcept SystemExit as end:\n    print(end.code)\n"
    )
    result = with_pytorch()(command, file.parent, "size", f"{file}:misfit", "--memory", "1GiB")
    assert result.stdout == "2\n"
    reason = "misfit: the model or its loss raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert_one_line(result.stderr, [reason])


def assert_one_line(stderr, parts):
    (line,) = [line for line in stderr.splitlines() if line != "noise of the user's own"]
    assert all(part in line for part in parts), line
