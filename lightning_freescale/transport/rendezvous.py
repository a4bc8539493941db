"""How the ranks of a group find one another: who shares a host, and who can be reached where."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_freescale.transport.errors import TransportError


def host_id() -> str:
    """Equal on ranks that can share memory. ``FREESCALE_HOST_ID`` overrides it, which makes one machine act as many."""
    given = os.environ.get("FREESCALE_HOST_ID")
    if given:
        return given
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/dev/shm').st_dev}"  # containers of one machine may have a /dev/shm each


def local_address() -> str:
    """The address at which other hosts reach this one: ``FREESCALE_ADDRESS``, or the one that faces ``MASTER_ADDR``."""
    given = os.environ.get("FREESCALE_ADDRESS")
    if given:
        return given
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing; only picks the way there
            return probe.getsockname()[0]
    except OSError as error:
        raise TransportError(
            f"no way from this host to MASTER_ADDR={master!r} ({error}); set FREESCALE_ADDRESS to this host's address"
        ) from error


class Rendezvous:
    """Rounds in which every rank tells all others something, over the group's store.

    A rank that cannot go on tells why, and every rank raises that.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta):
        self._store, self._rank, self._world, self._timeout = store, rank, world, timeout

    def tell(self, step: str, text: str) -> list[str]:
        """What every rank told in this step, in rank order."""
        return self._meet(step, f"+{text}")

    def give_up(self, step: str, error: Exception) -> None:
        """Tell the others that this rank cannot take this step. Does not wait for them."""
        self._store.set(f"{step}/{self._rank}", f"-{error}")

    def _meet(self, step: str, text: str) -> list[str]:
        self._store.set(f"{step}/{self._rank}", text)
        told = []
        for peer in range(self._world):
            key = f"{step}/{peer}"
            try:
                self._store.wait([key], self._timeout)
            except Exception as error:
                raise TransportError(
                    f"rank {self._rank}: rank {peer} did not come to the set-up of the transport ({step}) "
                    f"within {self._timeout.total_seconds():g} s"
                ) from error
            told.append(self._store.get(key).decode())
        for peer, text in enumerate(told):
            if text[0] == "-":
                raise TransportError(f"the transport cannot be set up: rank {peer}: {text[1:]}")
        return [text[1:] for text in told]
