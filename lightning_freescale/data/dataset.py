"""Map-style samples, collated a batch at a time straight out of the memory map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.data.batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.errors import ConfigurationError, InputError
from lightning_freescale.jagged import gather


def make_batch(
    items: NDArray[np.int64],
    timestamps: NDArray[np.int64],
    features: Mapping[str, NDArray[np.int64]],
    lengths: NDArray[np.int64],
    negatives: NDArray[np.int64],
    targets: NDArray[np.int64] | None,
) -> SeqBatch:
    """Put the columns of ``B`` samples into a :class:`SeqBatch` with keys ``history, negatives, *features``.

    Args:
        items, timestamps, features: ``[sum(lengths)]`` each.
        lengths: ``[B]``.
        negatives: ``[B, K]``; ``K`` may be 0, the key is there all the same, so that one EmbeddingCollection takes
            training and validation batches.
        targets: ``[B]`` in validation.
    """
    samples, count = negatives.shape
    values = np.concatenate([items, negatives.reshape(-1), *features.values()])
    per_key = [lengths, np.full(samples, count, dtype=np.int64), *[lengths] * len(features)]
    return SeqBatch(
        KeyedJaggedTensor(
            keys=[HISTORY, NEGATIVES, *features],
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(np.concatenate(per_key)),
            stride=samples,
        ),
        torch.from_numpy(timestamps),
        None if targets is None else torch.from_numpy(targets),
    )


class HistoryDataset(Dataset):
    """One sample per user: all events but the last, at most the latest ``max_history`` of them.

    In training the target of each position is the item after it; the user's last event is held out and is the target in
    validation (leave-one-out).

    Args:
        histories: every user with at least two events.
        max_history: events kept of each history, the latest.
        negatives: draws each training sample's negatives; ``None`` makes validation samples, which carry ``targets``.
    """

    def __init__(self, histories: Histories, max_history: int, negatives: NegativeSampler | None):
        if max_history < 1:
            raise ConfigurationError(f"max_history: must be at least 1, not {max_history}")
        if histories.num_users and (shortest := int(histories.lengths.min())) < 2:
            raise InputError(f"histories: a user has {shortest} event; a history and a target need at least 2")
        self.histories, self.max_history, self.negatives = histories, max_history, negatives

    def __len__(self) -> int:
        return self.histories.num_users

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[len(self)]``, the history length of each sample."""
        return np.minimum(self.histories.lengths - 1, self.max_history)

    def __getitem__(self, users: int | Sequence[int]) -> SeqBatch:
        """Collate the samples of ``users [B]``; a :class:`~.sampler.LocalBatch` also says the negatives' epoch."""
        indices = np.atleast_1d(np.asarray(users, dtype=np.int64))
        source = self.histories
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"users {indices.min()} to {indices.max()} asked for, there are {len(self)}")
        last = source.offsets[indices + 1] - 1
        lengths = np.minimum(last - source.offsets[indices], self.max_history)
        starts = last - lengths
        if self.negatives is None:
            negatives, targets = np.empty((len(indices), 0), dtype=np.int64), source.items[last]
        else:
            negatives, targets = self.negatives.draw(indices, getattr(users, "epoch", 0)), None
        return make_batch(
            gather(source.items, starts, lengths),
            gather(source.timestamps, starts, lengths),
            {name: gather(values, starts, lengths) for name, values in source.features.items()},
            lengths,
            negatives,
            targets,
        )
