"""Loads the function that a user names on the command line as `path/to/file.py:make`."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import gradaccum

__all__ = ["UserCodeError", "one_line", "subject", "users_frames"]


class UserCodeError(ValueError):
    """The user's file or function can't be used. The message is one line."""


def subject(target: str) -> tuple[Any, Any, dict[str, Any]]:
    """What `make()` in the user's file returns: `(model, batch, keywords)`.

    `make` returns `(model, batch, loss_fn)`, or a dict of keywords such as `{"compute_loss": ..., "weight": ...}` in
    the third place.
    """
    function, (path, _, name) = _loaded(target), target.rpartition(":")
    with _errors_in(f"{name}() in {path}"):
        made = function()
    if not isinstance(made, tuple) or len(made) != 3:
        received = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise UserCodeError(f"{target} must return (model, batch, loss_fn). Received: {received}.")
    model, batch, loss = made
    return model, batch, dict(loss) if isinstance(loss, Mapping) else {"loss_fn": loss}


def _loaded(target: str) -> Any:
    """The function named by `path/to/file.py:make`."""
    path_text, colon, name = target.rpartition(":")
    if not colon or not path_text or not name.isidentifier():
        raise UserCodeError(f"Name the function as path/to/file.py:make. Received: {target!r}.")
    path = pathlib.Path(path_text)
    if not path.is_file():
        raise UserCodeError(f"{path_text}: no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{path_text} is not a Python file. Name the function as path/to/file.py:make.")
    module = importlib.util.module_from_spec(spec)
    # As `python path/to/file.py` has it: its neighbours can be imported, and it can find itself.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    with _errors_in(path_text):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(
            n for n, o in vars(module).items() if callable(o) and getattr(o, "__module__", "") == path.stem
        )
        there = f" It has {', '.join(functions)}." if functions else ""
        raise UserCodeError(f"{path_text} has no function {name!r}.{there}")
    return function


@contextlib.contextmanager
def _errors_in(what: str) -> Iterator[None]:
    """Whatever the user's code raises becomes one line that says where."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserCodeError(f"{what} raised {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An exception in one line: its type, its first line, and the last place outside of libraries where it was.

    Example:
        >>> one_line(ValueError("Out of range.\\nMore about it."))
        'ValueError: Out of range.'
    """
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    text = (str(error).strip().splitlines() or [""])[0]
    frames = users_frames(error)
    where = f" ({pathlib.Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where it passed, outside of libraries and of this package."""
    package, found = pathlib.Path(gradaccum.__file__).parent, list[traceback.FrameSummary]()
    for frame in traceback.extract_tb(error.__traceback__):
        path = pathlib.Path(frame.filename)
        library = {"site-packages", "dist-packages"} & set(path.parts) or package in path.parents
        if frame.filename[0] != "<" and not library:
            found.append(frame)
    return found
