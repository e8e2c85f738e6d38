"""The Python of trainers' pages runs."""

import pytest

from tests.documents import OF_TRAINERS, ROOT


@pytest.mark.parametrize("path", OF_TRAINERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_blocks_run(path, tmp_path, fresh_process):
    done = fresh_process(path, tmp_path)
    assert done.ok, done.stderr
