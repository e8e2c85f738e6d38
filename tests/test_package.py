"""The distributions: what they say of themselves, and that they install and work."""

import re
import subprocess
import sys

import pytest

from gradaccum import __version__
from tests.documents import ROOT


@pytest.mark.parametrize("file", ["compat/runai/pyproject.toml", "CITATION.cff"])
def test_every_file_states_the_same_version(file):
    stated = re.findall(r"^version(?: =|:) \"?([\d.]+)\"?$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert stated == [__version__]


def test_both_distributions_have_the_licence():
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "compat/runai/LICENSE").read_bytes()


@pytest.mark.slow
def test_the_distributions_build_pass_the_index_check_and_work_in_an_empty_environment(tmp_path):
    pytest.importorskip("build")
    address = "https://example.org/gradaccum"
    command = [sys.executable, "-m", "scripts.package", "--repository", address, "--out", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert built == [
        f"gradaccum-{__version__}-py3-none-any.whl",
        f"gradaccum-{__version__}.tar.gz",
        f"gradaccum_runai-{__version__}-py3-none-any.whl",
        f"gradaccum_runai-{__version__}.tar.gz",
    ]
