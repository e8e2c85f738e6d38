"""The public names and signatures are those of docs/api.txt, and each that is new has its line in the changelog."""

import re

from scripts.api import SNAPSHOT, snapshot
from tests.documents import ROOT
from tests.source import FACES

RELEASED = ROOT / "tests/data/api_0_2.txt"


def by_name(text):
    """The lines of each class or function, by the name that users import."""
    found = {}
    for line in text.splitlines():
        face = max((face for face in FACES if line.startswith(f"{face}.")), key=len)
        found.setdefault(re.match(r"\w*", line[len(face) + 1 :])[0], []).append(line)
    return found


def test_public_names_and_signatures_are_those_of_the_snapshot():
    """Otherwise: is it meant? Then `python -m scripts.api`, and a line in CHANGELOG.md."""
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8")


def test_what_has_changed_since_the_last_release_is_in_the_changelog():
    before, now = by_name(RELEASED.read_text(encoding="utf-8")), by_name(snapshot())
    unreleased = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    assert changed - set(re.findall(r"\w+", unreleased)) == set()
