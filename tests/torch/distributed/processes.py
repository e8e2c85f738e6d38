"""Real processes that form a process group over gloo, started once for many tests, which run on each rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NamedTuple

import pytest

from tests.documents import PYTORCH, leave_pytest

LIMIT = 150.0
"""Seconds after which a case counts as hung, on a machine that is busy."""

TIMEOUT = 600.0
"""Seconds after which a collective gives up. No case is over within the limit that waits for that."""

# Ranks are forks of one process that has imported what takes long to import, and has done nothing with it.
_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", *PYTORCH.split()])


def start_server() -> None:
    """Start the process that ranks are forks of, on Linux as a fork of this one: its imports are there already.

    To be called before the first test.
    """
    if _START == "forkserver" and sys.platform == "linux":
        resource_tracker.ensure_running()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(util, "spawnv_passfds", _forked)
            forkserver.ensure_running()


def _forked(path: Any, arguments: list[str], passed: list[int]) -> int:
    """A fork of this process that runs what a new interpreter would be told to."""
    server = os.fork()
    if server:
        return server
    try:
        pipes = {os.fstat(end).st_ino for end in passed}
        for end in map(int, os.listdir("/proc/self/fd")):  # the server ends when nobody holds the other end
            if end not in passed and _inode(end) in pipes:
                os.close(end)
        leave_pytest()
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:  # it was that of the listing
        return None


def fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a process that has imported PyTorch, and done nothing with it, on a function."""
    process = multiprocessing.get_context(_START).Process(target=function, args=arguments, daemon=True)  # type: ignore[attr-defined]
    process.start()
    return process


def on_ranks(processes: str = "ranks") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs on each rank of this fixture's at the same time, and asserts there."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            arguments.pop(processes).run(_run_body, body.__module__, body.__name__, **arguments)

        names = [processes, *list(inspect.signature(body).parameters)[1:]]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(rank: int, module: str, name: str, **arguments: Any) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, **arguments)


class Processes:
    """Ranks of one process group, which run functions `case(rank, *arguments)` at the same time.

    Args:
        ranks: How many.
        timeout: Seconds after which a collective gives up.
    """

    def __init__(self, ranks: int = 2, timeout: float = TIMEOUT) -> None:
        self._ranks, self._timeout = ranks, timeout
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context(_START)
        port = new_port()
        self._pipes, self._processes = [], []
        for rank in range(self._ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self._ranks, port, self._timeout), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def regroup(self, timeout: float = TIMEOUT) -> None:
        """A new process group, after what may have left the old one in pieces; new processes only where one is gone."""
        self._timeout = timeout
        if not self.alive or any(
            isinstance(result, Raised) for result in self.try_run(_join_group, self._ranks, new_port(), timeout)
        ):
            self.kill()
            self._start()

    def whole(self) -> Processes:
        """These; new ones where the test before left them in pieces."""
        if not self.alive:
            self.regroup(self._timeout)
        return self

    def run(self, case: Callable[..., Any], *arguments: Any, limit: float = LIMIT, **keywords: Any) -> list[Any]:
        """What `case(rank, *arguments)` returns on each rank; an error on any rank is an AssertionError here."""
        __tracebackhide__ = True
        results = self.try_run(case, *arguments, limit=limit, **keywords)
        if any(isinstance(result, Raised) for result in results):
            self.kill()  # what is left of the group would be the next test's error, too
        for rank, result in enumerate(results):
            assert not isinstance(result, Raised), f"rank {rank}:\n{result.trace}"
        return results

    def try_run(self, case: Callable[..., Any], *arguments: Any, limit: float = LIMIT, **keywords: Any) -> list[Any]:
        """As `run`, with a `Raised` in place of the result where a rank raised."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone, as the answer says
                pipe.send((case, arguments, keywords))
        end = time.monotonic() + limit
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self.kill()
                raise AssertionError(f"rank {rank} hung for {limit:g} s in {case.__name__}")
            try:
                results.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(LIMIT)  # one that is still dying would count as alive
                results.append(Raised("the process is gone", "", ""))
        if any(isinstance(result, Raised) and "fully_shard needs torch" in result.trace for result in results):
            pytest.skip("FSDP2 is refused with this torch")
        return results

    @property
    def alive(self) -> bool:
        """Whether all processes are there; one that is dying counts as gone, as its pipe is closed before it is."""
        gone = any(pipe.poll() for pipe in self._pipes)
        return not gone and all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class Raised(NamedTuple):
    """An error on one rank."""

    message: str
    kind: str
    trace: str


_stores: list[Any] = []


def new_port() -> int:
    """Where ranks meet: a store in this process, at a port that nobody else can have taken by then. Old ones stay."""
    import torch.distributed as dist

    _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _stores[-1].port


def wait_no_longer_than(seconds: float) -> None:
    """From here on this rank's process groups give up so soon."""
    import torch.distributed as dist

    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _serve(pipe: Any, rank: int, ranks: int, port: int, timeout: float) -> None:
    import torch

    gc.freeze()  # what the imports have left is not looked at, or copied, by each rank's collections
    torch.set_num_threads(1)
    _join_group(rank, ranks, port, timeout)
    while True:
        case, arguments, keywords = pipe.recv()
        try:
            result = case(rank, *arguments, **keywords)
            pickle.dumps(result)
        except BaseException as error:  # reported, whatever it is
            result = Raised(str(error), type(error).__name__, traceback.format_exc())
        pipe.send(result)


def _join_group(rank: int, ranks: int, port: int, timeout: float) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    wait_no_longer_than(timeout)
