"""The Python of trainers' pages runs, and each recipe is a script that compares itself with the large batch."""

import importlib
import runpy
import subprocess
import sys

import pytest

from tests.documents import OF_TRAINERS, ROOT

RECIPES = ROOT / "examples" / "torch"


@pytest.mark.parametrize("path", OF_TRAINERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_blocks_run(path, tmp_path, fresh_process):
    done = fresh_process(path, tmp_path)
    assert done.ok, done.stderr


@pytest.mark.parametrize("name", ["accelerate", "lightning", "sentence_transformers", "transformers"])
def test_dir_shows_public_names_only(name):
    module = importlib.import_module(f"gradaccum.integrations.{name}")
    assert [each for each in dir(module) if not each.startswith("_")] == sorted(module.__all__)


@pytest.mark.filterwarnings("ignore")  # what third parties warn of, where they are installed
@pytest.mark.parametrize("name", ["gan", "diffusion", "third_party_optimizers"])
def test_a_recipe_makes_the_large_batchs_updates(name, capsys):
    runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    assert "against the large batch" in capsys.readouterr().out


def test_clip_in_chunks_on_two_ranks_is_one_process_with_all_rows():
    command = [sys.executable, "-W", "ignore", str(RECIPES / "clip_ranks.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "relative error against one process with all rows" in result.stdout
