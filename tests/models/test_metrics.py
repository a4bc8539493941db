"""HR@k, NDCG@k and MRR against torchmetrics, and summed over two ranks."""

from __future__ import annotations

import pytest
import torch
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG

from lightning_freescale.models.metrics import MRR, NDCG, HitRate, popularity_hit_rate, target_ranks
from tests.ranks import run_ranks

RNG = torch.Generator().manual_seed(0)
SCORES = torch.randn(40, 25, generator=RNG)
TARGETS = torch.randint(25, (40,), generator=RNG)


def ranks(scores: torch.Tensor = SCORES, targets: torch.Tensor = TARGETS) -> torch.Tensor:
    is_target = targets[:, None] == torch.arange(scores.shape[1])
    return target_ranks(scores, scores.gather(1, targets[:, None])[:, 0], is_target)


@pytest.mark.parametrize("k", [1, 3, 10, 25])
def test_equal_to_torchmetrics_retrieval(k: int) -> None:
    query = torch.arange(40).repeat_interleave(25)
    relevant = TARGETS[:, None] == torch.arange(25)
    positive = SCORES - SCORES.min() + 1  # the MRR of torchmetrics ignores items with a score of 0 or less
    pairs = [
        (HitRate(k), RetrievalHitRate(top_k=k)),
        (NDCG(k), RetrievalNormalizedDCG(top_k=k)),
        (MRR(k), RetrievalMRR(top_k=k)),
        (MRR(), RetrievalMRR()),
    ]
    for ours, theirs in pairs:
        ours.update(ranks()[:13])
        ours.update(ranks()[13:])
        torch.testing.assert_close(ours.compute(), theirs(positive.flatten(), relevant.flatten(), query))


def test_rank_is_the_place_in_the_sorted_list() -> None:
    order = SCORES.argsort(descending=True)
    assert torch.equal(ranks(), (order == TARGETS[:, None]).int().argmax(1))


def test_ties_and_nan_count_against_the_target() -> None:
    assert ranks(torch.zeros(3, 25), TARGETS[:3]).tolist() == [24, 24, 24]
    assert ranks(torch.full((3, 25), torch.nan), TARGETS[:3]).tolist() == [24, 24, 24]


def test_no_query_is_zero() -> None:
    assert HitRate().compute() == 0


def _update_on_rank(rank: int) -> tuple[float, float]:
    torch.distributed.init_process_group("gloo")
    metrics = HitRate(5), NDCG(5)
    part = ranks()[:10] if rank == 0 else ranks()[10:]  # unequal numbers of queries
    for metric in metrics:
        metric.update(part)
    return metrics[0].compute().item(), metrics[1].compute().item()


def test_ranks_are_pooled_over_processes() -> None:
    whole = HitRate(5), NDCG(5)
    for metric in whole:
        metric.update(ranks())
    expected = tuple(metric.compute().item() for metric in whole)
    assert run_ranks(_update_on_rank) == [pytest.approx(expected)] * 2


def test_popularity_recommends_the_most_frequent() -> None:
    counts = torch.tensor([5, 1, 9, 0, 7])
    assert popularity_hit_rate(counts, torch.tensor([2, 4, 0, 1]), k=2) == 0.5
    assert popularity_hit_rate(counts, torch.tensor([2, 4, 0, 1])) == 1.0
