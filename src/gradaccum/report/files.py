"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
from collections.abc import Iterator

ROOM = 1 << 20
"""Bytes that `check_writable` tries: more than a report takes."""


def write(path: str | os.PathLike[str], content: bytes) -> pathlib.Path:
    """Write `content` to the file at `path`, and make its folder. Returns the path.

    The new file replaces an old one when it is complete, so a full disk leaves the old one as it was.

    Raises:
        OSError: It cannot be written; names the file.
    """
    with _target(path) as target:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
            target.write_bytes(content)
        else:
            with _unfinished(target) as unfinished:
                unfinished.write_bytes(content)
                unfinished.replace(target)
    return pathlib.Path(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Test whether `write` can write to this `path`. Leaves nothing behind.

    Raises:
        OSError: The folder is read-only or can't be made, the disk is full, `path` is a folder itself, ...; names the
            file.
    """
    with _target(path) as target, contextlib.ExitStack() as undo:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():  # a device or a pipe: whoever reads it would read this
            return
        missing = itertools.takewhile(lambda folder: not folder.exists(), target.parents)
        for folder in reversed(list(missing)):
            undo.callback(_remove_empty, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _unfinished(target) as unfinished:
            unfinished.write_bytes(bytes(ROOM))


@contextlib.contextmanager
def _target(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """What a link leads to; a link to itself is an error when it is used. Errors inside name the path."""
    try:
        yield pathlib.Path(os.path.realpath(path))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(pathlib.Path(path))) from None


@contextlib.contextmanager
def _unfinished(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file beside the `target`, which is gone at the end, also where that is an error or Ctrl-C."""
    file = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _remove_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # it was never made, or somebody uses it by now
        folder.rmdir()
