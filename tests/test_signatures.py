"""Every parameter of what users call stands in its docstring."""

import ast
import re

import pytest

from tests.source import FACES, declared, definition

PUBLIC = {f"{face}.{name}": found[1] for face in FACES for name in declared(face) if (found := definition(face, name))}


def parameters(function):
    """Its parameters' names, without `self`, `*args` and what begins with an underscore."""
    of = function.args
    names = [argument.arg for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    return {name for name in names if not name.startswith("_")} - {"self", "cls"}


def callables(name, node):
    """`(name, parameters, docstring)` of a function; of a class, how it is made, and its public methods."""
    doc = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        yield name, parameters(node), doc
        return
    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
    if "__init__" in methods:
        yield name, parameters(methods["__init__"]), doc + (ast.get_docstring(methods["__init__"]) or "")
    elif node.decorator_list:  # a dataclass
        fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
        yield name, {field.id for field in fields if isinstance(field, ast.Name)}, doc


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_parameter_is_in_the_docstring(name):
    for found, names, doc in callables(name, PUBLIC[name]):
        missing = {p for p in names if not re.search(rf"`{p}\b|^ *(\w+, )*{p}(, \w+)*:", doc, re.MULTILINE)}
        assert missing == set(), found


def test_all_faces_have_public_names():
    assert {name.rpartition(".")[0] for name in PUBLIC} == set(FACES)
