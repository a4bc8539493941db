"""TCP ports at which ranks meet."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque

PORTS_KEPT = 8
_taken: deque[socket.socket] = deque()


def free_port() -> int:
    """A port that no process uses. It lies below the range from which the system takes ports for other sockets.

    Several clusters may start at the same time, and each may open its port late or several times. If another cluster took the
    same port meanwhile, its ranks would meet those of the first one. So the port is marked as taken by a socket with an
    abstract name, until this process and those forked from it have ended or have taken ``PORTS_KEPT`` further ports.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            mark = undo.enter_context(socket.socket(socket.AF_UNIX))
            mark.bind(f"\0lightning-freescale-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
            undo.pop_all()
            _taken.append(mark)
            if len(_taken) > PORTS_KEPT:
                _taken.popleft().close()
            return port
