"""The documentation's site: it builds without a warning, has every public name, and fetches nothing from elsewhere."""

import os
import re
import subprocess
import sys

import pytest

from scripts.formulas import mathml
from tests.documents import ROOT
from tests.source import FACES

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module", params=["false", pytest.param("true", marks=pytest.mark.slow)])
def site(request, tmp_path_factory):
    """Links, headings that links name, and files that are in no menu are warnings of mkdocs; here they are errors.

    Without the index of its search, which takes a third of the time.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "SEARCH": request.param}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (folder / "search/search_index.json").exists() is (request.param == "true")
    return folder


def test_every_public_name_is_in_the_reference(site):
    pages = {face: (site / f"reference/{face}.html").read_text(encoding="utf-8") for face in FACES}
    section = r'id="{0}\.(\w+)"(.*?)(?=id="{0}\.\w+"|\Z)'
    sections = {
        face: dict(re.findall(section.format(re.escape(face)), page, re.DOTALL)) for face, page in pages.items()
    }
    missing = []
    for line in (ROOT / "docs/api.txt").read_text(encoding="utf-8").splitlines():
        face = max((face for face in FACES if line.startswith(f"{face}.")), key=len)
        name, _, member = line[len(face) + 1 :].partition("(")[0].partition(".")
        section = sections[face].get(name)
        if f"{face}.{name}" in FACES or name == "__version__":
            continue
        if section is None or (member and not re.search(rf'id="[\w.]+\.{member}"', section)):
            missing.append(line)
    assert not missing
    assert list(sections["gradaccum.torch"])[:3] == ["TrainStep", "BlockStep", "chunked"]  # as introduced


def test_nothing_is_fetched_from_elsewhere(site):
    """Links may lead away; scripts, styles, fonts and pictures are the site's own."""
    fetching = r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"([^\"]*)\""
    for page in site.rglob("*.html"):
        fetched = re.findall(fetching, page.read_text(encoding="utf-8"))
        assert [address for address in fetched if "//" in address] == []
    for style in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*", style.read_text(encoding="utf-8")) == []


def test_formulas_are_rendered_without_a_script(site):
    page = (site / "theory.html").read_text(encoding="utf-8")
    assert page.count('<math display="block">') == 4
    assert re.search(r"<math[^>]*>.*\\|\$\\", page) is None, "a formula is left in LaTeX"
    text = re.sub(r"<p>\s*</p>", "", page)
    assert "<p>by <span><math>" not in text, "an inline formula has broken its paragraph"
    with pytest.raises(ValueError, match=r"a formula has \\oint"):
        mathml(r"\oint f")


def test_types_that_stand_for_several_others_are_written_out(site):
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/gradaccum").rglob("*.py"))
    aliases = set(re.findall(r"^([A-Z][a-z]\w*) = (?:\w+ \||\w+\[|Any$)", sources, re.MULTILINE))
    aliases -= {"Block", "Array"}  # a public name, with an entry of its own, and JAX' own
    assert {"GroupsChoice", "BatchDims", "BufferRule", "PairsOf"} <= aliases
    for page in (site / "reference").glob("*.html"):
        shown = set(re.findall(r">(\w+)</span>", page.read_text(encoding="utf-8")))
        assert shown & aliases == set(), page.name


def test_a_link_to_nowhere_would_be_seen(tmp_path):
    """The settings that make it so, on a page that has one."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Page\n\n[there](index.md#nowhere)\n", encoding="utf-8")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (validation,) = re.findall(r"^validation:\n(?: .*\n)+", settings, re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(f"site_name: One page\n{validation}", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert built.returncode == 1, "with --quiet, --strict sees no warning"
    assert "index.md#nowhere" in built.stdout + built.stderr
