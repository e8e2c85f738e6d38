"""The site's pages that are made of other files, as hooks of mkdocs: the README, the reference, examples, changelog.

A file that is a page already stays where it is; links to it are led to the page.
"""

from __future__ import annotations

import ast
import pathlib
import posixpath
import re
import sys
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.formulas import mathml, rendered  # noqa: E402  # mkdocs loads this file by its path
from scripts.gallery_pictures import RECIPES  # noqa: E402
from tests.source import FACES, TREES, definition  # noqa: E402

WHOLE_FILES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "compat/runai/README.md": "migrate/runai.md",
}
EXAMPLES = {
    path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).with_suffix(".md").as_posix()
    for path in sorted((ROOT / "examples").rglob("*.py"))
    if path.parent.name != "demo"
}
PAGES = {**WHOLE_FILES, **EXAMPLES}
CONCEPTS = (
    "noise_scale.md",
    "batch_norm.md",
    "equivalence.md",
    "limits.md",
    "layers.md",
    "contrastive.md",
    "howto/mixed_precision.md",
)
"""Pages that a search for their subject finds before those that mention it."""
LAST = ("benchmarks.md", "changelog.md", "examples/")


def public_names() -> dict[str, dict[str, list[str]]]:
    """`{face: {name: members}}` of docs/api.txt: a module that users import from, what it has, and what that has."""
    found: dict[str, dict[str, list[str]]] = {face: {} for face in FACES}
    for line in (ROOT / "docs/api.txt").read_text(encoding="utf-8").splitlines():
        face = max((face for face in FACES if line.startswith(f"{face}.")), key=len)
        name, _, member = line[len(face) + 1 :].partition("(")[0].partition(".")
        if f"{face}.{name}" not in FACES and name != "__version__":  # modules have pages of their own
            found[face].setdefault(name, []).extend([member] if member else [])
    return found


def _entry(face: str, name: str, members: list[str]) -> str:
    path, anchor = f"{face}.{name}", ""
    source, node = definition(face, name) or ("", None)
    if node is not None and source.endswith(f".{name}"):  # a module of the same name, which Griffe would take
        path, anchor = f"{source}.{node.name}", f'<a id="{face}.{name}"></a>\n\n'
    options = f"heading: {name}\n      toc_label: {name}\n      members: [{', '.join(members)}]"
    return f"{anchor}::: {path}\n    options:\n      {options}\n"


def _reference(face: str) -> str:
    introduction = ast.get_docstring(TREES[face]) or ""

    def order(name: str) -> tuple[bool, int, str]:
        """What the introduction names first, in its order."""
        place = introduction.find(f"`{name}`")
        return place < 0, place, name

    names = public_names()[face]
    entries = [_entry(face, name, names[name]) for name in sorted(names, key=order)]
    return "\n".join([f"# `{face}`\n", introduction, "", *_wrapped_classes(face), *entries])


def _wrapped_classes(face: str) -> list[str]:
    """The classes of a module that makes them when they are asked for: its stub lists them."""
    stub = ROOT / "src" / f"{face.replace('.', '/')}.pyi"
    if not stub.exists():
        return []
    names = re.findall(r"^class (\w+)\(", stub.read_text(encoding="utf-8"), re.MULTILINE)
    return [f"Wrapped classes: {', '.join(f'`{name}`' for name in names)}.", ""]


def _example(path: str) -> str:
    code = (ROOT / path).read_text(encoding="utf-8")
    stem = pathlib.Path(path).stem
    name = "recipes" if stem in RECIPES else stem
    pictures = [f"gallery_{name}.svg", f"keras_{name}.png" if "keras/" in path else f"{name}.png"]
    images = posixpath.relpath("docs/images", posixpath.dirname(path))
    shown = [f"![{name}]({images}/{file})\n\n" for file in pictures if (ROOT / "docs/images" / file).exists()]
    return f"# `{path}`\n\n{''.join(shown)}```python\n{code}```\n"


def _generated() -> Iterator[tuple[str, str]]:
    yield from ((page, (ROOT / path).read_text(encoding="utf-8")) for path, page in WHOLE_FILES.items())
    yield from ((page, _example(path)) for path, page in EXAMPLES.items())
    yield from ((f"reference/{face}.md", _reference(face)) for face in FACES)


def on_files(files: Files, *, config: Any) -> Files:
    for page, text in _generated():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links lead from page to page, wherever the files lie in the repository."""
    uri = page.file.src_uri
    hidden = {
        "toc": 'class="side"' in markdown
        or not re.search(r"^##|^:::", markdown, re.MULTILINE),  # no room, or nothing in it
        "navigation": uri in ("index.md", "start.md"),
    }
    page.meta["hide"] = [part for part, is_hidden in hidden.items() if is_hidden]
    page.meta["search"] = {"boost": 4.0 if uri in CONCEPTS else 0.5 if uri.startswith(("reference/", *LAST)) else 1.0}
    sources = {to: path for path, to in PAGES.items()}
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def lead(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if "://" in target or not target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        to = PAGES.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [rendered(re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", lead, part)) for part in parts[::2]]
    parts[1::2] = [re.sub(r"^```math\n(.*?)```$", _formula, part, flags=re.DOTALL) for part in parts[1::2]]
    return "".join(parts)


def _formula(block: re.Match[str]) -> str:
    return f'<div class="formula">{mathml(block[1], display=True)}</div>'
