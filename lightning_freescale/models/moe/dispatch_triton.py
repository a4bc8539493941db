"""The index structures of :mod:`.dispatch` on CUDA: three Triton kernels.

The first counts, for each block of copies, those of each expert. The second sums the counts up, so that every block knows the
first row of each expert. The third gives every copy its row. Nothing is sorted, and no kernel uses atomics.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.moe.dispatch import Arrangement, row_bound

COPIES = 512  # of a block
SCANNED = 64  # blocks that are summed up at a time


@triton.jit(do_not_specialize=["total"])
def _count(chosen_ptr, counts_ptr, total, SIZE: tl.constexpr, EXPERTS: tl.constexpr):
    """``counts[block, expert]``. ``EXPERTS`` is a power of two, not less than the number of experts."""
    copy = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    expert = tl.load(chosen_ptr + copy, mask=copy < total, other=-1).to(tl.int32)
    chosen = (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.sum(chosen, 0))


@triton.jit(do_not_specialize=["blocks", "experts", "tiles"])
def _scan(
    counts_ptr, first_ptr, ends_ptr, totals_ptr, tiles_ptr, blocks, experts, tiles,
    SCANNED: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program. ``first[block, expert]``: the row of the first copy of ``expert`` in ``block``."""
    expert, block = tl.arange(0, EXPERTS), tl.arange(0, SCANNED)
    totals = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, blocks, SCANNED):
        place = (start + block)[:, None] * EXPERTS + expert[None, :]
        counts = tl.load(counts_ptr + place, mask=(start + block)[:, None] < blocks, other=0)
        totals += tl.sum(counts, 0)
    padded = (totals + TILE - 1) // TILE * TILE
    ends = tl.cumsum(padded, 0)
    running = ends - padded
    for start in range(0, blocks, SCANNED):
        place = (start + block)[:, None] * EXPERTS + expert[None, :]
        mask = (start + block)[:, None] < blocks
        counts = tl.load(counts_ptr + place, mask=mask, other=0)
        tl.store(first_ptr + place, running[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        running += tl.sum(counts, 0)
    tl.store(ends_ptr + expert, ends, mask=expert < experts)
    tl.store(totals_ptr + expert, totals, mask=expert < experts)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        after = (tile[:, None] * TILE >= ends[None, :]) & (expert[None, :] < experts)
        tl.store(tiles_ptr + tile, tl.sum(after.to(tl.int32), 1), mask=tile < tiles)


@triton.jit(do_not_specialize=["total"])
def _place(
    chosen_ptr, first_ptr, copies_ptr, rows_ptr, total, SIZE: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    copy = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    expert = tl.load(chosen_ptr + copy, mask=copy < total, other=-1).to(tl.int32)
    chosen = expert[:, None] == tl.arange(0, EXPERTS)[None, :]
    first = tl.load(first_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS))
    before = tl.cumsum(chosen.to(tl.int32), 0) - 1
    row = tl.sum(tl.where(chosen, before + first[None, :], 0), 1)
    tl.store(rows_ptr + copy, row, mask=copy < total)
    tl.store(copies_ptr + row, copy, mask=copy < total)


def arrange_copies(chosen: Tensor, experts: int, tile: int) -> Arrangement:
    """:func:`.dispatch.arrange_plain`, as int32."""
    total, device = chosen.numel(), chosen.device
    bound = row_bound(total, experts, tile)
    blocks, tiles, padded = triton.cdiv(total, COPIES), bound // tile, triton.next_power_of_2(experts)
    chosen = chosen.contiguous()

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts, first, ends, totals, tile_experts = (
        *new(2, blocks, padded).unbind(),
        new(experts),
        new(experts),
        new(tiles),
    )
    copies = torch.full((bound,), -1, dtype=torch.int32, device=device)
    rows = new(*chosen.shape)
    if blocks:
        _count[(blocks,)](chosen, counts, total, COPIES, padded)
    _scan[(1,)](counts, first, ends, totals, tile_experts, blocks, experts, tiles, SCANNED, padded, tile, 128)
    if blocks:
        _place[(blocks,)](chosen, first, copies, rows, total, COPIES, padded)
    return Arrangement(copies, rows, ends, totals, tile_experts)
