"""The Python of Keras' pages runs, on the backend that these tests run on."""

import pytest

from tests.documents import ROOT
from tests.keras.problems import BACKEND, slow

PAGES = sorted((ROOT / "docs").rglob("keras*.md"))


# One on TensorFlow, too: the longest compile for twenty seconds.
@pytest.mark.parametrize(
    "path",
    [path if path.parent.name == "migrate" and BACKEND == "tensorflow" else slow(path) for path in PAGES],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_pages_blocks_run(path, tmp_path, fresh_process):
    done = fresh_process(path, tmp_path)
    assert done.ok, done.stderr
