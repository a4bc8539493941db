"""The order in which the partial sums of row-wise bags are added is that of gloo's reduce-scatter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embedding.partial_sums import SumOfPartials, own_segments
from tests.ranks import run_ranks

WIDTH = 56
# Samples of each rank. The largest buffers have more segments than two for each rank.
CASES = ([1, 1, 1, 1], [7, 7, 7, 7], [12_000, 12_000, 12_000, 12_000], [3, 0, 1, 9], [200, 201, 170, 5])


def differences(rank: int, world: int) -> list[tuple[int, int]]:
    """For each case, how many numbers differ from gloo's: in gloo's order, and in the order of the ranks."""
    dist.init_process_group("gloo")
    found = []
    for case in CASES:
        samples = case[:world]
        before, own = sum(samples[:rank]), samples[rank]
        drawn = [
            torch.randn(sum(samples), WIDTH, generator=torch.Generator().manual_seed(r)).exp() for r in range(world)
        ]
        expected = torch.empty(own, WIDTH)
        if len(set(samples)) == 1:
            dist.reduce_scatter_tensor(expected, drawn[rank].clone())
        else:
            dist.reduce_scatter(expected, list(drawn[rank].split(samples)))
        partials = torch.stack([part[before : before + own] for part in drawn], dim=1)
        got = SumOfPartials.apply(partials, own_segments(WIDTH, samples, rank))
        plain = torch.stack(partials.unbind(1)).cumsum(0)[-1]
        found.append((int((got != expected).sum()), int((plain != expected).sum())))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_it_is_the_order_of_gloo(world: int) -> None:
    by_rank = run_ranks(differences, world, args=(world,))
    assert all(wrong == 0 for rank in by_rank for wrong, _ in rank)
    in_order_of_ranks = sum(wrong for rank in by_rank for _, wrong in rank)
    assert (in_order_of_ranks > 0) == (world > 2)  # two numbers can be added in any order


def test_every_partial_sum_has_the_gradient_of_the_sum() -> None:
    partials = torch.randn(5, 3, 4, requires_grad=True)
    weights = torch.randn(5, 4)
    (SumOfPartials.apply(partials, own_segments(4, [5, 5, 5], 1)) * weights).sum().backward()
    assert partials.grad is not None
    assert torch.equal(partials.grad, weights[:, None].expand(5, 3, 4))
