"""Batches whose ids follow a power law, as those of a real catalogue do. Pure functions of a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness.workload import EqualCostWorkload, seeded_generator

PRIME = 2_654_435_761  # larger than any table here, so it has no divisor in common with the number of rows


@dataclass(frozen=True)
class PowerLawWorkload(EqualCostWorkload):
    """The lengths of :class:`EqualCostWorkload`. An id of popularity ``r`` is drawn with probability ~ ``(r + 1) ** -skew``."""

    skew: float = 0.8

    def ids(self, rank: int, step: int, ranks: int, collisions: float) -> Tensor:
        """``[ids_per_rank]`` int64 ids. Their collisions follow from ``skew``, and ``collisions`` is not used."""
        drawn = torch.rand(self.ids_per_rank, generator=seeded_generator(self.seed, rank, step, 1), dtype=torch.float64)
        popularity = (self.rows * drawn ** (1 / (1 - self.skew))).long().clamp(max=self.rows - 1)
        return self.id_of(popularity)

    def id_of(self, popularity: Tensor) -> Tensor:
        """The id of each popularity, from 0 for the most popular one. Popular ids are spread over the whole table."""
        return popularity * PRIME % self.rows
