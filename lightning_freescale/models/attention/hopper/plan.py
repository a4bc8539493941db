"""Which tile of which history each block works on, made on the device: the host does not wait for the lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Plan:
    """Offsets ``[B + 1]`` of ``total`` events, and what the kernels need to know of them. All layers share one plan."""

    offsets: Tensor
    total: int
    _schedules: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict)
    _scale: Tensor | None = None

    def tiles(self, size: int) -> int:
        """A bound on the tiles of ``size`` events."""
        return self.total // size + len(self.offsets) - 1 if self.total else 0

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
        lengths = self.offsets.diff()
        counts, query_counts = (lengths + size - 1) // size, (lengths + query_size - 1) // query_size
        ends, query_firsts = counts.cumsum(0), query_counts.cumsum(0) - query_counts
        tile = torch.arange(self.tiles(size), device=self.offsets.device)
        sample = torch.searchsorted(ends, tile, right=True)
        used = sample < len(lengths)
        sample = sample.clamp_(max=len(lengths) - 1)
        row = (tile - ends[sample] + counts[sample]) * size
        length = lengths[sample] * used
        work = (length - row if keys else row + 1) * used
        columns = torch.stack([self.offsets[:-1][sample], length, row, query_firsts[sample]], 1).int()
        return columns[work.argsort(descending=True, stable=True)].contiguous()

    def scale(self) -> Tensor:
        """``[total]`` float32: 1 over the number of events that each event attends to."""
        if self._scale is None:
            event = torch.arange(self.total, device=self.offsets.device)
            sample = torch.searchsorted(self.offsets, event, right=True) - 1
            self._scale = 1.0 / (event - self.offsets[sample] + 1).float()
        return self._scale


def plan(offsets: Tensor, total: int) -> Plan:
    """Make a plan for histories at ``offsets`` of ``total`` events in all."""
    return Plan(offsets.long(), total)
