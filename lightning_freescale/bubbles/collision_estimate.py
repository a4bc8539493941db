"""Estimates how many rows of a batch collide, in runs whose exchange does not look for collisions itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.timeline import Timeline


class CollisionEstimate:
    """Share of the ids of a batch whose rows the previous batch has updated, measured at the owner of the rows.

    A sample of the rows, chosen by hash, is marked in a bitmap. All shapes are static, so nothing waits for the device. Rows
    that share a bit make the estimate too large, by at most 1.6 percentage points.
    """

    BITS = 1 << 22
    SAMPLE = 1 << 16  # expected number of sampled ids, at most; SAMPLE / BITS is the bound on the error

    def __init__(self) -> None:
        self.watching = False  # whether the ids of the current batch are kept for the next batch
        self.counting = False  # whether the current batch is compared with the previous one
        self._previous: dict[Any, Tensor] = {}

    def follow(self, count: bool, remember: bool) -> None:
        """Set, before a step, what to do with its batch.

        Args:
            count: compare it with the previous batch; possible only if the previous batch was remembered.
            remember: keep its ids for the next batch.
        """
        self.counting = count and self.watching
        self.watching = remember
        if not remember:
            self._previous.clear()

    def see(self, key: Any, lookup: Any, features: KeyedJaggedTensor, timeline: Timeline) -> None:
        """Process the ids that one lookup receives. ``key`` identifies the lookup from step to step."""
        rows = _row_keys(lookup, features)
        previous = self._previous.get(key)
        if self.counting and previous is not None and rows.numel():
            bits = torch.zeros(self.BITS + 1, dtype=torch.bool, device=rows.device)
            # Both batches use the same sampling rate, or a row could be in one sample and not in the other.
            rate = -(-max(rows.numel(), previous.numel()) // self.SAMPLE)
            bits[self._slots(previous, rate)] = True
            slots = self._slots(rows, rate)
            chosen = slots < self.BITS
            timeline.count("collisions", (bits[slots] & chosen).sum() * rate)
            timeline.count("rows", chosen.sum() * rate)
        self._previous[key] = rows

    def _slots(self, rows: Tensor, rate: int) -> Tensor:
        """``[n]`` position in the bitmap of each row; ``BITS`` for the rows that are not in the sample of one in ``rate``."""
        mixed = _mix(rows)
        return torch.where(mixed % rate == 0, (mixed // rate) % self.BITS, self.BITS)


def _mix(values: Tensor) -> Tensor:
    """Hash int64 values to 62 bits, not negative. This is the finalizer of SplitMix64 in signed arithmetic."""
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (values ^ ((values >> 31) & 0x1FFFFFFFF)) & 0x3FFFFFFFFFFFFFFF


def _row_keys(lookup: Any, features: KeyedJaggedTensor) -> Tensor:
    """``[n]`` a number for the row of each id. Features that share a table get the same number for the same row."""
    tables = [table for group in lookup.grouped_configs for table in group.embedding_tables]
    table_of_feature = [index for index, table in enumerate(tables) for _ in table.feature_names]
    ids = features.values().long()
    if not table_of_feature:  # table-wise sharding, and this rank owns no table
        return ids
    parts = ids.split(features.length_per_key())
    return torch.cat([part + (index << 48) for index, part in zip(table_of_feature, parts, strict=True)])
