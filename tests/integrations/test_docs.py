"""The Python of trainers' pages runs."""

import importlib

import pytest

from tests.documents import OF_TRAINERS, ROOT


@pytest.mark.parametrize("path", OF_TRAINERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_blocks_run(path, tmp_path, fresh_process):
    done = fresh_process(path, tmp_path)
    assert done.ok, done.stderr


@pytest.mark.parametrize("name", ["accelerate", "lightning", "sentence_transformers", "transformers"])
def test_dir_shows_public_names_only(name):
    module = importlib.import_module(f"gradaccum.integrations.{name}")
    assert [each for each in dir(module) if not each.startswith("_")] == sorted(module.__all__)
