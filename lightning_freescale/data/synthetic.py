"""Synthetic histories: long-tailed lengths, Zipf items, and a rule that only a sequence model can learn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.data.histories import CHUNK, Histories, user_chunks
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.jagged import lengths_to_offsets


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Options of the synthetic source.

    Items are split into clusters, and each user likes one. Every item has one preferred successor in its cluster; the
    next event is that successor with probability ``follow``, else a fresh Zipf draw from the user's cluster.

    Attributes:
        users: number of users.
        items: number of items; item ``i`` has popularity rank ``i`` and belongs to cluster ``i % clusters``.
        clusters: number of taste clusters.
        mean_length: mean number of events of a user, before the cap.
        sigma: spread of the log-normal lengths; 1.0 and more give the long tail that makes stragglers.
        min_length: no user has fewer events.
        max_length: no user has more events.
        follow: probability that an event is the preferred successor of the one before.
        zipf: exponent of the items' popularity.
        feature_sizes: categorical features of the events, by name, with their number of values; drawn independently.
        mean_gap: mean time between two events, seconds.
        seed: equal options and seed give equal data.
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
            raise ConfigurationError(f"synthetic: {self.clusters} clusters for {self.items} items")
        if not 1 <= self.min_length <= self.max_length:
            raise ConfigurationError(f"synthetic: min_length {self.min_length}, max_length {self.max_length}")
        if not 0 <= self.follow <= 1:
            raise ConfigurationError(f"synthetic: follow is a probability, not {self.follow}")
        if self.sigma < 0:
            raise ConfigurationError(f"synthetic: sigma must be at least 0, not {self.sigma}")

    def rule(self) -> PlantedRule:
        """The rule behind the data; what a perfect model would know."""
        return PlantedRule(self)

    def generate(self) -> Histories:
        """Draw the histories. Vectorised over events; memory is that of the result and a chunk."""
        rule = self.rule()
        rng = np.random.default_rng((self.seed, 1))
        location = np.log(self.mean_length) - self.sigma**2 / 2  # so that the mean is mean_length
        lengths = (
            rng.lognormal(location, self.sigma, self.users).clip(self.min_length, self.max_length).astype(np.int64)
        )
        offsets = lengths_to_offsets(lengths)
        tastes = rng.choice(self.clusters, self.users, p=rule.cluster_mass)
        items, times = (np.empty(offsets[-1], dtype=np.int64) for _ in range(2))
        for first, last in user_chunks(offsets, CHUNK):
            events = slice(offsets[first], offsets[last])
            items[events] = self._items(rule, tastes[first:last], lengths[first:last], rng)
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
        self, rule: PlantedRule, tastes: NDArray[np.int64], lengths: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        total = int(lengths.sum())
        fresh = rng.random(total) >= self.follow
        fresh[lengths_to_offsets(lengths)[:-1]] = True  # a first event has nothing to follow
        position = np.arange(total)
        anchor = np.maximum.accumulate(np.where(fresh, position, 0))  # the fresh draw each event descends from
        drawn = np.empty(total, dtype=np.int64)
        drawn[fresh] = rule.draw(np.repeat(tastes, lengths)[fresh], rng)
        return rule.follow(drawn[anchor], position - anchor)

    def _times(self, lengths: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        gaps = rng.exponential(self.mean_gap, int(lengths.sum())).astype(np.int64)
        heads = lengths_to_offsets(lengths)[:-1]
        year = 365 * 24 * 3600
        gaps[heads] = 1_700_000_000 + rng.integers(year, size=len(lengths))
        elapsed = np.cumsum(gaps)
        return elapsed - np.repeat(elapsed[heads] - gaps[heads], lengths)


class PlantedRule:
    """Successors form one cycle per cluster, so that following ``k`` times is one addition on the cycle.

    Attributes:
        popularity: ``[items]``, probability of each item in a fresh draw.
        cluster_mass: ``[clusters]``, share of users, and of fresh draws, of each cluster.
        successor: ``[items]``, the preferred next item of each.
    """

    def __init__(self, options: Synthetic):
        self.clusters = options.clusters
        self.popularity = np.arange(1, options.items + 1, dtype=np.float64) ** -options.zipf
        self.popularity /= self.popularity.sum()
        cluster = np.arange(options.items) % self.clusters
        self.cluster_mass = np.bincount(cluster, self.popularity)
        self._start = np.searchsorted(np.sort(cluster), np.arange(self.clusters))
        self._size = np.bincount(cluster)
        # Members of each cluster side by side: by popularity for the draws, in random order for the cycles.
        self._by_rank = np.argsort(cluster, kind="stable")
        rng = np.random.default_rng((options.seed, 0))
        self._cycle = np.lexsort((rng.random(options.items), cluster))
        self._place = np.argsort(self._cycle)
        self._edges = np.cumsum(self.popularity[self._by_rank])
        self.successor = self.follow(np.arange(options.items), np.ones(options.items, dtype=np.int64))

    def follow(self, items: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[n]`` items to the items ``steps [n]`` successors later."""
        cluster = items % self.clusters
        start, size = self._start[cluster], self._size[cluster]
        return self._cycle[start + (self._place[items] - start + steps) % size]

    def draw(self, tastes: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """``[n]`` clusters to ``[n]`` items of them, in proportion to the items' popularity."""
        floor = (self._edges - self.popularity[self._by_rank])[self._start]
        edge = floor[tastes] + rng.random(len(tastes)) * self.cluster_mass[tastes]
        at = np.searchsorted(self._edges, edge, side="right")
        return self._by_rank[at.clip(self._start[tastes], self._start[tastes] + self._size[tastes] - 1)]
