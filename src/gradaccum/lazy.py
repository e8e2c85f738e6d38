"""Names of a package that are imported when they are first used: so that importing the package takes no time."""

# Nothing is imported here before it is needed: typing alone takes longer than all that `import gradaccum` does.

__all__ = ["when_used"]

TYPE_CHECKING = False  # type checkers take it for typing's
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def when_used(package: str, names: "Mapping[str, str]") -> "tuple[Callable[[str], Any], Callable[[], list[str]]]":
    """The `__getattr__` and `__dir__` of a package whose names are imported when somebody asks for them.

    Args:
        package: Its `__name__`.
        names: The module of each name; a name may be that of a module itself.

    Example:
        >>> import sys
        >>> get, names = when_used(__name__, {"dumps": "json", "lazy": "gradaccum.lazy"})
        >>> get("dumps")(1), get("lazy").__name__, {"dumps", "lazy"} <= {*names()}
        ('1', 'gradaccum.lazy', True)
    """
    import sys

    def __getattr__(name: str) -> "Any":
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        where = names[name]
        module = import_module(where)
        found = module if where.rpartition(".")[2] == name else getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return __getattr__, __dir__
