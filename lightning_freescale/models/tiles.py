"""Memory layouts that the kernels need: histories cut into tiles of events, and rows without gaps between elements.

No length is copied from the device to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """Tiles of up to ``size`` consecutive events of one history.

    All fields are ``[N]``. ``N`` is an upper bound on the number of tiles; the tiles that are not needed come last.
    """

    sample: Tensor  # int64, index of the history
    row: Tensor  # int64, first event of the tile within the history
    used: Tensor  # bool, False for tiles that are not needed; their ``sample`` is a valid index nevertheless


def cut_tiles(offsets: Tensor, total: int, size: int) -> Tiles:
    """All tiles of ``size`` events, in order. ``N`` follows from shapes alone, so the host does not wait for the device.

    Args:
        offsets: ``[B + 1]`` int64, from 0 to ``total``.
        total: ``sum(L)``, the number of events.
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


def cdiv(count: int, size: int) -> int:
    """How many groups of ``size`` hold ``count``. Triton's function of this name takes ten times as long on the host."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The smallest power of 2 that is not smaller than ``count``."""
    return 1 << (count - 1).bit_length()


def unit_stride(x: Tensor) -> Tensor:
    """``x``, or a copy of it if the elements of a row are not next to each other in memory: the Triton kernels need that."""
    return x if x.stride(-1) == 1 else x.contiguous()
