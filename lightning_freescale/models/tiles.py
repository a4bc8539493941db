"""Cut histories into tiles without asking the device how long they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """Up to ``size`` consecutive events of one history each. All ``[N]``; ``N`` is a bound, surplus tiles come last."""

    sample: Tensor  # int64, the history
    row: Tensor  # int64, the tile's first event within the history
    used: Tensor  # bool, False for surplus tiles, which name some history


def cut(offsets: Tensor, total: int, size: int) -> Tiles:
    """All tiles of ``size`` events, in order. ``N`` follows from shapes alone: the host does not wait for the device.

    Args:
        offsets: ``[B + 1]`` int64, from 0 to ``total``.
        total: ``sum(L)``.
        size: events of a tile.
    """
    lengths = offsets.diff()
    samples = len(lengths)
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    tile = torch.arange(total // size + samples if total else 0, device=offsets.device)
    sample = torch.searchsorted(ends, tile, right=True)
    used = sample < samples
    sample = sample.clamp_(max=samples - 1)
    return Tiles(sample, (tile - ends[sample] + counts[sample]) * size, used)
