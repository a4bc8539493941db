"""The segments of a streamed epoch: workers continue the order of the batches. ``test_stream.py`` tests whole epochs."""

from __future__ import annotations

import doctest

from lightning_freescale.data import epoch_segments
from lightning_freescale.data.epoch_segments import worker_batches


def test_the_order_of_batches_does_not_depend_on_where_the_epoch_resumes() -> None:
    for total in range(12):
        for workers in range(1, 5):
            whole = _interleaved(total, 0, workers)
            assert sorted(whole) == list(range(total))
            for skip in range(total + 1):
                assert _interleaved(total, skip, workers) == whole[skip:]


def _interleaved(total: int, skip: int, workers: int) -> list[int]:
    """Return what a DataLoader yields that takes batches from its workers in turn."""
    queues = [list(worker_batches(total, skip, worker, workers)) for worker in range(workers)]
    order = []
    while any(queues):
        for queue in queues:
            order += [queue.pop(0)] if queue else []
    return order


def test_the_examples_in_the_docstrings_are_correct() -> None:
    assert doctest.testmod(epoch_segments).failed == 0
    assert doctest.testmod(epoch_segments).attempted == 4
