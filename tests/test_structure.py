"""The package: no cycles, imports that lead downward only, modules, folders and functions of a size, declared names."""

import ast

import pytest

from tests.documents import ROOT
from tests.source import PATHS, TREES, declared, imported

MOST_LINES, MOST_MODULES, MOST_BRANCHES = 700, 12, 15

BRANCHES = ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.BoolOp, ast.Match
INNER = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef

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


LAYERS = {
    name: layer
    for layer, names in enumerate(
        (("integrations", "compat", "cli"), ("torch", "keras", "jax"), ("on_torch", "on_jax"), ("core",))
    )
    for name in names
}


def layer(module):
    """Where a module stands: its subpackage if that is a layer of its own, else the core."""
    _, area, *_ = [*module.split("."), ""]
    area = "compat" if module.startswith("runai") else area.replace("__main__", "cli")
    return area if area in LAYERS else "core"


def upward_imports():
    """Imports that lead to a layer above, or to another one beside: the shells never see each other."""
    for module, targets in ARROWS.items():
        for to in targets - {"gradaccum"} if module != "gradaccum" else ():  # its version, its folder, its errors
            a, b = layer(module), layer(to)
            if a != b and LAYERS[a] >= LAYERS[b]:
                yield f"{module} -> {to}"


def undeclared_names():
    for module, tree in TREES.items():
        for source, name in imported(tree):
            if name is not None and name not in declared(source):
                yield f"{module}: {source}.{name}"


def branches(node):
    """How often a function branches by itself, without the functions inside of it."""
    children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, INNER)]
    return sum(isinstance(child, BRANCHES) + branches(child) for child in children)


def branching_functions():
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and branches(node) > MOST_BRANCHES:
                yield f"{module}.{node.name}"


FOUND = {
    "import cycles": circles,
    "upward imports": upward_imports,
    "long modules": lambda: (m for m, path in PATHS.items() if len(path.read_text("utf-8").splitlines()) > MOST_LINES),
    "crowded folders": lambda: (
        str(folder.relative_to(ROOT))
        for folder in {path.parent for path in PATHS.values()}
        if len([p for p in folder.glob("*.py") if p.stem != "__init__"]) > MOST_MODULES
    ),
    "branching functions": branching_functions,
    "undeclared names": undeclared_names,
}


@pytest.mark.parametrize("rule", FOUND)
def test_the_package_has_no(rule):
    assert set(FOUND[rule]()) == set()
