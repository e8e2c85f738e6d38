"""Libraries that users install beside the package: imported when needed, and what is used of them privately."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

# The extra that brings a library; for others it is "cli".
_EXTRAS = {
    name: name for name in ("torch", "keras", "jax", "transformers", "lightning", "accelerate", "sentence_transformers")
}
_EXTRAS["optax"] = "jax"


def how_to_install(extra: str) -> str:
    """The command, also from a checkout that no index has.

    Example:
        >>> how_to_install("cli")
        'Install it with: pip install "gradaccum[cli]", or in a checkout: pip install ".[cli]"'
    """
    return f'Install it with: pip install "gradaccum[{extra}]", or in a checkout: pip install ".[{extra}]"'


def require(name: str) -> Any:
    """The module of this `name`, imported now.

    Example:
        >>> require("json").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        library = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"This needs {library}, which is not installed. {how_to_install(_EXTRAS.get(library, 'cli'))}",
            name=library,
        ) from None


class PrivateName(NamedTuple):
    """A name that is used beyond a library's public API.

    Example:
        >>> PrivateName("string", "_join", "joins words").missing_from("a b", "Python 4")
        'Python 4 has no _join in its string: joins words.'
    """

    owner: str
    """A module, or the kind of object that has the attribute: `"ddp"`, `"model"`, `"losses"` ..."""
    name: str
    """The function or attribute, or a path to it."""
    purpose: str
    """What it is used for here."""
    otherwise: str = ""
    """How it goes on without it; empty where it cannot."""

    def missing_from(self, owner: object, library: str) -> str | None:
        """A sentence where `owner` lacks the name, else None; `library` is its name and version."""
        for name in self.name.split("."):
            if not hasattr(owner, name):
                without = f" Without it: {self.otherwise}." if self.otherwise else ""
                return f"{library} has no {self.name} in its {self.owner}: {self.purpose}.{without}"
            owner = getattr(owner, name)
        return None
