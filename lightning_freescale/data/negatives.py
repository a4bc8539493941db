"""Sampled negatives as a pure function of seed, epoch and user, so they do not depend on the rank, batch or worker."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import ConfigurationError

Distribution = Literal["uniform", "popularity"]
POSITIONS_PER_SET = 32  # a history with fewer positions has one set of negatives
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the output function of SplitMix64, a bijection in which every input bit affects all output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(seed: int, epoch: int, users: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """Return ``[n, count]`` uniform 64-bit numbers for the users ``[n]``. The generator is counter-based, without state."""
    return jagged_random_bits(seed, epoch, users, np.full(len(users), count)).reshape(len(users), count)


def jagged_random_bits(
    seed: int, epoch: int, users: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return ``counts[i]`` uniform 64-bit numbers for each user ``users[i]``, one user after the other."""
    stream = _mix(_key(seed, epoch) + users.astype(np.uint64) * _GOLDEN)
    # The methods of an array take less time than the functions of NumPy with the same names.
    counters = np.arange(1, counts.sum() + 1) - (counts.cumsum() - counts).repeat(counts)
    return _mix(stream.repeat(counts) + counters.astype(np.uint64) * _GOLDEN)


@lru_cache(maxsize=8)
def _key(seed: int, epoch: int) -> NDArray[np.uint64]:
    """``[1]``, the part of the random numbers that all users of an epoch share."""
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, epoch):
        key = _mix(key + _GOLDEN + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    key.flags.writeable = False
    return key


class NegativeSampler:
    """Draws items with replacement, in sets of ``K``. Each position of a history is scored against one set of its sample.

    A set that many positions share is a worse estimate of the softmax over all items than a set for each position. But each
    negative is a row that travels between the ranks. So a history has one set for every 32 positions, and at most ``sets``.

    Args:
        num_items: items have the numbers 0 to ``num_items - 1``.
        count: negatives of a set, ``K``.
        distribution: ``"uniform"``, or ``"popularity"``, which is proportional to ``item_counts``.
        item_counts: ``[num_items]``, for ``"popularity"`` only.
        seed: the seed of the training, equal on all ranks.
        sets: the largest number of sets of a sample.
    """

    def __init__(
        self,
        num_items: int,
        count: int,
        distribution: Distribution = "uniform",
        item_counts: NDArray[np.int64] | None = None,
        seed: int = 0,
        sets: int = 1,
    ):
        if sets < 1:
            raise ConfigurationError(f"negative_sets: must be at least 1, not {sets}")
        if count < 0:
            raise ConfigurationError(f"num_negatives: must be at least 0, not {count}")
        if distribution not in ("uniform", "popularity"):
            raise ConfigurationError(f"negatives: {distribution!r} is unknown; choose 'uniform' or 'popularity'")
        self.num_items, self.count, self.distribution = num_items, count, distribution
        self.seed, self.sets = seed, sets
        self._edges: NDArray[np.float64] | None = None
        if distribution == "popularity":
            if item_counts is None or not item_counts.any():
                raise ConfigurationError(
                    "negatives: 'popularity' needs item_counts, not all of them 0; or choose 'uniform'"
                )
            mass = np.cumsum(item_counts, dtype=np.float64)
            self._edges = mass / mass[-1]

    def counts(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many negatives histories of these lengths ``[n]`` have: a multiple of ``K``, ``[n]``."""
        return self.count * (-(-(lengths - 1) // POSITIONS_PER_SET)).clip(1, self.sets)

    def draw(self, users: NDArray[np.int64], epoch: int, counts: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the negatives of the users ``[n]`` in this epoch.

        Args:
            users: their numbers, ``[n]``.
            epoch: number of the epoch.
            counts: negatives of each user, ``[n]``.

        Returns:
            ``[sum(counts)]`` int64, one user after the other; without ``counts`` one set for each user, ``[n, K]``.
        """
        if counts is None:
            return self.draw(users, epoch, np.full(len(users), self.count)).reshape(len(users), self.count)
        bits = jagged_random_bits(self.seed, epoch, users, counts)
        uniform = (bits >> np.uint64(11)) * 2.0**-53  # in [0, 1), all 53 bits of a double
        if self._edges is not None:
            return np.searchsorted(self._edges, uniform, side="right").astype(np.int64)
        return (uniform * self.num_items).astype(np.int64)
