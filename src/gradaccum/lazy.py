"""Names of a package that are imported when they are first used: so that importing the package takes no time."""

# Nothing is imported here before it is needed: typing alone takes longer than all that `import gradaccum` does.

__all__ = ["listed", "when_used"]

TYPE_CHECKING = False  # type checkers take it for typing's
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def when_used(
    package: str, names: "Mapping[str, str]", elsewhere: "Mapping[str, str] | None" = None
) -> "tuple[Callable[[str], Any], Callable[[], list[str]]]":
    """The `__getattr__` and `__dir__` of a package whose names are imported when somebody asks for them.

    Example:
        >>> import sys
        >>> get, names = when_used(__name__, {"dumps": "json", "lazy": "gradaccum.lazy"}, {"loads": "It is in json."})
        >>> get("dumps")(1), get("lazy").__name__
        ('1', 'gradaccum.lazy')
        >>> get("loads")
        Traceback (most recent call last):
            ...
        AttributeError: module 'gradaccum.lazy' has no attribute 'loads'. It is in json.
    """
    import sys

    def __getattr__(name: str) -> "Any":
        if name not in names:
            where = (elsewhere or {}).get(name)
            message = f"module {package!r} has no attribute {name!r}" + (f". {where}" if where else "")
            # With `name` and `obj`, Python adds "Did you mean".
            raise AttributeError(message, name=name, obj=sys.modules[package])
        from importlib import import_module

        where = names[name]
        module = import_module(where)
        found = module if where.rpartition(".")[2] == name else getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    return __getattr__, listed(package, names, elsewhere)


def listed(package: str, *names: "Mapping[str, str] | None") -> "Callable[[], list[str]]":
    """The `__dir__` of a module that shows its public names only: `__all__`, and those of `names` that are there.

    Example:
        >>> [name for name in listed(__name__)() if not name.startswith("_")]
        ['listed', 'when_used']
    """
    import sys

    def __dir__() -> list[str]:
        held = vars(sys.modules[package])
        known = {name for each in names for name in each or ()}
        return sorted({*held.get("__all__", ()), *(n for n in held if n.startswith("__") or n in known)})

    return __dir__
