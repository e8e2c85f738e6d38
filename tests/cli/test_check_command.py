"""`gradaccum check file.py:make`: exit codes 0, 1 and 2, one line for bad input, JSON and HTML."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gradaccum.cli import commands

FILE = """
import torch
from torch import nn

def good():
    print("the user's own line")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3))
    return model, (torch.randn(12, 6), torch.randint(3, (12,))), nn.CrossEntropyLoss()

def different():
    model, batch, loss_fn = good()
    model[1] = nn.BatchNorm1d(8)
    return model, batch, loss_fn

def keywords():
    model, batch, _ = good()
    batch[1][:5] = -100
    return model, batch, {
        "compute_loss": lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        "weight": lambda x, y: (y != -100).sum(),
    }

def raises():
    raise RuntimeError("boom")

def leaves():
    raise SystemExit(7)

def base():
    raise BaseException("base")

def pair():
    return 1, 2

def misfit():
    model, (x, y), loss_fn = good()
    return model, (x[:, :5], y), loss_fn

def one_row():
    model, (x, y), loss_fn = good()
    return model, (x[:1], y[:1]), loss_fn

def no_gradient():
    model, batch, _ = good()
    return model, batch, {"compute_loss": lambda model, x, y: model(x).argmax(1).double().mean()}

def no_copy():
    import threading
    model, batch, loss_fn = good()
    model.lock = threading.Lock()
    return model, batch, loss_fn

class Net(nn.Linear):
    def forward(self, x):
        raise ValueError("the first line\\nthe second")

class Leaves(nn.Linear):
    def forward(self, x):
        raise SystemExit(0)

def leaves_in_forward():
    return Leaves(6, 3), good()[1], nn.CrossEntropyLoss()

def in_forward():
    return Net(6, 3), good()[1], nn.CrossEntropyLoss()

def named():
    model, (x, y), _ = good()
    return model, {"x": x, "y": y}, lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def causal():
    torch.manual_seed(0)
    ids, mask = torch.randint(7, (6, 5)), torch.arange(5) < torch.tensor([5, 2, 2, 4, 2, 5])[:, None]
    batch = {"attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}

    def compute_loss(model, batch):
        logits, labels = model(batch["labels"].clamp(min=0)), batch["labels"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)), batch, {"compute_loss": compute_loss}

def misspelt():
    model, batch, loss_fn = good()
    return model, batch, {"loss_fn": loss_fn, "reductoin": "sum"}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def check(*arguments):
    return CliRunner().invoke(commands, ["check", *map(str, arguments)])


def test_equal_is_exit_code_0_with_a_line_per_module(file):
    result = check(f"{file}:good")
    assert result.exit_code == 0, result.stderr
    assert "The accumulated gradient is the large batch's" in result.stdout
    assert "12 rows at once against" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("gradient")]
    assert [(module, int(tensors), int(numbers)) for _, module, tensors, numbers, _ in lines] == [
        ("0", 2, 56),
        ("1", 2, 16),
        ("3", 2, 27),
    ]
    assert max(float(error) for *_, error in lines) < 1e-12


def test_different_is_exit_code_1_with_the_culprit_and_what_to_do(file):
    result = check(f"{file}:different")
    assert result.exit_code == 1
    assert "NOT the large batch's" in result.stdout
    assert "'1' is a BatchNorm1d" in result.stdout
    assert "GroupNorm" in result.stdout


def test_keywords_weights_and_a_micro_batch_size_are_tried_too(file):
    assert check(f"{file}:keywords").exit_code == 0  # in a dict
    # A causal model's weight is by its shifted labels, even where the mask agrees.
    assert "weight=lambda batch: (batch['labels'][:, 1:] != -100).sum()" in check(f"{file}:causal").stdout
    result = check(f"{file}:good", "--micro-batch-size", 5)
    assert result.exit_code == 0
    assert "against 4 + 4 + 4;" in result.stdout


@pytest.mark.parametrize("order", ["before", "after"])
def test_json_goes_to_standard_output_alone(file, order):
    target = f"{file}:different"
    result = check(*(["--json", target] if order == "before" else [target, "--json"]))
    assert result.exit_code == 1
    record = json.loads(result.stdout)  # without what the user's code prints
    assert record["ok"] is False
    assert record["causes"][0]["where"] == "1"
    errors = [difference["error"] for difference in record["differences"] if difference["part"] != "buffer"]
    assert record["max_error"] == max(errors)


