"""``LocalBatches``: loads, checks and splits the local batches of this rank. It does not communicate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.errors import CannotBalance
from lightning_freescale.balance.exchange.split_batch import Agreement, SplitBatch, check_layout, split_batch
from lightning_freescale.balance.sample_sizes import SampleSizes
from lightning_freescale.batch.reused_memory import ReusedMemory

WAITING_BATCHES = 6  # that may be loaded and not trained: those that the exchange and the training prepare in advance


class BatchStatus(IntEnum):
    """What a rank announces about its next batch, before any sample moves."""

    LOADED = 0  # the batch is ready for the exchange
    END_OF_DATA = 1  # the loader has no more batches
    FAILED = 2  # the loader or the check raised an exception
    CLOSED = 3  # the training on this rank has stopped iterating
    NOT_SEPARABLE = 4  # the batch can be trained on, but not be split into samples


class LoadedBatch(NamedTuple):
    """A local batch, or the reason why there is none.

    Attributes:
        status: what the rank announces.
        batch: as the loader made it.
        state: the loader's ``state_dict`` after this batch, if it has one.
        split: the batch as samples, for the exchange.
        sizes: ``[n, 2]`` history length and candidate count of each sample, for the exchange.
        error: why the status is ``FAILED`` or ``NOT_SEPARABLE``.
    """

    status: BatchStatus
    batch: Any = None
    state: dict | None = None
    split: SplitBatch | None = None
    sizes: NDArray[np.int64] | None = None
    error: Exception | None = None


class LocalBatches:
    """One iteration over the local batches of this rank. Errors become a status, which the rank announces to the others.

    Args:
        loader: any iterable of batches in host memory.
        check: raises if a batch cannot be trained on.
        sizes: returns the history lengths and the candidate counts of the samples of a batch.
        waiting: how many batches may wait for their training in the memory that the loader put them into.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        check: Callable[[Any], None] | None,
        sizes: SampleSizes,
        waiting: int = WAITING_BATCHES,
    ):
        self._loader, self._iterator = loader, iter(loader)
        self._check, self._sizes = check, sizes
        self._memory = ReusedMemory(waiting)
        self._closed = threading.Event()

    def close(self) -> None:
        """Report every further batch as ``CLOSED``. Any thread may call this."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def load(self, check: bool = False) -> LoadedBatch:
        """Load the next batch. It is not split, and it is checked only on demand."""
        if self._closed.is_set():
            return LoadedBatch(BatchStatus.CLOSED)
        try:
            batch = self._memory.next(self._iterator)
            state = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
            if check and self._check is not None:
                self._check(batch)
        except StopIteration:
            return LoadedBatch(BatchStatus.END_OF_DATA)
        except Exception as error:  # the training thread raises it when it asks for this batch
            return LoadedBatch(BatchStatus.FAILED, error=error)
        if self._closed.is_set():
            return LoadedBatch(BatchStatus.CLOSED)
        return LoadedBatch(BatchStatus.LOADED, batch, state)

    def load_for_exchange(self, agreement: Agreement | None) -> LoadedBatch:
        """Load and check the next batch, and split it into samples.

        Args:
            agreement: what the ranks agreed on at an earlier batch; this batch must fit it.
        """
        loaded = self.load(check=True)
        if loaded.status is not BatchStatus.LOADED:
            return loaded
        try:
            split = split_batch(loaded.batch)
            if agreement is not None:
                check_layout(split, agreement)
            sizes = np.stack(self._sizes(loaded.batch), axis=1).astype(np.int64, copy=False)
            if len(sizes) != split.num_samples:
                raise CannotBalance(f"batch: {len(sizes)} lengths for {split.num_samples} samples")
        except CannotBalance as reason:
            return loaded._replace(status=BatchStatus.NOT_SEPARABLE, error=reason)
        except Exception as error:
            return LoadedBatch(BatchStatus.FAILED, error=error)
        return loaded._replace(split=split, sizes=sizes)
