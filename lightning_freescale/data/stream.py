"""Streaming from Parquet, one row per user: no preprocessed copy, and never more in memory than a few row groups.

With the index of the files every rank and worker knows exactly which rows are its own, and how many batches all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_freescale.balance.sampler import check_enough
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.data.columns import TICKS_PER_SECOND
from lightning_freescale.data.dataset import Samples, collate, leave_one_out
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.data.preprocess import time_order
from lightning_freescale.data.rowgroups import Piece, StreamIndex, read_pieces
from lightning_freescale.runtime.errors import CheckpointError, InputError
from lightning_freescale.runtime.jagged import lengths_to_offsets
from lightning_freescale.runtime.log import log_once

MAX_RUNS = 16  # of different shapes, within one epoch


class Run(NamedTuple):
    """Part of an epoch: so many ranks, of so many workers each, trained on so many batches each."""

    ranks: int
    workers: int
    batch_size: int
    batches: int


class Start(NamedTuple):
    """Where in an epoch an iteration begins: after earlier runs of other shapes, and some batches of its own."""

    runs: tuple[Run, ...] = ()
    skip: int = 0


def to_make(total: int, done: int, role: int, workers: int) -> range:
    """Of a rank's ``total`` batches those left to one of its workers, when the loader has taken ``done`` from them in turn."""
    first = sum(len(range(other, total, workers)) for other in range(role))
    return range(first + len(range(role, min(done, total), workers)), first + len(range(role, total, workers)))


