"""The public names and their signatures, as text: `python -m scripts.api` writes them to docs/api.txt."""

from __future__ import annotations

import ast
import copy
import pathlib
from collections.abc import Iterator

from tests.source import FACES, declared, definition

SNAPSHOT = pathlib.Path(__file__).parent.parent / "docs/api.txt"


def _signature(function: ast.FunctionDef) -> str:
    """Names and defaults, without `self` and annotations."""
    arguments = copy.deepcopy(function.args)
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(arguments).removeprefix('self').removeprefix(', ')})"


def _members(name: str, module: str, node: ast.ClassDef) -> Iterator[str]:
    """How a class is made, and its public methods, properties and fields, those of its bases among them."""
    for base in node.bases:
        found = definition(module, ast.unparse(base))
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield from (line for line in _members(name, *found) if not line.startswith(f"{name}("))
    methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
    yield from (name + _signature(method) for method in methods if method.name == "__init__")
    for method in methods:
        decorators = " ".join(ast.unparse(decorator) for decorator in method.decorator_list)
        if not method.name.startswith("_") and ".setter" not in decorators and ".deleter" not in decorators:
            yield f"{name}.{method.name}{'' if 'property' in decorators else _signature(method)}"
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_":
            yield f"{name}.{field.target.id}"


def snapshot() -> str:
    """A line for each public name, sorted."""
    lines = set[str]()
    for face in FACES:
        for declared_name in declared(face):
            name, found = f"{face}.{declared_name}", definition(face, declared_name)
            if found is not None and isinstance(found[1], ast.ClassDef):
                lines.update([*_members(name, *found)] or [name])
            else:
                lines.add(name + (_signature(found[1]) if found is not None else ""))
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
