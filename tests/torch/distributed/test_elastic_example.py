"""examples/torch/elastic.py: killed, and resumed on another number of ranks, it takes the same updates."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.processes import LIMIT, fresh_process, new_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch" / "elastic.py"


def run(said, environment, arguments):
    """The example as a program, and what it prints in a file."""
    os.environ.update(environment)
    sys.argv[:] = [str(EXAMPLE), *arguments]
    with said.open("w") as sys.stdout:
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def start(checkpoint, ranks, *arguments):
    """What torchrun starts on each rank, as forks of a process that has imported PyTorch, and what each says.

    They meet in this process, as torchrun's do in its agent: at a port that nobody else can have taken.
    """
    port, found = str(new_port()), []
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port, "MASTER_ADDR": "localhost"}
        said = checkpoint.with_suffix(f".{port}.{rank}")
        line = ("--checkpoint", str(checkpoint), *arguments)
        found.append((fresh_process(run, said, {**agent, **place}, line), said))
    return found


def finished(process, said):
    """Its exit code, and what it has said."""
    process.join(LIMIT)
    return process.exitcode, said.read_text()


def test_a_run_that_is_killed_goes_on_with_another_number_of_ranks(tmp_path):
    killed = start(tmp_path / "elastic.pt", 2, "--kill-after", "3")
    (whole,) = start(tmp_path / "whole.pt", 1, "--maximum-batch-size", "48")
    codes, said = zip(*(finished(*process) for process in killed), strict=True)
    assert any(code != 0 for code in codes)
    assert "2 ranks, 3 steps, from update 0" in said[0]
    (again,) = start(tmp_path / "elastic.pt", 1)
    code, output = finished(*again)
    assert code == 0
    assert "1 ranks, 6 steps, from update 3" in output
    assert "1 ranks, 1 steps, from update 0" in finished(*whole)[1]

    elastic, reference = (torch.load(tmp_path / name, weights_only=True) for name in ("elastic.pt", "whole.pt"))
    assert elastic["optimizer"]["gradaccum"]["updates"] == 8
    assert relative_error(elastic["model"].values(), reference["model"].values()) <= FLOAT64
    momenta = [[state["momentum_buffer"] for state in s["optimizer"]["state"].values()] for s in (elastic, reference)]
    assert relative_error(*momenta) <= FLOAT64
    assert elastic["scheduler"]["last_epoch"] == reference["scheduler"]["last_epoch"]
