"""Ranking metrics for queries with one relevant item, the target. They keep two numbers, summed over all ranks at the end."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _RankMetric(Metric):
    """Mean over queries of a gain that depends on the place of the target in the list."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, k: float = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def gain(self, ranks: Tensor) -> Tensor:
        """Gain ``[B]`` float64 of targets at the places ``ranks [B]``, before the cut-off at ``k``."""
        raise NotImplementedError

    def update(self, ranks: Tensor) -> None:
        """Add ``B`` queries. ``ranks [B]`` counts the items before the target: 0 if the target comes first."""
        self.total += (self.gain(ranks) * (ranks < self.k)).sum()
        self.count += ranks.numel()

    def compute(self) -> Tensor:
        return (self.total / self.count.clamp(min=1)).float()


class HitRate(_RankMetric):
    """Share of queries whose target is among the first ``k`` items."""

    def gain(self, ranks: Tensor) -> Tensor:
        return torch.ones_like(ranks, dtype=torch.float64)


class NDCG(_RankMetric):
    """Mean over queries of ``1 / log2(rank + 2)``, or 0 past the first ``k`` items. With one target the ideal DCG is 1."""

    def gain(self, ranks: Tensor) -> Tensor:
        return (ranks.double() + 2).log2().reciprocal()


class MRR(_RankMetric):
    """Mean reciprocal rank: mean over queries of ``1 / (rank + 1)``, of the whole list by default."""

    def __init__(self, k: float = math.inf, **kwargs: Any) -> None:
        super().__init__(k, **kwargs)

    def gain(self, ranks: Tensor) -> Tensor:
        return (ranks.double() + 1).reciprocal()


def target_ranks(scores: Tensor, target_scores: Tensor, is_target: Tensor) -> Tensor:
    """How many other items rank before the target. Ties and NaN count as before it, so a broken model scores nothing.

    Args:
        scores: ``[B, N]`` scores of the ranked items.
        target_scores: ``[B]`` score of each query's target.
        is_target: ``[B, N]`` bool, True where the ranked item is the target itself.

    Returns:
        ``[B]`` int64.
    """
    return (~(scores < target_scores[:, None]) & ~is_target).sum(-1)


def popularity_hit_rate(item_counts: Tensor, targets: Tensor, k: int = 10) -> float:
    """HR@k of recommending the ``k`` most frequent items to everyone, the baseline that a model has to beat.

    Args:
        item_counts: ``[num_items]`` number of occurrences of each item in the training histories.
        targets: ``[B]`` held-out items.
        k: length of the list.
    """
    return torch.isin(targets, item_counts.topk(min(k, len(item_counts))).indices).double().mean().item()
