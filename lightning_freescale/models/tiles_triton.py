"""Histories cut into tiles, inside Triton kernels. :mod:`.tiles` takes about ten PyTorch operations, each with its launch.

A program reads the offsets of all histories in blocks. They are few, and all programs read the same.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

# Histories that a program reads at a time. Batches with few histories use it, too: Triton compiles a kernel for each size, and if
# the size followed the number of histories, a rank could compile in the middle of a training, while all others wait.
BLOCK = 1024


@triton.jit
def load_lengths(offsets_ptr, histories, samples):
    """The lengths of ``histories [BLOCK]``, int32; 0 past the last history."""
    known = histories < samples
    end = tl.load(offsets_ptr + histories + 1, mask=known, other=0)
    return (end - tl.load(offsets_ptr + histories, mask=known, other=0)).to(tl.int32)


@triton.jit
def find_tile(offsets_ptr, samples, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The history of tile number ``tile``, the number of its first tile, and how many tiles all histories have. All are int32.

    The tiles of ``SIZE`` events are numbered in order. The history of a tile that is not needed is ``samples``.
    """
    history, first, total = 0, 0, 0
    for start in range(0, samples, BLOCK):
        histories = start + tl.arange(0, BLOCK)
        tiles = tl.cdiv(load_lengths(offsets_ptr, histories, samples), SIZE)
        ends = total + tl.cumsum(tiles, 0)
        before = (ends <= tile) & (histories < samples)
        history += tl.sum(before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(before, ends, 0), 0))
        total += tl.sum(tiles, 0)
    return history, first, total


@triton.jit
def tiles_before(offsets_ptr, samples, history, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """How many tiles of ``SIZE`` events the histories before ``history`` have."""
    count = 0
    for start in range(0, samples, BLOCK):
        histories = start + tl.arange(0, BLOCK)
        tiles = tl.cdiv(load_lengths(offsets_ptr, histories, samples), SIZE)
        count += tl.sum(tl.where(histories < history, tiles, 0), 0)
    return count
