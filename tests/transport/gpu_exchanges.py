"""GPU checks of the bytes that arrive: random exchanges, all dtypes, and a fault that the checks must detect."""

from __future__ import annotations

import itertools
import os
import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.gpu_cluster.bare_ranks import GpuRank
from benchmarks.harness.gpu_cluster.transports import as_separate_host
from tests.transport.gpu_package import collectives, host_staged, new_group, rank_buffers, transport

_store_numbers = itertools.count()  # each use of the store needs keys of its own


class Case:
    """A random uneven all-to-all. All ranks hold the same table of random bytes, and every buffer is a slice of it."""

    def __init__(self, cluster: GpuRank, table: Tensor, number: int, largest: int):
        draw = random.Random(number)
        world, rank = cluster.world, cluster.rank
        kinds = [0] * 30 + [64 << 10] * 60 + [largest // 12] * 9 + [largest]
        sizes = [[draw.randint(0, draw.choice(kinds)) for _ in range(world)] for _ in range(world)]
        starts = [[draw.randrange(table.numel() - largest) for _ in range(world)] for _ in range(world)]

        def slice_of(source: int, target: int) -> Tensor:
            return table[starts[source][target] : starts[source][target] + sizes[source][target]]

        self.send = torch.cat([slice_of(rank, target) for target in range(world)])
        self.right = torch.cat([slice_of(source, rank) for source in range(world)])
        self.received = torch.full_like(self.right, 0xEE)
        self.send_splits, self.receive_splits = sizes[rank], [sizes[source][rank] for source in range(world)]


def random_table(cluster: GpuRank) -> Tensor:
    """96 MiB of random bytes, equal on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (96 << 20,), dtype=torch.uint8, generator=generator).to(cluster.device)


def run_random(cluster: GpuRank, group: Any, count: int, largest: int = 24 << 20) -> tuple[int, int]:
    """Count the bytes that differ from the table, and from gloo's result for one exchange in a hundred."""
    table = random_table(cluster)
    wrong = torch.zeros((), dtype=torch.int64, device=cluster.device)
    wrong_by_gloo = 0
    outstanding: list[tuple[Any, Case]] = []
    order = random.Random(cluster.rank)
    for number in range(count):
        case = Case(cluster, table, number, largest)
        work = dist.all_to_all_single(
            case.received, case.send, case.receive_splits, case.send_splits, group=group, async_op=True
        )
        outstanding.append((work, case))
        if number % 100 == 99:
            reference = torch.empty_like(case.right, device="cpu")
            dist.all_to_all_single(reference, case.send.cpu(), case.receive_splits, case.send_splits)
            work.wait()
            wrong_by_gloo += int((case.received.cpu() != reference).sum())
        if len(outstanding) >= 6:
            work, case = outstanding.pop(order.randrange(len(outstanding)))  # each rank waits in another order
            work.wait()
            wrong += (case.received != case.right).sum()
        if number % 250 == 249:
            torch.cuda.synchronize()  # bounds the memory that the allocator keeps for the streams
    for work, case in outstanding:
        work.wait()
        wrong += (case.received != case.right).sum()
    return int(wrong), wrong_by_gloo


def exact(cluster: GpuRank, args: Any) -> str:
    """Thousands of random uneven exchanges have no wrong byte."""
    group = new_group()
    wrong, wrong_by_gloo = run_random(cluster, group, args.exchanges)
    assert wrong == 0, f"{wrong} wrong bytes"
    assert wrong_by_gloo == 0, f"{wrong_by_gloo} bytes differ from gloo's"
    report = group.report()
    on_device = any(found["device_bytes"] for found in report.values())
    assert on_device == (os.environ.get("FREESCALE_RINGS") == "device"), (
        f"the buffers are in the wrong memory: {report}"
    )
    dist.destroy_process_group(group)
    return f"{args.exchanges} exchanges, 0 wrong bytes, {report}"


def hosts(cluster: GpuRank, args: Any) -> str:
    """Random exchanges have no wrong byte between ranks that treat each other as other hosts."""
    count = min(300, args.exchanges)
    with as_separate_host(cluster.rank):
        group = new_group()
        wrong, wrong_by_gloo = run_random(cluster, group, count)
    assert wrong == wrong_by_gloo == 0, f"{wrong} and {wrong_by_gloo} wrong bytes"
    dist.destroy_process_group(group)
    return f"{count} exchanges over the network, 0 wrong bytes"


def dtypes(cluster: GpuRank, args: Any) -> str:
    """Every collective works with every dtype, on small tensors."""
    group, rank, world, device = new_group(), cluster.rank, cluster.world, cluster.device
    for seed, dtype in enumerate(collectives.DTYPES):
        send, send_splits, receive_splits, right = collectives.all_to_all_case(rank, world, seed, dtype)
        received = torch.empty_like(right, device=device)
        dist.all_to_all_single(received, send.to(device), receive_splits, send_splits, group=group)
        assert collectives.same_bits(received, right), f"all_to_all_single of {dtype}"
        generator = torch.Generator().manual_seed(seed)
        everyone = [collectives.random_tensor((peer, 2), dtype, generator) for peer in range(world)]
        gathered = [torch.empty_like(tensor, device=device) for tensor in everyone]
        dist.all_gather(gathered, everyone[rank].to(device), group=group)
        assert all(map(collectives.same_bits, gathered, everyone)), f"all_gather of {dtype}"
        tensor = torch.empty_like(everyone[-1], device=device)
        if rank == world - 1:
            tensor.copy_(everyone[-1])
        dist.broadcast(tensor, src=world - 1, group=group)
        assert collectives.same_bits(tensor, everyone[-1]), f"broadcast of {dtype}"
    dist.destroy_process_group(group)
    return f"{len(collectives.DTYPES)} dtypes"


def early_flag(cluster: GpuRank, args: Any) -> str:
    """Chunks that are announced before they are copied give wrong bytes. If not, the checks above prove nothing."""
    store = dist.PrefixStore(f"early{next(_store_numbers)}", dist.distributed_c10d._get_default_store())
    mover = host_staged.HostStagedMover(
        store, cluster.rank, cluster.world, timedelta(seconds=20), cluster.device, transport.Options(), early_flag=True
    )
    table = random_table(cluster)
    other = torch.zeros(64 << 20, dtype=torch.uint8, device=cluster.device)
    on_host, beside = torch.empty_like(other, device="cpu", pin_memory=True), torch.cuda.Stream()
    wrong, total, number = 0, 0.0, 0
    # A receiver that copies as fast as the sender stays behind it and sees no wrong byte. A second copy to the host makes the
    # sender slower, so that the receiver overtakes it.
    while number < 200 and total == 0:
        for _ in range(20):
            number += 1
            case = Case(cluster, table, number, 24 << 20)
            send = rank_buffers.RankBuffers.split(case.send, case.send_splits, cluster.world, "send")
            receive = rank_buffers.RankBuffers.split(case.received, case.receive_splits, cluster.world, "receive")
            with torch.cuda.stream(beside):
                on_host.copy_(other, non_blocking=True)
            mover.exchange("all_to_all", send, receive).wait()
            wrong += int((case.received != case.right).sum())
        total = sum(cluster.gather(wrong))
    cluster.meet()
    mover.close(10)
    assert total > 0, "the fault was not detected"
    return f"the fault shows as {wrong} wrong bytes here, {int(total)} in all, after {number} exchanges"
