"""The sampled softmax of :mod:`.loss` on CUDA: four Triton kernels compute the loss and all gradients, in float32.

The first takes one tile of positions: its logits, loss, and the gradients of the logits. The second takes some columns of a tile:
the gradients of outputs and items. The third takes some tiles that are scored against the same set of negatives, and sums the
gradient of this set over them, in their order. The fourth adds these sums. Without atomics every sum has a fixed order. Of all
logits only their gradients are stored, ``[positions, K]``.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.loss import LOSS_TILE, SampledHistories
from lightning_freescale.models.loss_tiles_triton import position_tiles, set_segments
from lightning_freescale.models.tiles import cdiv, power_of_2
from lightning_freescale.runtime.direct_triton import direct

MAX_NEGATIVES = 512  # of a set: the logits of a tile stay in registers
SEGMENT = 16  # tiles over which a program sums the gradient of a set; a long history has many
# Columns and rows that a kernel multiplies at a time, and its warps. Larger ones would take more registers than a thread has.
LOGITS_LAUNCH = {"DEPTH": 16, "num_warps": 4, "num_stages": 3}
OUTPUTS_LAUNCH = {"DEPTH": 32, "COLS": 64, "num_warps": 4, "num_stages": 3}
NEGATIVES_LAUNCH = {"COLS": 64, "num_warps": 8, "num_stages": 3}
SUM_ELEMENTS = 1024


@triton.jit
def _fields(tiles_ptr, tile):
    """The fields of a tile: see :func:`.loss_tiles_triton.position_tiles`."""
    field = tiles_ptr + tile * 5
    return tl.load(field), tl.load(field + 1), tl.load(field + 2), tl.load(field + 3), tl.load(field + 4)


@direct
@triton.jit(do_not_specialize=["item_ids_ptr", "negative_ids_ptr", "target_q_ptr", "negative_q_ptr"])
def _logits(
    outputs_ptr, items_ptr, negatives_ptr, item_ids_ptr, negative_ids_ptr, target_q_ptr, negative_q_ptr,
    tiles_ptr, loss_ptr, dpositive_ptr, dlogits_ptr, scale, D, K,
    CORRECT: tl.constexpr, TILE: tl.constexpr, K_BLOCK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile. Position ``i`` predicts item ``i + 1``."""
    tile = tl.program_id(0).to(tl.int64)
    number, first, count, _, _ = _fields(tiles_ptr, tile)
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
    target_id = tl.load(item_ids_ptr + rows + 1, mask=used, other=-1)
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


