"""Map-style datasets that collate whole batches from memory-mapped histories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.data.samples import MIN_EVENTS, SampleArrays, collate, events_before, leave_one_out
from lightning_freescale.runtime.errors import ConfigurationError, InputError


class HistoryDataset(Dataset):
    """One sample per user: all events before the target, at most the latest ``max_history`` of them.

    The target is the last event of a user, or an earlier one with ``skip``. In training it is not used: there the target of each
    position of the history is the next item.

    Args:
        histories: the events of all users. Every user has at least three.
        max_history: largest number of events of a sample.
        negatives: draws the negatives of each training sample; ``None`` makes validation samples, which have ``targets``.
        skip: number of last events of each user that are left out before the target is chosen, 0 or 1.
        item_ids: ``[num_items]``, the id of each item in the batches. By default the items keep their numbers.
    """

    def __init__(
        self,
        histories: Histories,
        max_history: int,
        negatives: NegativeSampler | None,
        skip: int = 0,
        item_ids: NDArray[np.int64] | None = None,
    ):
        if max_history < 1:
            raise ConfigurationError(f"max_history: must be at least 1, not {max_history}")
        if histories.num_users and (shortest := int(histories.lengths.min())) < MIN_EVENTS:
            raise InputError(
                f"histories: a user has {shortest} events, but needs at least {MIN_EVENTS}; leave out users with fewer"
            )
        self.histories, self.max_history, self.negatives = histories, max_history, negatives
        self.skip, self.item_ids = skip, item_ids

    def __len__(self) -> int:
        return self.histories.num_users

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[len(self)]``, the history length of each sample."""
        return np.minimum(self.histories.lengths - 1 - self.skip, self.max_history)

    @property
    def candidates(self) -> NDArray[np.int64]:
        """``[len(self)]``, the number of negatives that are scored for each sample, over all of its positions."""
        return (self.lengths - 1) * (self.negatives.count if self.negatives else 0)

    def __getitem__(self, users: int | Sequence[int]) -> SeqBatch:
        """Return the batch of the samples of ``users [B]``.

        The epoch of the negatives comes from :class:`~lightning_freescale.balance.sampler.BatchIndices`; for any other
        sequence it is 0.
        """
        indices = np.array(users, dtype=np.int64, ndmin=1)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"users: {indices.min()} to {indices.max()}, but there are {len(self)} users")
        return collate(self._samples(indices), self.negatives, getattr(users, "epoch", 0), self.item_ids)

    def _samples(self, indices: NDArray[np.int64]) -> SampleArrays:
        events = self.histories
        columns = (events.items, events.timestamps, events.features, events.offsets)
        return leave_one_out(*columns, indices, self.max_history, skip=self.skip)


class WholeHistoryDataset(HistoryDataset):
    """One sample per user for predictions: the latest ``max_history`` events, with the last one. Users need one event."""

    def __init__(self, histories: Histories, max_history: int, item_ids: NDArray[np.int64] | None = None):
        self.histories, self.max_history, self.negatives = histories, max_history, None
        self.item_ids = item_ids

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.minimum(self.histories.lengths, self.max_history)

    def _samples(self, indices: NDArray[np.int64]) -> SampleArrays:
        events = self.histories
        columns = (events.items, events.timestamps, events.features, events.offsets)
        return events_before(events.offsets[indices + 1], *columns, indices, self.max_history)
