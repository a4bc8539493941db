"""The bandwidth of each transport when nothing else runs: all-to-alls in which a rank sends nothing to itself."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster.transports import HOST, NCCL, TCP, as_separate_host

CONCURRENT_EXCHANGES = 4


def all_links(device: torch.device, mebibytes: int = 64) -> dict[str, float]:
    """GB/s that leave a rank, mean over the ranks, for every transport; on the CPU for gloo only. A collective."""
    default = gb_per_second(None, device, mebibytes)
    if device.type == "cpu":
        return {"gloo": default}
    found = {NCCL: default}
    for name in (HOST, TCP):
        group = sm_free_tcp_group(device) if name == TCP else sm_free_group()
        found[name] = gb_per_second(group, device, mebibytes)
        dist.destroy_process_group(group)
    return found


def gb_per_second(group: Any, device: torch.device, mebibytes: int = 64) -> float:
    """GB/s that leave a rank, mean over the ranks. A collective.

    Args:
        group: process group; ``None`` is the default group.
        mebibytes: what leaves a rank in one exchange.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    each = (mebibytes << 18) // (world - 1)  # float32 values per peer
    splits = [0 if peer == rank else each for peer in range(world)]
    send = torch.zeros(sum(splits), device=device)
    receive = torch.empty_like(send)

    def exchange() -> float:
        dist.barrier()
        began = time.perf_counter()
        works = [
            dist.all_to_all_single(receive, send, splits, splits, group=group, async_op=True)
            for _ in range(CONCURRENT_EXCHANGES)
        ]
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return CONCURRENT_EXCHANGES * send.nbytes / 1e9 / (time.perf_counter() - began)

    exchange()  # sets up connections and buffers
    rates: list[Any] = [None] * world
    dist.all_gather_object(rates, exchange())
    return statistics.mean(rates)


def sm_free_group(options: Any = None) -> Any:
    """A process group of all ranks over the SM-free transport. A collective."""
    from lightning_freescale.transport import Options  # imported late: the import registers the backend

    options = options or Options(reductions="gloo")
    return dist.new_group(backend="freescale", pg_options=options, timeout=timedelta(seconds=60))


def sm_free_tcp_group(device: torch.device, options: Any = None) -> Any:
    """As :func:`sm_free_group`, but the ranks treat each other as separate hosts and use TCP. A collective."""
    with as_separate_host(dist.get_rank()):
        group = sm_free_group(options)
        gathered = torch.empty(dist.get_world_size(), device=device)
        dist.all_gather_into_tensor(
            gathered, gathered[:1].clone(), group=group
        )  # the first collective connects the ranks
    return group