@direct
@triton.jit
def _outputs(
    outputs_ptr, items_ptr, negatives_ptr, tiles_ptr, dpositive_ptr, dlogits_ptr, doutputs_ptr, ditems_ptr,
    D, K, TILE: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of ``COLS`` columns of the outputs and the items of one tile."""
    tile = tl.program_id(0).to(tl.int64)
    number, first, count, events, begins = _fields(tiles_ptr, tile)
    within, col = tl.arange(0, TILE), tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([TILE, COLS], tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        place = (tile * TILE + within)[:, None] * K + k[None, :]
        dlogits = tl.load(dlogits_ptr + place, mask=k[None, :] < K, other=0.0)
        place = (number * K + k)[:, None] * D + col[None, :]
        negative = tl.load(negatives_ptr + place, mask=(k[:, None] < K) & (col[None, :] < D), other=0.0)
        total = tl.dot(dlogits, negative, total, input_precision=PRECISION)
    place = (first + within)[:, None] * D + col[None, :]
    own, inside = (within < events)[:, None] & (col[None, :] < D), col[None, :] < D
    dpositive = tl.load(dpositive_ptr + tile * TILE + within)[:, None]
    target = tl.load(items_ptr + place + D, mask=(within < count)[:, None] & inside, other=0.0)
    tl.store(doutputs_ptr + place, total + dpositive * target, mask=own)
    # The position before predicts an item. It may be in the tile before. Nothing predicts the first item of a history.
    predicted = within >= begins
    before = tl.load(dpositive_ptr + tile * TILE + within - 1, mask=predicted, other=0.0)
    output = tl.load(outputs_ptr + place - D, mask=own & predicted[:, None], other=0.0)
    tl.store(ditems_ptr + place, before[:, None] * output, mask=own)


@direct
@triton.jit
def _negatives(
    outputs_ptr, dlogits_ptr, tiles_ptr, segments_ptr, sums_ptr, D, K,
    TILE: tl.constexpr, K_BLOCK: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum of ``COLS`` columns of the gradient of one set over one segment."""
    segment = tl.program_id(0).to(tl.int64)
    field = segments_ptr + segment * 3
    tile, stride, tiles = tl.load(field).to(tl.int64), tl.load(field + 1), tl.load(field + 2)
    within, k = tl.arange(0, TILE), tl.arange(0, K_BLOCK)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([K_BLOCK, COLS], tl.float32)
    for _ in range(tiles):
        _, first, count, _, _ = _fields(tiles_ptr, tile)
        dlogits = tl.load(
            dlogits_ptr + (tile * TILE + within)[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0
        )
        mask = (within < count)[:, None] & (col[None, :] < D)
        output = tl.load(outputs_ptr + (first + within)[:, None] * D + col[None, :], mask=mask, other=0.0)
        total = tl.dot(dlogits, output, total, input_precision=PRECISION)
        tile += stride
    place = (segment * K + k)[:, None] * D + col[None, :]
    tl.store(sums_ptr + place, total, mask=(k[:, None] < K) & (col[None, :] < D))


@direct
@triton.jit
def _add_segments(sums_ptr, ranges_ptr, out_ptr, elements, SIZE: tl.constexpr):
    """The gradient of one set: the sum over its segments, in their order."""
    number = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    first, end = tl.load(ranges_ptr + number * 2), tl.load(ranges_ptr + number * 2 + 1)
    for segment in range(first.to(tl.int64), end.to(tl.int64)):
        total += tl.load(sums_ptr + segment * elements + place, mask=place < elements, other=0.0)
    tl.store(out_ptr + number * elements + place, total, mask=place < elements)


def supports(outputs: Tensor, negatives: Tensor) -> bool:
    """Whether the kernels can be used for ``outputs [N, D]`` and ``negatives [sets, K, D]``."""
    return outputs.is_cuda and outputs.dtype == torch.float32 and 0 < negatives.shape[1] <= MAX_NEGATIVES


def loss_and_gradients(
    outputs: Tensor,
    items: Tensor,
    negatives: Tensor,
    item_ids: Tensor,
    negative_ids: Tensor,
    correction: tuple[Tensor, Tensor] | None,
    histories: SampledHistories,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of outputs, items and negatives. Arguments as prepared by :func:`.loss.sampled_softmax`."""
    (num_sets, size, dim), device = negatives.shape, outputs.device
    tiles = position_tiles(histories, outputs.shape[0])
    num_tiles = tiles.shape[0]
    outputs, items, negatives, item_ids, negative_ids = (
        x.contiguous() for x in (outputs, items, negatives, item_ids, negative_ids)
    )
    losses = torch.empty(num_tiles, device=device)
    dlogits = torch.empty(num_tiles * LOSS_TILE, size, device=device)
    dpositive = torch.empty(num_tiles * LOSS_TILE, device=device)
    doutputs, ditems, dnegatives = (torch.empty_like(x) for x in (outputs, items, negatives))
    block = {"K_BLOCK": max(16, power_of_2(size))}
    shared = {
        "TILE": LOSS_TILE,
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    }
    target_q, negative_q = (losses, losses) if correction is None else (x.contiguous() for x in correction)
    _logits[(num_tiles,)](
        outputs, items, negatives, item_ids, negative_ids, target_q, negative_q,
        tiles, losses, dpositive, dlogits, scale, dim, size,
        CORRECT=correction is not None, **LOGITS_LAUNCH, **block, **shared,
    )  # fmt: skip
    _outputs[(num_tiles, cdiv(dim, OUTPUTS_LAUNCH["COLS"]))](
        outputs, items, negatives, tiles, dpositive, dlogits, doutputs, ditems, dim, size, **OUTPUTS_LAUNCH, **shared
    )  # fmt: skip
    ranges, segments = set_segments(histories, num_sets, num_tiles, SEGMENT)
    sums = torch.empty(segments.shape[0], size, dim, device=device)
    _negatives[(segments.shape[0], cdiv(dim, NEGATIVES_LAUNCH["COLS"]))](
        outputs, dlogits, tiles, segments, sums, dim, size, **NEGATIVES_LAUNCH, **block, **shared
    )  # fmt: skip
    _add_segments[(num_sets, cdiv(size * dim, SUM_ELEMENTS))](sums, ranges, dnegatives, size * dim, SUM_ELEMENTS)
    return losses.sum(), doutputs, ditems, dnegatives
