"""A connection to the rendezvous store that is opened while the ranks train, so that it is there when one of them fails.

torch looks up the name of each address that connects, on both sides. If the name server does not answer, that takes seconds, and
the store answers nobody meanwhile. A rank that ends has less time to say why.
"""

from __future__ import annotations

import threading
from typing import Any

from lightning_freescale.runtime.process_groups import own_store


class StoreConnection:
    """A connection of its own, because one that is shared is blocked while another thread waits in it."""

    def __init__(self) -> None:
        self._store: Any = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to connect, unless this is done or under way. An attempt that has failed is repeated. Returns at once."""
        if self._store is None and (self._thread is None or not self._thread.is_alive()):
            self._error = None
            self._thread = threading.Thread(target=self._connect, daemon=True, name="freescale-store")
            self._thread.start()

    def get(self, seconds: float) -> Any:
        """The connection. Raises ConnectionError if it is not open after ``seconds``."""
        self.open()
        if self._thread is not None:
            self._thread.join(seconds)
        if self._store is None:
            why = self._error or f"no connection within {seconds:g} s"
            raise ConnectionError(f"the rendezvous store does not answer: {why}") from self._error
        return self._store

    def _connect(self) -> None:
        try:
            self._store = own_store()
        except Exception as error:
            self._error = error
