"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
from collections.abc import Iterator

__all__ = ["check_writable", "write"]

ROOM = 1 << 20
"""Bytes that `check_writable` tries: more than a report takes."""


def write(path: str | os.PathLike[str], content: bytes) -> pathlib.Path:
    """Write `content` to the file at `path`, and make its folder. Returns the path.

    The new file replaces an old one when it is complete, so a full disk leaves the old one as it was.

    Raises:
        OSError: It cannot be written; names the file.
    """
    with _written(path, content) as (target, unfinished):
        if unfinished is None:
            target.write_bytes(content)
        else:
            unfinished.replace(target)
    return pathlib.Path(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Do all that `write` does to this `path`, but for replacing it. Leaves nothing behind.

    Raises:
        OSError: The folder is read-only or can't be made, the disk is full, `path` is a folder itself, ...; names the
            file.
    """
    target = pathlib.Path(os.path.realpath(path))
    missing = itertools.takewhile(lambda folder: not os.path.exists(folder), target.parents)
    with contextlib.ExitStack() as undo:
        for folder in reversed(list(missing)):
            undo.callback(_remove_empty, folder)
        with _written(path, bytes(ROOM)):
            if target.is_dir():
                raise _named(IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)), path)


@contextlib.contextmanager
def _written(path: str | os.PathLike[str], content: bytes) -> Iterator[tuple[pathlib.Path, pathlib.Path | None]]:
    """What a link leads to, and a file beside it with the content, which is gone at the end; errors name the path.

    A device or a pipe cannot be replaced, so that there is no such file.
    """
    try:
        target = pathlib.Path(os.path.realpath(path))  # a link to itself is an error when it is used
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
        if target.exists() and not (target.is_file() or target.is_dir()):
            yield target, None
            return
        try:
            unfinished.write_bytes(content)
            yield target, unfinished
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise _named(error, path) from None


def _named(error: OSError, path: str | os.PathLike[str]) -> OSError:
    return OSError(error.errno, error.strerror, str(pathlib.Path(path)))


def _remove_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # it was never made, or somebody uses it by now
        folder.rmdir()
