"""Map-style samples, collated a batch at a time straight out of the memory map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from lightning_freescale.runtime.jagged import gather

MIN_EVENTS = 3  # two to learn a transition from, and the held-out target


class Samples(NamedTuple):
    """``n`` samples, their events one after another.

    Attributes:
        users: ``[n]``, what the negatives are drawn by.
        lengths: ``[n]`` events of each history.
        items, timestamps, features: ``[sum(lengths)]`` each.
        targets: ``[n]``, the held-out last item of each user.
    """

    users: NDArray[np.int64]
    lengths: NDArray[np.int64]
    items: NDArray[np.int64]
    timestamps: NDArray[np.int64]
    features: dict[str, NDArray[np.int64]]
    targets: NDArray[np.int64]


def leave_one_out(
    items: NDArray[np.int64],
    timestamps: NDArray[np.int64],
    features: Mapping[str, NDArray[np.int64]],
    offsets: NDArray[np.int64],
    indices: NDArray[np.int64],
    max_history: int,
    first_user: int = 0,
) -> Samples:
    """All events but the last of users ``indices [n]``, at most the latest ``max_history`` of them.

    Args:
        items, timestamps, features: ``[T]`` each, all users' events.
        offsets: ``[U + 1]``, which of them are whose.
        indices: each with at least two events.
        max_history: events kept.
        first_user: number of the user at offset 0.
    """
    last = offsets[indices + 1] - 1
    lengths = np.minimum(last - offsets[indices], max_history)
    starts = last - lengths
    return Samples(
        users=indices + first_user,
        lengths=lengths,
        items=gather(items, starts, lengths),
        timestamps=gather(timestamps, starts, lengths),
        features={name: gather(values, starts, lengths) for name, values in features.items()},
        targets=items[last],
    )


def collate(samples: Samples, negatives: NegativeSampler | None, epoch: int) -> SeqBatch:
    """A training batch, or without ``negatives`` a validation batch, which has targets.

    The keys are ``history, negatives, *features`` in both, so that one EmbeddingCollection takes both; in validation the
    negatives have length 0.
    """
    count = 0 if negatives is None else negatives.count
    drawn = [] if negatives is None else [negatives.draw(samples.users, epoch).reshape(-1)]
    values = np.concatenate([samples.items, *drawn, *samples.features.values()])
    lengths = [samples.lengths, np.full_like(samples.lengths, count), *[samples.lengths] * len(samples.features)]
    return SeqBatch(
        KeyedJaggedTensor(
            keys=[HISTORY, NEGATIVES, *samples.features],
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            stride=len(samples.users),
        ),
        torch.from_numpy(samples.timestamps),
        torch.from_numpy(samples.targets) if negatives is None else None,
    )


class HistoryDataset(Dataset):
    """One sample per user: all events but the last, at most the latest ``max_history`` of them.

    In training the target of each position is the item after it; the user's last event is held out and is the target in
    validation (leave-one-out).

    Args:
        histories: every user with at least three events.
        max_history: events kept of each history, the latest.
        negatives: draws each training sample's negatives; ``None`` makes validation samples, which carry ``targets``.
    """

    def __init__(self, histories: Histories, max_history: int, negatives: NegativeSampler | None):
        if max_history < 1:
            raise ConfigurationError(f"max_history: must be at least 1, not {max_history}")
        if histories.num_users and (shortest := int(histories.lengths.min())) < MIN_EVENTS:
            raise InputError(f"histories: a user has {shortest} events; training and held-out target need {MIN_EVENTS}")
        self.histories, self.max_history, self.negatives = histories, max_history, negatives

    def __len__(self) -> int:
        return self.histories.num_users

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[len(self)]``, the history length of each sample."""
        return np.minimum(self.histories.lengths - 1, self.max_history)

    @property
    def candidates(self) -> NDArray[np.int64]:
        """``[len(self)]``, how many negatives the positions of each sample are scored against, together."""
        return (self.lengths - 1) * (self.negatives.count if self.negatives else 0)

    def __getitem__(self, users: int | Sequence[int]) -> SeqBatch:
        """Collate the samples of ``users [B]``; a :class:`~.sampler.LocalBatch` also says the negatives' epoch."""
        indices = np.atleast_1d(np.asarray(users, dtype=np.int64))
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"users {indices.min()} to {indices.max()} asked for, there are {len(self)}")
        all_ = self.histories
        samples = leave_one_out(all_.items, all_.timestamps, all_.features, all_.offsets, indices, self.max_history)
        return collate(samples, self.negatives, epoch=getattr(users, "epoch", 0))
