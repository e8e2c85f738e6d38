"""`gradaccum check` and `gradaccum size`: exit codes 0 to 3, one line for bad input, no traceback, JSON and HTML."""

import json
import os
import re
import subprocess
import sys

import pytest

import gradaccum
from tests.cli.results import assert_one_clear_line, invoke
from tests.documents import with_pytorch

FILE = """
import threading
import torch
from torch import nn
F = nn.functional
def good(layer=nn.LayerNorm):
    print("the user's own line")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), layer(8), nn.Dropout(0.5), nn.Linear(8, 3))
    return model, (torch.randn(12, 6), torch.randint(3, (12,))), nn.CrossEntropyLoss()
def different(): return good(nn.BatchNorm1d)
def keywords():
    model, batch, _ = good()
    batch[1][:5] = -100
    how = {"compute_loss": lambda model, x, y: F.cross_entropy(model(x), y), "weight": lambda x, y: (y != -100).sum()}
    return model, batch, how
def changed(rows=12, columns=6, loss=None):
    model, (x, y), loss_fn = good()
    return model, (x[:rows, :columns], y[:rows]), loss or loss_fn
def raises(): raise RuntimeError("boom")
def leaves(): raise SystemExit(7)
def base(): raise BaseException("base")
def pair(): return 1, 2
def misfit(): return changed(columns=5)
def one_row(): return changed(rows=1)
def no_gradient(): return changed(loss={"compute_loss": lambda model, x, y: model(x).argmax(1).double().mean()})
def misspelt(): return changed(loss={"reductoin": "sum"})
def no_copy():
    model, batch, loss_fn = good()
    model.lock = threading.Lock()
    return model, batch, loss_fn
class Net(nn.Linear):
    def forward(self, x): raise self.error
def in_forward(error=ValueError("the first line\\nthe second")):
    model = Net(6, 3)
    model.error = error
    return model, good()[1], nn.CrossEntropyLoss()
def leaves_in_forward(): return in_forward(SystemExit(0))
def named():
    model, (x, y), _ = good()
    return model, {"x": x, "y": y}, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])
def causal():
    torch.manual_seed(0)
    ids, mask = torch.randint(7, (6, 5)), torch.arange(5) < torch.tensor([5, 2, 2, 4, 2, 5])[:, None]
    batch = {"attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    def compute_loss(model, batch):
        logits, labels = model(batch["labels"].clamp(min=0)), batch["labels"]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return nn.Embedding(7, 7), batch, {"compute_loss": compute_loss}
def wide():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, (torch.zeros(512, 64), torch.zeros(512, dtype=torch.long)), nn.CrossEntropyLoss()
def with_optimizer(made=None):
    model, batch, loss_fn = made or wide()
    return model, batch, {"loss_fn": loss_fn, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
def square(layers): return nn.Sequential(*layers), (torch.zeros(16, 96), torch.zeros(16, 96)), nn.MSELoss()
def deep(): return with_optimizer(square(nn.Linear(96, 96) for _ in range(6)))
def shared(): return square([nn.Linear(96, 96)] * 2)
class Keras(nn.Module): pass
Keras.__module__ = "keras.src.models"
def of_keras(): return Keras(), good()[1], None
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "experiment.py"
    path.write_text(FILE, encoding="utf-8")
    return path


# check.


def test_equal_is_exit_code_0_with_a_line_per_module(file):
    result = invoke("check", f"{file}:good")
    assert result.exit_code == 0, result.stderr
    assert "The accumulated gradient is the large batch's" in result.stdout
    assert "12 rows at once against" in result.stdout
    lines = re.findall(r"^gradient +(\d) +(\d+) +(\d+) +(\S+)$", result.stdout, re.MULTILINE)
    assert [line[:3] for line in lines] == [("0", "2", "56"), ("1", "2", "16"), ("3", "2", "27")]
    assert max(float(error) for *_, error in lines) < 1e-12


def test_different_is_exit_code_1_with_the_culprit_and_what_to_do(file):
    result = invoke("check", f"{file}:different")
    assert result.exit_code == 1
    for part in ("NOT the large batch's", "'1' is a BatchNorm1d", "GroupNorm"):
        assert part in result.stdout


def test_keywords_weights_and_a_micro_batch_size_are_tried_too(file):
    assert invoke("check", f"{file}:keywords").exit_code == 0  # in a dict
    # A causal model's weight is by its shifted labels, even where the mask agrees.
    assert "weight=lambda batch: (batch['labels'][:, 1:] != -100).sum()" in invoke("check", f"{file}:causal").stdout
    result = invoke("check", f"{file}:good", "--micro-batch-size", 5)
    assert result.exit_code == 0
    assert "against 4 + 4 + 4;" in result.stdout


@pytest.mark.parametrize("order", ["before", "after"])
def test_json_goes_to_standard_output_alone(file, order):
    target = f"{file}:different"
    result = invoke("check", *(["--json", target] if order == "before" else [target, "--json"]))
    assert result.exit_code == 1
    record = json.loads(result.stdout)  # without what the user's code prints
    assert record["ok"] is False
    assert record["causes"][0]["where"] == "1"
    errors = [difference["error"] for difference in record["differences"] if difference["part"] != "buffer"]
    assert record["max_error"] == max(errors)


def test_json_and_html_go_to_files(file, tmp_path):
    paths = [tmp_path / "new" / "result.json", tmp_path / "new" / "r.html"]
    result = invoke("check", f"{file}:good", "--json", paths[0], "--html", paths[1])
    assert result.exit_code == 0
    assert json.loads(paths[0].read_text(encoding="utf-8"))["ok"] is True
    assert "the large batch" in paths[1].read_text(encoding="utf-8")
    assert "The accumulated gradient is" in result.stdout


# size.


def size(target, memory, *more):
    result = invoke("size", target, "--memory", memory, *more)
    return result.exit_code, result.stdout.splitlines()


def test_the_best_way_its_peak_and_the_margin_are_printed_first(file):
    code, (first, second, _, title, *ways, _, note) = size(f"{file}:wide", "1500 kB")
    assert code == 0
    rows = int(first.removeprefix("Accumulated, ").split()[0])
    assert 1 < rows < 512
    assert first.endswith(f"{rows} rows at a time: TrainStep(..., micro_batch_size={rows}).")
    assert "that a margin of 10 % leaves of 1.4 MiB" in second
    assert title.startswith("update of 512 rows")
    assert [way.split()[0] for way in ways] == ["plain", "accumulated"]
    assert ways[0].endswith("does not fit")
    assert ways[1].endswith(f"TrainStep(..., micro_batch_size={rows})")
    assert note.startswith("No list of blocks was found")
    assert "20 %" in size(f"{file}:with_optimizer", "1500 kB", "--margin", "0.2")[1][1]


def test_a_limit_that_only_updates_in_backward_fit_is_exit_code_0(file):
    code, (first, *lines) = size(f"{file}:deep", "440 kB", "--margin", "0")
    assert code == 0
    assert first.startswith("Whole gradients, 218.2 KiB, don't fit with the rest. Updated in backward")
    (pasted,) = [line for line in lines if line.startswith("updated in backward  ")]
    assert 'BlockStep(..., micro_batch_size=16, update="in_backward")' in pasted
    for misfit in ("accumulated", "layer by layer"):
        (line,) = [line for line in lines if line.startswith(misfit)]
        assert line.endswith("does not fit")
    assert size(f"{file}:shared", "1GiB")[1][-1].startswith("Not layer by layer: The block")


def test_nothing_fits_is_exit_code_1_and_everything_takes_an_ordinary_step(file):
    code, lines = size(f"{file}:wide", "10 kB")
    assert code == 1
    assert "Not even a micro-batch of one row fits" in "\n".join(lines)
    assert size(f"{file}:deep", "1GiB")[1][0] == "The whole batch of 16 rows fits into an ordinary step."


def test_a_keras_model_is_told_to_be_one_where_there_is_no_pytorch(file, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for model, part in (
        (type("Model", (), {"__module__": "keras.src.models"})(), "this is a Keras model"),
        (object(), 'pip install "gradaccum[torch]"'),
    ):
        found = model, None, dict[str, object]()
        monkeypatch.setattr(sys.modules["gradaccum.cli.commands"], "subject", lambda target, found=found: found)
        assert_one_clear_line(invoke("size", f"{file}:wide"), part)


# Bad input, and what breaks down.


def check(name, *parts, options=()):
    return "check", f"{{file}}:{name}", options, parts


BAD = [
    check("raises", "raises()", "RuntimeError: boom (experiment.py, line 20)"),
    check("leaves", "leaves()", "SystemExit: 7"),
    check("base", "base() in", "raised BaseException: base (experiment.py, line 22)"),
    check("pair", "must return (model, batch, loss_fn)", "a tuple of 2"),
    check("in_forward", "in_forward: the model", "ValueError: the first line (experiment.py, line 33)"),
    check("leaves_in_forward", "leaves_in_forward: the model", "SystemExit: 0 (experiment.py, line 33)"),
    check("misfit", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    check("one_row", "at least 2 rows", "Received: 1"),
    check("no_gradient", "The loss has no gradient"),
    check("no_copy", "The model can't be copied", "_thread.lock"),
    check(
        "named", "must be Tensor, not dict. A batch that is a dict goes", '{"compute_loss": lambda model, batch: ...}'
    ),
    check("misspelt", "unexpected keyword argument 'reductoin'"),
    check("absent", "has no function 'absent'", "It has Net, base, causal, changed, deep, different,"),
    check("no name", "path/to/file.py:make"),
    # Files are tried before anything runs.
    check("good", "--html", "ends in .html", "report.pdf", options=["--html", "report.pdf"]),
    check("good", "--json", "ends in .json", "r.yaml", options=["--json", "r.yaml"]),
    check("raises", "--html /proc/self/r.html: ", options=["--html", "/proc/self/r.html"]),
    check("raises", "--json /proc/self/r.json: ", options=["--json", "/proc/self/r.json"]),
    check("good", "--device nonsense: Expected one of cpu", options=["--device", "nonsense"]),
    ("check", "{folder}/absent.py:make", (), ["absent.py: no such file"]),
    ("check", "experiment.py", (), ["path/to/file.py:make", "Received: 'experiment.py'"]),
    ("check", "{folder}/broken.py:make", (), ["broken.py", "SyntaxError", "line 1"]),
    ("check", "{folder}/missing.py:make", (), ["No module named 'nowhere_to_be_found'"]),
    ("check", "{folder}/notes.txt:make", (), ["not a Python file"]),
    ("check", "", (), ["Name what to check"]),
    ("size", "{file}:wide", ["--memory", "lots"], ["Error: --memory"]),
    ("size", "{file}:wide", ["--margin", "1"], ["Error: ", "--margin"]),
    ("size", "{folder}/absent.py:make", (), ["absent.py: no such file"]),
    ("size", "{file}:in_forward", (), ["or its loss raised ValueError: the first line (experiment.py, line 33)"]),
    ("size", "{file}:of_keras", (), ["of PyTorch and JAX, and this is a Keras model", 'micro_batched(model, "auto")']),
    ("demo", "", (), ["Error: No such command 'demo'."]),
]


@pytest.mark.parametrize(("command", "target", "options", "parts"), BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(command, target, options, parts, file):
    folder = file.parent
    for name, content in (("broken.py", "def make(:\n"), ("missing.py", "import nowhere_to_be_found\n")):
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "notes.txt").write_text("notes", encoding="utf-8")
    targets = [target.format(file=file, folder=folder)] if target else []
    assert_one_clear_line(invoke(command, *targets, *options), *parts)


def in_a_shell(*arguments, **options):
    """`python -m gradaccum ...`, as a user runs it."""
    line = [sys.executable, "-W", "error", "-m", "gradaccum", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(line, text=True, timeout=120, **pipes | options)


def test_in_a_shell_neighbours_can_be_imported_and_there_is_no_traceback(tmp_path):
    (tmp_path / "neighbour.py").write_text("def make():\n    raise KeyError('lost')\n", encoding="utf-8")
    (tmp_path / "file.py").write_text("from neighbour import make\n", encoding="utf-8")
    result = in_a_shell("check", f"{tmp_path}/file.py:make")
    assert (result.returncode, result.stdout) == (2, "")
    said = f"Error: make() in {tmp_path}/file.py raised KeyError: 'lost' (neighbour.py, line 2)"
    assert result.stderr.strip() == said


def test_in_a_shell_there_is_no_log_of_pytorch_s(file, tmp_path):
    command = tmp_path / "command.py"
    command.write_text(
        "from gradaccum.__main__ import main\ntry:\n    main()\nexcept SystemExit as end:\n    print(end.code)\n"
    )
    result = with_pytorch()(command, tmp_path, "size", f"{file}:misfit", "--memory", "1GiB")
    assert result.stdout == "2\n"
    (line,) = [line for line in result.stderr.splitlines() if line != "the user's own line"]
    assert "misfit: the model or its loss raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in line


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_an_output_that_takes_no_more_or_that_nobody_reads_is_not_exit_code_1_which_means_different():
    with open("/dev/full", "w") as full:
        result = in_a_shell("--version", stdout=full)
    assert (result.returncode, result.stderr) == (3, "Error: [Errno 28] No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    result = in_a_shell("--version", stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (3, "")


def test_an_error_of_its_own_is_exit_code_3_and_never_the_one_for_different(tmp_path, monkeypatch):
    def broken(file):
        raise AssertionError("a bug")

    monkeypatch.setattr("gradaccum.report.run.read", broken)
    result = invoke("report", tmp_path / "run.jsonl")
    assert result.exit_code == 3
    assert "AssertionError: a bug" in result.stderr


def test_click_missing_is_one_line_with_the_extra(tmp_path):
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('No module', name='click')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gradaccum.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", program, "size"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert 'pip install "gradaccum[cli]"' in line


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_is_there_and_the_version(arguments):
    assert invoke("--version").stdout == f"gradaccum, version {gradaccum.__version__}\n"
    output = invoke(*arguments).output
    assert "Usage: " in output
    assert "check" in output
    assert "..." not in output.split("Commands:")[-1]  # each command's sentence is there to its end
