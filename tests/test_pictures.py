"""The pictures in docs/images: of the data that they claim, for light and dark screens, and small."""

import re
from xml.etree import ElementTree

import pytest

from scripts import gallery_pictures, layers_picture, pages, pictures

DRAWN = ("window", "ways", "exactness", "scaling", "loss", "memory", "layers")
GALLERY = [f"gallery_{name}" for name in gallery_pictures.NAMES]
SCRIPTED = {name: getattr(pictures, name) for name in ("window", "ways", "exactness", "scaling")}
SCRIPTED |= {f"gallery_{name}": getattr(gallery_pictures, name) for name in ("elastic", "large_models")}
SCRIPTED["layers"] = layers_picture.picture
"""Those that draw what doesn't change from run to run."""


@pytest.mark.parametrize("name", [*DRAWN, *GALLERY])
def test_a_picture_is_small_says_what_it_shows_fetches_nothing_and_is_what_its_script_draws(name):
    """After docs/peers.md has changed: python -m scripts.pictures exactness"""
    text = (pictures.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert len(text) < 20_000
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    root = ElementTree.fromstring(text)
    assert len(root[0].text or "") > 40
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    places = re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)"', text)
    assert all(0 < float(x) < width and 0 < float(y) < height for x, y in places)
    if name in SCRIPTED:
        assert text == SCRIPTED[name]()


def test_each_entry_of_the_gallery_has_a_picture():
    page = (pictures.ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    entries = page.split("\n## ")[1:]
    assert [entry.splitlines()[0] for entry in entries if "](images/" not in entry] == []
    shown = {path: pages._example(path) for path in pages.EXAMPLES}
    assert [path for path, text in shown.items() if not re.search(r"^!\[", text, re.MULTILINE)] == []
    assert len(re.findall(r"\d\.\de[+-]\d\d</text>", gallery_pictures.bars("Errors", {"a": 1e-16, "b": 0.5}))) == 2


def test_the_heat_map_has_every_cell_of_the_table_in_its_colour():
    page = (pictures.ROOT / "docs/peers.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("| **"))
    drawn = pictures.exactness()
    assert drawn.count("var(--good)") == len(re.findall(r"\| exact ", table))
    assert drawn.count("var(--bad)") == len(re.findall(r"\| (?:off by|NaN) ", table))
    assert drawn.count("var(--none)") == len(re.findall(r"\| (?:refused|not possible)", table))


def test_curves_keep_to_their_axes():
    drawn = pictures.chart("A", "update", [("one", [1, 2], [0.0, 4.0]), ("two", [1, 2], [-1.0, 2.0])], "%")
    points = [tuple(map(float, p.split(","))) for line in re.findall(r'points="([^"]*)"', drawn) for p in line.split()]
    assert all(0 <= x <= 640 and 0 <= y <= 320 for x, y in points)
    assert "one ends at 4; two ends at 2" in drawn
