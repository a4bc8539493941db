"""What a link carries: measured over real groups, with the transports of a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import launcher as cluster
from benchmarks.harness.gpu_cluster import link_bandwidth as rates
from lightning_freescale.transport import Options
from tests.ranks import run_ranks


def _measure(rank: int, world: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    device = torch.device("cpu")
    found = rates.links(device, mebibytes=1)
    assert found.keys() == {"gloo"}
    queue = Options(cpu="queue")
    found |= {
        cluster.HOST: rates.gb_per_second(rates.sm_free_group(queue), device, mebibytes=1),
        cluster.TCP: rates.gb_per_second(rates.hosts_of_their_own(device, queue), device, mebibytes=1),
    }
    assert all(rate > 0 for rate in found.values()), found
    everybody: list[dict[str, float]] = [{}] * world
    dist.all_gather_object(everybody, found)
    assert everybody == [found] * world  # the mean of the ranks, known to all
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_every_link_carries_something(world: int) -> None:
    run_ranks(_measure, world, (world,))
