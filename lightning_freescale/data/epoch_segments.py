"""Which samples of a streamed epoch are left after an interruption.

All samples of an epoch have an order. Each rank gets a contiguous range of it, and each worker of a rank gets a contiguous
range of the rank's batches. A training that is interrupted may continue with other numbers of ranks and workers, so an epoch
may consist of several segments. Each segment divides the samples that the earlier ones have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_SEGMENTS = 16  # of one epoch


class EpochSegment(NamedTuple):
    """A part of an epoch that was trained with one number of ranks, workers and samples per batch.

    Attributes:
        ranks: number of ranks.
        workers: number of workers of each rank.
        batch_size: samples per rank and batch.
        batches: batches that each rank trained.
    """

    ranks: int
    workers: int
    batch_size: int
    batches: int


class EpochStart(NamedTuple):
    """Where in an epoch an iteration begins.

    Attributes:
        segments: earlier segments with other numbers of ranks, workers or samples per batch.
        skip: batches of the current segment that are trained already.
    """

    segments: tuple[EpochSegment, ...] = ()
    skip: int = 0


def samples_per_rank(samples: int, ranks: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of samples that each rank trains, if all ranks together have ``samples``."""
    return samples // (ranks * batch_size) * batch_size if drop_last else -(-samples // ranks)


def worker_batches(total: int, skip: int, worker: int, workers: int) -> range:
    """Return the batches that a worker makes, so that the order of all batches does not depend on ``skip``.

    The loader takes batches from its workers in turn. Each worker has a contiguous range of batches, so that it reads
    contiguous rows. After ``skip`` batches the loader starts again with worker 0. That worker therefore continues the range
    of the worker whose turn it is.

    Args:
        total: batches of this rank.
        skip: batches that are trained already.
        worker: number of the worker.
        workers: number of workers of this rank.

    >>> [list(worker_batches(5, 0, worker, workers=2)) for worker in range(2)]
    [[0, 1, 2], [3, 4]]
    >>> [list(worker_batches(5, 3, worker, workers=2)) for worker in range(2)]
    [[4], [2]]
    """
    return _remaining_batches(total, skip, (worker + skip) % workers, workers)


def untrained_ranges(samples: int, segments: Sequence[EpochSegment], drop_last: bool = False) -> list[range]:
    """Return the samples that are left after ``segments``, as ranges of positions in the order of the epoch.

    >>> untrained_ranges(10, [EpochSegment(ranks=2, workers=1, batch_size=2, batches=1)])
    [range(2, 5), range(7, 10)]
    >>> untrained_ranges(10, [EpochSegment(ranks=1, workers=2, batch_size=2, batches=3)])
    [range(4, 6), range(8, 10)]
    """
    left = [range(samples)]
    for ranks, workers, batch_size, batches in segments:
        count = sum(map(len, left))
        total = -(-samples_per_rank(count, ranks, batch_size, drop_last) // batch_size)
        untouched = range(total, count)  # with drop_last, samples after the last batch of a rank
        still_left: list[range] = []
        for rank in range(ranks):
            first, stop = count * rank // ranks, count * (rank + 1) // ranks
            for own in (*(_remaining_batches(total, batches, share, workers) for share in range(workers)), untouched):
                begin, end = (min(first + batch * batch_size, stop) for batch in (own.start, own.stop))
                still_left += _slice_ranges(left, begin, end)
        left = still_left
    return left


def _remaining_batches(total: int, done: int, share: int, workers: int) -> range:
    """Return the batches of contiguous range ``share`` that are left, after the loader took ``done`` from all in turn."""
    first = sum(len(range(other, total, workers)) for other in range(share))
    return range(first + len(range(share, min(done, total), workers)), first + len(range(share, total, workers)))


def _slice_ranges(ranges: Sequence[range], first: int, stop: int) -> list[range]:
    """Return the elements ``first`` to ``stop`` of the concatenation of ``ranges``."""
    parts, at = [], 0
    for whole in ranges:
        part = whole[max(0, first - at) : max(0, stop - at)]
        parts += [part] if len(part) else []
        at += len(whole)
    return parts
