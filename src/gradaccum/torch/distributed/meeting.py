"""Connects ranks with each other, by sockets: all of them meet through the process group's store.

Each rank listens meanwhile, and leaves word in the store of where, with a key that both ends of a connection show each
other, as `multiprocessing.connection` does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import torch.distributed as dist

from gradaccum.errors import WindowError
from gradaccum.on_torch.private import default_store, host_of

_REACHABLE = 10.0
"""Seconds in which an address answers, or another one is tried; and in which a caller shows that it has the key."""
_STRANGER = AssertionError, AuthenticationError, EOFError, OSError
"""What a connection to somebody else comes to; the first in Python 3.11 and before."""


def meet(members: Sequence[int], seconds: float) -> dict[int, socket.socket]:
    """Wait until every rank is about to make a channel, or one says that it won't: nobody waits for that one then.

    Returns connections by rank; this one's is missing.
    """
    store, place, rank = default_store(), _place(members), members.index(dist.get_rank())
    key, connections = secrets.token_bytes(32), dict[int, socket.socket]()
    with _listener(len(members)) as listener:
        store.set(f"{place}/{rank}", json.dumps([[*_addresses(listener)], listener.getsockname()[1], key.hex()]))
        if store.add(f"{place}/arrived", 1) == len(members):
            store.set(f"{place}/outcome", "met")
        store.wait([f"{place}/outcome"], timedelta(seconds=seconds))
        outcome, _, absent = store.get(f"{place}/outcome").decode().partition(" ")
        if outcome == "absent":
            raise WindowError(
                f"Rank {absent} raised an error while it built its Optimizer or TrainStep. Nothing was built on rank "
                f"{dist.get_rank()} either. Look at rank {absent}'s own error."
            )
        for other in range(rank):  # those before this one; those behind it call
            addresses, port, theirs = json.loads(store.get(f"{place}/{other}"))
            connections[other] = _call(addresses, port, bytes.fromhex(theirs), seconds, rank)
        listener.settimeout(seconds)
        while len(connections) < len(members) - 1:
            one, _ = listener.accept()
            with contextlib.suppress(*_STRANGER):
                caller = _introduced(one, key, min(seconds, _REACHABLE))  # one with the key: the others wait for it
                connections[caller] = one
    return connections


def stay_away(members: Sequence[int]) -> None:
    """This rank won't make the channel that the other ones are about to make, or wait for. Waits for nobody."""
    if len(members) > 1:
        with contextlib.suppress(RuntimeError):
            default_store().set(f"{_place(members)}/outcome", f"absent {dist.get_rank()}")


def _place(members: Sequence[int]) -> str:
    """Where these ranks leave word about the channel that each of them tries to make for the n-th time."""
    meeting = f"gradaccum/{'-'.join(map(str, members))}/"
    return f"{meeting}{default_store().add(f'{meeting}{dist.get_rank()}', 1)}"


def _listener(callers: int) -> socket.socket:
    """Listens at the interface that the user has named, on this machine alone where the store is, or everywhere."""
    is_local = host_of(default_store()) in ("localhost", "127.0.0.1")
    address = _named_address() or ("127.0.0.1" if is_local else "")
    if not address and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=callers)
    return socket.create_server((address, 0), backlog=callers)


def _named_address() -> str | None:
    """Of the network interface that GLOO_SOCKET_IFNAME names first, if it does."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with contextlib.suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        import fcntl  # not on Windows

        found = fcntl.ioctl(one.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(found[20:24])
    return None


def _addresses(listener: socket.socket) -> Iterator[str]:
    """Where other ranks may reach this one, the likeliest first."""
    address, host = listener.getsockname()[0], host_of(default_store()) or socket.gethostname()
    if address not in ("0.0.0.0", "::"):
        yield address
        return
    with contextlib.suppress(OSError):
        for family, kind, _, _, there in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as one:
                one.connect(there)  # sends nothing, and finds the way to the store
                yield one.getsockname()[0]
    yield from (host, "127.0.0.1")  # under its name others may know this machine better, if it is the store's


def _call(addresses: Iterable[str], port: int, key: bytes, seconds: float, rank: int) -> socket.socket:
    """A connection to the rank that left this word."""
    tried = dict[str, str]()
    for address in addresses:
        try:
            one = socket.create_connection((address, port), min(seconds, _REACHABLE))
            _introduced(one, key, seconds, rank)  # a caller waits for its turn
            return one
        except _STRANGER as error:
            tried[address] = str(error)
    raise RuntimeError(
        f"Rank {dist.get_rank()} could not connect to another rank at port {port} of {tried}. GLOO_SOCKET_IFNAME names "
        "the network interface to use."
    )


def _introduced(one: socket.socket, key: bytes, seconds: float, caller: int | None = None) -> int:
    """The rank that calls, where both have shown that they have this key; closes the connection where they haven't."""
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    give_up_after(one, seconds)
    try:
        with Connection(one.dup().detach()) as connection:
            for show in (deliver_challenge, answer_challenge)[:: 1 if caller is None else -1]:
                show(connection, key)
            if caller is None:
                return int(connection.recv())
            connection.send(caller)
            return caller
    except BaseException:
        one.close()
        raise


def give_up_after(one: socket.socket, seconds: float) -> None:
    """A read or a write that has waited so long is an OSError."""
    one.setblocking(True)
    micro = max(1, math.ceil(1e6 * seconds))  # of 0, one would wait for ever
    after = -(-micro // 1000) if os.name == "nt" else struct.pack("ll", *divmod(micro, 10**6))
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        one.setsockopt(socket.SOL_SOCKET, way, after)
