"""How the ranks of a group meet before the first transfer: they share texts, and a failure of one rank ends the wait of all."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

from lightning_freescale.transport.errors import TransportError

# A call of the store that waits would keep all other threads of the process from the store. So a rank asks again and again,
# in intervals that grow to this many seconds.
_LONGEST_INTERVAL = 0.1
# Rank 0 usually hosts the store, which ends with it. After a failure rank 0 stays for this many seconds, so that the other ranks
# can read the reason.
_STAY_SECONDS = 1.0


class Rendezvous:
    """Set-up in steps, over the group's store. In each step every rank shares a text with all ranks.

    If a rank reports a failure, every rank raises it at once, in whatever step it is. A step takes a few calls of the store on
    each rank, for any number of ranks.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta):
        self._store, self._rank, self._world, self._timeout = store, rank, world, timeout

    def share(self, step: str, text: str) -> list[str]:
        """Share ``text`` with all ranks. Waits for every rank, and returns ``[world]`` texts of this step in rank order."""
        keys = [f"{step}/{peer}" for peer in range(self._world)]
        self._store.set(keys[self._rank], text)
        start = time.monotonic()
        while not self._store.check(keys):
            self.raise_failure()
            waited = time.monotonic() - start
            if waited > self._timeout.total_seconds():
                raise TransportError(self._missing(step, keys))
            time.sleep(min(_LONGEST_INTERVAL, 0.002 + waited / 8))
        return [value.decode() for value in self._values(keys)]

    def report_failure(self, error: Exception) -> None:
        """Tell all ranks that this rank has failed. The first failure of a group counts."""
        with contextlib.suppress(Exception):  # without the store, the other ranks have to wait for their timeout
            self._store.compare_set("failed", "", f"rank {self._rank}: {error}")
        if self._rank == 0:
            time.sleep(_STAY_SECONDS)

    def raise_failure(self) -> None:
        """Raise the failure that a rank has reported, if there is one."""
        if self._store.check(["failed"]):
            raise TransportError(f"the transport cannot be set up: {self._store.get('failed').decode()}")

    def _values(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return self._store.multi_get(keys)
        return [self._store.get(key) for key in keys]

    def _missing(self, step: str, keys: list[str]) -> str:
        absent = [str(peer) for peer, key in enumerate(keys) if not self._store.check([key])]
        return (
            f"rank {self._rank}: rank {', '.join(absent)} did not take part in the set-up of the transport (step {step!r}) "
            f"within {self._timeout.total_seconds():g} s; check whether it is still running"
        )
