"""examples/torch/elastic.py: killed, and resumed on another number of ranks, it takes the same updates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.processes import free_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch" / "elastic.py"


def start(rank: int, ranks: int, port: int, checkpoint: Path, *arguments: str) -> subprocess.Popen[str]:
    """What torchrun starts on each rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--checkpoint", str(checkpoint), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", **{k: str(v) for k, v in place.items()}},
    )


def test_a_run_that_is_killed_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    port = free_port()
    killed = [start(rank, 2, port, tmp_path / "elastic.pt", "--kill-after", "3") for rank in range(2)]
    whole = start(0, 1, free_port(), tmp_path / "whole.pt", "--maximum-batch-size", "48")
    said = [process.communicate(timeout=120)[0] for process in killed]
    assert any(process.returncode != 0 for process in killed)
    assert "2 ranks, 3 steps, from update 0" in said[0]
    resumed = start(0, 1, free_port(), tmp_path / "elastic.pt")
    output, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    assert "1 ranks, 6 steps, from update 3" in output
    assert "1 ranks, 1 steps, from update 0" in whole.communicate(timeout=120)[0]

    elastic, reference = (torch.load(tmp_path / name, weights_only=True) for name in ("elastic.pt", "whole.pt"))
    assert elastic["optimizer"]["gradaccum"]["updates"] == 8
    assert relative_error(elastic["model"].values(), reference["model"].values()) <= FLOAT64
    momenta = [[state["momentum_buffer"] for state in s["optimizer"]["state"].values()] for s in (elastic, reference)]
    assert relative_error(*momenta) <= FLOAT64
    assert elastic["scheduler"]["last_epoch"] == reference["scheduler"]["last_epoch"]
