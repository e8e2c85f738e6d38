"""The house: no circles of imports, arrows in one direction, small modules and wings, declared names."""

import re

import pytest

from tests.documents import ROOT
from tests.source import PATHS, TREES, declared, imported

MOST_LINES, MOST_MODULES = 400, 9

ARROWS = {module: {to for to, _ in imported(tree)} for module, tree in TREES.items()}


def reachable(module):
    found, waiting = set(), [module]
    while waiting:
        new = ARROWS[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def circles():
    reach = {module: reachable(module) for module in PATHS}
    groups = {module: {other for other in reach[module] if module in reach[other]} for module in PATHS}
    return {" ".join(sorted(group)) for group in groups.values() if group}


def floors(begin):
    """The line `begin a | b -> c` of CONTRIBUTING.md as `{"a": 0, "b": 0, "c": 1}`."""
    (line,) = re.findall(rf"^{re.escape(begin)}(.*->.*)$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    return {name.strip(): floor for floor, names in enumerate(line.split("->")) for name in names.split("|")}


def rooms(module):
    """`(plan, room)` for each plan that the module is on: the house's, and its shell's or the centre's."""
    _, area, wing, *_ = [*module.split("."), "", ""]
    if module.startswith("runai"):
        return [("house", "compat")]
    if area in ("torch", "keras", "jax"):
        return [("house", area), (area, wing if wing in PLANS[area] else "faces")]
    if area in PLANS["house"] or area == "__main__":
        return [("house", area.replace("__main__", "cli"))]
    return [("house", "centre"), ("centre", area)]


PLANS = {name: floors(f"{name}: ") for name in ("house", "torch", "keras", "jax", "centre")}


def wrong_arrows():
    """Imports between two rooms of a plan that do not lead to the right."""
    for module, targets in ARROWS.items():
        for to in targets - {"gradaccum"} if module != "gradaccum" else ():  # its version, its folder, its errors
            for (plan, a), (other, b) in zip(rooms(module), rooms(to), strict=False):
                if plan == other and a != b and PLANS[plan][a] >= PLANS[plan][b]:
                    yield f"{module} -> {to}"


def undeclared_names():
    for module, tree in TREES.items():
        for source, name in imported(tree):
            if name is not None and name not in declared(source):
                yield f"{module}: {source}.{name}"


FOUND = {
    "circles": circles,
    "arrows": wrong_arrows,
    "long modules": lambda: (m for m, path in PATHS.items() if len(path.read_text("utf-8").splitlines()) > MOST_LINES),
    "large wings": lambda: (
        str(folder.relative_to(ROOT))
        for folder in {path.parent for path in PATHS.values()}
        if len([p for p in folder.glob("*.py") if p.stem != "__init__"]) > MOST_MODULES
    ),
    "undeclared names": undeclared_names,
}


@pytest.mark.parametrize("rule", FOUND)
def test_the_house_has_no(rule):
    assert set(FOUND[rule]()) == set()
