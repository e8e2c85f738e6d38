"""examples/torch/elastic.py: killed, and resumed on another number of ranks, it takes the same updates."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.processes import free_port, fresh_process

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch" / "elastic.py"


def run(said: Path, environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    """The example as a program, and what it prints in a file."""
    os.environ.update(environment)
    sys.argv[:] = [str(EXAMPLE), *arguments]
    with said.open("w") as sys.stdout:
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def start(rank: int, ranks: int, port: int, checkpoint: Path, *arguments: str) -> tuple[Any, Path]:
    """What torchrun starts on each rank, as a fork of a process that has imported PyTorch."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "MASTER_ADDR": "localhost"}
    said = checkpoint.with_suffix(f".{port}.{rank}")
    environment = {name: str(value) for name, value in place.items()}
    line = ("--checkpoint", str(checkpoint), *arguments)
    return fresh_process(run, said, environment, line), said


def finished(process: Any, said: Path) -> tuple[int, str]:
    """Its exit code, and what it has said."""
    process.join(120)
    return process.exitcode, said.read_text()


def test_a_run_that_is_killed_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    port = free_port()
    killed = [start(rank, 2, port, tmp_path / "elastic.pt", "--kill-after", "3") for rank in range(2)]
    whole = start(0, 1, free_port(), tmp_path / "whole.pt", "--maximum-batch-size", "48")
    codes, said = zip(*(finished(*process) for process in killed), strict=True)
    assert any(code != 0 for code in codes)
    assert "2 ranks, 3 steps, from update 0" in said[0]
    code, output = finished(*start(0, 1, free_port(), tmp_path / "elastic.pt"))
    assert code == 0
    assert "1 ranks, 6 steps, from update 3" in output
    assert "1 ranks, 1 steps, from update 0" in finished(*whole)[1]

    elastic, reference = (torch.load(tmp_path / name, weights_only=True) for name in ("elastic.pt", "whole.pt"))
    assert elastic["optimizer"]["gradaccum"]["updates"] == 8
    assert relative_error(elastic["model"].values(), reference["model"].values()) <= FLOAT64
    momenta = [[state["momentum_buffer"] for state in s["optimizer"]["state"].values()] for s in (elastic, reference)]
    assert relative_error(*momenta) <= FLOAT64
    assert elastic["scheduler"]["last_epoch"] == reference["scheduler"]["last_epoch"]
