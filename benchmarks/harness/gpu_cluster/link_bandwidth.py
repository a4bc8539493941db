"""What the links between ranks carry with nothing beside them: the exchange's shape, an AllToAll without a part for oneself."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster.launcher import HOST, NCCL, TCP, own_host

EXCHANGES = 4  # under way at the same time


def links(device: torch.device, mebibytes: int = 64) -> dict[str, float]:
    """GB/s that leave a rank, mean of the ranks, by transport; on CPU by gloo alone. A collective."""
    usual = gb_per_second(None, device, mebibytes)
    if device.type == "cpu":
        return {"gloo": usual}
    found = {NCCL: usual}
    for name in (HOST, TCP):
        group = hosts_of_their_own(device) if name == TCP else sm_free_group()
        found[name] = gb_per_second(group, device, mebibytes)
        dist.destroy_process_group(group)
    return found


def gb_per_second(group: Any, device: torch.device, mebibytes: int = 64) -> float:
    """Of a group; ``None``: of all ranks' own. A collective.

    Args:
        mebibytes: that leave a rank in one exchange.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    each = (mebibytes << 18) // (world - 1)  # numbers of four bytes
    splits = [0 if peer == rank else each for peer in range(world)]
    send = torch.zeros(sum(splits), device=device)
    receive = torch.empty_like(send)

    def exchange() -> float:
        dist.barrier()
        began = time.perf_counter()
        works = [
            dist.all_to_all_single(receive, send, splits, splits, group=group, async_op=True) for _ in range(EXCHANGES)
        ]
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return EXCHANGES * send.nbytes / 1e9 / (time.perf_counter() - began)

    exchange()  # sets up connections and buffers
    rates: list[Any] = [None] * world
    dist.all_gather_object(rates, exchange())
    return statistics.mean(rates)


def sm_free_group(options: Any = None) -> Any:
    """A group of all ranks over the SM-free transport. A collective."""
    from lightning_freescale.transport import Options  # not at the top: registers the backend

    options = options or Options(reductions="gloo")
    return dist.new_group(backend="freescale", pg_options=options, timeout=timedelta(seconds=60))


def hosts_of_their_own(device: torch.device, options: Any = None) -> Any:
    """The same between ranks that take each other for hosts. A collective."""
    with own_host(dist.get_rank()):
        group = sm_free_group(options)
        everyone = torch.empty(dist.get_world_size(), device=device)
        dist.all_gather_into_tensor(everyone, everyone[:1].clone(), group=group)  # connects them
    return group