def test_json_and_html_go_to_files(file, tmp_path):
    result = check(f"{file}:good", "--json", tmp_path / "new" / "result.json", "--html", tmp_path / "new" / "r.html")
    assert result.exit_code == 0
    assert json.loads((tmp_path / "new" / "result.json").read_text(encoding="utf-8"))["ok"] is True
    assert "the large batch" in (tmp_path / "new" / "r.html").read_text(encoding="utf-8")
    assert "The accumulated gradient is" in result.stdout


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("raises", ["raises()", "RuntimeError: boom (experiment.py, line 25)"]),
        ("leaves", ["leaves()", "SystemExit: 7"]),
        ("base", ["base() in", "raised BaseException: base (experiment.py, line 31)"]),
        ("pair", ["must return (model, batch, loss_fn)", "a tuple of 2"]),
        ("in_forward", ["in_forward: the model", "ValueError: the first line (experiment.py, line 56)"]),
        ("leaves_in_forward", ["leaves_in_forward: the model", "SystemExit: 0 (experiment.py, line 60)"]),
        ("misfit", ["RuntimeError: mat1 and mat2 shapes cannot be multiplied"]),
        ("one_row", ["at least 2 rows", "Received: 1"]),
        ("no_gradient", ["The loss has no gradient"]),
        ("no_copy", ["The model can't be copied", "_thread.lock"]),
        (
            "named",
            ["must be Tensor, not dict. A batch that is a dict goes", '{"compute_loss": lambda model, batch: ...}'],
        ),
        ("misspelt", ["unexpected keyword argument 'reductoin'"]),
        ("absent", ["has no function 'absent'", "It has Leaves, Net, base, causal, different, good,"]),
        ("no name", ["path/to/file.py:make"]),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(file, name, parts):
    assert_one_clear_line(check(f"{file}:{name}"), *parts)


def test_a_target_that_cannot_be_run_is_one_clear_line(tmp_path):
    for name, content in (("broken", "def make(:\n"), ("missing", "import nowhere_to_be_found\n")):
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("notes", encoding="utf-8")
    for target, *parts in (
        (tmp_path / "absent.py:make", "absent.py: no such file"),
        ("experiment.py", "path/to/file.py:make", "Received: 'experiment.py'"),
        (tmp_path / "broken.py:make", "broken.py", "SyntaxError", "line 1"),
        (tmp_path / "missing.py:make", "No module named 'nowhere_to_be_found'"),
        (tmp_path / "notes.txt:make", "not a Python file"),
    ):
        assert_one_clear_line(check(target), *parts)
    assert_one_clear_line(check(), "Name what to check")


@pytest.mark.parametrize(
    ("name", "option", "value", "parts"),
    [
        ("good", "--html", "report.pdf", ["--html", "ends in .html", "report.pdf"]),
        ("good", "--json", "r.yaml", ["--json", "ends in .json", "r.yaml"]),
        ("raises", "--html", "/proc/self/r.html", ["--html /proc/self/r.html: "]),
        ("raises", "--json", "/proc/self/r.json", ["--json /proc/self/r.json: "]),
        ("good", "--device", "nonsense", ["--device nonsense: Expected one of cpu"]),
    ],
)
def test_an_option_that_cannot_be_is_one_clear_line(file, name, option, value, parts):
    """Files are tried before anything runs."""
    assert_one_clear_line(check(f"{file}:{name}", option, value), *parts)


def assert_one_clear_line(result, *parts):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *own, line = result.stderr.strip().splitlines()
    assert set(own) <= {"the user's own line"}
    assert line.startswith("Error: ")
    assert all(part in line for part in parts), line


def test_in_a_shell_neighbours_can_be_imported_and_there_is_no_traceback(file):
    (file.parent / "neighbour.py").write_text("def make():\n    raise KeyError('lost')\n", encoding="utf-8")
    file.write_text("from neighbour import make\n", encoding="utf-8")
    line = [sys.executable, "-W", "error", "-m", "gradaccum", "check", f"{file}:make"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.strip() == f"Error: make() in {file} raised KeyError: 'lost' (neighbour.py, line 2)"
