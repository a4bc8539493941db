"""Bandwidth of the links: measured over real process groups, with the transports of a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import link_bandwidth
from benchmarks.harness.gpu_cluster.transports import HOST, TCP
from lightning_freescale.transport import Options
from tests.ranks import run_ranks


def _measure(rank: int, world: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    device = torch.device("cpu")
    found = link_bandwidth.all_links(device, mebibytes=1)
    assert found.keys() == {"gloo"}
    queue = Options(cpu="queue")
    found |= {
        HOST: link_bandwidth.gb_per_second(link_bandwidth.sm_free_group(queue), device, mebibytes=1),
        TCP: link_bandwidth.gb_per_second(link_bandwidth.sm_free_tcp_group(device, queue), device, mebibytes=1),
    }
    assert all(rate > 0 for rate in found.values()), found
    gathered: list[dict[str, float]] = [{}] * world
    dist.all_gather_object(gathered, found)
    assert gathered == [found] * world  # every rank has the mean over the ranks
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_every_link_has_a_bandwidth(world: int) -> None:
    run_ranks(_measure, world, (world,))
