"""``Synthetic``: generated histories with long-tailed lengths, Zipf items, and a rule that only a sequence model can learn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.data.histories import CHUNK_EVENTS, Histories, user_chunks
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.jagged import lengths_to_offsets


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Options of the generated histories.

    The items are divided into clusters, and each user has items of one cluster only. Every item has one preferred successor
    in its cluster. The next event is that successor with probability ``follow``, else a Zipf draw from the cluster.

    Attributes:
        users: number of users.
        items: number of items. Item ``i`` has popularity rank ``i`` and belongs to cluster ``i % clusters``.
        clusters: number of clusters.
        mean_length: mean number of events of a user, before lengths are limited.
        sigma: spread of the log-normal lengths. From about 1.0 on, the lengths have a long tail, which makes stragglers.
        min_length: smallest number of events of a user.
        max_length: largest number of events of a user.
        follow: probability that an event is the preferred successor of the previous one.
        zipf: exponent of the popularity of the items.
        feature_sizes: number of values of each categorical feature of the events, by name. Values are independent.
        mean_gap: mean time between two events, in seconds.
        seed: equal options and an equal seed give equal data.
    """

    users: int = 2000
    items: int = 1000
    clusters: int = 20
    mean_length: float = 50.0
    sigma: float = 1.0
    min_length: int = 3
    max_length: int = 21_000
    follow: float = 0.7
    zipf: float = 0.8
    feature_sizes: dict[str, int] = field(default_factory=dict)
    mean_gap: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive = {name: getattr(self, name) for name in ("users", "items", "clusters", "mean_length", "mean_gap")}
        for name, value in {**positive, **self.feature_sizes}.items():
            if value <= 0:
                raise ConfigurationError(f"synthetic: {name} must be positive, not {value}")
        if self.clusters > self.items:
            raise ConfigurationError(
                f"synthetic: {self.clusters} clusters need at least as many items, not {self.items}"
            )
        if not 1 <= self.min_length <= self.max_length:
            raise ConfigurationError(
                f"synthetic: needs 1 <= min_length <= max_length, not {self.min_length} and {self.max_length}"
            )
        if not 0 <= self.follow <= 1:
            raise ConfigurationError(f"synthetic: follow must be a probability from 0 to 1, not {self.follow}")
        if self.sigma < 0:
            raise ConfigurationError(f"synthetic: sigma must be at least 0, not {self.sigma}")

    def rule(self) -> PlantedRule:
        """Return the rule behind the data, which a perfect model would learn."""
        return PlantedRule(self)

    def generate(self) -> Histories:
        """Generate the histories. Memory holds the result and one chunk of events."""
        rule = self.rule()
        rng = np.random.default_rng((self.seed, 1))
        location = np.log(self.mean_length) - self.sigma**2 / 2  # makes the mean equal to mean_length
        lengths = (
            rng.lognormal(location, self.sigma, self.users).clip(self.min_length, self.max_length).astype(np.int64)
        )
        offsets = lengths_to_offsets(lengths)
        cluster_of_user = rng.choice(self.clusters, self.users, p=rule.cluster_mass)
        items, times = (np.empty(offsets[-1], dtype=np.int64) for _ in range(2))
        for first, last in user_chunks(offsets, CHUNK_EVENTS):
            events = slice(offsets[first], offsets[last])
            items[events] = self._items(rule, cluster_of_user[first:last], lengths[first:last], rng)
            times[events] = self._times(lengths[first:last], rng)
        return Histories(
            items=items,
            timestamps=times,
            offsets=offsets,
            item_ids=np.arange(self.items),
            user_ids=np.arange(self.users),
            features={name: rng.integers(size, size=len(items)) for name, size in self.feature_sizes.items()},
            feature_values={name: np.arange(size) for name, size in self.feature_sizes.items()},
        )

    def _items(
        self, rule: PlantedRule, clusters: NDArray[np.int64], lengths: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return the items of users with these clusters and lengths, ``[sum(lengths)]``."""
        total = int(lengths.sum())
        is_draw = rng.random(total) >= self.follow
        is_draw[lengths_to_offsets(lengths)[:-1]] = True  # the first event of a user has no predecessor
        position = np.arange(total)
        anchor = np.maximum.accumulate(np.where(is_draw, position, 0))  # the last draw at or before each event
        drawn = np.empty(total, dtype=np.int64)
        drawn[is_draw] = rule.draw(np.repeat(clusters, lengths)[is_draw], rng)
        return rule.follow(drawn[anchor], position - anchor)

    def _times(self, lengths: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the time of each event in seconds, ``[sum(lengths)]``. Each user starts at a random time of one year."""
        gaps = rng.exponential(self.mean_gap, int(lengths.sum())).astype(np.int64)
        heads = lengths_to_offsets(lengths)[:-1]
        year = 365 * 24 * 3600
        gaps[heads] = 1_700_000_000 + rng.integers(year, size=len(lengths))
        elapsed = np.cumsum(gaps)
        return elapsed - np.repeat(elapsed[heads] - gaps[heads], lengths)


class PlantedRule:
    """The preferred successor of each item. The items of a cluster form a cycle, so ``k`` successors are one addition.

    Attributes:
        popularity: ``[items]``, probability of each item in a draw over all clusters.
        cluster_mass: ``[clusters]``, the sum of the popularity of its items. It is also the share of its users.
        successor: ``[items]``, the preferred successor of each item.
    """

    def __init__(self, options: Synthetic):
        self.clusters = options.clusters
        self.popularity = np.arange(1, options.items + 1, dtype=np.float64) ** -options.zipf
        self.popularity /= self.popularity.sum()
        cluster = np.arange(options.items) % self.clusters
        self.cluster_mass = np.bincount(cluster, self.popularity)
        self._start = np.searchsorted(np.sort(cluster), np.arange(self.clusters))
        self._size = np.bincount(cluster)
        # Both arrays list the items cluster by cluster: by popularity for draws, in random order for cycles.
        self._by_rank = np.argsort(cluster, kind="stable")
        rng = np.random.default_rng((options.seed, 0))
        self._cycle = np.lexsort((rng.random(options.items), cluster))
        self._place = np.argsort(self._cycle)
        self._edges = np.cumsum(self.popularity[self._by_rank])
        self.successor = self.follow(np.arange(options.items), np.ones(options.items, dtype=np.int64))

    def follow(self, items: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the items that come ``steps [n]`` successors after ``items [n]``."""
        cluster = items % self.clusters
        start, size = self._start[cluster], self._size[cluster]
        return self._cycle[start + (self._place[items] - start + steps) % size]

    def draw(self, clusters: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Return an item of each of the ``clusters [n]``, drawn in proportion to the popularity of the items."""
        floor = (self._edges - self.popularity[self._by_rank])[self._start]
        edge = floor[clusters] + rng.random(len(clusters)) * self.cluster_mass[clusters]
        at = np.searchsorted(self._edges, edge, side="right")
        return self._by_rank[at.clip(self._start[clusters], self._start[clusters] + self._size[clusters] - 1)]
