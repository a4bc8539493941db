"""Means over the global batch of values that ranks have taken over different numbers of samples or tokens.

Lightning, like DDP, averages over ranks as if all held equally many. Weighted by its rank's share beforehand, a value's plain
mean over ranks is the mean over the global batch:

    >>> losses, weights = [0.5, 2.0], [3, 1]
    >>> sum(loss * share(weights, rank) for rank, loss in enumerate(losses)) / 2  # (3 * 0.5 + 1 * 2.0) / 4
    0.875
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.seq_batch import SeqBatch

REDUCTIONS = ("sample", "token")
MEANS = ("mean", "avg", dist.ReduceOp.AVG)  # what Lightning calls them


def share(weights: Sequence[int], rank: int) -> float:
    """What the mean of ``rank`` counts for, 1 if all ranks' ``weights`` (samples or tokens, ``[ranks]``) are equal."""
    if len(set(weights)) <= 1:
        return 1.0
    return weights[rank] * len(weights) / sum(weights)


def weigh(value: Tensor, weights: Sequence[int], rank: int) -> Tensor:
    """``value`` by its :func:`share`. The mean over no samples, which is often no number, counts for nothing."""
    portion = share(weights, rank)
    if portion == 1.0:
        return value
    return value * portion if portion else torch.zeros_like(value)


def mean_of_counts(total: Tensor, ranks: int) -> Tensor:
    """``total / ranks``, integer only if that is exact.

    Lightning cuts the mean of the ranks' batch sizes to an integer and divides by it: 3 and 4 samples would count as 3.
    """
    mean = total.div(ranks, rounding_mode="floor")
    return mean if torch.equal(mean * ranks, total) else (total.double() / ranks).to(torch.get_default_dtype())


def loss_weight(batch: Any, reduction: str) -> int:
    """What a mean loss over this rank's batch counts for in the mean over all ranks.

    ``"sample"``: the stride of the first KeyedJaggedTensor, else the first dimension of the first tensor. ``"token"``: the
    predicted positions of the histories, one less than their events each; for batches of other types, all ids.
    """
    if isinstance(batch, SeqBatch) and reduction == "token":
        return int((batch.lengths - 1).sum())
    for features in find_parts(batch, KeyedJaggedTensor):
        return features.values().numel() if reduction == "token" else features.stride()
    for tensor in find_parts(batch, Tensor):
        return tensor.shape[0] if tensor.ndim else 1
    return 1
