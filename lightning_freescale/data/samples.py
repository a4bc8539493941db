"""Samples: histories without their last events, and their collation into a ``SeqBatch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.batch.torchrec_types import KeyedJaggedTensor
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.runtime.jagged import gather

MIN_EVENTS = 3  # one event for validation, one for the test, and at least one that comes before them


class SampleArrays(NamedTuple):
    """``n`` samples as arrays. The events of one sample follow those of the sample before.

    Attributes:
        users: ``[n]`` user numbers. The negatives of a sample depend on its user.
        lengths: ``[n]`` events of each history.
        items: ``[sum(lengths)]``.
        timestamps: ``[sum(lengths)]``, seconds.
        features: by name, ``[sum(lengths)]``.
        targets: ``[n]``, the item that follows each history; ``None`` if the histories are whole.
    """

    users: NDArray[np.int64]
    lengths: NDArray[np.int64]
    items: NDArray[np.int64]
    timestamps: NDArray[np.int64]
    features: dict[str, NDArray[np.int64]]
    targets: NDArray[np.int64] | None


def leave_one_out(
    items: NDArray[np.int64],
    timestamps: NDArray[np.int64],
    features: Mapping[str, NDArray[np.int64]],
    offsets: NDArray[np.int64],
    indices: NDArray[np.int64],
    max_history: int,
    first_user: int = 0,
    skip: int = 0,
) -> SampleArrays:
    """Return the samples of the users ``indices [n]``: their latest events, without the last one, which is the target.

    Args:
        items, timestamps, features: ``[T]`` each, the events of all users.
        offsets: ``[U + 1]``; user ``u`` owns events ``offsets[u]`` to ``offsets[u + 1]``.
        indices: users with at least ``skip + 2`` events each.
        max_history: largest number of events of a sample.
        first_user: the number of the user at offset 0.
        skip: number of last events that are left out before the target is chosen.
    """
    last = offsets[indices + 1] - 1 - skip
    samples = events_before(last, items, timestamps, features, offsets, indices, max_history)
    return samples._replace(users=indices + first_user, targets=items[last])


def events_before(
    ends: NDArray[np.int64],
    items: NDArray[np.int64],
    timestamps: NDArray[np.int64],
    features: Mapping[str, NDArray[np.int64]],
    offsets: NDArray[np.int64],
    indices: NDArray[np.int64],
    max_history: int,
) -> SampleArrays:
    """Return the latest ``max_history`` events of the users ``indices [n]`` before the events ``ends [n]``, without targets.

    The other arguments are those of :func:`leave_one_out`.
    """
    lengths = np.minimum(ends - offsets[indices], max_history)
    starts = ends - lengths
    return SampleArrays(
        users=indices,
        lengths=lengths,
        items=gather(items, starts, lengths),
        timestamps=gather(timestamps, starts, lengths),
        features={name: gather(values, starts, lengths) for name, values in features.items()},
        targets=None,
    )


def concatenate(parts: Sequence[SampleArrays]) -> SampleArrays:
    """Return the samples of all ``parts`` in one object."""
    if len(parts) == 1:
        return parts[0]
    return SampleArrays(
        users=np.concatenate([part.users for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        items=np.concatenate([part.items for part in parts]),
        timestamps=np.concatenate([part.timestamps for part in parts]),
        features={name: np.concatenate([part.features[name] for part in parts]) for name in parts[0].features},
        targets=None if parts[0].targets is None else np.concatenate([part.targets for part in parts]),  # type: ignore[misc]
    )


def collate(
    samples: SampleArrays,
    negatives: NegativeSampler | None,
    epoch: int,
    item_ids: NDArray[np.int64] | None = None,
) -> SeqBatch:
    """Return a training batch with sampled negatives or, if ``negatives`` is ``None``, a validation batch with targets.

    Samples without targets become a batch for predictions, which has the users. All have the keys
    ``history, negatives, *features``, so that one EmbeddingCollection accepts them. Without sampled negatives they have length 0.

    Args:
        item_ids: ``[num_items]``, the id of each item in the batch. By default the items keep their numbers.
    """
    counts = np.zeros_like(samples.lengths) if negatives is None else negatives.counts(samples.lengths)
    drawn = samples.items[:0] if negatives is None else negatives.draw(samples.users, epoch, counts)
    items, targets = [samples.items, drawn], samples.targets
    if item_ids is not None:
        items = [item_ids[part] for part in items]
        targets = None if targets is None else item_ids[targets]
    values = [*items, *samples.features.values()]
    lengths = [samples.lengths, counts, *[samples.lengths] * len(samples.features)]
    return SeqBatch(
        KeyedJaggedTensor(
            keys=[HISTORY, NEGATIVES, *samples.features],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            stride=len(samples.users),
            length_per_key=[len(part) for part in values],  # TorchRec would sum up the lengths.
        ),
        torch.from_numpy(samples.timestamps),
        torch.from_numpy(targets) if negatives is None and targets is not None else None,
        None if negatives is None else negatives.count,
        torch.from_numpy(samples.users) if targets is None else None,
    )
