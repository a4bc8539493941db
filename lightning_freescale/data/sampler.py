"""Which samples make a global batch, and which rank takes which of them: a function of (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_freescale.errors import ConfigurationError, InputError

Partition = Callable[[NDArray[np.int64], int], Sequence[NDArray[np.int64]]]


class LocalBatch(list[int]):
    """Sample indices of one local batch, and the epoch they are drawn in: it reaches worker processes with them."""

    def __init__(self, indices: Sequence[int], epoch: int = 0):
        super().__init__(indices)
        self.epoch = epoch


def deal(indices: NDArray[np.int64], world: int) -> list[NDArray[np.int64]]:
    """Deal a global batch to ``world`` ranks like cards: counts differ by at most one.

    >>> [part.tolist() for part in deal(np.array([7, 3, 5, 1, 9]), world=2)]
    [[7, 5, 9], [3, 1]]
    """
    return [indices[rank::world] for rank in range(world)]


def check_enough(samples: int, batch_size: int, ranks: int, drop_last: bool) -> None:
    """Every rank needs at least one batch, and every batch at least one sample."""
    if batch_size < 1:
        raise ConfigurationError(f"batch_size: must be at least 1, not {batch_size}")
    if samples < ranks:
        raise InputError(
            f"dataset: {samples} samples for {ranks} ranks; every rank needs at least one, so train on at most {samples} "
            "ranks or on more data"
        )
    if drop_last and samples < batch_size * ranks:
        raise InputError(
            f"dataset: {samples} samples do not fill one global batch of {batch_size} x {ranks} ranks, and drop_last would "
            "drop them all; lower batch_size or set drop_last=False"
        )


class GlobalBatchSampler(DistributedSampler):
    """Yields the index list of each local batch, for ``DataLoader(dataset, sampler=..., batch_size=None)``.

    Global batch ``g`` is a slice of a permutation that depends on ``(seed, epoch)`` alone; ``partition`` says which
    rank takes which of its samples. All ranks have the same number of batches, and every batch at least one sample. The
    last global batch may be short; if it has fewer samples than there are ranks, the epoch's first ones are repeated.

    Subclasses ``DistributedSampler`` because Lightning replaces every other sampler by one.

    Args:
        dataset: anything with a length, the number of samples ``N``.
        batch_size: samples per rank; a global batch has ``batch_size * num_replicas``.
        num_replicas: number of ranks.
        rank: this rank.
        shuffle: permute the samples anew each epoch.
        seed: equal on all ranks.
        drop_last: leave out a last global batch that is not full.
        partition: ``(indices [n], ranks)`` to the indices of each rank; must be equal on all ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        partition: Partition = deal,
    ):
        check_enough(len(dataset), batch_size, num_replicas, drop_last)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.batch_size, self.partition = batch_size, partition
        self._skip = 0

    def __len__(self) -> int:
        """Local batches per epoch, the same on every rank."""
        samples, global_size = len(self.dataset), self.batch_size * self.num_replicas  # type: ignore[arg-type]
        return samples // global_size if self.drop_last else -(-samples // global_size)

    def resume(self, batches: int) -> None:
        """Start the next iteration after that many batches of its epoch, without loading them. Applies once."""
        self._skip = batches

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return self._batches(skip)

    def _batches(self, skip: int) -> Iterator[LocalBatch]:
        # A generator: the epoch is read at the first next(), for Lightning calls set_epoch() after iter().
        epoch, order = self.epoch, self._order()
        for number in range(skip, len(self)):
            parts = self.partition(self._global_batch(order, number), self.num_replicas)
            yield LocalBatch(parts[self.rank].tolist(), epoch)

    def _order(self) -> NDArray[np.int64]:
        samples = len(self.dataset)  # type: ignore[arg-type]
        return (
            np.random.default_rng((self.seed, self.epoch)).permutation(samples) if self.shuffle else np.arange(samples)
        )

    def _global_batch(self, order: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        size = self.batch_size * self.num_replicas
        batch = order[number * size : (number + 1) * size]
        missing = max(0, self.num_replicas - len(batch))
        return np.concatenate([batch, order[:missing]])


class SequentialBatchSampler(GlobalBatchSampler, SequentialSampler):
    """Unshuffled global batches. Says so by its type, which is how Lightning's ``overfit_batches`` asks."""

    def __init__(self, dataset: Sized, batch_size: int, **options: Any):
        super().__init__(dataset, batch_size, shuffle=False, **options)
