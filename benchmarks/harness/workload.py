"""Training batches with a known collision rate. Pure functions of a seed.

The rows of the table fall into three classes by ``row % 3``. Class 0 holds a few hot rows, evenly spread over the
table; every batch uses them. The other ids of a batch are uniform over class 1 in even steps and over class 2 in odd
steps. Consecutive batches therefore share hot rows only, and the collision rate is the share of hot ids.
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
# Average number of ids of a global batch per hot row. A batch misses a hot row with probability exp(-8) = 0.03%.
HOT_REPEATS = 8


SAME_LENGTHS = 10_000  # steps of a LongTailWorkload this far apart have histories of the same lengths with other ids
CONTEXT_ROWS = 100_000  # rows of the table of each context feature
CONTEXT_IDS = 10  # ids of each sample and context feature


@dataclass
class ContextBatch(SeqBatch):
    """Histories, and context features of each sample whose rows are pooled."""

    context: KeyedJaggedTensor | None = None


@dataclass
class ExchangeBatch(Pipelineable):
    """The histories of one rank and step, in the form that TorchRec's pipelines require."""

    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> ExchangeBatch:
        return ExchangeBatch(self.features.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)  # type: ignore[arg-type]

    def pin_memory(self) -> ExchangeBatch:
        return ExchangeBatch(self.features.pin_memory())


@dataclass(frozen=True)
class EqualCostWorkload:
    """Histories with log-normal lengths, looked up in one row-wise sharded table.

    Every rank and step has the same lengths, in a different order. All steps cost the same on all ranks, so a benchmark of the
    exchange does not measure imbalance.

    Args:
        histories: samples per rank and step.
        log_mean: mean of the logarithm of the lengths.
        log_std: standard deviation of the logarithm of the lengths.
        longest: upper limit of the lengths, in events.
        rows: rows of the table.
        dim: columns of the table (float32).
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
        drawn = torch.randn(self.histories, generator=seeded_generator(self.seed)) * self.log_std + self.log_mean
        lengths = drawn.exp().long().clamp(1, self.longest)
        return lengths[torch.randperm(self.histories, generator=seeded_generator(self.seed, rank, step))]

    @property
    def ids_per_rank(self) -> int:
        """Ids of one rank's batch."""
        return int(self.lengths(0, 0).sum())

    @property
    def row_bytes(self) -> int:
        """Bytes of the embedding rows of one rank's batch."""
        return self.ids_per_rank * self.dim * 4

    def ids(self, rank: int, step: int, ranks: int, collisions: float) -> Tensor:
        """``[ids_per_rank]`` int64 ids; a share ``collisions`` of them is hot."""
        count = self.ids_per_rank
        hot = round(collisions * count)
        hot_rows = max(1, round(hot * ranks / HOT_REPEATS))
        return draw_ids(count, hot, hot_rows, self.rows, step, seeded_generator(self.seed, rank, step, 1))

    def batch(self, rank: int, step: int, ranks: int, collisions: float) -> ExchangeBatch:
        """The batch of one rank and step."""
        ids, lengths = self.ids(rank, step, ranks, collisions), self.lengths(rank, step)
        return ExchangeBatch(KeyedJaggedTensor([FEATURE], ids, lengths=lengths.to(torch.int32)))


@dataclass(frozen=True)
class LongTailWorkload:
    """Histories with independent log-normal lengths. As in real data, ranks and steps have unequal amounts of work.

    The median length is a fixed share of the longest, so the distribution has the same shape for every ``longest``.

    Args:
        samples: samples per rank and step.
        longest: upper limit of the lengths, in events.
        rows: rows of the table.
        negatives: sampled negatives per sample, drawn like the ids of the histories.
        collisions: share of the ids of a batch whose rows the previous batch uses, too.
        log_std: standard deviation of the logarithm of the lengths; 0 makes all lengths equal to ``longest``.
        context: number of context features of a sample, each with :data:`CONTEXT_IDS` ids, which are pooled.
    """

    samples: int
    longest: int
    rows: int
    negatives: int = 32
    collisions: float = 0.12
    log_std: float = 1.2
    seed: int = 0
    context: int = 0

    def lengths(self, rank: int, step: int) -> Tensor:
        """``[samples]`` int64, events."""
        if not self.log_std:
            return torch.full((self.samples,), self.longest)
        log_median = 7.3 + math.log(self.longest / 21_000)
        generator = seeded_generator(self.seed, rank, step % SAME_LENGTHS)
        drawn = torch.randn(self.samples, generator=generator) * self.log_std + log_median
        return drawn.exp().long().clamp(2, self.longest)

    def predicted(self, rank: int, step: int) -> int:
        """Number of positions that predict an item: the weight of this rank's mean loss."""
        return int((self.lengths(rank, step) - 1).sum())

    def ids(self, rank: int, step: int, ranks: int) -> Tensor:
        """Ids of the batch: of all events, then of all negatives."""
        count = int(self.lengths(rank, step).sum()) + self.samples * self.negatives
        typical = (
            int(self.lengths(0, 0).sum()) + self.samples * self.negatives
        )  # of any batch: all batches share the hot rows
        hot_rows = max(1, round(self.collisions * typical * ranks / HOT_REPEATS))
        generator = seeded_generator(self.seed, rank, step, 1)
        return draw_ids(count, round(self.collisions * count), hot_rows, self.rows, step, generator)

    def batch(self, rank: int, step: int, ranks: int) -> SeqBatch:
        """The batch of one rank and step. The events of a history are one hour apart."""
        lengths = self.lengths(rank, step)
        counts = torch.cat([lengths, torch.full_like(lengths, self.negatives)])
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        hours = torch.arange(int(lengths.sum())) - starts
        features = KeyedJaggedTensor([HISTORY, NEGATIVES], self.ids(rank, step, ranks), lengths=counts)
        if not self.context:
            return SeqBatch(features, 3600 * hours)
        return ContextBatch(features, 3600 * hours, context=self._context_features(rank, step))

    @property
    def context_names(self) -> list[str]:
        return [f"context_{number}" for number in range(self.context)]

    def _context_features(self, rank: int, step: int) -> KeyedJaggedTensor:
        shape = (self.context * self.samples * CONTEXT_IDS,)
        ids = torch.randint(CONTEXT_ROWS, shape, generator=seeded_generator(self.seed, rank, step, 2))
        lengths = torch.full((self.context * self.samples,), CONTEXT_IDS)
        return KeyedJaggedTensor(self.context_names, ids, lengths=lengths)


def draw_ids(count: int, hot: int, hot_rows: int, rows: int, step: int, generator: torch.Generator) -> Tensor:
    """``[count]`` int64 ids for ``step``; ``hot`` of them, at random places, are drawn from the ``hot_rows`` hot rows."""
    third = rows // 3
    if hot_rows > third:
        raise ValueError(f"rows={rows}: too few for {hot_rows} hot rows; use a larger table or a smaller batch")
    ids = torch.randint(third, (count,), generator=generator) * 3 + 1 + step % 2
    where = torch.randperm(count, generator=generator)[:hot]
    ids[where] = torch.randint(hot_rows, (hot,), generator=generator) * third // hot_rows * 3
    return ids


def collision_rate(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Share of the ids of the batch ``second`` whose rows the batch ``first`` uses, too. Each batch is a list of ids per rank."""
    ids = torch.cat(list(second))
    return float(torch.isin(ids, torch.cat(list(first))).float().mean())


def seeded_generator(*seeds: int) -> torch.Generator:
    """A generator of random numbers that depends on all of ``seeds``."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    return torch.Generator().manual_seed(mixed)
