"""The Python of Keras' pages runs, on the backend that these tests run on."""

import pytest

from tests.documents import OF_KERAS, ROOT
from tests.keras.problems import BACKEND, slow_where_compiled

PAGES = [*sorted((ROOT / "docs").rglob("keras*.md")), *(OF_KERAS if BACKEND == "torch" else [])]


@slow_where_compiled  # for up to twenty seconds
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_blocks_run(path, tmp_path, fresh_process):
    done = fresh_process(path, tmp_path)
    assert done.ok, done.stderr
