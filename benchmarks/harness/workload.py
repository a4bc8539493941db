"""What the exchange benchmarks train on: histories of known lengths whose rows collide at a known rate. Pure and seeded.

The rows of the table fall into three classes by ``row % 3``. Class 0 holds the hot rows, few and evenly spread over the table,
each asked for by every batch. The other ids of a batch are uniform over class 1 in even steps and over class 2 in odd ones, so
consecutive batches share no row but hot ones: the collision rate is the share of hot ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch

FEATURE = "item"
# How often a global batch asks for each hot row on average. Exp(-8) of the hot rows are missed: 0.03 %.
HOT_REPEATS = 8


@dataclass
class Batch(Pipelineable):
    """The histories of one rank and step, as TorchRec's pipelines want them."""

    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)  # type: ignore[arg-type]

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory())


@dataclass(frozen=True)
class Workload:
    """Histories of log-normal lengths, looked up in one row-wise table.

    Every rank and step has the same lengths in an order of its own: all steps cost the same on all ranks, so that a benchmark
    of the exchange does not measure imbalance.

    Args:
        histories: samples a rank and step.
        log_mean, log_std: of the lengths' logarithm.
        longest: cap of the lengths, in events.
        rows, dim: shape of the table (float32).
    """

    histories: int
    log_mean: float
    log_std: float
    longest: int
    rows: int
    dim: int
    seed: int = 0

    def lengths(self, rank: int, step: int) -> Tensor:
        """``[histories]`` int64, events."""
        drawn = torch.randn(self.histories, generator=_generator(self.seed)) * self.log_std + self.log_mean
        lengths = drawn.exp().long().clamp(1, self.longest)
        return lengths[torch.randperm(self.histories, generator=_generator(self.seed, rank, step))]

    @property
    def ids_per_rank(self) -> int:
        return int(self.lengths(0, 0).sum())

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of one rank's batch."""
        return self.ids_per_rank * self.dim * 4

    def ids(self, rank: int, step: int, ranks: int, collisions: float) -> Tensor:
        """``[ids_per_rank]`` int64 rows; a share ``collisions`` of them is hot."""
        count = self.ids_per_rank
        hot = round(collisions * count)
        hot_rows = max(1, round(hot * ranks / HOT_REPEATS))
        return draw_ids(count, hot, hot_rows, self.rows, step, _generator(self.seed, rank, step, 1))

    def batch(self, rank: int, step: int, ranks: int, collisions: float) -> Batch:
        ids, lengths = self.ids(rank, step, ranks, collisions), self.lengths(rank, step)
        return Batch(KeyedJaggedTensor([FEATURE], ids, lengths=lengths.to(torch.int32)))


@dataclass(frozen=True)
class LongTail:
    """Training batches of log-normal histories drawn freely, so that ranks and steps have unequal work, as real data have.

    The median is a fixed share of the longest: the same shape of tail, whatever the longest.

    Args:
        samples: a rank and step.
        longest: cap of the lengths, in events.
        rows: of the table.
        negatives: sampled negatives of each sample; drawn as the histories' ids are.
        collisions: share of the ids of a batch whose row the batch before asks for, too.
        log_std: of the lengths' logarithm; 0 makes them all equal.
    """

    samples: int
    longest: int
    rows: int
    negatives: int = 32
    collisions: float = 0.12
    log_std: float = 1.2
    seed: int = 0

    def lengths(self, rank: int, step: int) -> Tensor:
        """``[samples]`` int64, events."""
        if not self.log_std:
            return torch.full((self.samples,), self.longest)
        log_median = 7.3 + math.log(self.longest / 21_000)
        drawn = torch.randn(self.samples, generator=_generator(self.seed, rank, step)) * self.log_std + log_median
        return drawn.exp().long().clamp(2, self.longest)

    def predicted(self, rank: int, step: int) -> int:
        """Positions that predict an item: the weight of this rank's mean loss."""
        return int((self.lengths(rank, step) - 1).sum())

    def ids(self, rank: int, step: int, ranks: int) -> Tensor:
        """Rows that the batch asks for: of all events, then of all negatives."""
        count = int(self.lengths(rank, step).sum()) + self.samples * self.negatives
        typical = int(self.lengths(0, 0).sum()) + self.samples * self.negatives  # hot rows are the same in every batch
        hot_rows = max(1, round(self.collisions * typical * ranks / HOT_REPEATS))
        generator = _generator(self.seed, rank, step, 1)
        return draw_ids(count, round(self.collisions * count), hot_rows, self.rows, step, generator)

    def batch(self, rank: int, step: int, ranks: int) -> SeqBatch:
        """One event an hour in every history."""
        lengths = self.lengths(rank, step)
        counts = torch.cat([lengths, torch.full_like(lengths, self.negatives)])
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        hours = torch.arange(int(lengths.sum())) - starts
        features = KeyedJaggedTensor([HISTORY, NEGATIVES], self.ids(rank, step, ranks), lengths=counts)
        return SeqBatch(features, 3600 * hours)


def draw_ids(count: int, hot: int, hot_rows: int, rows: int, step: int, generator: torch.Generator) -> Tensor:
    """``[count]`` int64 rows for ``step``; ``hot`` of them, at random places, are among the ``hot_rows`` hot ones."""
    third = rows // 3
    if hot_rows > third:
        raise ValueError(f"rows={rows}: too few for {hot_rows} hot rows; use a larger table or a smaller batch")
    ids = torch.randint(third, (count,), generator=generator) * 3 + 1 + step % 2
    where = torch.randperm(count, generator=generator)[:hot]
    ids[where] = torch.randint(hot_rows, (hot,), generator=generator) * third // hot_rows * 3
    return ids


def collision_rate(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Share of the ids of the batch ``second`` whose row the batch ``first`` asks for, too; each given by rank."""
    ids = torch.cat(list(second))
    return float(torch.isin(ids, torch.cat(list(first))).float().mean())


def _generator(*seeds: int) -> torch.Generator:
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    return torch.Generator().manual_seed(mixed)
