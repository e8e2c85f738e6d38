"""For the site's reference: `Example:` sections are Griffe's `Examples:`, and names of types are written out."""

import re
from collections.abc import Iterator
from typing import Any

import griffe

__all__ = ["Examples", "WrittenOut"]

ALIAS = re.compile(
    r"\w*(?:Choice|Dims|Steps|Tree|Rule)|Sync|Reduction|Nonfinite|BatchNorm(?:OrExact)?|PairsOf|Word|Direction"
)
"""What the package calls its types that stand for several others."""


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


class WrittenOut(griffe.Extension):
    """`groups: GroupsChoice` is shown as `groups: int | Tensor | ...`: no page documents the name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        objects = list(_objects(pkg))
        aliases = {
            each.name: str(each.value)
            for each in objects
            if isinstance(each, griffe.Attribute) and each.value is not None and ALIAS.fullmatch(each.name)
        }
        for each in objects:
            if isinstance(each, griffe.Function):
                for parameter in each.parameters:
                    written = _expanded(str(parameter.annotation), aliases)
                    if written != str(parameter.annotation):
                        parameter.annotation = written


def _objects(module: griffe.Object) -> Iterator[griffe.Object]:
    for member in module.members.values():
        if not member.is_alias:
            yield member  # type: ignore[misc]  # no alias is left
            yield from _objects(member)  # type: ignore[arg-type]


def _expanded(annotation: str, aliases: dict[str, str]) -> str:
    """The annotation with the types' definitions in place of their names, and of the names in these."""
    for _ in range(4):
        annotation = re.sub(r"\b\w+\b", lambda name: aliases.get(name[0], name[0]), annotation)
    union = re.fullmatch(r"Union\[(.*)\]", annotation)
    return annotation if union is None else union[1]
