"""Connections whose only purpose is to break when a process ends, whatever its threads were doing.

Rank 0 has a connection to every other rank. The system closes the connections of a process that dies, and the other end notices
it at once. A rank that ends in order says goodbye first. Nothing is sent in between, so a busy process is never taken for a
dead one. A host that vanishes closes nothing; then the system asks it for a sign of life.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import weakref
from contextlib import suppress
from typing import Any

TOKEN_BYTES = 16
RANK_BYTES = 4
HELLO_BYTES = TOKEN_BYTES + RANK_BYTES
HAS_DIED, UNREACHABLE = "has died", "cannot be reached"
WELCOME, GOODBYE = b"+", b"."
RECEIVE_BYTES = 64
TEXT_CHARACTERS = 300
_NOT_IN_TEXTS = {ord(character): " " for character in "().+"}  # They have a meaning on the wire.
BACKLOG = 1024  # ranks that connect in the same moment
PROBES = 4  # questions for a sign of life, until a host counts as vanished

_open: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


class PeerConnections:
    """The connections of one rank. :meth:`open` and :meth:`lost` may run in different threads.

    Args:
        rank: the rank of this process.
        timeout: a host that gives no sign of life for this many seconds counts as vanished.
    """

    def __init__(self, rank: int, timeout: float):
        self._rank, self._timeout = rank, timeout
        self._token = b""
        self._lock = threading.Lock()
        self._closed = False
        self._ranks: dict[socket.socket, int | None] = {}  # None: it has not said yet which rank it is.
        self._welcome: set[socket.socket] = set()  # Connections that both ends have accepted.
        self._received: dict[socket.socket, bytes] = {}
        self._listener: socket.socket | None = None
        self._bell, self._button = socket.socketpair()
        self._selector = selectors.PollSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        _open.add(self)

    # ---- start -----------------------------------------------------------------------------------------------------
    def open(self, store: Any, key: str) -> None:
        """Connect to rank 0, or be ready for the others. Waits until rank 0 has written its addresses to ``store``."""
        if self._rank == 0:
            try:
                port = self._listen()
                store.set(key, f"{port} {self._token.hex()} {','.join(_own_addresses())}")
            except (OSError, KeyError):
                store.set(key, "")  # The others must not wait for it.
                raise
            return
        answer = store.get(key).decode()
        if not answer:
            raise ConnectionError("rank 0 cannot be reached by the others")
        number, token, addresses = answer.split(" ")
        connection = _connect(addresses.split(","), int(number), self._timeout)
        self._add(connection, rank=0)
        connection.sendall(bytes.fromhex(token) + self._rank.to_bytes(RANK_BYTES, "little"))
        self.wake()

    def _listen(self) -> int:
        """Wait for connections. Returns the port."""
        self._token = secrets.token_bytes(TOKEN_BYTES)
        try:
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        except (OSError, ValueError):  # The system has no IPv6.
            listener = socket.create_server(("", 0), backlog=BACKLOG)
        listener.setblocking(False)
        with self._lock:
            if self._closed:
                listener.close()
                raise ConnectionAbortedError("this rank has ended")
            self._listener = listener
            self._selector.register(listener, selectors.EVENT_READ)
        self.wake()
        return int(listener.getsockname()[1])

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        _ask_for_signs_of_life(connection, self._timeout)
        connection.setblocking(False)
        with self._lock:
            if self._closed:
                connection.close()
                raise ConnectionAbortedError("this rank has ended")
            self._ranks[connection], self._received[connection] = rank, b""
            self._selector.register(connection, selectors.EVENT_READ)

    # ---- watch -----------------------------------------------------------------------------------------------------
    def lost(self, seconds: float) -> list[str]:
        """Wait up to ``seconds``, or until :meth:`wake`. Say which ranks have ended without a goodbye."""
        found = []
        for selected, _ in self._selector.select(seconds):
            source = selected.fileobj
            assert isinstance(source, socket.socket)
            if source is self._bell:
                source.recv(RECEIVE_BYTES)
            elif source is self._listener:
                self._accept()
            elif (text := self._read(source)) is not None:
                found.append(text)
        return found

    def wake(self) -> None:
        """End the wait of :meth:`lost`."""
        with suppress(OSError):  # The connections are closed.
            self._button.send(b"!")

    def tell(self, text: str) -> None:
        """Send ``text`` in parentheses to all connected ranks. They need it only if their Python code cannot run any more."""
        data = f"({text.translate(_NOT_IN_TEXTS)[:TEXT_CHARACTERS]})".encode(errors="replace")
        with self._lock:
            connections = list(self._welcome)
        for connection in connections:
            with suppress(OSError):
                connection.send(data)

    def descriptors(self) -> list[tuple[int, int]]:
        """The descriptor and the rank of each connection."""
        with self._lock:
            known = ((source, rank) for source, rank in self._ranks.items() if source in self._welcome)
            return [(source.fileno(), rank) for source, rank in known if rank is not None]

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            while True:
                self._add(self._listener.accept()[0], rank=None)

    def _read(self, source: socket.socket) -> str | None:
        """Read what has arrived. If the connection has ended without a goodbye, return which rank is lost, and how."""
        rank = self._ranks[source]
        try:
            data = source.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        except OSError as error:
            self._drop(source)
            return f"rank {rank} {UNREACHABLE}: its host has vanished, or the link to it is down ({error})"
        if not data:
            established = source in self._welcome
            self._drop(source)
            return f"rank {rank} {HAS_DIED}" if established else None
        received = self._received[source] + data
        if rank is None:
            if len(received) < HELLO_BYTES:
                self._received[source] = received
                return None
            token, rank = received[:TOKEN_BYTES], int.from_bytes(received[TOKEN_BYTES:HELLO_BYTES], "little")
            if not hmac.compare_digest(token, self._token):
                self._drop(source)
                return None
            self._ranks[source], received = rank, received[HELLO_BYTES:]
            self._welcome.add(source)
            with suppress(OSError):
                source.send(WELCOME)
        self._received[source] = b""
        if WELCOME in received:
            self._welcome.add(source)
        if GOODBYE in received:
            self._drop(source)
        return None

    def _drop(self, source: socket.socket) -> None:
        with self._lock:
            self._selector.unregister(source)
            del self._ranks[source], self._received[source]
        self._welcome.discard(source)
        source.close()

    # ---- end -------------------------------------------------------------------------------------------------------
    def close(self, goodbye: bool = True) -> None:
        """Say goodbye and close everything. No thread may be in :meth:`lost`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._listener is not None:
            with suppress(OSError):
                while True:  # A rank that connects in this moment waits for its goodbye as well.
                    connection = self._listener.accept()[0]
                    connection.setblocking(False)
                    self._ranks[connection] = None
        for connection in self._ranks:
            with suppress(OSError):
                if goodbye:
                    connection.send(GOODBYE)
        self.forget()

    def forget(self) -> None:
        """Close the sockets of this process without a goodbye. A forked process must do so: it would keep them open."""
        for part in (*self._ranks, self._listener, self._bell, self._button):
            if part is not None:
                part.close()


def _forget_in_forked_process() -> None:
    for connections in list(_open):
        connections.forget()


os.register_at_fork(after_in_child=_forget_in_forked_process)


def _own_addresses() -> list[str]:
    """Where the other ranks may reach rank 0: the address of the rendezvous, and that of the interface that leads to it."""
    main = os.environ["MASTER_ADDR"]
    found = [main]
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # A datagram socket sends nothing here.
            own = str(probe.getsockname()[0])
        if own not in found:
            found.append(own)
    return found


def _connect(addresses: list[str], port: int, timeout: float) -> socket.socket:
    """A connection to the first address that answers."""
    failure: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout / len(addresses))
        except OSError as error:
            failure = error
    raise ConnectionError(f"rank 0 does not answer at port {port} of {' or '.join(addresses)}: {failure}")


def _ask_for_signs_of_life(connection: socket.socket, timeout: float) -> None:
    """Let the system notice within about ``timeout`` seconds that the other host has vanished."""
    pause = max(1, int(timeout / (2 * PROBES)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(timeout / 2) - pause)),
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", int(750 * timeout)),
    ):
        if hasattr(socket, name):  # Other systems than Linux lack some of them.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
