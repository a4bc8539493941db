"""Questions that a rank asks all others through the rendezvous store, before it does what they may not do.

A gather would not do: ranks that need not ask do not come to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_freescale.runtime.bounded import within
from lightning_freescale.runtime.process_groups import own_store

MAX_ANSWER_SECONDS = 60.0  # How long a rank waits at most until the others ask the same question.
LEAST_ANSWER_SECONDS = 0.05  # How long for each of them at least.
MORE_SECONDS = 0.1  # The store ends a wait by itself before this rank gives it up.


class Questions:
    """The questions of one run.

    Args:
        prefix: of the keys in the store.
        rank: this rank.
        world_size: number of ranks.
        timeout: the timeout of the strategy in seconds. A wait for an answer is shorter.
    """

    def __init__(self, prefix: str, rank: int, world_size: int, timeout: float):
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._seconds = min(MAX_ANSWER_SECONDS, timeout / 2)
        self._store: Any = None  # A connection takes seconds now and then, so it is kept.
        self._last: str | None = None

    def ask(self, question: str) -> list[int]:
        """The ranks that do not ask the same question in time."""
        if self._store is None:
            self._store = own_store()
        key, deadline = f"{self._prefix}/{question}", time.monotonic() + self._seconds
        self._store.set(f"{key}/{self._rank}", "")
        keys = [f"{key}/{other}" for other in range(self._world_size)]
        missing = []
        if not self._has(keys, deadline):
            missing = [other for other, one in enumerate(keys) if not self._has([one], deadline)]
        elif (
            self._last is not None
        ):  # All ranks have seen the answers to the last question, because they ask another one.
            self._store.delete_key(f"{self._last}/{self._rank}")
        self._last = key
        return missing

    def _has(self, keys: list[str], deadline: float) -> bool:
        left = max(deadline - time.monotonic(), LEAST_ANSWER_SECONDS)
        wait: Callable[[], None] = partial(self._store.wait, keys, timedelta(seconds=left))
        try:
            within(left + MORE_SECONDS, wait)
        except (dist.DistError, TimeoutError):
            return False
        return True
