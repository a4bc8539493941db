"""Sampled softmax over jagged histories: each position predicts the next item of its own history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_freescale.models.tiles import cut_tiles
from lightning_freescale.runtime.errors import InputError

LOSS_TILE = 32  # consecutive positions of one history whose logits are one matrix product
CHUNK_TILES = 4096  # tiles computed at a time: the logits of at most 131,072 positions exist at once


class SampledHistories(NamedTuple):
    """Which positions belong to a history, and which sets of negatives."""

    offsets: Tensor  # [B + 1] int64
    sets: Tensor | None  # [B] int64, how many sets of negatives each history has; one if there is nothing here


class PositionTiles(NamedTuple):
    """All positions, in tiles of one history."""

    chosen: Tensor  # [N], the set of negatives that the tile is scored against
    rows: Tensor  # [N, LOSS_TILE], flat rows; some other row past the end of the history
    predicted: Tensor  # [N, LOSS_TILE] bool, whether the position predicts an item


def sampled_softmax(
    outputs: Tensor,
    items: Tensor,
    item_ids: Tensor,
    negatives: Tensor,
    negative_ids: Tensor,
    offsets: Tensor,
    log_q: Tensor | None = None,
    counts: Tensor | None = None,
    set_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Sum over all positions that predict an item of ``-log softmax`` of the target among itself and negatives of the sample.

    The target of position ``t`` of a history is item ``t + 1``. The last position predicts nothing, so a history of one event
    adds 0. A negative that equals the target of a position is not a candidate there. Logits are dot products,
    divided by the temperature: normalize both sides for a cosine.

    The negatives of a sample are one or more sets of ``K``. Its first 32 positions are scored against the first set, the next 32
    against the second, and so on; after the last set the first one follows again.

    Positions are scored in tiles of one history, so work and memory are proportional to ``sum(L)`` and not to the longest
    history. The number of tiles is bounded by shapes alone, so the host does not wait for the device. Forward also computes
    the gradients, tile by tile, so the logits are computed once and not stored.

    Args:
        outputs: ``[sum(L), D]`` output of the model at every event.
        items: ``[sum(L), D]`` embeddings of the items of the histories.
        item_ids: ``[sum(L)]`` their ids.
        negatives: ``[sum(counts), D]`` embeddings of the negatives.
        negative_ids: ``[sum(counts)]`` their ids.
        offsets: ``[B + 1]``, from 0 to ``sum(L)``.
        log_q: ``[num_items]`` log probability that an item is drawn as a negative; subtracted from the item's logit.
        counts: ``[B]`` negatives of each sample, a multiple of ``set_size``. Without ``set_size`` it is not used.
        set_size: ``K``. By default each sample has one set, and all samples have the same number of negatives.
        temperature: the logits are divided by it.

    Returns:
        Scalar. It has a gradient even if no position predicts an item; that gradient is 0.
    """
    samples = len(offsets) - 1
    if len(outputs) == 0:
        return (outputs.sum() + items.sum() + negatives.sum()) * 0.0
    if set_size is None:
        if len(negatives) % samples:
            raise InputError(
                f"negatives: {len(negatives)} for {samples} samples; every sample must have the same number of negatives"
            )
        num_sets, sets = samples, None
    else:
        assert counts is not None
        num_sets, sets = len(negatives) // set_size, counts.long() // set_size
    negative_ids = negative_ids.view(num_sets, -1)
    # The last event of each history has a wrong target here. It predicts nothing.
    correction = None if log_q is None else (log_q[item_ids.roll(-1)], log_q[negative_ids])
    histories, scale = SampledHistories(offsets.contiguous(), sets), 1.0 / temperature
    rest = item_ids, negative_ids, correction, histories, scale
    return _SampledSoftmax.apply(*_learned((outputs, items, negatives)), *rest)


def _learned(rows: Sequence[Tensor]) -> Iterator[Tensor | list[Tensor | None]]:
    """The first four arguments of :class:`_SampledSoftmax`, from outputs, items and negatives."""
    origins = [_origin(x) for x in rows]
    yield from (x if origin is None else origin for x, origin in zip(rows, origins, strict=True))
    yield [None if origin is None else x.detach() for x, origin in zip(rows, origins, strict=True)]


def _origin(x: Tensor) -> Tensor | None:
    """What ``x`` was made of, if it has been scaled to length 1 on CUDA: then backward takes one pass over its rows, not two."""
    if not x.is_cuda:
        return None
    from lightning_freescale.models import norm_triton  # Triton is installed on CUDA machines only

    return norm_triton.origin_of(x)


