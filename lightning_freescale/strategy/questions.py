"""Questions that a rank asks all others through the rendezvous store, before it does what they may not do.

A gather would not do: ranks that need not ask do not come to it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_freescale.runtime.bounded import within
from lightning_freescale.runtime.store_connection import StoreConnection

MAX_ANSWER_SECONDS = 60.0  # How long a rank waits at most until the others ask the same question.
CHECK_SECONDS = 2.0  # How long the store may take to say which of them have asked it.
MORE_SECONDS = 0.1  # The store ends a wait by itself before this rank gives it up.


class Questions:
    """The questions of one run.

    Args:
        prefix: of the keys in the store.
        rank: this rank.
        world_size: number of ranks.
        timeout: the timeout of the strategy in seconds. A wait for an answer is shorter.
        connection: to the rendezvous store.
    """

    def __init__(self, prefix: str, rank: int, world_size: int, timeout: float, connection: StoreConnection):
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._seconds, self._connection = min(MAX_ANSWER_SECONDS, timeout / 2), connection
        self._last: str | None = None

    def ask(self, question: str) -> list[int]:
        """The other ranks that do not ask the same question in time."""
        store, key = self._connection.get(self._seconds), f"{self._prefix}/{question}"
        keys = {other: f"{key}/{other}" for other in range(self._world_size) if other != self._rank}
        store.set(f"{key}/{self._rank}", "")
        wait: Callable[[], None] = partial(store.wait, [*keys.values()], timedelta(seconds=self._seconds))
        try:
            within(self._seconds + MORE_SECONDS, wait)
        except (dist.DistError, TimeoutError):
            if missing := _missing(store, keys):
                return missing
        # All ranks have seen the answers to the last question, because they ask another one.
        if self._last is not None:
            store.delete_key(f"{self._last}/{self._rank}")
        self._last = key
        return []


def _missing(store: Any, keys: dict[int, str]) -> list[int]:
    """The ranks whose keys are not in the store. All of them, if it does not answer."""
    try:
        return within(CHECK_SECONDS, lambda: [rank for rank, key in keys.items() if not store.check([key])])
    except (dist.DistError, TimeoutError):
        return list(keys)
