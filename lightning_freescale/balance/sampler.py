"""Which samples make a global batch, and which rank takes which of them: the same on all ranks, nothing is exchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_freescale.balance.planner import Planner
from lightning_freescale.runtime.errors import ConfigurationError, FreeScaleError, InputError


class LocalBatch(list[int]):
    """Sample indices of one local batch, and the epoch they are drawn in: it reaches worker processes with them."""

    def __init__(self, indices: Sequence[int], epoch: int = 0):
        super().__init__(indices)
        self.epoch = epoch


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

    Global batch ``g`` is a slice of a permutation that depends on ``(seed, epoch)`` alone. Its samples are dealt to the
    ranks like cards or, with a planner, by their cost: every rank computes the same plan and reads its own samples. All
    ranks have the same number of batches, and every batch at least one sample. The last global batch may be short; if it
    has fewer samples than there are ranks, the epoch's first ones are repeated.

    Subclasses ``DistributedSampler`` because Lightning replaces every other sampler by one.

    Args:
        dataset: anything with a length, the number of samples ``N``. A planner also needs its ``lengths``, ``[N]`` events
            of each history, and takes its ``candidates``, ``[N]`` candidates of each sample, if it has them.
        batch_size: samples per rank, or their mean if the planner makes counts differ; a global batch has
            ``batch_size * num_replicas``.
        num_replicas: number of ranks.
        rank: this rank.
        shuffle: permute the samples anew each epoch.
        seed: equal on all ranks.
        drop_last: leave out a last global batch that is not full.
        planner: balances every global batch; equal on all ranks. A new one comes by :meth:`use`.
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
        planner: Planner | None = None,
    ):
        check_enough(len(dataset), batch_size, num_replicas, drop_last)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.batch_size, self.planner = batch_size, planner
        if planner is not None:
            _ = self._lengths  # say now if there are none
        self._origin = self._next_origin = (0, 0)  # batches and global samples of the epoch before its first batch here
        self.drawn = 0  # batches of the epoch that are planned: loaders and their workers ask ahead of the training
        self._coming: list[tuple[float, Planner]] = []  # planners to come, and the batch of the epoch each begins with

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return _sizes(self.dataset, "lengths")  # type: ignore[arg-type]

    @cached_property
    def _candidates(self) -> NDArray[np.int64] | None:
        return _sizes(self.dataset, "candidates") if hasattr(self.dataset, "candidates") else None  # type: ignore[arg-type]

    @property
    def balanced(self) -> bool:
        """Whether local batches are equal in cost."""
        return self.planner is not None

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.num_replicas

    def __len__(self) -> int:
        """Local batches per epoch, the same on every rank."""
        return self._batches_of(len(self.dataset))  # type: ignore[arg-type]

    def _batches_of(self, samples: int) -> int:
        return samples // self.global_batch_size if self.drop_last else -(-samples // self.global_batch_size)

    def use(self, planner: Planner, first: float) -> None:
        """Plan with ``planner`` from batch ``first`` of this epoch on, or from the next epoch on if that comes earlier.

        Call it at the same step on all ranks, with the same arguments: they may have planned different numbers of batches
        by then, but none of them ``first``.
        """
        if first < self.drawn:
            raise FreeScaleError(
                f"rank {self.rank}: batch {self.drawn - 1} of epoch {self.epoch} is planned already, and the ranks were to "
                f"plan anew from batch {first} on: its loader runs further ahead than it did"
            )
        self._coming.append((first, planner))

    def _turn_to(self, number: float) -> None:
        """Put the planner into force that batch ``number`` is planned with."""
        while self._coming and self._coming[0][0] <= number:
            self.planner = self._coming.pop(0)[1]

    def position(self, batches: int) -> int:
        """Samples, over all ranks, in the first ``batches`` batches of this epoch: what :meth:`resume` takes."""
        done, samples = self._origin
        return samples + (batches - done) * self.global_batch_size

    def resume(self, batches: int, position: int | None = None) -> int:
        """Start the next iteration after ``batches`` batches of its epoch, without loading them. Applies once.

        With ``position``, from a run on any number of ranks and of any batch size, the epoch goes on right after those
        samples: none is repeated or lost.

        Returns:
            The number of batches that count as done here; with those to come they make ``len(self)``.
        """
        samples = batches * self.global_batch_size if position is None else position
        to_come = self._batches_of(max(0, len(self.dataset) - samples))  # type: ignore[arg-type]
        self._next_origin = (len(self) - to_come, samples)
        return self._next_origin[0]

    def __iter__(self) -> Iterator[Any]:
        self._origin, self._next_origin = self._next_origin, (0, 0)
        self.drawn = self._origin[0]
        return self._batches(*self._origin)

    def _batches(self, done: int, samples: int) -> Iterator[LocalBatch]:
        # A generator: the epoch is read at the first next(), for Lightning calls set_epoch() after iter().
        epoch, order = self.epoch, self._order()
        self._turn_to(math.inf)
        for number in range(done, len(self)):
            self._turn_to(number)
            self.drawn = number + 1
            batch = self._global_batch(order, samples + (number - done) * self.global_batch_size)
            yield LocalBatch(self._own(batch).tolist(), epoch)

    def _order(self) -> NDArray[np.int64]:
        samples = len(self.dataset)  # type: ignore[arg-type]
        return (
            np.random.default_rng((self.seed, self.epoch)).permutation(samples) if self.shuffle else np.arange(samples)
        )

    def _global_batch(self, order: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        batch = order[start : start + self.global_batch_size]
        missing = max(0, self.num_replicas - len(batch))
        return np.concatenate([batch, order[:missing]])

    def _own(self, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples of this rank among those of a global batch, ``[n]``, in their order there."""
        if self.planner is None or self.num_replicas == 1:
            return batch[self.rank :: self.num_replicas]
        candidates = None if self._candidates is None else self._candidates[batch]
        return batch[self.planner(self._lengths[batch], candidates, world=self.num_replicas) == self.rank]


def _sizes(dataset: Sized, name: str) -> NDArray[np.int64]:
    values = getattr(dataset, name, None)
    if values is None or np.shape(values) != (len(dataset),):
        raise ConfigurationError(
            f"dataset.{name}: {'missing' if values is None else f'shape {np.shape(values)}'}; balancing by cost needs one "
            f"number for each of {len(dataset)} samples (or set balance='off')"
        )
    return np.asarray(values)


class SequentialBatchSampler(GlobalBatchSampler, SequentialSampler):
    """Unshuffled global batches. Says so by its type, which is how Lightning's ``overfit_batches`` asks."""

    def __init__(self, dataset: Sized, batch_size: int, **options: Any):
        super().__init__(dataset, batch_size, shuffle=False, **options)
