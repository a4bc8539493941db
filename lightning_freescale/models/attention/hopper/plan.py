"""Which tile of which history each block works on, made on the device: the host does not wait for the lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import RECORD_EVENTS


@dataclass
class Plan:
    """Offsets ``[B + 1]`` of ``total`` events, and what the kernels need to know of them. All layers share one plan.

    For attention with relative bias also the times of the events (``[total]`` int32, seconds) and the edges of the buckets
    (``[BIAS_SLOTS]`` int32, the smallest distance of each).
    """

    offsets: Tensor
    total: int
    times: Tensor | None = None
    edges: Tensor | None = None
    _schedules: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict)
    _scale: Tensor | None = None
    _records: Tensor | None = None

    def tiles(self, size: int) -> int:
        """A bound on the tiles of ``size`` events."""
        return self.total // size + self.offsets.shape[0] - 1 if self.total else 0

    def schedule(self, size: int, query_size: int, keys: bool) -> Tensor:
        """``[N, 4]`` int32, tiles of ``size`` events, most work first; surplus entries come last and have length 0.

        Columns: the history's first row, its length, the tile's first row within the history, and the number of the
        history's first tile of ``query_size`` events. Queries work up to the diagonal, ``keys`` from there to the end.
        """
        key = (size, query_size, keys)
        if key not in self._schedules:
            self._schedules[key] = self._make(*key)
        return self._schedules[key]

    def _make(self, size: int, query_size: int, keys: bool) -> Tensor:
        sample, row, used = self._cut(size)
        query_counts = (self.offsets.diff() + query_size - 1) // query_size
        query_firsts = query_counts.cumsum(0) - query_counts
        length = self.offsets.diff()[sample] * used
        work = (length - row if keys else row + 1) * used
        columns = torch.stack([self.offsets[:-1][sample], length, row, query_firsts[sample]], 1).int()
        return columns[work.argsort(descending=True, stable=True)].contiguous()

    def _cut(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """All tiles of ``size`` events in order: the sample, the first row within its history, whether the tile is used."""
        lengths = self.offsets.diff()
        counts = (lengths + size - 1) // size
        ends = counts.cumsum(0)
        tile = torch.arange(self.tiles(size), device=self.offsets.device)
        sample = torch.searchsorted(ends, tile, right=True)
        used = sample < len(lengths)
        sample = sample.clamp_(max=len(lengths) - 1)
        return sample, (tile - ends[sample] + counts[sample]) * size, used

    def records(self) -> Tensor:
        """``[N, RECORD_EVENTS + 4]`` int32: the times of each tile of events, twice its first row, its least and largest time.

        Behind the end of a history the last time is repeated. A kernel may read one record more than a history has.
        """
        if self._records is None:
            assert self.times is not None
            sample, row, _ = self._cut(RECORD_EVENTS)
            within = row[:, None] + torch.arange(RECORD_EVENTS, device=row.device)
            event = self.offsets[sample, None] + within.minimum(self.offsets.diff()[sample, None] - 1)
            times = self.times[event.clamp_(0, self.total - 1)]
            row = row.int()
            columns = [times, torch.stack([row, row, times.amin(1), times.amax(1)], 1)]
            self._records = torch.nn.functional.pad(torch.cat(columns, 1), (0, 0, 0, 1))
        return self._records

    def scale(self) -> Tensor:
        """``[total]`` float32: 1 over the number of events that each event attends to."""
        if self._scale is None:
            event = torch.arange(self.total, device=self.offsets.device)
            sample = torch.searchsorted(self.offsets, event, right=True) - 1
            self._scale = 1.0 / (event - self.offsets[sample] + 1).float()
        return self._scale


def plan(offsets: Tensor, total: int, times: Tensor | None = None, edges: Tensor | None = None) -> Plan:
    """Make a plan for histories at ``offsets`` of ``total`` events in all; with times and edges for relative bias."""
    return Plan(offsets.long(), total, times, edges)
