"""The documentation's Python runs: Keras' pages in tests/keras, JAX' in tests/jax, trainers' in tests/integrations."""

import re

import pytest

from tests.documents import OF_TRAINERS, ROOT, blocks, run, run_in, with_pytorch

RUNAI = ROOT / "compat/runai/README.md"
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if not path.name.startswith(("keras", "jax")) and path not in OF_TRAINERS
]
EVERY_PAGE = [*ROOT.glob("*.md"), RUNAI, *sorted((ROOT / "docs").rglob("*.md"))]


def name(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """How each page ended, and the README's first block by itself."""
    folder = tmp_path_factory.mktemp("pages")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "first.md").write_text(re.findall(r"^```python\n.*?^```$", text, re.MULTILINE | re.DOTALL)[0] + "\n")
    done = run_in(with_pytorch(), [*PAGES, folder / "first.md"], folder)
    return dict(zip([*PAGES, "first"], done, strict=True))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_pages_blocks_run(path, finished):
    assert finished[path].ok, finished[path].stderr


def test_the_readme_begins_with_code_that_runs_by_itself(finished):
    assert finished["first"].ok, finished["first"].stderr
    assert blocks(ROOT / "README.md") >= 2


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("import gradaccum\ngradaccum.steps_for(256)\n", "TypeError"),
        ("import warnings\nwarnings.warn('careless')\n", "UserWarning: careless"),
        ("assert 1 + 1 == 3\n", "AssertionError"),
        ("def broken(:\n", "SyntaxError"),
    ],
)
def test_a_broken_block_would_be_seen(tmp_path, block, error):
    page = tmp_path / "page.md"
    page.write_text(
        f"# A page\n\n```python\nvalue = 1\n```\nText.\n```python\nvalue += 1\n{block}```\n", encoding="utf-8"
    )
    (done,) = run([page], tmp_path)
    assert not done.ok
    assert error in done.stderr
    assert re.search(rf'page\.md", line {9 + block.count(chr(10)) - 1}\b', done.stderr), "it points to another line"


def test_blocks_of_a_page_share_their_names_and_other_languages_are_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n```console\n$ false\n```\n```python\nprint(a + 1)\n```\n", encoding="utf-8")
    assert run([page], tmp_path)[0].stdout == "2\n"


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
