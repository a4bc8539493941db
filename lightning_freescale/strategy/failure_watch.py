"""Threads that find out that another rank has failed, remember why, and end the waits of this rank for it.

The thread that trains cannot do this. When a rank dies, the others wait for it, and on a GPU they wait in a call of CUDA that
no timeout ends. The ranks that notice a failure publish what they know in the rendezvous store. The store may end with its
host. So every rank looks at the store from time to time, and keeps the explanation.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lightning_freescale.runtime import last_resort
from lightning_freescale.runtime.bounded import BOUNDED_CALL, within
from lightning_freescale.runtime.device_errors import tells_of_device_error
from lightning_freescale.runtime.log import logger
from lightning_freescale.runtime.nccl_calls import threads_in_nccl
from lightning_freescale.runtime.nccl_groups import abort_all, end_process, nccl_backends, nccl_error
from lightning_freescale.runtime.process_groups import own_store
from lightning_freescale.strategy.peer_connections import HAS_DIED, UNREACHABLE, PeerConnections

WATCH_SECONDS = 0.5  # Between two looks at the store. A rank that fails stays longer than that.
PUBLISH_SECONDS = 2.0  # How long the store may take to answer.
GOODBYE_SECONDS = 2.0  # How long the end waits for the thread that says goodbye.
# On a GPU, the communicators of NCCL are aborted if the training thread makes no progress for so long after a failure. A rank
# that handles an exception has more time, because what it does until its end has limits of its own.
GRACE_SECONDS, LEAVING_SECONDS = 3.0, 10.0
NAMING_SECONDS = 2.0  # How long an error of NCCL waits for a better explanation, which names a rank.
# How long a rank has to report its error after the abort, until its process ends itself: a part of the timeout. It is longer
# than a wait of ranks that connect. After a timeout of NCCL it is shorter, so that twice the timeout is never exceeded.
EXIT_FACTOR, LATE_EXIT_FACTOR = 1.4, 0.5
LEAST_EXIT_SECONDS = 15.0
# If no Python code runs for this part of the timeout, the process ends itself. The others have given up before. After a failure
# the part is that of a late exit.
HOLD_FACTOR = 1.7

STORE_IS_LOST = "rank 0, which hosts the rendezvous store, has ended or cannot be reached"
_NCCL_TEXTS = {"TIMEOUT": "a transfer of NCCL took longer than the timeout", "COMM_ERROR": "NCCL has lost a connection"}
_LOST = re.compile(rf"(^|; )rank \d+ ({HAS_DIED}|{UNREACHABLE})")


class FailureWatch:
    """Watches the other ranks until :meth:`close`.

    On CUDA, it also ends a wait of the training thread. After a failure, the thread has a few seconds to fail by itself. Then
    the communicators of NCCL are aborted, and the kernels that wait in them end. What they have computed is invalid:
    :attr:`aborted` is true from then on. If the thread still does not come out, the process ends itself.

    On every device, the process ends itself if no Python code of it runs for longer than the timeout.

    Args:
        key: where the first explanation of a failure is in the rendezvous store.
        rank: the rank of this process.
        timeout: the timeout of the strategy in seconds.
        device: the device of this rank.
        backends: returns NCCL's part of the process groups.

    Attributes:
        explanation: why a rank has failed; ``None`` while no failure is known.
        aborted: whether the communicators of NCCL are being aborted or were.
        progress: a number that the training thread increases. While it grows, nothing is aborted.
        leaving: whether the training thread handles an exception.
    """

    def __init__(
        self,
        key: str,
        rank: int,
        timeout: float,
        device: torch.device | None = None,
        backends: Callable[[], list[Any]] = nccl_backends,
    ):
        self.explanation: str | None = None
        self.aborted, self.leaving, self.progress = False, False, 0
        self._key, self._rank, self._timeout, self._backends = key, rank, timeout, backends
        self._on_cuda = device is not None and device.type == "cuda"
        self._exit_seconds = max(EXIT_FACTOR * timeout, LEAST_EXIT_SECONDS)
        self._last: tuple[object, float] = (None, 0.0)  # The last state of the training thread, and since when.
        self._nccl_since: float | None = None
        self._waits_for_abort, self._has_told, self._store_is_lost = False, False, False
        self._end, self._news = threading.Event(), threading.Event()
        self._store: Any = None  # A connection whose calls return at once.
        self._peers = PeerConnections(rank, timeout)
        self._threads = [
            threading.Thread(target=target, daemon=True, name=name)
            for target, name in ((self._look, "freescale-failures"), (self._guard, "freescale-guard"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def misses_a_rank(self) -> bool:
        """Whether a rank does not come any more: its process or its host has ended, or waits for it were ended."""
        return self.aborted or (self.explanation is not None and _LOST.search(self.explanation) is not None)

    def has_died(self, rank: int) -> bool:
        """Whether the explanation says that the process of ``rank`` has ended."""
        return self.explanation is not None and f"rank {rank} {HAS_DIED}" in self.explanation

    def wait_for_explanation(self, seconds: float) -> str | None:
        """The explanation. Waits up to ``seconds`` for it, if there is none yet, or only one that may be a consequence itself."""
        deadline = time.monotonic() + seconds
        while not self._knows_the_cause and not self._end.is_set() and time.monotonic() < deadline:
            time.sleep(WATCH_SECONDS / 10)
        return STORE_IS_LOST if self.explanation is None and self._store_is_lost else self.explanation

    @property
    def _knows_the_cause(self) -> bool:
        """Whether there is an explanation that is not an error of CUDA of some rank. Such an error may follow from a death."""
        return self.explanation is not None and not _may_be_a_consequence(self.explanation)

    def publish(self, explanation: str) -> None:
        """Tell the other ranks why a rank has failed. The first explanation counts."""
        store = own_store() if self._store is None else self._store
        store.compare_set(self._key, "", explanation)

    def close(self, abort: bool = False) -> None:
        """Say goodbye to the other ranks, and end the threads.

        Args:
            abort: on CUDA, abort the communicators of NCCL, because a rank is missing. The end of the process would wait for
                their kernels otherwise.
        """
        self._end.set()
        if abort and self._on_cuda and not self.aborted:
            self.aborted = True
            self._abort(self._backends())
        self._news.set()
        self._peers.wake()
        looks, guards = self._threads
        guards.join(GOODBYE_SECONDS)
        looks.join(WATCH_SECONDS)  # A call of the store may hang if its host is gone. The thread ends later then.

    # ---- the thread that talks to the store --------------------------------------------------------------------------
    def _look(self) -> None:
        with suppress(Exception):  # The store has ended.
            store = own_store()  # Connects here, because that takes long if the host of the store is gone.
            self._connect(store)  # It may wait for rank 0, and the connection is blocked meanwhile.
            self._store = store
            while not self._end.is_set():
                self._news.wait(WATCH_SECONDS)
                self._news.clear()
                if (own := self.explanation) is not None:
                    self.explanation = self._agreed(store, own)
                elif store.check([self._key]):
                    self.explanation = store.get(self._key).decode()
                if self._knows_the_cause:
                    return
            return
        self._store_is_lost = not self._end.is_set()

    def _agreed(self, store: Any, own: str) -> str:
        """The explanation in the store. ``own`` is put there if there is none, or if it explains the one that is there."""
        first = str(store.compare_set(self._key, "", own).decode())
        if _may_be_a_consequence(own) or not _may_be_a_consequence(first):
            return first
        both = own if first in own else f"{own}; {first}"
        store.set(self._key, both)
        return both

    def _connect(self, store: Any) -> None:
        try:
            self._peers.open(store, f"{self._key}/peers")
        except Exception as error:
            if not self._end.is_set():
                logger.warning("rank %d: the death of a rank is noticed later than usual: %s", self._rank, error)

    # ---- the thread that watches the processes -----------------------------------------------------------------------
    def _guard(self) -> None:
        try:
            while not self._end.is_set():
                self._set_last_resort()
                for text in self._peers.lost(WATCH_SECONDS):
                    self._explain(text)
                if self.explanation is not None and not self._has_told:
                    self._has_told = True
                    self._peers.tell(self.explanation)
                    if self._on_cuda:
                        last_resort.name_crashes(
                            f"rank {self._rank}: {self.explanation}. The process crashes after that."
                        )
                if self._on_cuda and not self._end.is_set():
                    self._end_waits(time.monotonic())
        finally:
            last_resort.disarm()
            self._peers.close()

    def _set_last_resort(self) -> None:
        """Let the process end if this thread does not come here again in time."""
        factor = HOLD_FACTOR if self.explanation is None else LATE_EXIT_FACTOR
        seconds = max(factor * self._timeout, LEAST_EXIT_SECONDS)
        known = "" if self.explanation is None else f"{self.explanation}; "
        stuck = f"no Python code has run for {seconds:.0f} s: a call that does not return holds the interpreter's lock"
        message = f"rank {self._rank}: {known}{stuck}. The process ends itself."
        last_resort.arm(seconds, message, self._peers.descriptors())

    def _explain(self, explanation: str) -> None:
        """Note and publish an explanation, unless the cause is known."""
        if not self._knows_the_cause and not self._end.is_set():
            self.explanation = explanation if self.explanation is None else f"{explanation}; {self.explanation}"
            self._news.set()

    def _end_waits(self, now: float) -> None:
        if self.explanation is None:
            self._look_at_nccl(now)
            return
        state = (self.progress, self.leaving, self.aborted)
        if state != self._last[0]:
            self._last = (state, now)
        seconds = now - self._last[1]
        if self.aborted:
            if seconds > self._exit_seconds:
                end_process(f"rank {self._rank}: {self.explanation}")
            elif self._waits_for_abort and not threads_in_nccl():
                self._abort(self._backends())
        elif seconds > (LEAVING_SECONDS if self.leaving else GRACE_SECONDS):
            self.aborted = True  # Before the abort: what the training thread finds afterwards is invalid.
            logger.error("rank %d: %s. The waits of the device are ended.", self._rank, self.explanation)
            backends = self._backends()
            if nccl_error(backends) == "TIMEOUT":
                self._exit_seconds = max(LATE_EXIT_FACTOR * self._timeout, LEAST_EXIT_SECONDS)
            if set(threads_in_nccl()) - {BOUNDED_CALL}:  # Nothing can end such a call. A bounded one has its own limit.
                self._exit_seconds = min(LEAVING_SECONDS, self._exit_seconds)
            self._abort(backends)

    def _abort(self, backends: list[Any]) -> None:
        """Abort the communicators, now or when no thread is inside a call of NCCL any more."""
        why = self.explanation or "a rank is missing"
        last_resort.name_crashes(f"rank {self._rank}: {why}. The abort of NCCL's communicators has failed.")
        self._waits_for_abort = not abort_all(backends)

    def _look_at_nccl(self, now: float) -> None:
        error = nccl_error(self._backends())
        if error is None:
            self._nccl_since = None
        elif self._nccl_since is None:
            self._nccl_since = now
        elif now - self._nccl_since > NAMING_SECONDS:
            self._explain(f"{_NCCL_TEXTS.get(error, f'NCCL reports {error}')} on rank {self._rank}")


def _may_be_a_consequence(explanation: str) -> bool:
    """Whether ``explanation`` is an error of CUDA of some rank, which may follow from the death of another one."""
    return tells_of_device_error(explanation) and _LOST.search(explanation) is None


def publish_within_limit(watch: FailureWatch, explanation: str) -> None:
    """Publish ``explanation`` if the store answers."""
    with suppress(Exception):  # The store has ended.
        within(PUBLISH_SECONDS, lambda: watch.publish(explanation))
