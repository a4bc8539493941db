"""Which positions and which set of negatives each program of :mod:`.loss_triton` works on: one Triton kernel for each list."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models import tiles_triton
from lightning_freescale.models.loss import LOSS_TILE, SampledHistories
from lightning_freescale.models.tiles_triton import find_tile, load_lengths
from lightning_freescale.runtime.direct_triton import direct

TILE_FIELDS = 5
SEGMENT_FIELDS = 3


@triton.jit
def _load_sets(sets_ptr, histories, samples, SETS: tl.constexpr):
    """How many sets of negatives each of ``histories`` has; 0 past the last history."""
    known = histories < samples
    sets = known.to(tl.int32)
    if SETS:
        sets = tl.load(sets_ptr + histories, mask=known, other=0).to(tl.int32)
    return sets


@direct
@triton.jit(do_not_specialize=["offsets_ptr", "samples"])
def _tiles(
    offsets_ptr, sets_ptr, out_ptr, samples, SETS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the fields of one tile; all are 0 for a tile that is not needed."""
    tile = tl.program_id(0)
    history, first, total = find_tile(offsets_ptr, samples, tile, SIZE, BLOCK)
    used = tile < total
    begin = tl.load(offsets_ptr + history, mask=used, other=0)
    length = (tl.load(offsets_ptr + history + 1, mask=used, other=0) - begin).to(tl.int32)
    number = tile - first
    set_number, own_sets = 0, 0
    for start in range(0, samples, BLOCK):
        histories = start + tl.arange(0, BLOCK)
        sets = _load_sets(sets_ptr, histories, samples, SETS)
        set_number += tl.sum(tl.where(histories < history, sets, 0), 0)
        own_sets += tl.sum(tl.where(histories == history, sets, 0), 0)
    set_number += number % tl.maximum(own_sets, 1)
    events = tl.minimum(length - number * SIZE, SIZE)
    field = out_ptr + tile.to(tl.int64) * 5
    tl.store(field, tl.where(used, set_number, 0).to(tl.int64))
    tl.store(field + 1, tl.where(used, begin + number * SIZE, 0))
    tl.store(field + 2, tl.where(used, tl.minimum(length - 1 - number * SIZE, SIZE), 0).to(tl.int64))
    tl.store(field + 3, tl.where(used, events, 0).to(tl.int64))
    tl.store(field + 4, (used & (number == 0)).to(tl.int64))


@direct
@triton.jit(do_not_specialize=["offsets_ptr", "samples"])
def _segments(
    offsets_ptr, sets_ptr, ranges_ptr, out_ptr, samples,
    SETS: tl.constexpr, SIZE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the range of the segments of one set, and the fields of these segments.

    Tile ``i`` of a history with ``m`` sets belongs to its set ``i % m``. So ``n % m`` of its sets have one tile more than the
    others.
    """
    number = tl.program_id(0)
    history, sets_before, sets_so_far = 0, 0, 0
    for start in range(0, samples, BLOCK):
        histories = start + tl.arange(0, BLOCK)
        ends = sets_so_far + tl.cumsum(_load_sets(sets_ptr, histories, samples, SETS), 0)
        before = (ends <= number) & (histories < samples)
        history += tl.sum(before.to(tl.int32), 0)
        sets_before = tl.maximum(sets_before, tl.max(tl.where(before, ends, 0), 0))
        sets_so_far = tl.max(ends, 0)
    own = number - sets_before
    first_tile, first_segment, tiles, stride = 0, 0, 0, 0
    for start in range(0, samples, BLOCK):
        histories = start + tl.arange(0, BLOCK)
        count = tl.cdiv(load_lengths(offsets_ptr, histories, samples), SIZE)
        sets = _load_sets(sets_ptr, histories, samples, SETS)
        some = tl.maximum(sets, 1)
        # Of the history of this set, the sets before it count; of the histories before, all sets.
        counted = tl.where(histories < history, sets, tl.where(histories == history, own, 0))
        longer = tl.minimum(counted, count % some)
        short = count // some
        first_segment += tl.sum(longer * tl.cdiv(short + 1, SEGMENT) + (counted - longer) * tl.cdiv(short, SEGMENT), 0)
        first_tile += tl.sum(tl.where(histories < history, count, 0), 0)
        tiles += tl.sum(tl.where(histories == history, count, 0), 0)
        stride += tl.sum(tl.where(histories == history, sets, 0), 0)
    stride = tl.maximum(stride, 1)
    tiles = tl.cdiv(tl.maximum(tiles - own, 0), stride)
    segments = tl.cdiv(tiles, SEGMENT)
    tl.store(ranges_ptr + number * 2, first_segment)
    tl.store(ranges_ptr + number * 2 + 1, first_segment + segments)
    for segment in range(0, segments):
        field = out_ptr + (first_segment + segment) * 3
        tl.store(field, first_tile + own + segment * SEGMENT * stride)
        tl.store(field + 1, stride)
        tl.store(field + 2, tl.minimum(tiles - segment * SEGMENT, SEGMENT))


def position_tiles(histories: SampledHistories, total: int) -> Tensor:
    """All ``total`` positions, in tiles of one history.

    Returns:
        ``[N, TILE_FIELDS]`` int64: the set of negatives; the first position, as a flat row; how many positions predict an item;
        how many events the tile has; whether it is the first tile of its history. ``N`` is an upper bound on the number of
        tiles. Those that are not needed have no events.
    """
    offsets, sets = histories
    samples = offsets.shape[0] - 1
    out = torch.empty(total // LOSS_TILE + samples, TILE_FIELDS, dtype=torch.int64, device=offsets.device)
    some_sets = offsets if sets is None else sets  # the kernel needs some pointer
    _tiles[(out.shape[0],)](offsets, some_sets, out, samples, sets is not None, LOSS_TILE, tiles_triton.BLOCK)
    return out


def set_segments(histories: SampledHistories, num_sets: int, num_tiles: int, size: int) -> tuple[Tensor, Tensor]:
    """The tiles of each set, in segments of ``size`` tiles.

    Returns:
        ``[num_sets, 2]`` int32: the first segment of each set, and the first one behind them. ``[N, SEGMENT_FIELDS]`` int32: the
        first tile of a segment, the distance from one tile to the next, and the number of tiles. A segment that is not needed
        has none.
    """
    offsets, sets = histories
    samples, device = offsets.shape[0] - 1, offsets.device
    ranges = torch.empty(num_sets, 2, dtype=torch.int32, device=device)
    out = torch.zeros(num_tiles // size + num_sets, SEGMENT_FIELDS, dtype=torch.int32, device=device)
    some_sets = offsets if sets is None else sets  # the kernel needs some pointer
    _segments[(num_sets,)](
        offsets, some_sets, ranges, out, samples, sets is not None, LOSS_TILE, size, tiles_triton.BLOCK
    )  # fmt: skip
    return ranges, out
