"""The sampled softmax of :mod:`.loss` on CUDA: four Triton kernels compute the loss and all gradients, in float32.

The first takes one tile of positions: its logits, loss, and the gradients of the logits. The second takes some columns of a tile:
the gradients of outputs and items. The third takes some tiles that are scored against the same set of negatives, and sums the
gradient of this set over them, in their order. The fourth adds these sums. Without atomics every sum has a fixed order. Of all
logits only their gradients are stored, ``[positions, K]``.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.tiles import cut_tiles

MAX_NEGATIVES = 512  # of a set: the logits of a tile stay in registers
SEGMENT = 16  # tiles over which a program sums the gradient of a set; a long history has many
# Columns and rows that a kernel multiplies at a time, and its warps. Larger ones would take more registers than a thread has.
LOGITS_LAUNCH = {"DEPTH": 16, "num_warps": 4, "num_stages": 3}
OUTPUTS_LAUNCH = {"DEPTH": 32, "COLS": 64, "num_warps": 4, "num_stages": 3}
NEGATIVES_LAUNCH = {"COLS": 64, "num_warps": 8, "num_stages": 3}
SUM_ELEMENTS = 1024


@triton.jit
def _logits(
    outputs_ptr, items_ptr, negatives_ptr, target_ids_ptr, negative_ids_ptr, target_q_ptr, negative_q_ptr,
    set_ptr, row_ptr, count_ptr, loss_ptr, dpositive_ptr, dlogits_ptr, scale, D, K,
    CORRECT: tl.constexpr, TILE: tl.constexpr, K_BLOCK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile: positions ``row`` to ``row + count``, scored against set ``set``. Position ``i`` predicts item ``i + 1``."""
    tile = tl.program_id(0).to(tl.int64)
    number, first, count = tl.load(set_ptr + tile), tl.load(row_ptr + tile), tl.load(count_ptr + tile)
    within, k, cols = tl.arange(0, TILE), tl.arange(0, K_BLOCK), tl.arange(0, DEPTH)
    rows, used = first + within, within < count
    logits, products = tl.zeros([TILE, K_BLOCK], tl.float32), tl.zeros([TILE, DEPTH], tl.float32)
    for start in range(0, D, DEPTH):
        col = start + cols
        mask = used[:, None] & (col[None, :] < D)
        output = tl.load(outputs_ptr + rows[:, None] * D + col[None, :], mask=mask, other=0.0)
        target = tl.load(items_ptr + (rows[:, None] + 1) * D + col[None, :], mask=mask, other=0.0)
        place = (number * K + k)[None, :] * D + col[:, None]
        negative = tl.load(negatives_ptr + place, mask=(k[None, :] < K) & (col[:, None] < D), other=0.0)
        logits = tl.dot(output, negative, logits, input_precision=PRECISION)
        products += output * target
    positive, logits = tl.sum(products, 1) * scale, logits * scale
    target_id = tl.load(target_ids_ptr + rows, mask=used, other=-1)
    negative_id = tl.load(negative_ids_ptr + number * K + k, mask=k < K, other=-1)
    if CORRECT:
        positive -= tl.load(target_q_ptr + rows, mask=used, other=0.0)
        logits -= tl.load(negative_q_ptr + number * K + k, mask=k < K, other=0.0)[None, :]
    hidden = (k[None, :] >= K) | (target_id[:, None] == negative_id[None, :])
    logits = tl.where(hidden, float("-inf"), logits)
    highest = tl.max(logits, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # all negatives equal the target
    weights = tl.exp(logits - highest[:, None])
    total = tl.sum(weights, 1)
    margin = highest + tl.log(total) - positive
    loss = tl.maximum(margin, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(margin)))
    tl.store(loss_ptr + tile, tl.sum(tl.where(used, loss, 0.0)))
    dmargin = tl.where(used & (total > 0), tl.sigmoid(margin), 0.0) * scale
    tl.store(dpositive_ptr + tile * TILE + within, -dmargin)
    dlogits = weights * (dmargin / tl.where(total > 0, total, 1.0))[:, None]
    tl.store(dlogits_ptr + (tile * TILE + within)[:, None] * K + k[None, :], dlogits, mask=k[None, :] < K)


