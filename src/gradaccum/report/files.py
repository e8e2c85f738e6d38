"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import pathlib
import tempfile

__all__ = ["check_writable", "write"]

ROOM = 1 << 20
"""Bytes that `check_writable` tries: more than a report takes."""


def write(path: str | os.PathLike[str], content: bytes) -> pathlib.Path:
    """Write `content` to the file at `path`, and make its folder. Returns the path.

    The new file replaces an old one when it is complete, so a full disk leaves the old one as it was.

    Raises:
        OSError: It cannot be written; names the file.
    """
    path = pathlib.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
            path.write_bytes(content)
            return path
        target = path.resolve()  # of a link
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


def check_writable(path: str | os.PathLike[str]) -> None:
    """Try to write beside this `path`, or where its folder would be made. Leaves nothing behind.

    Raises:
        OSError: The folder is read-only, the disk is full, `path` is a folder itself, ...; names the file.
    """
    path = pathlib.Path(path).absolute()
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        folder = next(parent for parent in path.parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