class _SampledSoftmax(torch.autograd.Function):
    """The loss and its gradients, both computed in forward. Arguments as prepared by :func:`sampled_softmax`.

    ``units`` are the rows of outputs, items and negatives that were scaled to length 1; the argument before is then their origin.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        items: Tensor,
        negatives: Tensor,
        units: list[Tensor | None],
        item_ids: Tensor,
        negative_ids: Tensor,
        correction: tuple[Tensor, Tensor] | None,
        histories: SampledHistories,
        scale: float,
    ) -> Tensor:
        learned = outputs, items, negatives
        outputs, items, negatives = (x if unit is None else unit for x, unit in zip(learned, units, strict=True))
        negatives = negatives.view(len(negative_ids), -1, negatives.shape[-1])
        inputs = outputs, items, negatives, item_ids, negative_ids, correction, histories, scale
        compute = _loss_and_gradients
        if outputs.is_cuda:
            from lightning_freescale.models import loss_triton  # Triton is installed on CUDA machines only

            if loss_triton.supports(outputs, negatives):
                compute = loss_triton.loss_and_gradients
        loss, *gradients = compute(*inputs)
        origins = (None if unit is None else x for x, unit in zip(learned, units, strict=True))
        ctx.save_for_backward(*(x.flatten(0, -2) for x in gradients), *origins)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts, origins = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        found = (_scaled(grad, part, origin) for part, origin in zip(parts, origins, strict=True))
        return *found, None, None, None, None, None, None


def _scaled(grad: Tensor, part: Tensor, origin: Tensor | None) -> Tensor:
    """``grad * part``, or the gradient of the rows that were scaled to length 1."""
    if origin is None:
        return grad * part
    from lightning_freescale.models import norm_triton  # Triton is installed on CUDA machines only

    return norm_triton.unit_rows_backward(origin, part, factor=grad)


def _loss_and_gradients(
    outputs: Tensor,
    items: Tensor,
    negatives: Tensor,
    item_ids: Tensor,
    negative_ids: Tensor,
    correction: tuple[Tensor, Tensor] | None,
    histories: SampledHistories,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of outputs, items and negatives, in PyTorch operations."""
    tiles, target_ids = _position_tiles(histories, len(outputs)), item_ids.roll(-1)
    outputs = outputs * scale
    loss = outputs.new_zeros(())
    dpositive, doutputs = outputs.new_zeros(len(outputs)), torch.zeros_like(outputs)
    dnegatives = torch.zeros_like(negatives)
    # Slices are views; rolling the items would copy them. The very last position predicts nothing.
    positions, targets = outputs[:-1], items[1:]
    positive = F.pad((positions * targets).sum(-1), (0, 1))
    negatives_t = negatives.mT.contiguous()
    if correction is not None:
        positive -= correction[0]
    for chosen, row, predicted in zip(*(part.split(CHUNK_TILES) for part in tiles), strict=True):
        logits = outputs[row] @ negatives_t[chosen]  # [tiles, LOSS_TILE, K]
        if correction is not None:
            logits -= correction[1][chosen][:, None]
        logits.masked_fill_(target_ids[row][:, :, None] == negative_ids[chosen][:, None], -torch.inf)
        log_sum = logits.logsumexp(-1)
        margin = log_sum - positive[row]  # loss = log(1 + exp(margin))
        loss += (F.softplus(margin) * predicted).sum()
        dmargin = margin.sigmoid() * predicted
        # Padding has the row number of a real position. Its gradient is 0, so it must be added and not copied there.
        dpositive.index_add_(0, row.flatten(), -dmargin.flatten())
        dlogits = logits.sub_(log_sum[..., None]).exp_().nan_to_num_(0.0).mul_(dmargin[..., None])
        doutputs.index_add_(0, row.flatten(), (dlogits @ negatives[chosen]).flatten(0, 1))
        dnegatives.index_add_(0, chosen, dlogits.mT @ outputs[row])
    dpositive = dpositive[:-1, None]
    doutputs[:-1].addcmul_(dpositive, targets)
    ditems = torch.zeros_like(items)
    torch.mul(dpositive, positions, out=ditems[1:])
    return loss, doutputs.mul_(scale), ditems, dnegatives


def _set_of_tile(sample: Tensor, row: Tensor, sets: Tensor) -> Tensor:
    """Which set of negatives the positions of each tile are scored against, ``[N]``.

    Args:
        sample: ``[N]`` the sample of each tile.
        row: ``[N]`` the first position of the tile in its history.
        sets: ``[B]`` number of sets of each sample. The sets of a sample follow those of the sample before.
    """
    first = sets.cumsum(0) - sets
    return first[sample] + (row // LOSS_TILE) % sets[sample].clamp(min=1)


def _position_tiles(histories: SampledHistories, total: int) -> PositionTiles:
    """All ``total`` positions, in tiles of one history."""
    offsets, sets = histories
    sample, row, used = cut_tiles(offsets, total, LOSS_TILE)
    rows = (offsets[sample] + row)[:, None] + torch.arange(LOSS_TILE, device=offsets.device)
    predicted = (rows < offsets[sample + 1][:, None] - 1) & used[:, None]
    chosen = sample if sets is None else _set_of_tile(sample, row, sets)
    return PositionTiles(chosen, rows.clamp_(max=total - 1), predicted)
