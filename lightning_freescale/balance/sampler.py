"""``GlobalBatchSampler``: the sample indices of each local batch, balanced at the source.

Every rank computes all global batches and their partition by itself, so the ranks need no communication.
"""

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


def at_the_source(planner: Planner) -> str:
    """For the log: how batches are balanced."""
    return f"balance={planner.mode!r}: balanced at the source; every rank reads samples such that all ranks have equal work"


class BatchIndices(list[int]):
    """The sample indices of one local batch, and their epoch. This is how worker processes learn the epoch."""

    def __init__(self, indices: Sequence[int], epoch: int = 0):
        super().__init__(indices)
        self.epoch = epoch


def check_enough(samples: int, batch_size: int, ranks: int, drop_last: bool) -> None:
    """Raise unless there are enough samples: one batch for every rank, and one sample for every batch."""
    if batch_size < 1:
        raise ConfigurationError(f"batch_size: must be at least 1, not {batch_size}")
    if samples < ranks:
        raise InputError(
            f"dataset: {samples} samples for {ranks} ranks, but every rank needs at least one; use at most {samples} ranks "
            "or more data"
        )
    if drop_last and samples < batch_size * ranks:
        raise InputError(
            f"dataset: {samples} samples do not fill one global batch of {batch_size} x {ranks} ranks, and drop_last would "
            "drop them all; lower batch_size or set drop_last=False"
        )


