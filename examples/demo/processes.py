"""Runs work in a fresh process, which inherits no memory of this one. Imports no framework."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

__all__ = ["RunError", "call"]


class RunError(RuntimeError):
    """A run failed in its process; the message has that process's traceback."""


@dataclass(frozen=True)
class _Done:
    result: Any


@dataclass(frozen=True)
class _Failed:
    traceback: str


def call(name: str, module: str, function: str, arguments: tuple[Any, ...], notify: Callable[[Any], None]) -> Any:
    """Call `module.function(*arguments, notify)` in a fresh process and return its result.

    Args:
        name: Of the work, in errors.
        module, function, arguments: What to call.
        notify: Called here with whatever the function gives to its own `notify`.

    Raises:
        RunError: It failed, or its process ended early.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, module, function, arguments), daemon=True)
    try:
        with _interrupts_blocked():
            process.start()
        there.close()
        while True:
            message = here.recv()
            if isinstance(message, _Done):
                return message.result
            if isinstance(message, _Failed):
                raise RunError(f"{name} failed:\n{message.traceback}")
            notify(message)
    except EOFError:
        process.join()
        raise RunError(f"{name} ended early, with exit code {process.exitcode}.") from None
    finally:
        if process.pid is not None:
            process.terminate()
            process.join()
        here.close()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process started meanwhile never gets Ctrl-C, which a terminal sends to all: this one ends it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(pipe: multiprocessing.connection.Connection, module: str, function: str, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked

    def send(message: object) -> None:
        try:
            pipe.send(message)
        except BrokenPipeError:  # the demo itself was killed
            sys.exit(1)

    try:
        send(_Done(getattr(importlib.import_module(module), function)(*arguments, send)))
    except Exception:
        send(_Failed(traceback.format_exc()))
