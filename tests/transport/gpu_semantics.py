"""GPU checks of streams, memory, priorities and failures."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster.bare_ranks import GpuRank
from tests.transport.gpu_hold import eventually
from tests.transport.gpu_package import new_group, transport


def host_goes_on(cluster: GpuRank, args: Any) -> str:
    """``wait()`` makes the current stream wait and does not block the host."""
    group, world = new_group(), cluster.world
    send = torch.full((world * 1000,), float(cluster.rank), device=cluster.device)
    received = torch.full_like(send, -1)
    dist.all_to_all_single(received, send, group=group)  # sets up the queue
    # Loads the kernel now. The first launch of a kernel waits for all streams, even for those that wait for a peer.
    doubled = received * 2
    cluster.meet()
    received.fill_(-1)
    done = torch.cuda.Event()
    if cluster.rank == 0:
        dist.all_to_all_single(received, send, group=group, async_op=True).wait()
        doubled = received * 2  # in stream order after the exchange
        done.record()
        time.sleep(0.05)
        assert not done.query(), "the stream did not wait for a peer that has not sent yet"
    dist.barrier()  # the others send only now, so a host that blocks in wait() never gets here
    if cluster.rank != 0:
        dist.all_to_all_single(received, send, group=group)
        doubled = received * 2
    torch.cuda.synchronize()
    right = torch.arange(world, device=cluster.device).repeat_interleave(1000) * 2.0
    assert torch.equal(doubled, right), "the kernel after wait() did not see the result"
    dist.destroy_process_group(group)
    return "the stream waits, the host does not"


def dropped(cluster: GpuRank, args: Any) -> str:
    """The memory of tensors that the caller drops is not reused before the transfer is done."""
    group, world = new_group(), cluster.world
    results = []
    for number in range(40):
        send = torch.full((world << 20,), 10.0 * number + cluster.rank, device=cluster.device)
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=group, async_op=True)
        del send
        torch.full((world << 20,), -7.0, device=cluster.device)  # would get the memory of the dropped tensor
        results.append((work, received))
    for number, (work, received) in enumerate(results):
        work.wait()
        right = (torch.arange(world, device=cluster.device) + 10.0 * number).repeat_interleave(1 << 20)
        assert torch.equal(received, right), f"exchange {number} sent memory that had been reused"
    dist.destroy_process_group(group)
    return "40 dropped inputs arrived unchanged"


def priorities(cluster: GpuRank, args: Any) -> str:
    """A small high-priority exchange that is issued after a large low-priority one finishes first."""
    low, high = new_group(), new_group(priority="high")
    world = cluster.world
    large = torch.ones(world << 26, device=cluster.device)  # 256 MiB for each rank
    small = torch.ones(world << 20, device=cluster.device)  # 4 MiB for each rank
    large_in, small_in = torch.empty_like(large), torch.empty_like(small)
    for tensor, into, group in ((large, large_in, low), (small, small_in, high)):
        dist.all_to_all_single(into, tensor, group=group)
    cluster.meet()
    began = time.perf_counter()
    dist.all_to_all_single(small_in, small, group=high)
    torch.cuda.synchronize()
    alone = time.perf_counter() - began
    cluster.meet()
    began = time.perf_counter()
    slow = dist.all_to_all_single(large_in, large, group=low, async_op=True)
    fast = dist.all_to_all_single(small_in, small, group=high, async_op=True)
    assert eventually(fast.is_completed, 20), "the high-priority exchange did not end"
    took, first = time.perf_counter() - began, not slow.is_completed()
    assert eventually(slow.is_completed, 20), "the low-priority exchange did not end"
    whole = time.perf_counter() - began
    assert first, "the low-priority exchange finished before the high-priority one"
    assert bool((large_in == 1).all()), "the low-priority exchange moved wrong bytes"
    assert bool((small_in == 1).all()), "the high-priority exchange moved wrong bytes"
    cluster.meet()
    dist.destroy_process_group(low)
    dist.destroy_process_group(high)
    return f"high {took * 1e3:.2f} ms beside the low one of {whole * 1e3:.1f} ms; alone {alone * 1e3:.2f} ms"


def timeout(cluster: GpuRank, args: Any) -> str:
    """When a rank is late, every rank raises an error that names it, and what did not come is NaN."""
    group, world = new_group(seconds=3), cluster.world
    send = torch.ones(world << 20, device=cluster.device)
    received = torch.zeros_like(send)
    dist.all_to_all_single(received, send, group=group)
    assert bool((received == 1).all()), "the first exchange moved wrong bytes"
    cluster.meet()
    began, text = time.monotonic(), ""
    if cluster.rank != world - 1:
        try:
            dist.all_to_all_single(received, send, group=group, async_op=True).wait()
            torch.cuda.synchronize()  # returns although the data never arrive
            dist.all_to_all_single(received, send, group=group)
        except transport.TransportError as error:
            text = str(error)
        torch.cuda.synchronize()
        assert bool(received.view(world, -1)[-1].isnan().all()), "what did not come must be NaN"
    else:
        assert eventually(lambda: transport.failed_transfer() is not None, 20), "the late rank must hear of the failure"
        text = str(transport.failed_transfer())
    took = time.monotonic() - began
    assert f"bytes from rank {world - 1}" in text, f"the error must name the late rank, but is {text!r}"
    assert took < 15, f"the error came after {took:.1f} s"
    cluster.meet()
    dist.destroy_process_group(group)
    return f"after {took:.2f} s: {text}"


def death(cluster: GpuRank, args: Any) -> str:
    """When a rank dies, the others raise an error that names it, even if their host waits for the device."""
    group, world = new_group(), cluster.world
    send = torch.ones(world << 20, device=cluster.device)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    cluster.meet()
    if cluster.rank == world - 1:
        print(f"rank {cluster.rank} death: exits without closing the group", flush=True)
        os._exit(0)
    began, text = time.monotonic(), ""
    try:
        dist.all_to_all_single(received, send, group=group, async_op=True).wait()
        torch.cuda.synchronize()  # returns although the data never arrive
        dist.all_to_all_single(received, send, group=group)
    except transport.TransportError as error:
        text = str(error)
    took = time.monotonic() - began
    assert f"rank {world - 1}" in text, f"the error must name the dead rank, but is {text!r}"
    assert took < 30, f"the error came after {took:.1f} s"
    return f"after {took:.2f} s: {text}"
