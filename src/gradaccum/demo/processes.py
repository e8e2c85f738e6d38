"""Work in fresh processes: none inherits the memory of another, and Ctrl-C ends them all. Imports no framework."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

__all__ = ["RunError", "Work", "call"]


class RunError(RuntimeError):
    """A run failed in its process; the message has that process's traceback."""


@dataclass(frozen=True)
class Work:
    """What a process does: call `function` of the module with the arguments, and `notify` as the last of them."""

    module: str
    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Done:
    result: Any


@dataclass(frozen=True)
class _Failed:
    traceback: str


def call(name: str, work: Work, notify: Callable[[Any], None], *, ranks: int = 1, of_torch: bool = True) -> Any:
    """What the work returns; it is done in a fresh process, or in one for each of the ranks, of which the first counts.

    Args:
        name: Of the work, in errors.
        work: To be done.
        notify: Called here with whatever the work gives to its own `notify`.
        ranks: Processes.
        of_torch: Whether the work is PyTorch's, whose processes start faster.

    Raises:
        RunError: It failed, or its process ended early.
    """
    context = _context(of_torch)
    here, there = context.Pipe(duplex=False)
    port = _free_port() if ranks > 1 else 0
    processes = [
        context.Process(target=_child, args=(there if rank == 0 else None, work, rank, ranks, port), daemon=True)
        for rank in range(ranks)
    ]
    try:
        _start(processes, context)
        there.close()
        while True:
            message = here.recv()
            if isinstance(message, _Done):
                return message.result
            if isinstance(message, _Failed):
                raise RunError(f"{name} failed:\n{message.traceback}")
            notify(message)
    except EOFError:
        processes[0].join()
        raise RunError(f"{name} ended early, with exit code {processes[0].exitcode}.") from None
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()
        here.close()


_Context = multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext
"""How processes are started."""


def _start(processes: Sequence[multiprocessing.process.BaseProcess], context: _Context) -> None:
    """Start them deaf to Ctrl-C: a terminal sends it to all processes, and this one ends the others."""
    if context.get_start_method() == "forkserver":
        with _interrupts_blocked():
            forkserver.ensure_running()
        first = context.Process(target=_nothing, daemon=True)  # the server imports PyTorch first, for seconds
        first.start()
        first.join()
    with _interrupts_blocked():
        for process in processes:
            process.start()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C waits meanwhile. What is started meanwhile never gets it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """The work of a process that is started to see others started."""


def _context(of_torch: bool) -> _Context:
    """Where fresh processes come from: a fork of this one would inherit its memory.

    PyTorch's, on Linux, are forks of one that has imported it and done nothing else: the import takes longest.
    """
    if not of_torch or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gradaccum.demo.torch_experiment"])
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(pipe: multiprocessing.connection.Connection | None, work: Work, rank: int, ranks: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    # What torchrun tells its processes; rank 0 reports for all.
    where = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in where.items()})

    def send(message: object) -> None:
        try:
            if pipe is not None:
                pipe.send(message)
        except BrokenPipeError:  # whom it is for was killed
            sys.exit(1)

    try:
        function = getattr(importlib.import_module(work.module), work.function)
        send(_Done(function(*work.arguments, send)))
    except Exception:
        send(_Failed(traceback.format_exc()))
