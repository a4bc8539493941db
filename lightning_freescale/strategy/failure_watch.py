"""A thread that remembers why another rank has ended, for the moment when nobody can be asked any more.

When a rank dies, the ranks that waited for it find out first. They publish what they know in the rendezvous store, and end.
A rank that waited for one of those fails only when they have ended. The store may have ended with them. So every rank looks
at the store from time to time, and keeps the explanation.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from lightning_freescale.runtime.process_groups import own_store

WATCH_SECONDS = 0.5  # Between two looks at the store. A rank that fails stays longer than that.


class FailureWatch:
    """Looks for the first explanation of a failure under ``key`` of the rendezvous store, until :meth:`close`."""

    def __init__(self, key: str):
        self.explanation: str | None = None
        self._key = key
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="freescale-failures")
        self._thread.start()

    def publish(self, explanation: str) -> None:
        """Tell the other ranks why this one ends. The first explanation counts."""
        own_store().compare_set(self._key, "", explanation)

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(
            WATCH_SECONDS
        )  # A call of the store may hang if its host is gone. The thread ends later then.

    def _run(self) -> None:
        with suppress(Exception):  # The store has ended.
            store = own_store()  # Connects here, because that takes long if the host of the store is gone.
            while not self._end.wait(WATCH_SECONDS):
                if store.check([self._key]):
                    self.explanation = store.get(self._key).decode()
                    return
