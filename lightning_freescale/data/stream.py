"""Streaming from Parquet, one row per user: no preprocessed copy, and never more in memory than a few row groups.

With the index of the files every rank and worker knows exactly which rows are its own, and how many batches all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_freescale._log import say_once
from lightning_freescale.data.batch import SeqBatch
from lightning_freescale.data.columns import TICKS_PER_SECOND
from lightning_freescale.data.dataset import Samples, collate, leave_one_out
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.data.preprocess import time_order
from lightning_freescale.data.rowgroups import Piece, StreamIndex, read_pieces
from lightning_freescale.data.sampler import check_enough
from lightning_freescale.errors import InputError
from lightning_freescale.jagged import lengths_to_offsets


class StreamDataset(IterableDataset):
    """Local batches of one rank, split over its workers. Use it with :class:`StreamLoader`.

    The rows with enough events, ``N``, stand in one line: row groups in random order, rows in random order within a
    piece. Each rank takes an equal stretch of that line, and each worker an equal stretch of its rank's batches; where
    ``N`` does not divide, a rank repeats its last sample. So all ranks have the same number of batches, known in advance.

    Args:
        index: of the files.
        batch_size: samples per rank.
        max_history: events kept of each history, the latest.
        negatives: draws each training sample's negatives; ``None`` makes validation samples.
        num_replicas: number of ranks.
        rank: this rank.
        shuffle: permute anew each epoch.
        seed: equal on all ranks.
        drop_last: leave out what does not fill a batch on every rank.
    """

    def __init__(
        self,
        index: StreamIndex,
        batch_size: int,
        max_history: int,
        negatives: NegativeSampler | None,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ):
        self.index, self.batch_size, self.max_history, self.negatives = index, batch_size, max_history, negatives
        self.num_replicas, self.rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        rows, least, path = len(index.lengths), index.min_events, index.source.path
        self._kept = np.flatnonzero(index.lengths >= least)
        if not len(self._kept):
            raise InputError(f"{path}: none of {rows} rows has {least} events or more (min_events)")
        if dropped := rows - len(self._kept):
            say_once(f"{path.name}: {dropped} of {rows} rows have fewer than {least} events, left out")
        check_enough(len(self._kept), batch_size, num_replicas, drop_last)
        self._pieces = [Piece(*piece) for piece in index.pieces.tolist()]
        self._first = lengths_to_offsets(index.pieces[:, Piece._fields.index("rows")])  # [P + 1] over all files
        self._edges = np.searchsorted(self._kept, self._first)  # [P + 1] into the kept rows
        self._epoch = self._skip = 0
        # Workers may outlive an epoch: this is how they hear of the next one. [epoch, batches to skip]
        self._announced = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        """Local batches per epoch, the same on every rank."""
        return -(-self._samples_per_rank // self.batch_size)

    @property
    def _samples_per_rank(self) -> int:
        if self.drop_last:
            return len(self._kept) // (self.num_replicas * self.batch_size) * self.batch_size
        return -(-len(self._kept) // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def resume(self, batches: int) -> None:
        """Start the next iteration after that many batches of its epoch. Applies once."""
        self._skip = batches

    def announce(self) -> None:
        """Tell the workers that an iteration begins, and where. In the training process."""
        self._announced[0], self._announced[1] = self._epoch, self._skip
        self._skip = 0

    def __iter__(self) -> Iterator[SeqBatch]:
        info = get_worker_info()
        if info is None:
            self.announce()
            worker, workers = 0, 1
        else:
            worker, workers = info.id, info.num_workers
        epoch, skip = self._announced.tolist()
        return self._batches(epoch, worker_batches(len(self), skip, worker, workers))

    def _batches(self, epoch: int, numbers: range) -> Iterator[SeqBatch]:
        parts: list[Samples] = []
        missing = self.batch_size
        for samples in self._samples(epoch, numbers):
            parts.append(samples)
            missing -= len(samples.users)
            if missing == 0:
                yield collate(_join(parts), self.negatives, epoch)
                parts, missing = [], self.batch_size
        if parts:
            yield collate(_join(parts), self.negatives, epoch)

    def _samples(self, epoch: int, numbers: range) -> Iterator[Samples]:
        """Samples of the local batches ``numbers``, in runs that end where a batch or a piece does."""
        plan = list(self._plan(epoch, numbers))
        room = self.batch_size
        threads = get_worker_info() is None  # workers are the threads
        pieces = read_pieces(self.index.source, [self._pieces[at] for at, _ in plan], threads)
        for (at, rows), events in zip(plan, pieces, strict=True):
            assert events.lengths is not None
            order = time_order(events.ticks, events.lengths)
            items = np.asarray(events.items)[order]
            times = events.ticks[order] // TICKS_PER_SECOND
            features = {name: np.asarray(values)[order] for name, values in events.features.items()}
            offsets, first = lengths_to_offsets(events.lengths), int(self._first[at])
            while len(rows):
                run, rows = rows[:room], rows[room:]
                room = room - len(run) or self.batch_size
                yield leave_one_out(items, times, features, offsets, run - first, self.max_history, first_user=first)

    def _plan(self, epoch: int, numbers: range) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Which pieces to read, and which rows of each, for the local batches ``numbers``."""
        order = self._piece_order(epoch)
        line = lengths_to_offsets(np.diff(self._edges)[order])  # [P + 1] places in the line of samples
        first, stop = (len(self._kept) * rank // self.num_replicas for rank in (self.rank, self.rank + 1))
        own = np.arange(numbers.start * self.batch_size, min(numbers.stop * self.batch_size, self._samples_per_rank))
        if not len(own):
            return
        places = np.minimum(first + own, stop - 1)
        slots = np.searchsorted(line, places, side="right") - 1
        for run in np.split(np.arange(len(places)), np.flatnonzero(np.diff(slots)) + 1):
            slot = slots[run[0]]
            at = int(order[slot])
            rows = self._kept[self._edges[at] : self._edges[at + 1]]
            if self.shuffle:
                rows = np.random.default_rng((self.seed, epoch, at)).permutation(rows)
            yield at, rows[places[run] - line[slot]]

    def _piece_order(self, epoch: int) -> NDArray[np.int64]:
        """``[P]``: row groups permuted, the pieces of each in order, for they are read one after another."""
        if not self.shuffle:
            return np.arange(len(self._pieces))
        _, group = np.unique(self.index.pieces[:, :2], axis=0, return_inverse=True)
        key = np.random.default_rng((self.seed, epoch)).permutation(group.max() + 1)
        return np.argsort(key[group.reshape(-1)], kind="stable")


def worker_batches(total: int, skip: int, worker: int, workers: int) -> range:
    """Numbers of the local batches a worker makes, so that the loader, asking the workers in turn, gets a fixed order.

    Each worker has a stretch of consecutive batches, for it to read consecutive rows. After ``skip`` batches the loader
    starts with worker 0 again: it takes over the stretch of the worker whose turn it was.

    >>> [list(worker_batches(5, 0, worker, workers=2)) for worker in range(2)]
    [[0, 1, 2], [3, 4]]
    >>> [list(worker_batches(5, 3, worker, workers=2)) for worker in range(2)]
    [[4], [2]]
    """
    role = (worker + skip) % workers
    first = sum(len(range(other, total, workers)) for other in range(role))
    done = len(range(role, min(skip, total), workers))
    return range(first + done, first + len(range(role, total, workers)))


def _join(parts: Sequence[Samples]) -> Samples:
    if len(parts) == 1:
        return parts[0]
    return Samples(
        users=np.concatenate([part.users for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        items=np.concatenate([part.items for part in parts]),
        timestamps=np.concatenate([part.timestamps for part in parts]),
        features={name: np.concatenate([part.features[name] for part in parts]) for name in parts[0].features},
        targets=np.concatenate([part.targets for part in parts]),
    )


class StreamLoader(DataLoader):
    """A loader that tells a :class:`StreamDataset`'s workers the epoch.

    Args:
        dataset: what to load.
        epoch: asked when an iteration begins; Lightning announces epochs to samplers alone, and a stream has none.
        options: of ``DataLoader``.
    """

    dataset: StreamDataset

    def __init__(self, dataset: StreamDataset, epoch: Callable[[], int] | None = None, **options: Any):
        super().__init__(dataset, batch_size=None, **options)
        self._current_epoch = epoch

    def __iter__(self) -> Any:
        if self._current_epoch is not None:
            self.dataset.set_epoch(self._current_epoch())
        if self.num_workers:  # else the dataset does so itself
            self.dataset.announce()
        return super().__iter__()
