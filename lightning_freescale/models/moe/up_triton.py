"""The first product of the experts with the activation on Hopper GPUs: a persistent Triton kernel with the copy engine (TMA).

A tile of rows has copies of one expert only (:mod:`.dispatch`), so the kernel needs no mask. The columns ``2 j`` and ``2 j +
1`` of the product are ``a`` and ``b`` of hidden unit ``j``: they lie in the same thread, which computes ``silu(a) * b`` from
its registers.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightning_freescale.models.moe.dispatch import EXPERT_TILE, Arrangement

TILE_COLUMNS = 256
TILE_DEPTH = 64
TILE_GROUP = 8  # tiles of rows that are computed together, so that they find the weights in the cache
LOAD_STAGES = 3
INTERPRETED_PROGRAMS = 4  # in Triton's interpreter, which has no multiprocessors


@triton.jit
def _tile_place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile. ``GROUP`` tiles of rows are taken together, column by column."""
    in_group = GROUP * column_tiles
    first = tile // in_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return first + tile % in_group % size, tile % in_group // size


@triton.jit
def _finish(total, ab, f, row, column, ACTIVATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    ab.store([row, column], total.to(ab.dtype))
    if ACTIVATE:
        a, b = tl.split(tl.reshape(total, [ROWS, COLS // 2, 2]))
        f.store([row, column // 2], (a * tl.sigmoid(a) * b).to(f.dtype))


@triton.jit(do_not_specialize=["experts", "column_tiles"])  # one compiled kernel serves all of them
def _up(
    x, w, ab, f, tile_experts_ptr, ends_ptr, experts, column_tiles, depth,
    ACTIVATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ab = x w; f = silu(a) b if ``ACTIVATE``. The loads for the next tile start before this tile is stored (``flatten``)."""
    row_tiles = tl.load(ends_ptr + experts - 1) // ROWS
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row, column = _tile_place(tile, row_tiles, column_tiles, GROUP)
        expert = tl.load(tile_experts_ptr + row)
        total = tl.zeros([ROWS, COLS], tl.float32)
        for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
            total = tl.dot(x.load([row * ROWS, start]), w.load([expert * depth + start, column * COLS]), total)
        HALF: tl.constexpr = COLS // 2  # half a tile at a time: it is stored from shared memory, which is small
        left, right = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, HALF]), [0, 2, 1]))
        _finish(left, ab, f, row * ROWS, column * COLS, ACTIVATE, ROWS, HALF)
        _finish(right, ab, f, row * ROWS, column * COLS + HALF, ACTIVATE, ROWS, HALF)


def _tiles(x: Tensor, *block: int) -> Any:
    return TensorDescriptor.from_tensor(x, list(block))


def up(x: Tensor, w: Tensor, index: Arrangement, activate: bool) -> tuple[Tensor, Tensor | None]:
    """``ab [R, 2 H]`` and, if ``activate``, ``f [R, H]``, of rows ``x [R, D]`` with ``w [E, D, 2 H]``.

    Rows after the last expert's are not written.
    """
    experts, depth, width = w.shape
    columns = min(TILE_COLUMNS, max(32, triton.next_power_of_2(width)))
    ab = x.new_empty(len(x), width)
    f = x.new_empty(len(x), width // 2) if activate else None
    programs = INTERPRETED_PROGRAMS
    if x.is_cuda:
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    _up[(programs,)](
        _tiles(x, EXPERT_TILE, TILE_DEPTH),
        _tiles(w.flatten(0, 1), TILE_DEPTH, columns),
        _tiles(ab, EXPERT_TILE, columns // 2),
        _tiles(ab if f is None else f, EXPERT_TILE, columns // 4),
        *(index.tile_experts, index.ends, experts, triton.cdiv(width, columns), depth),
        *(activate, EXPERT_TILE, columns, TILE_DEPTH, TILE_GROUP, LOAD_STAGES),
        num_warps=8,
    )
    return ab, f