def untrained(samples: int, runs: Sequence[Run], drop_last: bool = False) -> list[range]:
    """What is left of a line of samples after ``runs``, each of which divided what it found among its ranks and workers.

    >>> untrained(10, [Run(ranks=2, workers=1, batch_size=2, batches=1)])
    [range(2, 5), range(7, 10)]
    >>> untrained(10, [Run(ranks=1, workers=2, batch_size=2, batches=3)])
    [range(4, 6), range(8, 10)]
    """
    left = [range(samples)]
    for ranks, workers, batch_size, batches in runs:
        count, rest = sum(map(len, left)), []
        total = -(-samples_per_rank(count, ranks, batch_size, drop_last) // batch_size)
        for rank in range(ranks):
            first, stop = count * rank // ranks, count * (rank + 1) // ranks
            spare = range(total, count)  # what no batch had room for
            for own in (*(to_make(total, batches, role, workers) for role in range(workers)), spare):
                begin, end = (min(first + batch * batch_size, stop) for batch in (own.start, own.stop))
                rest += _cut(left, begin, end)
        left = rest
    return left


def samples_per_rank(samples: int, ranks: int, batch_size: int, drop_last: bool) -> int:
    return samples // (ranks * batch_size) * batch_size if drop_last else -(-samples // ranks)


def _cut(stretches: Sequence[range], first: int, stop: int) -> list[range]:
    """Elements ``first`` to ``stop`` of stretches that stand one after another."""
    parts, at = [], 0
    for stretch in stretches:
        part = stretch[max(0, first - at) : max(0, stop - at)]
        parts += [part] if len(part) else []
        at += len(stretch)
    return parts


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
            log_once(f"{path.name}: {dropped} of {rows} rows have fewer than {least} events, left out")
        check_enough(len(self._kept), batch_size, num_replicas, drop_last)
        self._pieces = [Piece(*piece) for piece in index.pieces.tolist()]
        self._first = lengths_to_offsets(index.pieces[:, Piece._fields.index("rows")])  # [P + 1] over all files
        self._edges = np.searchsorted(self._kept, self._first)  # [P + 1] into the kept rows
        self._epoch, self.workers = 0, 1
        self._start, self._next_start = Start(), Start()  # of this iteration and of the next
        # Workers may outlive an epoch: this is how they hear of the next one. [epoch, batches to skip, runs before, ...]
        self._announced = torch.zeros(3 + len(Run._fields) * MAX_RUNS, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        """Local batches per epoch, the same on every rank."""
        return self._batches_of(len(self._kept))

    def _batches_of(self, samples: int) -> int:
        return -(-self._samples_per_rank(samples) // self.batch_size)

    def _samples_per_rank(self, samples: int) -> int:
        return samples_per_rank(samples, self.num_replicas, self.batch_size, self.drop_last)

    def _untrained(self, runs: Sequence[Run]) -> list[range]:
        return untrained(len(self._kept), runs, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def position(self, batches: int) -> list[list[int]]:
        """The runs, as numbers, that make up the first ``batches`` batches of this epoch: what :meth:`resume` takes."""
        done = len(self) - self._to_come(self._start)
        return [*map(list, self._start.runs), [*self._shape, self._start.skip + batches - done]]

    def resume(self, batches: int, position: list[list[int]] | None = None) -> int:
        """Start the next iteration after ``batches`` batches of its epoch. Applies once.

        With ``position``, from runs on any numbers of ranks and workers, it goes on with what they have not trained on.

        Returns:
            The number of batches that count as done here; with those to come they make ``len(self)``.
        """
        runs = [Run(*run) for run in position or [[*self._shape, batches]]]
        if len(runs) > MAX_RUNS:
            raise CheckpointError(
                f"resume: {len(runs)} runs had a part in this epoch; start from an earlier checkpoint"
            )
        same = runs[-1][:-1] == self._shape  # then the line is divided as it was
        self._next_start = Start(tuple(runs[:-1]), runs[-1].batches) if same else Start(tuple(runs))
        return len(self) - self._to_come(self._next_start)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.num_replicas, self.workers, self.batch_size

    def _to_come(self, start: Start) -> int:
        return max(0, self._batches_of(sum(map(len, self._untrained(start.runs)))) - start.skip)

    def announce(self) -> None:
        """Tell the workers that an iteration begins, and where. In the training process."""
        start = self._start = self._next_start
        self._next_start = Start()
        numbers = [self._epoch, start.skip, len(start.runs), *(number for run in start.runs for number in run)]
        self._announced[: len(numbers)] = torch.tensor(numbers)

    def __iter__(self) -> Iterator[SeqBatch]:
        info = get_worker_info()
        if info is None:
            self.announce()
            worker, workers = 0, 1
        else:
            worker, workers = info.id, info.num_workers
        epoch, skip, count, *numbers = self._announced.tolist()
        width = len(Run._fields)
        stretches = self._untrained([Run(*numbers[width * at : width * (at + 1)]) for at in range(count)])
        total = self._batches_of(sum(map(len, stretches)))
        return self._batches(epoch, stretches, worker_batches(total, skip, worker, workers))

    def _batches(self, epoch: int, stretches: list[range], numbers: range) -> Iterator[SeqBatch]:
        parts: list[Samples] = []
        missing = self.batch_size
        for samples in self._samples(epoch, stretches, numbers):
            parts.append(samples)
            missing -= len(samples.users)
            if missing == 0:
                yield collate(_join(parts), self.negatives, epoch)
                parts, missing = [], self.batch_size
        if parts:
            yield collate(_join(parts), self.negatives, epoch)

    def _samples(self, epoch: int, stretches: list[range], numbers: range) -> Iterator[Samples]:
        """Samples of the local batches ``numbers``, in runs that end where a batch or a piece does."""
        plan = list(self._plan(epoch, stretches, numbers))
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

    def _plan(self, epoch: int, stretches: list[range], numbers: range) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Which pieces to read, and which rows of each, for the local batches ``numbers`` of ``stretches`` of the line."""
        order = self._piece_order(epoch)
        line = lengths_to_offsets(np.diff(self._edges)[order])  # [P + 1] places in the line of samples
        left = lengths_to_offsets([len(stretch) for stretch in stretches])
        per_rank = self._samples_per_rank(int(left[-1]))
        first, stop = (int(left[-1]) * rank // self.num_replicas for rank in (self.rank, self.rank + 1))
        own = np.arange(numbers.start * self.batch_size, min(numbers.stop * self.batch_size, per_rank))
        if not len(own):
            return
        places = np.minimum(first + own, max(0, stop - 1))  # among what is left
        within = np.searchsorted(left, places, side="right") - 1
        places += np.array([stretch.start for stretch in stretches])[within] - left[within]
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
    return to_make(total, skip, (worker + skip) % workers, workers)


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
        dataset.workers = max(1, self.num_workers)
        self._current_epoch = epoch

    def __iter__(self) -> Any:
        if self._current_epoch is not None:
            self.dataset.set_epoch(self._current_epoch())
        if self.num_workers:  # else the dataset does so itself
            self.dataset.announce()
        return super().__iter__()
