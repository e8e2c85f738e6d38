"""The Python of JAX' pages runs, and the experiment's JAX runs are PyTorch's."""

import pytest

from tests.demo.shells import program
from tests.documents import ROOT

PAGES = sorted((ROOT / "docs").rglob("jax*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_blocks_run(path, tmp_path, fresh_process):
    done = fresh_process(path, tmp_path)
    assert done.ok, done.stderr


@pytest.mark.slow  # tests/demo makes the claim of PyTorch's side
def test_in_the_demo_accumulated_is_the_large_batch_and_each_run_is_pytorchs(tmp_path, fresh_process):
    done = fresh_process(program("jax", tmp_path), tmp_path)
    assert done.ok, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