@triton.jit
def _outputs(
    outputs_ptr, items_ptr, negatives_ptr, set_ptr, row_ptr, count_ptr, dpositive_ptr, dlogits_ptr, doutputs_ptr, ditems_ptr,
    D, K, TILE: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of ``COLS`` columns of the outputs of one tile, and of the items that it predicts."""
    tile = tl.program_id(0).to(tl.int64)
    number, first, count = tl.load(set_ptr + tile), tl.load(row_ptr + tile), tl.load(count_ptr + tile)
    within, col = tl.arange(0, TILE), tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([TILE, COLS], tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        place = (tile * TILE + within)[:, None] * K + k[None, :]
        dlogits = tl.load(dlogits_ptr + place, mask=k[None, :] < K, other=0.0)
        place = (number * K + k)[:, None] * D + col[None, :]
        negative = tl.load(negatives_ptr + place, mask=(k[:, None] < K) & (col[None, :] < D), other=0.0)
        total = tl.dot(dlogits, negative, total, input_precision=PRECISION)
    mask = (within < count)[:, None] & (col[None, :] < D)
    output_place = (first + within)[:, None] * D + col[None, :]
    dpositive = tl.load(dpositive_ptr + tile * TILE + within)[:, None]
    target = tl.load(items_ptr + output_place + D, mask=mask, other=0.0)
    tl.store(doutputs_ptr + output_place, total + dpositive * target, mask=mask)
    output = tl.load(outputs_ptr + output_place, mask=mask, other=0.0)
    tl.store(ditems_ptr + output_place + D, dpositive * output, mask=mask)


@triton.jit
def _negatives(
    outputs_ptr, dlogits_ptr, order_ptr, start_ptr, set_ptr, first_ptr, used_ptr, row_ptr, count_ptr, sums_ptr, D, K,
    TILE: tl.constexpr, K_BLOCK: tl.constexpr, COLS: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum of ``COLS`` columns of the gradient of one set over one segment.

    The tiles of a set are ``order[start[set]:start[set + 1]]``; those of the segment begin at ``first``, counted from there.
    """
    segment = tl.program_id(0).to(tl.int64)
    number, begin = tl.load(set_ptr + segment), tl.load(first_ptr + segment)
    within, k = tl.arange(0, TILE), tl.arange(0, K_BLOCK)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    begin += tl.load(start_ptr + number)
    end = tl.minimum(begin + SEGMENT, tl.load(start_ptr + number + 1))
    end = tl.where(tl.load(used_ptr + segment), end, begin)
    total = tl.zeros([K_BLOCK, COLS], tl.float32)
    for i in range(begin, end):
        tile = tl.load(order_ptr + i)
        first, count = tl.load(row_ptr + tile), tl.load(count_ptr + tile)
        dlogits = tl.load(
            dlogits_ptr + (tile * TILE + within)[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0
        )
        mask = (within < count)[:, None] & (col[None, :] < D)
        output = tl.load(outputs_ptr + (first + within)[:, None] * D + col[None, :], mask=mask, other=0.0)
        total = tl.dot(dlogits, output, total, input_precision=PRECISION)
    place = (segment * K + k)[:, None] * D + col[None, :]
    tl.store(sums_ptr + place, total, mask=(k[:, None] < K) & (col[None, :] < D))


@triton.jit
def _add_segments(sums_ptr, first_ptr, out_ptr, elements, SIZE: tl.constexpr):
    """The gradient of one set: the sum over its segments, which are ``first[set]`` to ``first[set + 1]``."""
    number = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for segment in range(tl.load(first_ptr + number), tl.load(first_ptr + number + 1)):
        total += tl.load(sums_ptr + segment * elements + place, mask=place < elements, other=0.0)
    tl.store(out_ptr + number * elements + place, total, mask=place < elements)


def supports(outputs: Tensor, negatives: Tensor) -> bool:
    """Whether the kernels can be used for ``outputs [N, D]`` and ``negatives [sets, K, D]``."""
    return outputs.is_cuda and outputs.dtype == torch.float32 and 0 < negatives.shape[1] <= MAX_NEGATIVES


def loss_and_gradients(
    outputs: Tensor,
    items: Tensor,
    negatives: Tensor,
    target_ids: Tensor,
    negative_ids: Tensor,
    correction: tuple[Tensor, Tensor] | None,
    tiles: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of outputs, items and negatives. Arguments as prepared by :func:`.loss.sampled_softmax`."""
    size, dim, (set_of_tile, rows, predicted, offsets) = *negatives.shape[1:], tiles
    first, counts, tile = rows[:, 0].contiguous(), predicted.sum(1), rows.shape[1]
    outputs, items, negatives, negative_ids = (x.contiguous() for x in (outputs, items, negatives, negative_ids))
    losses = torch.empty(len(set_of_tile), device=outputs.device)
    dlogits = torch.empty(len(set_of_tile) * tile, size, device=outputs.device)
    dpositive = torch.empty(len(dlogits), device=outputs.device)
    doutputs, ditems = torch.empty_like(outputs), torch.empty_like(items)
    # The kernels do not write the last output and the first item of a history, whose gradients are 0. Without events, a history
    # stands for its neighbour here, or the first one for the last.
    doutputs.index_fill_(0, (offsets[1:] - 1) % len(outputs), 0.0)
    ditems.index_fill_(0, offsets[:-1] % len(items), 0.0)
    block = {"K_BLOCK": max(16, triton.next_power_of_2(size))}
    shared = {
        "TILE": tile,
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    }
    target_q, negative_q = (losses, losses) if correction is None else (x.contiguous() for x in correction)
    _logits[(len(set_of_tile),)](
        outputs, items, negatives, target_ids, negative_ids, target_q, negative_q,
        set_of_tile, first, counts, losses, dpositive, dlogits, scale, dim, size,
        CORRECT=correction is not None, **LOGITS_LAUNCH, **block, **shared,
    )  # fmt: skip
    _outputs[(len(set_of_tile), triton.cdiv(dim, OUTPUTS_LAUNCH["COLS"]))](
        outputs, items, negatives, set_of_tile, first, counts, dpositive, dlogits, doutputs, ditems, dim, size,
        **OUTPUTS_LAUNCH, **shared,
    )  # fmt: skip
    ordered, order = set_of_tile.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(len(negatives) + 1, device=outputs.device))
    segments = cut_tiles(starts, len(order), SEGMENT)
    sums = torch.empty(len(segments.sample), size, dim, device=outputs.device)
    _negatives[(len(sums), triton.cdiv(dim, NEGATIVES_LAUNCH["COLS"]))](
        outputs, dlogits, order, starts, *segments, first, counts, sums, dim, size,
        SEGMENT=SEGMENT, **NEGATIVES_LAUNCH, **block, **shared,
    )  # fmt: skip
    firsts = torch.nn.functional.pad(((starts.diff() + SEGMENT - 1) // SEGMENT).cumsum(0), (1, 0))
    dnegatives = torch.empty_like(negatives)
    _add_segments[(len(negatives), triton.cdiv(size * dim, SUM_ELEMENTS))](
        sums, firsts, dnegatives, size * dim, SUM_ELEMENTS
    )
    return losses.sum(), doutputs, ditems, dnegatives
