"""The package's source as syntax trees: what imports what, without importing any of it."""

import ast

from tests.documents import ROOT

FOLDERS = [ROOT / "src/gradaccum", ROOT / "compat/runai/src/runai"]
PATHS = {
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in sorted(folder.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in PATHS.items()}

FACES = [
    "gradaccum.integrations.transformers", "gradaccum.integrations.sentence_transformers",
    "gradaccum.integrations.lightning", "gradaccum.integrations.accelerate",
    "gradaccum", "gradaccum.report", "gradaccum.torch", "gradaccum.torch.losses",
    "gradaccum.torch.packing", "gradaccum.torch.optim",
    "gradaccum.keras", "gradaccum.keras.callbacks", "gradaccum.keras.optimizers", "gradaccum.jax",
    "gradaccum.jax.losses", "gradaccum.keras.losses",
    "runai.ga.torch.optim", "runai.ga.keras.optimizers",
]  # fmt: skip
"""Where users import from."""


def imported(tree):
    """`(module, name)` for every import of ours, in functions and under TYPE_CHECKING too; no name for a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name in PATHS)
        elif isinstance(node, ast.ImportFrom) and node.module in PATHS:
            wholes = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from ((whole, None) if whole in PATHS else (node.module, name) for name, whole in wholes.items())


def declared(module):
    """The names that others may import: those of `__all__`, else what the module defines without an underscore."""
    found = set()
    for node in TREES[module].body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {
            name.id for target in targets for name in ast.walk(target or ast.Pass()) if isinstance(name, ast.Name)
        }
    return {name for name in found if not name.startswith("_")}


def definition(module, name):
    """The class or function of this name, wherever the module imports it from, and where; None for other names."""
    for node in TREES[module].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Name):
            return definition(module, node.value.id)
    for source, imported_name in imported(TREES[module]):
        if imported_name == name:
            return definition(source, name)
        if imported_name is None and source.rpartition(".")[2] == name and source != f"{module}.{name}":
            return definition(source, name)  # a module, and what it is named after
    return None
