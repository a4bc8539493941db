"""The sampled softmax of :mod:`.loss` on CUDA: two Triton kernels compute the loss and all gradients, in float32.

The first takes one tile of positions: logits, loss, and the gradients of outputs, items and logits. The second takes one set of
negatives and sums its gradient over the tiles that are scored against it, in their order. Without atomics every sum has a fixed
order. Of all logits only their gradients are stored, ``[positions, K]``.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_NEGATIVES = 512  # of a set: the logits of a tile stay in registers
DEPTH = 32  # columns of the embeddings that are multiplied at a time
NEGATIVE_COLUMNS = 64  # columns of the gradient of the negatives that a program sums


@triton.jit
def _tile(
    outputs_ptr, items_ptr, negatives_ptr, target_ids_ptr, negative_ids_ptr, target_q_ptr, negative_q_ptr,
    set_ptr, row_ptr, count_ptr, loss_ptr, doutputs_ptr, ditems_ptr, dlogits_ptr,
    D, K,
    CORRECT: tl.constexpr, TILE: tl.constexpr, K_BLOCK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile: positions ``row`` to ``row + count``, scored against set ``set``. Position ``i`` predicts item ``i + 1``."""
    tile = tl.program_id(0).to(tl.int64)
    number, first, count = tl.load(set_ptr + tile), tl.load(row_ptr + tile), tl.load(count_ptr + tile)
    within, k, cols = tl.arange(0, TILE), tl.arange(0, K_BLOCK), tl.arange(0, DEPTH)
    rows, used = first + within, within < count
    logits, positive = tl.zeros([TILE, K_BLOCK], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, D, DEPTH):
        col = start + cols
        mask = used[:, None] & (col[None, :] < D)
        output = tl.load(outputs_ptr + rows[:, None] * D + col[None, :], mask=mask, other=0.0)
        target = tl.load(items_ptr + (rows[:, None] + 1) * D + col[None, :], mask=mask, other=0.0)
        place = (number * K + k)[:, None] * D + col[None, :]
        negative = tl.load(negatives_ptr + place, mask=(k[:, None] < K) & (col[None, :] < D), other=0.0)
        logits = tl.dot(output, tl.trans(negative), logits, input_precision=PRECISION)
        positive += tl.sum(output * target, 1)
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
    dmargin = tl.where(used & (total > 0), tl.sigmoid(margin), 0.0)
    dlogits = weights * (dmargin / tl.where(total > 0, total, 1.0))[:, None]
    tl.store(dlogits_ptr + (tile * TILE + within)[:, None] * K + k[None, :], dlogits, mask=k[None, :] < K)
    for start in range(0, D, DEPTH):
        col = start + cols
        mask = used[:, None] & (col[None, :] < D)
        output = tl.load(outputs_ptr + rows[:, None] * D + col[None, :], mask=mask, other=0.0)
        target = tl.load(items_ptr + (rows[:, None] + 1) * D + col[None, :], mask=mask, other=0.0)
        place = (number * K + k)[:, None] * D + col[None, :]
        negative = tl.load(negatives_ptr + place, mask=(k[:, None] < K) & (col[None, :] < D), other=0.0)
        doutput = tl.dot(dlogits, negative, input_precision=PRECISION) - dmargin[:, None] * target
        tl.store(doutputs_ptr + rows[:, None] * D + col[None, :], doutput, mask=mask)
        tl.store(ditems_ptr + (rows[:, None] + 1) * D + col[None, :], -dmargin[:, None] * output, mask=mask)


@triton.jit
def _negatives(
    outputs_ptr, dlogits_ptr, order_ptr, start_ptr, row_ptr, count_ptr, dnegatives_ptr, D, K,
    TILE: tl.constexpr, K_BLOCK: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of ``COLS`` columns of one set: the sum over its tiles, which are ``order[start[set]:start[set + 1]]``."""
    number = tl.program_id(0).to(tl.int64)
    within, k = tl.arange(0, TILE), tl.arange(0, K_BLOCK)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([K_BLOCK, COLS], tl.float32)
    for i in range(tl.load(start_ptr + number), tl.load(start_ptr + number + 1)):
        tile = tl.load(order_ptr + i)
        first, count = tl.load(row_ptr + tile), tl.load(count_ptr + tile)
        dlogits = tl.load(
            dlogits_ptr + (tile * TILE + within)[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0
        )
        mask = (within < count)[:, None] & (col[None, :] < D)
        output = tl.load(outputs_ptr + (first + within)[:, None] * D + col[None, :], mask=mask, other=0.0)
        total = tl.dot(dlogits, output, total, input_precision=PRECISION)
    place = (number * K + k)[:, None] * D + col[None, :]
    tl.store(dnegatives_ptr + place, total, mask=(k[:, None] < K) & (col[None, :] < D))


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
    tiles: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of outputs, items and negatives. Arguments as prepared by :func:`.loss.sampled_softmax`."""
    (sets, size, dim), (set_of_tile, rows, predicted) = negatives.shape, tiles
    first, counts, tile = rows[:, 0].contiguous(), predicted.sum(1), rows.shape[1]
    outputs, items, negatives, negative_ids = (x.contiguous() for x in (outputs, items, negatives, negative_ids))
    losses = torch.empty(len(set_of_tile), device=outputs.device)
    dlogits = torch.empty(len(set_of_tile) * tile, size, device=outputs.device)
    doutputs, ditems, dnegatives = torch.zeros_like(outputs), torch.zeros_like(items), torch.empty_like(negatives)
    shape = {
        "TILE": tile,
        "K_BLOCK": max(16, triton.next_power_of_2(size)),
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    }
    target_q, negative_q = (losses, losses) if correction is None else (x.contiguous() for x in correction)
    _tile[(len(set_of_tile),)](
        outputs, items, negatives, target_ids, negative_ids, target_q, negative_q,
        set_of_tile, first, counts, losses, doutputs, ditems, dlogits, dim, size,
        CORRECT=correction is not None, DEPTH=DEPTH, **shape,
    )  # fmt: skip
    ordered, order = set_of_tile.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(sets + 1, device=outputs.device))
    _negatives[(sets, triton.cdiv(dim, NEGATIVE_COLUMNS))](
        outputs, dlogits, order, starts, first, counts, dnegatives, dim, size, COLS=NEGATIVE_COLUMNS, **shape
    )
    return losses.sum(), doutputs, ditems, dnegatives
