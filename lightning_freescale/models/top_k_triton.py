"""The best items of each query on CUDA: two kernels for the sort keys and the selection, and one that takes the keys apart.

A program takes the best ``k`` of a tile of scores, one after the other. The same kernel then takes the best of what the tiles of
a query have left, until one tile holds all. The result is exact: all keys of a query differ, except those of places without an
item. PyTorch's operations pass over all scores about ten times.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.tiles import cdiv, power_of_2, unit_stride

TILE = 1024  # scores or keys that a program reads
DECODED = 256  # keys that a program takes apart
_NOTHING = tl.constexpr(
    -0x7F800001 << 32
)  # the key of a place without an item: the score minus infinity and the last row
_LOW = tl.constexpr((1 << 32) - 1)


@triton.jit
def _monotone(bits):
    """As in :mod:`.top_k`."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["in_row", "out_row", "first_row", "count"])
def _best(
    in_ptr, out_ptr, in_row, out_row, first_row, count, SCORES: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """The sort keys of the best ``K`` of one tile of a query, the best first. The input has scores, or keys of a call before."""
    query, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tile * COLS + tl.arange(0, COLS)
    exists = cols < count
    place = in_ptr + query * in_row + cols
    if SCORES:
        scores = tl.load(place, mask=exists, other=-float("inf"))
        scores = tl.where(scores != scores, -float("inf"), scores)  # NaN
        scores = tl.where(scores == 0.0, 0.0, scores)  # -0
        high = _monotone(scores.to(tl.int32, bitcast=True).to(tl.int64)) << 32
        keys = tl.where(exists, high | (_LOW - (first_row + cols.to(tl.int64))), _NOTHING)
    else:
        keys = tl.load(place, mask=exists, other=_NOTHING)
    out = out_ptr + query * out_row + tile * K
    for number in range(K):
        best = tl.max(keys, 0)
        tl.store(out + number, best)
        keys = tl.where(keys == best, _NOTHING, keys)


@triton.jit(do_not_specialize=["count"])
def _decode(keys_ptr, rows_ptr, scores_ptr, count, SIZE: tl.constexpr):
    """Rows and scores of sort keys."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    keys = tl.load(keys_ptr + at, mask=at < count, other=0)
    scores = _monotone(keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    rows = tl.where(scores == -float("inf"), -1, _LOW - (keys & _LOW))
    tl.store(rows_ptr + at, rows, mask=at < count)
    tl.store(scores_ptr + at, scores, mask=at < count)


def best_keys(scores: Tensor, first_row: int, k: int) -> Tensor:
    """Sort keys of the best ``k`` of ``scores [Q, N]`` float32, the best first: ``[Q, k]`` int64.

    ``first_row`` is the row of the first column. ``k`` is from 1 to a quarter of ``TILE``; for more there are faster ways.
    """
    assert 1 <= k <= TILE // 4, f"k: must be from 1 to {TILE // 4}, not {k}"
    assert scores.dtype == torch.float32, f"scores: must be float32, not {scores.dtype}"
    found, is_scores = unit_stride(scores), True
    while is_scores or found.shape[1] > k:
        queries, count = found.shape
        tile = min(TILE, max(16, power_of_2(count)))
        tiles = max(1, cdiv(count, tile))
        out = torch.empty(queries, tiles * k, dtype=torch.int64, device=scores.device)
        if queries:
            _best[(queries, tiles)](found, out, found.stride(0), out.stride(0), first_row, count, is_scores, k, tile)
        found, is_scores = out, False
    return found


def decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, int64, and scores, float32, of sort keys of any shape. A place without an item has the row -1."""
    keys = keys.contiguous()
    rows, scores = torch.empty_like(keys), torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    if keys.numel():
        _decode[(cdiv(keys.numel(), DECODED),)](keys, rows, scores, keys.numel(), DECODED)
    return rows, scores
