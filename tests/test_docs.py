"""The documentation's Python runs: Keras' pages in tests/keras, JAX' in tests/jax, trainers' in tests/integrations."""

import re

import pytest

from tests.documents import OF_TRAINERS, ROOT, with_pytorch

RUNAI = ROOT / "compat/runai/README.md"
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if not path.name.startswith(("keras", "jax")) and path not in OF_TRAINERS
]
EVERY_PAGE = [*ROOT.glob("*.md"), RUNAI, *sorted((ROOT / "docs").rglob("*.md"))]


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_pages_blocks_run(path, tmp_path):
    done = with_pytorch()(path, tmp_path)
    assert done.ok, done.stderr


def test_the_readme_begins_with_code_that_runs_by_itself(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n.*?^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    (tmp_path / "first.md").write_text(blocks[0] + "\n")
    done = with_pytorch()(tmp_path / "first.md", tmp_path)
    assert done.ok, done.stderr


BROKEN = {
    "import gradaccum\ngradaccum.steps_for(256)\n": "TypeError",
    "import warnings\nwarnings.warn('careless')\n": "UserWarning: careless",
    "assert 1 + 1 == 3\n": "AssertionError",
    "def broken(:\n": "SyntaxError",
    "print(value)\n": None,  # the blocks of a page share their names, and other languages are left alone
}


@pytest.mark.parametrize("block", BROKEN)
def test_a_broken_block_would_be_seen(tmp_path, block):
    page = tmp_path / "page.md"
    page.write_text(
        f"# A page\n\n```python\nvalue = 1\n```\n```console\n$ false\n```\n```python\nvalue += 1\n{block}```\n"
    )
    done = with_pytorch()(page, tmp_path)
    assert done.ok is (BROKEN[block] is None)
    if done.ok:
        assert done.stdout == "2\n"
    else:
        place = rf'page\.md", line {11 + block.count(chr(10)) - 1}\b'
        assert BROKEN[block] in done.stderr
        assert re.search(place, done.stderr), "it points to another line"


@pytest.mark.parametrize("path", EVERY_PAGE, ids=name)
def test_links_to_files_and_headings_lead_somewhere(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{path.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings]
            assert heading in anchors, f"{path.name} links to {target}"


@pytest.mark.parametrize("path", EVERY_PAGE, ids=name)
def test_the_files_that_a_page_names_are_there(path):
    text = path.read_text(encoding="utf-8") if path.name != "CHANGELOG.md" else ""
    folders = "|".join(p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith("."))
    for file in re.findall(rf"(?<![\w/.])(?:{folders})/[\w/.*-]+\.\w+", text):
        assert list(ROOT.glob(file)), f"{path.name} names {file}"
