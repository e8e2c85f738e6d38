"""examples/torch/elastic.py: killed, and resumed on another number of ranks, it takes the same updates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.reference import FLOAT64, relative_error

EXAMPLE = Path(__file__).parents[3] / "examples" / "torch" / "elastic.py"


def torchrun(ranks: int, checkpoint: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(EXAMPLE), "--checkpoint", str(checkpoint), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_a_run_that_is_killed_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    killed = torchrun(2, tmp_path / "elastic.pt", "--kill-after", "3")
    assert killed.returncode != 0
    assert "2 ranks, 3 steps, from update 0" in killed.stdout
    resumed = torchrun(1, tmp_path / "elastic.pt")
    assert resumed.returncode == 0, resumed.stderr
    assert "1 ranks, 6 steps, from update 3" in resumed.stdout
    whole = torchrun(1, tmp_path / "whole.pt", "--maximum-batch-size", "48")
    assert "1 ranks, 1 steps, from update 0" in whole.stdout

    elastic, reference = (torch.load(tmp_path / name, weights_only=True) for name in ("elastic.pt", "whole.pt"))
    assert elastic["optimizer"]["gradaccum"]["updates"] == 8
    assert relative_error(elastic["model"].values(), reference["model"].values()) <= FLOAT64
    momenta = [[state["momentum_buffer"] for state in s["optimizer"]["state"].values()] for s in (elastic, reference)]
    assert relative_error(*momenta) <= FLOAT64
    assert elastic["scheduler"]["last_epoch"] == reference["scheduler"]["last_epoch"]
