"""The sockets over which ranks send each other numbers: no thread is woken to send or receive them, as gloo's are.

Each rank listens while all of them meet, and leaves word in the process group's store of where, with a secret that both
ends of a connection show each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import default_store, host_of

WIDTH = 25
"""Numbers in a message. All messages have the same size, so that even mismatched ones meet, and are told apart."""

_NUMBERS = struct.Struct(f"{WIDTH}d")
_OBJECT = -1.0
"""First number of a message behind which a pickled object comes, of as many bytes as the second one says."""

_SECRET, _CALL = 16, struct.Struct("!16sI")
_REACHABLE = 10.0
"""Seconds in which an address answers, or another one is tried."""


class Line:
    """A socket to each other rank; what arrives is in the order in which it was sent.

    Args:
        sockets: By rank; this one's is missing.
        timeout: How long to wait for another rank, at any time that this is called.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout: Callable[[], timedelta | None]) -> None:
        self._sockets, self.timeout, self._seconds = dict(sockets), timeout, -1.0
        self._arrived: dict[int, tuple[deque[list[float]], deque[Any]]] = {n: (deque(), deque()) for n in sockets}
        self.posted: list[list[float]] = []
        """What this rank has sent in exchanges whose answers have not been read."""
        for one in self._sockets.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        weakref.finalize(self, _close, [*self._sockets.values()]).atexit = False

    def send(self, numbers: Sequence[float]) -> None:
        """To each other rank. One that is gone is noticed when its own message is read: it may have left one."""
        self._send(_NUMBERS.pack(*numbers))

    def send_object(self, sent: Any) -> None:
        pickled = pickle.dumps(sent)
        self._send(_NUMBERS.pack(_OBJECT, len(pickled), *[0.0] * (WIDTH - 2)) + pickled)

    def _send(self, message: bytes) -> None:
        self._keep_time()
        for one in self._sockets.values():
            with contextlib.suppress(OSError):
                one.sendall(message)

    def receive(self, rank: int) -> list[float]:
        """Wait for the next numbers of this rank; an OSError if it is gone."""
        numbers, _ = self._arrived[rank]
        while not numbers:
            self._take(rank)
        return numbers.popleft()

    def receive_object(self, rank: int) -> Any:
        """Wait for the next object of this rank."""
        _, objects = self._arrived[rank]
        while not objects:
            self._take(rank)
        return objects.popleft()

    def _take(self, rank: int) -> None:
        self._keep_time()
        one, (numbers, objects) = self._sockets[rank], self._arrived[rank]
        found = [*_NUMBERS.unpack(_read(one, _NUMBERS.size))]
        if found[0] == _OBJECT:
            objects.append(pickle.loads(_read(one, int(found[1]))))
        else:
            numbers.append(found)

    def _keep_time(self) -> None:
        seconds = _seconds(self.timeout())
        if seconds != self._seconds:
            self._seconds = seconds
            for one in self._sockets.values():
                one.settimeout(seconds)


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _seconds(timeout: timedelta | None) -> float:
    return 1800.0 if timeout is None else timeout.total_seconds()


def _read(one: socket.socket, size: int) -> bytes:
    found = one.recv(size)
    while len(found) < size:
        more = one.recv(size - len(found))
        if not (found and more):
            raise ConnectionError("it has closed its connection")
        found += more
    return found


# How ranks meet.


def meet(members: Sequence[int], timeout: Callable[[], timedelta | None]) -> Line:
    """Wait until every rank is about to make a channel, or one says that it won't: nobody waits for that one then."""
    store, place, rank = default_store(), _place(members), members.index(dist.get_rank())
    with _listening(len(members)) as listener:
        secret = secrets.token_bytes(2 * _SECRET)
        word = {"port": listener.getsockname()[1], "secret": secret.hex(), "addresses": [*_addresses()]}
        store.set(f"{place}/{rank}", json.dumps(word))
        if store.add(f"{place}/arrived", 1) == len(members):
            store.set(f"{place}/outcome", "met")
        store.wait([f"{place}/outcome"], timedelta(seconds=_seconds(timeout())))
        outcome, _, absent = store.get(f"{place}/outcome").decode().partition(" ")
        if outcome == "absent":
            raise WindowError(
                f"Rank {absent} raised an error while it built its Optimizer or TrainStep. Nothing was built on rank "
                f"{dist.get_rank()} either. Look at rank {absent}'s own error."
            )
        seconds, sockets = _seconds(timeout()), dict[int, socket.socket]()
        for other in range(rank):  # those before this one; those behind it call
            sockets[other] = _call(json.loads(store.get(f"{place}/{other}")), rank, seconds)
        listener.settimeout(seconds)
        while len(sockets) < len(members) - 1:
            caller, one = _answer(listener, secret, seconds)
            if caller is not None:
                sockets[caller] = one
    return Line(sockets, timeout)


def stay_away(members: Sequence[int]) -> None:
    """This rank won't make the channel that the other ones are about to make, or wait for. Waits for nobody."""
    if len(members) > 1:
        with contextlib.suppress(RuntimeError):
            default_store().set(f"{_place(members)}/outcome", f"absent {dist.get_rank()}")


def _place(members: Sequence[int]) -> str:
    """Where these ranks leave word about the channel that each of them tries to make for the n-th time."""
    meeting = f"gradaccum/{'-'.join(map(str, members))}/"
    return f"{meeting}{default_store().add(f'{meeting}{dist.get_rank()}', 1)}"


def _listening(callers: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=callers)
    return socket.create_server(("", 0), backlog=callers)


def _addresses() -> Iterator[str]:
    """Where other ranks may reach this one, the likeliest first."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with contextlib.suppress(OSError, ImportError):
            yield _address_of(name)
    for host in filter(None, [host_of(default_store()), socket.gethostname()]):
        with contextlib.suppress(OSError):
            for family, kind, _, _, there in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as one:
                    one.connect(there)  # sends nothing, and finds the way
                    yield one.getsockname()[0]
    yield "127.0.0.1"


def _address_of(interface: str) -> str:
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = fcntl.ioctl(one.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
    return socket.inet_ntoa(request[20:24])


def _call(word: Mapping[str, Any], rank: int, seconds: float) -> socket.socket:
    """A connection to the rank that left this word."""
    secret, tried = bytes.fromhex(word["secret"]), dict[str, str]()
    for address in dict.fromkeys([*word["addresses"], host_of(default_store())]):
        try:
            one = socket.create_connection((address, word["port"]), min(seconds, _REACHABLE))
            one.settimeout(seconds)
            one.sendall(_CALL.pack(secret[:_SECRET], rank))
            if _read(one, _SECRET) == secret[_SECRET:]:
                return one
            one.close()
        except OSError as error:
            tried[str(address)] = str(error)
    raise RuntimeError(
        f"Rank {rank} could not connect to another rank at port {word['port']} of {tried}. GLOO_SOCKET_IFNAME names "
        "the network interface to use."
    )


def _answer(listener: socket.socket, secret: bytes, seconds: float) -> tuple[int | None, socket.socket]:
    """The rank that calls, and the connection; None: it is somebody else."""
    one, _ = listener.accept()
    try:
        one.settimeout(min(seconds, _REACHABLE))
        shown, rank = _CALL.unpack(_read(one, _CALL.size))
        if secrets.compare_digest(shown, secret[:_SECRET]):
            one.sendall(secret[_SECRET:])
            return rank, one
    except OSError:
        pass
    one.close()
    return None, one
