"""Sampled softmax over jagged histories: each position predicts the next item of its own history."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_freescale.models.tiles import cut
from lightning_freescale.runtime.errors import InputError

TILE = 32  # positions of one history scored together
CHUNK_TILES = 4096  # the logits of at most 131,072 positions exist at a time


def sampled_softmax(
    outputs: Tensor,
    items: Tensor,
    item_ids: Tensor,
    negatives: Tensor,
    negative_ids: Tensor,
    offsets: Tensor,
    log_q: Tensor | None = None,
) -> Tensor:
    """Sum over all predicted positions of ``-log softmax`` of the target among itself and its sample's negatives.

    Position ``t`` of a history has item ``t + 1`` as target; the last one has none, so a history of one event adds 0. A
    negative that is the target of a position is no candidate there. Logits are dot products: scale the outputs for a
    temperature, normalise both sides for a cosine.

    Positions are scored in tiles of one history each, so work and memory follow ``sum(L)``, not the longest history.
    How many tiles there are is bounded from shapes alone: the host does not wait for the device. Gradients are taken
    while the logits of a tile are at hand, so logits are computed once and never kept.

    Args:
        outputs: ``[sum(L), D]``.
        items: ``[sum(L), D]`` embeddings of the histories' items.
        item_ids: ``[sum(L)]``.
        negatives: ``[B * K, D]`` embeddings of the negatives, ``K`` for every sample.
        negative_ids: ``[B * K]``.
        offsets: ``[B + 1]``, from 0 to ``sum(L)``.
        log_q: ``[num_items]`` log probability with which an item is drawn as a negative; subtracted from its logit.

    Returns:
        Scalar, attached to the graph also when nothing is predicted.
    """
    samples = len(offsets) - 1
    if len(outputs) == 0:
        return (outputs.sum() + items.sum() + negatives.sum()) * 0.0
    if len(negatives) % samples:
        raise InputError(
            f"negatives: {len(negatives)} for {samples} samples; every sample needs the same number of negatives"
        )
    negatives, negative_ids = negatives.view(samples, -1, negatives.shape[-1]), negative_ids.view(samples, -1)
    target_ids = item_ids.roll(-1)  # the last event of a history meets the next one's first, but predicts nothing
    correction = None if log_q is None else (log_q[target_ids], log_q[negative_ids])
    return _SampledSoftmax.apply(
        outputs, items, negatives, target_ids, negative_ids, correction, _positions(offsets, len(outputs))
    )


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        items: Tensor,
        negatives: Tensor,
        target_ids: Tensor,
        negative_ids: Tensor,
        correction: tuple[Tensor, Tensor] | None,
        tiles: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        loss = outputs.new_zeros(())
        dpositive, doutputs = outputs.new_zeros(len(outputs)), torch.zeros_like(outputs)
        dnegatives = torch.zeros_like(negatives)
        # Views: to roll the items would be to copy them. The last position of all predicts nothing.
        positions, targets = outputs[:-1], items[1:]
        positive = F.pad((positions * targets).sum(-1), (0, 1))
        negatives_t = negatives.mT.contiguous()
        if correction is not None:
            positive -= correction[0]
        for owner, row, predicted in zip(*(part.split(CHUNK_TILES) for part in tiles), strict=True):
            logits = outputs[row] @ negatives_t[owner]  # [tiles, TILE, K]
            if correction is not None:
                logits -= correction[1][owner][:, None]
            logits.masked_fill_(target_ids[row][:, :, None] == negative_ids[owner][:, None], -torch.inf)
            rest = logits.logsumexp(-1)
            margin = rest - positive[row]  # loss = log(1 + exp(margin))
            loss += (F.softplus(margin) * predicted).sum()
            dmargin = margin.sigmoid() * predicted
            # Padding shares its row with a true position; adding its zeros is harmless, copying them is not.
            dpositive.index_add_(0, row.flatten(), -dmargin.flatten())
            dlogits = logits.sub_(rest[..., None]).exp_().nan_to_num_(0.0).mul_(dmargin[..., None])
            doutputs.index_add_(0, row.flatten(), (dlogits @ negatives[owner]).flatten(0, 1))
            dnegatives.index_add_(0, owner, dlogits.mT @ outputs[row])
        dpositive = dpositive[:-1, None]
        doutputs[:-1].addcmul_(dpositive, targets)
        ditems = torch.zeros_like(items)
        torch.mul(dpositive, positions, out=ditems[1:])
        ctx.save_for_backward(doutputs, ditems, dnegatives)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad * part for part in ctx.saved_tensors), None, None, None, None


def _positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions in tiles of one history each.

    Returns:
        ``[N]`` sample of each tile, ``[N, TILE]`` its flat rows (some row where the history has ended), ``[N, TILE]``
        bool, whether the position predicts an item.
    """
    sample, row, used = cut(offsets, total, TILE)
    rows = (offsets[sample] + row)[:, None] + torch.arange(TILE, device=offsets.device)
    predicted = (rows < offsets[sample + 1][:, None] - 1) & used[:, None]
    return sample, rows.clamp_(max=total - 1), predicted
