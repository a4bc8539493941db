"""``StreamDataset`` and ``StreamLoader``: batches of Parquet files with one row per user, read during training.

There is no preprocessed copy, and memory holds only a few row groups. With the index of the files every rank and every
worker knows which rows it reads, and how many batches all ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_freescale.balance.sampler import check_enough
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.data.columns import TICKS_PER_SECOND
from lightning_freescale.data.epoch_segments import (
    MAX_SEGMENTS,
    EpochSegment,
    EpochStart,
    samples_per_rank,
    untrained_ranges,
    worker_batches,
)
from lightning_freescale.data.histories import time_order
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.data.samples import SampleArrays, collate, concatenate, leave_one_out
from lightning_freescale.data.stream_index import RowGroupSlice, StreamIndex, read_slices
from lightning_freescale.runtime.errors import CheckpointError, InputError
from lightning_freescale.runtime.jagged import lengths_to_offsets
from lightning_freescale.runtime.log import log_once


class StreamDataset(IterableDataset):
    """The local batches of one rank, divided among its workers. Use it with :class:`StreamLoader`.

    An epoch has an order of all rows with enough events: row groups in random order, and the rows of each slice in random
    order. Each rank gets a contiguous range of this order, and each worker a contiguous range of the batches of its rank. The
    ranges are about equally long. If the number of rows is not a multiple of the number of ranks, some ranks repeat their last
    sample. So all ranks have the same number of batches, which is known in advance.

    Args:
        index: the index of the files.
        batch_size: samples per rank.
        max_history: largest number of events of a sample.
        negatives: draws the negatives of each training sample; ``None`` makes validation samples.
        num_replicas: number of ranks.
        rank: this rank.
        shuffle: use another random order in each epoch. By default the order of the files.
        seed: equal on all ranks.
        drop_last: drop samples that do not fill a batch on every rank.
        skip: number of last events of each row that are left out before the target is chosen, 0 or 1.
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
        skip: int = 0,
    ):
        self.index, self.batch_size, self.max_history, self.negatives = index, batch_size, max_history, negatives
        self.num_replicas, self.rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last, self.skip = shuffle, seed, drop_last, skip
        rows, least, path = len(index.lengths), index.min_events, index.source.path
        self._kept = np.flatnonzero(index.lengths >= least)
        if not len(self._kept):
            raise InputError(f"{path}: none of {rows} rows has {least} events or more; lower min_events")
        if dropped := rows - len(self._kept):
            log_once(f"{path.name}: {dropped} of {rows} rows have fewer than {least} events and are left out")
        check_enough(len(self._kept), batch_size, num_replicas, drop_last)
        self._slices = [RowGroupSlice(*fields) for fields in index.slices.tolist()]
        # [P + 1] each. Slice p has the rows _first_row[p] to _first_row[p + 1] of all files. Its kept rows are
        # _kept[_first_kept[p] : _first_kept[p + 1]].
        self._first_row = lengths_to_offsets(index.slices[:, RowGroupSlice._fields.index("rows")])
        self._first_kept = np.searchsorted(self._kept, self._first_row)
        self._epoch, self.workers = 0, 1
        self._start, self._next_start = EpochStart(), EpochStart()  # of this iteration and of the next
        # Shared memory tells workers, which may live longer than an epoch, how the next one starts: its number, batches to
        # skip, number of earlier segments, and their fields.
        self._announced = torch.zeros(3 + len(EpochSegment._fields) * MAX_SEGMENTS, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        """Return the number of local batches per epoch, equal on all ranks."""
        return self._batches_of(len(self._kept))

    def _batches_of(self, samples: int) -> int:
        return -(-self._samples_per_rank(samples) // self.batch_size)

    def _samples_per_rank(self, samples: int) -> int:
        return samples_per_rank(samples, self.num_replicas, self.batch_size, self.drop_last)

    def _untrained(self, segments: Sequence[EpochSegment]) -> list[range]:
        return untrained_ranges(len(self._kept), segments, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def position(self, batches: int) -> list[list[int]]:
        """Return the segments of the first ``batches`` batches of this epoch, as numbers, for :meth:`resume`."""
        done = len(self) - self._remaining(self._start)
        return [*map(list, self._start.segments), [*self._shape, self._start.skip + batches - done]]

    def resume(self, batches: int, position: list[list[int]] | None = None) -> int:
        """Start the next iteration after ``batches`` batches of its epoch. It applies once.

        Args:
            batches: number of batches to skip.
            position: the :meth:`position` of an earlier run, which may have had other numbers of ranks, workers and samples
                per batch. The epoch continues with the samples that are not trained yet.

        Returns:
            The number of batches that count as done here. Together with the remaining batches they make ``len(self)``.
        """
        segments = [EpochSegment(*fields) for fields in position or [[*self._shape, batches]]]
        if len(segments) > MAX_SEGMENTS:
            raise CheckpointError(
                f"resume: this epoch has {len(segments)} parts that differ in the number of ranks, workers or samples per "
                f"batch, but at most {MAX_SEGMENTS} are supported; resume from a checkpoint of an earlier epoch"
            )
        same = segments[-1][:-1] == self._shape  # then the last segment continues
        start = EpochStart(tuple(segments[:-1]), segments[-1].batches) if same else EpochStart(tuple(segments))
        self._next_start = start
        return len(self) - self._remaining(start)

    @property
    def _shape(self) -> tuple[int, int, int]:
        """All fields of an :class:`EpochSegment` but the last, for the current settings."""
        return self.num_replicas, self.workers, self.batch_size

    def _remaining(self, start: EpochStart) -> int:
        """Return the number of batches of an epoch from ``start`` on."""
        return max(0, self._batches_of(sum(map(len, self._untrained(start.segments)))) - start.skip)

    def announce(self) -> None:
        """Tell the workers where the next iteration begins. The training process calls this."""
        start = self._start = self._next_start
        self._next_start = EpochStart()
        fields = [number for segment in start.segments for number in segment]
        numbers = [self._epoch, start.skip, len(start.segments), *fields]
        self._announced[: len(numbers)] = torch.tensor(numbers)

    def __iter__(self) -> Iterator[SeqBatch]:
        info = get_worker_info()
        if info is None:
            self.announce()
            worker, workers = 0, 1
        else:
            worker, workers = info.id, info.num_workers
        epoch, skip, count, *numbers = self._announced.tolist()
        width = len(EpochSegment._fields)
        left = self._untrained([EpochSegment(*numbers[width * at : width * (at + 1)]) for at in range(count)])
        total = self._batches_of(sum(map(len, left)))
        return self._batches(epoch, left, worker_batches(total, skip, worker, workers))

    def _batches(self, epoch: int, left: list[range], numbers: range) -> Iterator[SeqBatch]:
        """Yield the local batches ``numbers`` of the samples that are ``left`` of the epoch."""
        parts: list[SampleArrays] = []
        missing = self.batch_size
        for samples in self._samples(epoch, left, numbers):
            parts.append(samples)
            missing -= len(samples.users)
            if missing == 0:
                yield collate(concatenate(parts), self.negatives, epoch, self.index.item_ids)
                parts, missing = [], self.batch_size
        if parts:
            yield collate(concatenate(parts), self.negatives, epoch, self.index.item_ids)

    def _samples(self, epoch: int, left: list[range], numbers: range) -> Iterator[SampleArrays]:
        """Yield the samples of the local batches ``numbers``, in parts that end at the end of a batch or of a slice."""
        plan = list(self._plan(epoch, left, numbers))
        room = self.batch_size
        threads = get_worker_info() is None  # several workers already use the cores
        slices = read_slices(self.index.source, [self._slices[at] for at, _ in plan], threads)
        for (at, rows), events in zip(plan, slices, strict=True):
            assert events.lengths is not None
            order = time_order(events.ticks, events.lengths)
            items = np.asarray(events.items)[order]
            if self.index.item_ids is not None:
                items = np.searchsorted(self.index.item_ids, items)
            times = events.ticks[order] // TICKS_PER_SECOND
            features = {name: np.asarray(values)[order] for name, values in events.features.items()}
            offsets, first = lengths_to_offsets(events.lengths), int(self._first_row[at])
            while len(rows):
                part, rows = rows[:room], rows[room:]
                room = room - len(part) or self.batch_size
                yield leave_one_out(
                    items, times, features, offsets, part - first, self.max_history, first_user=first, skip=self.skip
                )

    def _plan(self, epoch: int, left: list[range], numbers: range) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the slices to read, and the rows of each, for the local batches ``numbers``.

        Args:
            epoch: number of the epoch.
            left: ranges of the order of the epoch that are not trained yet.
            numbers: local batches of this rank.
        """
        order = self._slice_order(epoch)
        slice_start = lengths_to_offsets(
            np.diff(self._first_kept)[order]
        )  # [P + 1] positions in the order of the epoch
        left_start = lengths_to_offsets([len(part) for part in left])
        total = int(left_start[-1])
        first, stop = (total * rank // self.num_replicas for rank in (self.rank, self.rank + 1))
        per_rank = self._samples_per_rank(total)
        own = np.arange(numbers.start * self.batch_size, min(numbers.stop * self.batch_size, per_rank))
        if not len(own):
            return
        positions = np.minimum(first + own, max(0, stop - 1))  # among the samples that are left
        within = np.searchsorted(left_start, positions, side="right") - 1
        positions += np.array([part.start for part in left])[within] - left_start[within]  # in the order of the epoch
        slots = np.searchsorted(slice_start, positions, side="right") - 1
        for together in np.split(np.arange(len(positions)), np.flatnonzero(np.diff(slots)) + 1):
            slot = slots[together[0]]
            at = int(order[slot])
            rows = self._kept[self._first_kept[at] : self._first_kept[at + 1]]
            if self.shuffle:
                rows = np.random.default_rng((self.seed, epoch, at)).permutation(rows)
            yield at, rows[positions[together] - slice_start[slot]]

    def _slice_order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the slices, ``[P]``: row groups permuted, but the slices of each in row order for reading."""
        if not self.shuffle:
            return np.arange(len(self._slices))
        _, group = np.unique(self.index.slices[:, :2], axis=0, return_inverse=True)
        key = np.random.default_rng((self.seed, epoch)).permutation(group.max() + 1)
        return np.argsort(key[group.reshape(-1)], kind="stable")


class StreamLoader(DataLoader):
    """A loader that tells the workers of a :class:`StreamDataset` the epoch.

    Args:
        dataset: yields the batches.
        epoch: returns the current epoch. It is called when an iteration begins, because Lightning announces the epoch only
            to samplers, and a stream has no sampler.
        options: further options of ``DataLoader``.
    """

    dataset: StreamDataset

    def __init__(self, dataset: StreamDataset, epoch: Callable[[], int] | None = None, **options: Any):
        super().__init__(dataset, batch_size=None, **options)
        dataset.workers = max(1, self.num_workers)
        self._current_epoch = epoch

    def __iter__(self) -> Any:
        if self._current_epoch is not None:
            self.dataset.set_epoch(self._current_epoch())
        if self.num_workers:  # without workers the dataset announces it itself
            self.dataset.announce()
        return super().__iter__()
