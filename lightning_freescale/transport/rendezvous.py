"""How the ranks of a group find each other: which ranks share a host, and at which address a rank can be reached."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_freescale.transport.errors import TransportError


def host_id() -> str:
    """A text that is equal on ranks that can share memory.

    ``FREESCALE_HOST_ID`` overrides it. With a value per rank, one machine acts as several hosts.
    """
    given = os.environ.get("FREESCALE_HOST_ID")
    if given:
        return given
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/dev/shm').st_dev}"  # containers of one machine may have separate /dev/shm mounts


def local_address() -> str:
    """The address at which other hosts reach this one: ``FREESCALE_ADDRESS``, or that of the route to ``MASTER_ADDR``."""
    given = os.environ.get("FREESCALE_ADDRESS")
    if given:
        return given
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: a datagram socket only looks up the route
            return probe.getsockname()[0]
    except OSError as error:
        raise TransportError(
            f"this host has no route to MASTER_ADDR={master!r} ({error}), so its own address is unknown; "
            "set FREESCALE_ADDRESS to an address at which the other hosts reach this one"
        ) from error


class Rendezvous:
    """Set-up in steps, over the group's store. In each step every rank shares a text with all ranks.

    If a rank reports a failure in a step, every rank raises it.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta):
        self._store, self._rank, self._world, self._timeout = store, rank, world, timeout

    def share(self, step: str, text: str) -> list[str]:
        """Share ``text`` with all ranks. Waits for every rank, and returns ``[world]`` texts of this step in rank order."""
        self._store.set(f"{step}/{self._rank}", f"+{text}")
        answers = [self._answer(step, peer) for peer in range(self._world)]
        for peer, answer in enumerate(answers):
            if answer[0] == "-":
                raise TransportError(f"the transport cannot be set up: rank {peer}: {answer[1:]}")
        return [answer[1:] for answer in answers]

    def report_failure(self, step: str, error: Exception) -> None:
        """Tell all ranks that this rank failed in ``step``. Does not wait for them."""
        self._store.set(f"{step}/{self._rank}", f"-{error}")

    def _answer(self, step: str, peer: int) -> str:
        key = f"{step}/{peer}"
        try:
            self._store.wait([key], self._timeout)
        except Exception as error:
            raise TransportError(
                f"rank {self._rank}: rank {peer} did not take part in the set-up of the transport (step {step!r}) "
                f"within {self._timeout.total_seconds():g} s; check whether rank {peer} is still running"
            ) from error
        return self._store.get(key).decode()
