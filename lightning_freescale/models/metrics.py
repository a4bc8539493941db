"""Ranking metrics from the rank of each query's one relevant item: constant state, one sum over ranks at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _RankMetric(Metric):
    """Mean over queries of a gain that depends on the target's rank."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, k: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def gain(self, ranks: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, ranks: Tensor) -> None:
        """Add queries. ``ranks`` is ``[B]``, 0 where the target comes first."""
        self.total += (self.gain(ranks) * (ranks < self.k)).sum()
        self.count += ranks.numel()

    def compute(self) -> Tensor:
        return (self.total / self.count.clamp(min=1)).float()


class HitRate(_RankMetric):
    """Share of queries whose target is among the first ``k``."""

    def gain(self, ranks: Tensor) -> Tensor:
        return torch.ones_like(ranks, dtype=torch.float64)


class NDCG(_RankMetric):
    """Mean over queries of ``1 / log2(rank + 2)``, 0 beyond the first ``k``; with one target each, the ideal is 1."""

    def gain(self, ranks: Tensor) -> Tensor:
        return (ranks.double() + 2).log2().reciprocal()


def target_ranks(scores: Tensor, target_scores: Tensor, is_target: Tensor) -> Tensor:
    """How many other items rank before the target. Ties and NaN count against it: a broken model gains nothing.

    Args:
        scores: ``[B, N]`` of the items ranked.
        target_scores: ``[B]``.
        is_target: ``[B, N]`` bool, where the item is the target itself.

    Returns:
        ``[B]`` int64.
    """
    return (~(scores < target_scores[:, None]) & ~is_target).sum(-1)


def popularity_hit_rate(item_counts: Tensor, targets: Tensor, k: int = 10) -> float:
    """HR@k of recommending the ``k`` most frequent items to everyone: the baseline a model has to beat.

    Args:
        item_counts: ``[num_items]``, how often each item occurs in the training histories.
        targets: ``[B]`` held-out items.
    """
    return torch.isin(targets, item_counts.topk(min(k, len(item_counts))).indices).double().mean().item()
