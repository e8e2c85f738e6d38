"""Libraries that users install beside the package, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["require"]


def require(name: str) -> Any:
    """The module of this `name`, imported now.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to install it.

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
        extra = library if library in ("torch", "keras") else "cli"
        raise ModuleNotFoundError(
            f'This needs {library}, which is not installed. Install it with: pip install "gradaccum[{extra}]"',
            name=library,
        ) from None
