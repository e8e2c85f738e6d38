"""Each recipe is a script that compares itself with the large batch."""

import runpy
import subprocess
import sys

import pytest

from tests.documents import ROOT

FOLDER = ROOT / "examples" / "torch"


@pytest.mark.filterwarnings("ignore")  # what third parties warn of, where they are installed
@pytest.mark.parametrize("name", ["gan", "diffusion", "third_party_optimizers"])
def test_a_recipe_makes_the_large_batchs_updates(name, capsys):
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert "against the large batch" in capsys.readouterr().out


def test_clip_in_chunks_on_two_ranks_is_one_process_with_all_rows():
    command = [sys.executable, "-W", "ignore", str(FOLDER / "clip_ranks.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "relative error against one process with all rows" in result.stdout
