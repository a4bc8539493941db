"""``ExchangeThread``: the background thread that exchanges the samples of one batch after another."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_freescale.balance.errors import CannotBalance, PeerFailed
from lightning_freescale.balance.exchange.comparison_schedule import ComparisonSchedule
from lightning_freescale.balance.exchange.local_batches import BatchStatus, LoadedBatch, LocalBatches
from lightning_freescale.balance.exchange.messages import Announced, RankMessages
from lightning_freescale.balance.exchange.packing import build_batch, packed_sizes
from lightning_freescale.balance.exchange.places import FixedTensors, refuse_to_move
from lightning_freescale.balance.exchange.planners import Planners
from lightning_freescale.balance.exchange.split_batch import Agreement, agree
from lightning_freescale.balance.planner import Planner
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.log import log_once

READY_BATCHES = 2  # balanced batches that the thread prepares in advance of the training
CLOSE_SECONDS = 2.0  # how long a closing rank waits for the other ranks


class ReadyBatch(NamedTuple):
    """A batch for the training.

    Attributes:
        batch: the local batch.
        state: the ``state_dict`` of the loader after this batch, if it has one.
        seconds: the time that comparison and exchange took.
        bytes_sent: bytes that this rank sent to other ranks.
        compared: whether the ranks compared this batch.
    """

    batch: Any
    state: dict | None
    seconds: float = 0.0
    bytes_sent: int = 0
    compared: bool = False


class _SkipBatches(NamedTuple):
    """Tells the training thread to load this many batches itself. The ranks do not compare them."""

    batches: float


class ExchangeThread:
    """One iteration over the batches of all ranks: the thread that prepares batches, and the queue to the training.

    Args:
        batches: the local batches. Both threads load from it, but never at the same time.
        messages: the communication with the other ranks.
        planners: the planners of this rank. The caller may add another one at any time.
        balanced: batches in a row that needed no move of samples, at the end of the previous iteration.
        pin_memory: put batches into page-locked memory.
    """

    def __init__(
        self,
        batches: LocalBatches,
        messages: RankMessages,
        planners: Planners,
        *,
        balanced: int = 0,
        pin_memory: bool = False,
    ):
        self._batches, self._messages, self._planners, self._pin_memory = batches, messages, planners, pin_memory
        self.unbalanced: str | None = None  # why batches stay on the rank that loaded them, if they do
        self.balanced_at_end = 0  # for the next iteration; stays 0 unless all ranks reach the end of their data
        self._schedule = ComparisonSchedule(balanced)
        self._agreement: Agreement | None = None
        self._capacity = 0  # samples that an announcement has room for: the most that a rank had so far
        self._batch_number = 0
        self._free_slots: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry for each batch to prepare
        for _ in range(READY_BATCHES):
            self._free_slots.put(None)
        self._ready: queue.SimpleQueue[ReadyBatch | _SkipBatches | BaseException | None] = queue.SimpleQueue()
        self._to_skip = 0.0  # batches that the training thread loads before it asks for the next ready one
        # How the skipping ended: None after the full number of batches, else the batch that was not loaded.
        self._skipping_ended: queue.SimpleQueue[LoadedBatch | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="freescale-exchange", daemon=True)
        self._thread.start()

    # ---- called by the training thread -----------------------------------------------------------------------------
    def take(self) -> ReadyBatch | BaseException | None:
        """Return the next batch, the exception to raise instead of it, or ``None`` at the end of the data."""
        if not self._to_skip:
            ready = self._ready.get()
            if not isinstance(ready, _SkipBatches):
                self._free_slots.put(None)
                return ready
            self._to_skip = ready.batches
        loaded = self._batches.load()
        succeeded = loaded.status is BatchStatus.LOADED
        self._to_skip = self._to_skip - 1 if succeeded else 0.0
        self._batch_number += succeeded
        if not self._to_skip:
            self._skipping_ended.put(None if succeeded else loaded)
        return ReadyBatch(loaded.batch, loaded.state) if succeeded else loaded.error

    def close(self) -> bool:
        """Stop the iteration. Return whether the thread has ended, which it does as soon as the other ranks know."""
        if self._thread.is_alive():
            self._batches.close()
            self._skipping_ended.put(LoadedBatch(BatchStatus.CLOSED))
            self._free_slots.put(None)
            self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until the other ranks have closed this iteration, too. The next one uses the same process group."""
        self._thread.join()
        if self._failure is not None:
            raise FreeScaleError(
                "samples cannot be exchanged any more: an earlier exchange failed, so the ranks may be at different "
                "batches; restart the training from a checkpoint"
            ) from self._failure

    # ---- in the background thread ----------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while self._prepare_next():
                pass
        except Exception as error:
            self._failure = error
            if not isinstance(error, FreeScaleError):
                self._failure = FreeScaleError(
                    f"rank {self._messages.rank}: the exchange of samples for batch {self._batch_number} failed: {error}"
                )
                self._failure.__cause__ = error
            self._ready.put(self._failure)

    def _prepare_next(self) -> bool:
        """Prepare one batch, after those that the ranks skip. Return whether there may be more batches."""
        not_loaded = self._skip(math.inf if self.unbalanced is not None else self._schedule.batches_to_skip())
        if self.unbalanced is not None:
            return False
        self._free_slots.get()
        # If a skipped batch was not loaded here, tell the ranks that wait at the next comparison.
        loaded = not_loaded or self._batches.load_for_exchange(self._agreement)
        start = time.perf_counter()
        count = 0 if loaded.split is None else loaded.split.num_samples
        rows = None if loaded.split is None or self._agreement is None else _rows_of(loaded, self._agreement)
        announced = self._messages.announce(loaded.status, self._planners.count, count, rows, self._capacity)
        planner = self._planners.use(int(announced.planners.min()))  # the latest one that all ranks have
        statuses = announced.statuses
        if not {BatchStatus.LOADED, BatchStatus.NOT_SEPARABLE}.issuperset(statuses.tolist()):
            if not_loaded is None:
                self._ready.put(self._without_others(loaded, statuses))
            if (statuses == BatchStatus.END_OF_DATA).all():
                self.balanced_at_end = self._schedule.balanced
            return self.unbalanced is not None
        try:
            if (inseparable := np.flatnonzero(statuses == BatchStatus.NOT_SEPARABLE)).size:
                raise loaded.error or CannotBalance(f"samples cannot be separated on rank {_join(inseparable)}")
            batch, sent = self._exchange(loaded, announced, planner)
        except CannotBalance as reason:  # raised on all ranks at this batch, before any sample has moved
            self.unbalanced = str(reason)
            log_once(
                "balance: the ranks cannot exchange samples, so each rank trains the batches that it loads; "
                f"the work of the ranks may be uneven: {reason}"
            )
            batch, sent = loaded.batch, 0
        moved = batch is not loaded.batch
        self._schedule.record(moved)
        seconds = time.perf_counter() - start
        if not moved and self._pin_memory:
            batch = pin_memory(batch)
        self._ready.put(ReadyBatch(batch, loaded.state, seconds, sent, compared=True))
        self._batch_number += 1
        return True

    def _skip(self, count: float) -> LoadedBatch | None:
        """Let the training thread load ``count`` batches. Return the first one that was not loaded, if any."""
        if not count:
            return None
        self._ready.put(_SkipBatches(count))
        return self._skipping_ended.get()

    def _without_others(self, loaded: LoadedBatch, statuses: NDArray[np.int64]) -> ReadyBatch | BaseException | None:
        """Return what the training gets in place of a batch that not all ranks have; ``None`` if the iteration ends here.

        If the data of other ranks have ended, this rank trains its remaining batches as they were loaded. The caller of this
        loader decides what becomes of them.
        """
        if loaded.status in (BatchStatus.END_OF_DATA, BatchStatus.CLOSED, BatchStatus.FAILED):
            return loaded.error
        if (failed := np.flatnonzero(statuses == BatchStatus.FAILED)).size:
            return PeerFailed(f"batch {self._batch_number}: not loaded on rank {_join(failed)}; see the error there")
        ended = np.flatnonzero((statuses == BatchStatus.END_OF_DATA) | (statuses == BatchStatus.CLOSED))
        self.unbalanced = f"the data of rank {_join(ended)} have ended"
        if not self._batches.closed:
            log_once(f"balance: {self.unbalanced}; the other ranks train the rest of the epoch as they load it")
        self._batch_number += 1
        batch = pin_memory(loaded.batch) if self._pin_memory else loaded.batch
        return ReadyBatch(batch, loaded.state, compared=True)

    def _exchange(self, loaded: LoadedBatch, announced: Announced, planner: Planner) -> tuple[Any, int]:
        """Assign the samples of all ranks to ranks, and send them there. All ranks call this together.

        Args:
            loaded: the local batch of this rank.
            announced: about the batches of all ranks.
            planner: assigns the samples. It must be the same on all ranks.

        Returns:
            The new local batch and the bytes sent; the old batch and 0 if no sample moves.
        """
        split, counts, rows, world = loaded.split, announced.counts, announced.rows, self._messages.world_size
        assert split is not None
        if self._agreement is None:
            of_ranks = self._messages.gather_objects((split.layout, FixedTensors.of(split)))
            self._agreement = agree([layout for layout, _ in of_ranks])
            refuse_to_move([fixed for _, fixed in of_ranks])
        columns = self._agreement.columns
        if rows is None:
            rows = self._messages.gather_rows(_rows_of(loaded, self._agreement), counts)
            self._capacity = int(counts.max())
        lengths, candidates, sizes = rows.T
        current = np.repeat(np.arange(world), counts)
        assigned = planner.reassign(current, lengths, candidates, world=world)
        if assigned is current:
            return loaded.batch, 0
        received = self._messages.exchange_samples(split, columns, sizes, current, assigned)
        batch = build_batch(split, columns, received.packed, received.sizes, self._pin_memory)
        return batch, received.bytes_sent


def _rows_of(loaded: LoadedBatch, agreement: Agreement) -> NDArray[np.int64]:
    """Return what this rank announces about each sample of its batch."""
    assert loaded.split is not None
    assert loaded.sizes is not None
    return np.column_stack([loaded.sizes, packed_sizes(loaded.split, agreement.columns)])


def _join(ranks: NDArray[np.int64]) -> str:
    return ", ".join(map(str, ranks))