class GlobalBatchSampler(DistributedSampler):
    """Yields the index list of each local batch, for ``DataLoader(dataset, sampler=..., batch_size=None)``.

    A global batch is a slice of a permutation of all samples, which depends only on ``seed`` and ``epoch``. The planner
    assigns its samples to ranks by cost. Without a planner, rank ``r`` gets every ``num_replicas``-th sample, starting
    at position ``r``. All ranks have the same number of batches, and every batch has at least one sample. The last global batch
    may be short. If it has fewer samples than there are ranks, the first samples of the epoch are repeated in it.

    The base class is ``DistributedSampler``, because Lightning replaces any other sampler by one.

    Args:
        dataset: any object whose length is the number of samples ``N``. With a planner it also needs ``lengths``, the
            ``[N]`` history lengths, and may have ``candidates``, the ``[N]`` candidate counts.
        batch_size: samples per rank; their mean if the planner makes the counts differ. A global batch has
            ``batch_size * num_replicas`` samples.
        num_replicas: number of ranks.
        rank: this rank.
        shuffle: permute the samples in each epoch.
        seed: equal on all ranks.
        drop_last: drop the last global batch if it is not full.
        planner: balances every global batch; equal on all ranks. :meth:`use` replaces it during an epoch.
        follows_strategy: the strategy of the training decides whether batches are balanced, and sets ``planner``.
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
        follows_strategy: bool = False,
    ):
        check_enough(len(dataset), batch_size, num_replicas, drop_last)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.batch_size, self.planner, self.follows_strategy = batch_size, planner, follows_strategy
        if planner is not None or follows_strategy:
            _ = self._lengths  # raises now if the dataset has none
        # Where in the epoch the current and the next iteration begin: after this many batches, and samples of all ranks.
        self._origin = self._next_origin = (0, 0)
        self.planned = 0  # batches of the epoch that are planned; loaders and their workers run ahead of the training
        self._next_planners: list[tuple[float, Planner]] = []  # later planners, and the first batch of each

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return _sizes(self.dataset, "lengths")  # type: ignore[arg-type]

    @cached_property
    def _candidates(self) -> NDArray[np.int64] | None:
        return _sizes(self.dataset, "candidates") if hasattr(self.dataset, "candidates") else None  # type: ignore[arg-type]

    @property
    def balanced(self) -> bool:
        """Whether the samples are assigned to ranks by cost."""
        return self.planner is not None

    def follow(self, planner: Planner | None) -> None:
        """Use the planner of the strategy, if this sampler follows it."""
        if self.follows_strategy:
            self.planner = planner
            self._next_planners.clear()

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.num_replicas

    def __len__(self) -> int:
        """Return the number of local batches per epoch, equal on all ranks."""
        return self._batches_of(len(self.dataset))  # type: ignore[arg-type]

    def _batches_of(self, samples: int) -> int:
        return samples // self.global_batch_size if self.drop_last else -(-samples // self.global_batch_size)

    def use(self, planner: Planner, first: float) -> None:
        """Use ``planner`` from batch ``first`` of this epoch on, or from the next epoch on if that comes earlier.

        All ranks must call this at the same step with the same arguments. They may have planned different numbers of
        batches by then, but none of them may have planned batch ``first``.
        """
        if first < self.planned:
            raise FreeScaleError(
                f"rank {self.rank}: a new planner cannot start at batch {first} of epoch {self.epoch}, because batch "
                f"{self.planned - 1} is planned already; the loader of this rank runs further ahead than before"
            )
        self._next_planners.append((first, planner))

    def _switch_planner(self, number: float) -> None:
        """Switch to the planner for batch ``number``."""
        while self._next_planners and self._next_planners[0][0] <= number:
            self.planner = self._next_planners.pop(0)[1]

    def position(self, batches: int) -> int:
        """Return the number of samples of all ranks in the first ``batches`` batches of this epoch, for :meth:`resume`."""
        done, samples = self._origin
        return samples + (batches - done) * self.global_batch_size

    def resume(self, batches: int, position: int | None = None) -> int:
        """Start the next iteration after ``batches`` batches of its epoch, without loading them. It applies once.

        Args:
            batches: number of batches to skip.
            position: the :meth:`position` of an earlier run, which may have had another number of ranks or another batch
                size. The epoch continues right after it, so that no sample is repeated or lost.

        Returns:
            The number of batches that count as done here. Together with the remaining batches they make ``len(self)``.
        """
        samples = batches * self.global_batch_size if position is None else position
        remaining = self._batches_of(max(0, len(self.dataset) - samples))  # type: ignore[arg-type]
        self._next_origin = (len(self) - remaining, samples)
        return self._next_origin[0]

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

    def _batches(self) -> Iterator[BatchIndices]:
        # This is a generator, so it reads the epoch and the origin at the first next(). Lightning calls set_epoch() after iter(),
        # and a DataLoader with workers calls iter() twice and uses the second iterator only.
        done, samples = self._origin = self._next_origin
        self._next_origin, self.planned = (0, 0), done
        epoch, order = self.epoch, self._order()
        self._switch_planner(math.inf)
        for number in range(done, len(self)):
            self._switch_planner(number)
            self.planned = number + 1
            batch = self._global_batch(order, samples + (number - done) * self.global_batch_size)
            yield BatchIndices(self._own_samples(batch).tolist(), epoch)

    def _order(self) -> NDArray[np.int64]:
        samples = len(self.dataset)  # type: ignore[arg-type]
        return (
            np.random.default_rng((self.seed, self.epoch)).permutation(samples) if self.shuffle else np.arange(samples)
        )

    def _global_batch(self, order: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        batch = order[start : start + self.global_batch_size]
        missing = max(0, self.num_replicas - len(batch))
        return np.concatenate([batch, order[:missing]])

    def _own_samples(self, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples of this rank in a global batch ``[n]``, in their order there."""
        if self.planner is None or self.num_replicas == 1:
            return batch[self.rank :: self.num_replicas]
        candidates = None if self._candidates is None else self._candidates[batch]
        return batch[self.planner(self._lengths[batch], candidates, world=self.num_replicas) == self.rank]


def _sizes(dataset: Sized, name: str) -> NDArray[np.int64]:
    values = getattr(dataset, name, None)
    if values is None or np.shape(values) != (len(dataset),):
        raise ConfigurationError(
            f"dataset.{name}: {'missing' if values is None else f'shape {np.shape(values)}'}; balancing by cost needs one "
            f"number for each of {len(dataset)} samples; add them, or set balance='off'"
        )
    return np.asarray(values)


class SequentialBatchSampler(GlobalBatchSampler, SequentialSampler):
    """Global batches in the order of the dataset. Lightning's ``overfit_batches`` looks for the type ``SequentialSampler``."""

    def __init__(self, dataset: Sized, batch_size: int, **options: Any):
        super().__init__(dataset, batch_size, shuffle=False, **options)
