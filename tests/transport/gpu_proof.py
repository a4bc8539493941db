"""GPU checks that the transport uses no SM: exchanges while a kernel holds every SM, and a look at the profiler."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster.bare_ranks import GpuRank
from tests.transport.gpu_hold import Holder, eventually
from tests.transport.gpu_package import new_group


def proof(cluster: GpuRank, args: Any) -> str:
    """While a kernel holds every SM, exchanges complete, and a copy by a kernel of one block does not."""
    group, world = new_group(), cluster.world
    send = torch.full((world << 22,), float(cluster.rank), device=cluster.device)  # 16 MiB for each rank
    received = torch.full_like(send, -1)
    a, b = torch.ones(256, device=cluster.device), torch.zeros(256, device=cluster.device)
    right = torch.arange(world, device=cluster.device).repeat_interleave(1 << 22).float()
    control_stream, control = torch.cuda.Stream(cluster.device), torch.cuda.Event()
    # Everything runs once beforehand, because the first run pins buffers and loads kernels.
    dist.all_to_all_single(received, send, group=group)
    assert torch.equal(received, right)
    with torch.cuda.stream(control_stream):
        torch.add(a, 0, out=b)
        control.record()
    received.fill_(-1)
    b.zero_()
    holder = Holder(cluster.device, seconds=15)
    cluster.meet()
    held = holder.start()
    dist.barrier()
    try:
        began = time.perf_counter()
        works = [dist.all_to_all_single(received, send, group=group, async_op=True) for _ in range(3)]
        complete = eventually(lambda: all(work.is_completed() for work in works), 8)
        took = time.perf_counter() - began
        with torch.cuda.stream(control_stream):
            torch.add(a, 0, out=b)  # one block
            control.record()
        kernel_ran = eventually(control.query, 0.5)
        still_held = holder.running()
        dist.barrier()
    finally:
        holder.stop()
    torch.cuda.synchronize()
    assert held > 0, "the holding kernel did not start"
    assert still_held, "the holding kernel ended before the checks did"
    assert complete, "the exchange did not complete while every SM was held"
    assert not kernel_ran, "a copy by a kernel of one block ran too, so not all SMs were held and nothing is proved"
    assert torch.equal(received, right), "the exchange moved wrong bytes while the SMs were held"
    assert torch.equal(a, b), "the copy by a kernel never ran"
    dist.destroy_process_group(group)
    sizes = f"3 exchanges of {world * 16} MiB in {took * 1e3:.1f} ms"
    return f"{held} of {holder.blocks} blocks resident; {sizes}; the copy by a kernel stalled"


def profile(cluster: GpuRank, args: Any) -> str:
    """The profiler records copies and no kernels on the transport's streams."""
    group, world = new_group(), cluster.world
    send, received = (torch.ones(world << 20, device=cluster.device) for _ in range(2))
    dist.all_to_all_single(received, send, group=group)
    cluster.meet()

    def traced(body: Callable[[], Any]) -> list[dict[str, Any]]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            body()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]

    def exchange() -> None:
        for _ in range(4):
            dist.all_to_all_single(received, send, group=group, async_op=True).wait()

    traced(lambda: None)  # the first profile of a process may miss events
    dist.barrier()
    events = traced(exchange)
    control = traced(lambda: torch.add(send, 1, out=received))
    dist.barrier()
    kinds: dict[str, int] = {}
    for event in events:
        name = (
            event["name"].split("(")[0].strip() if event["cat"] == "gpu_memcpy" else f"{event['cat']} {event['name']}"
        )
        kinds[name] = kinds.get(name, 0) + 1
    dist.destroy_process_group(group)
    if not events and not control:
        return "NOT CHECKED: the profiler records nothing on this device; run with one rank and without MPS"
    assert any(event["cat"] == "kernel" for event in control), "the profiler misses kernels, so nothing is proved"
    assert all(event["cat"] == "gpu_memcpy" for event in events), f"there are not only copies: {kinds}"
    for way in ("DtoH", "HtoD"):
        assert any(way in name for name in kinds), f"there is no {way} copy among {kinds}"
    streams = sorted({event["args"]["stream"] for event in events})
    assert len(streams) == 2, f"copies on streams {streams}, expected one stream out and one in"
    return f"{kinds} on streams {streams}, no kernel"
