"""GPU checks of the transport, one process per rank; needs torch and the built C++ core alone (see build_core.sh).

Started by gpu_cluster.py, or by anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Every scenario prints
a line per rank; the first failure ends the rank. Nothing waits for ever: a scenario that takes too long ends the process
with all stacks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.cluster import own_host
from benchmarks.sm_free import Cluster, bare_package, limited
from tests.transport.gpu_hold import Holder, eventually

bare_package()
transport = importlib.import_module("lightning_freescale.transport")
host_staged = importlib.import_module("lightning_freescale.transport.host_staged")
parts = importlib.import_module("lightning_freescale.transport.parts")
_serial = 0


def new_group(**options: Any) -> Any:
    options = {"reductions": "gloo"} | options
    return dist.new_group(backend="freescale", pg_options=transport.Options(**options), timeout=timedelta(seconds=20))


# -- random exchanges --------------------------------------------------------------------------------------------------


class Case:
    """A random uneven AllToAll whose every part is a slice of one table of random bytes that all ranks hold."""

    def __init__(self, cluster: Cluster, table: Tensor, number: int, largest: int):
        draw = random.Random(number)
        world, rank = cluster.world, cluster.rank
        kinds = [0] * 30 + [64 << 10] * 60 + [largest // 12] * 9 + [largest]
        sizes = [[draw.randint(0, draw.choice(kinds)) for _ in range(world)] for _ in range(world)]
        starts = [[draw.randrange(table.numel() - largest) for _ in range(world)] for _ in range(world)]

        def piece(source: int, target: int) -> Tensor:
            return table[starts[source][target] : starts[source][target] + sizes[source][target]]

        self.send = torch.cat([piece(rank, target) for target in range(world)])
        self.right = torch.cat([piece(source, rank) for source in range(world)])
        self.received = torch.full_like(self.right, 0xEE)
        self.send_splits, self.receive_splits = sizes[rank], [sizes[source][rank] for source in range(world)]


def table(cluster: Cluster) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (96 << 20,), dtype=torch.uint8, generator=generator).to(cluster.device)


def run_random(cluster: Cluster, group: Any, count: int, largest: int = 24 << 20) -> tuple[int, int]:
    """Wrong bytes against the table, and against gloo for one exchange in a hundred."""
    bytes_of = table(cluster)
    wrong = torch.zeros((), dtype=torch.int64, device=cluster.device)
    wrong_by_gloo = 0
    flying: list[tuple[Any, Case]] = []
    order = random.Random(cluster.rank)
    for number in range(count):
        case = Case(cluster, bytes_of, number, largest)
        work = dist.all_to_all_single(
            case.received, case.send, case.receive_splits, case.send_splits, group=group, async_op=True
        )
        flying.append((work, case))
        if number % 100 == 99:
            reference = torch.empty_like(case.right, device="cpu")
            dist.all_to_all_single(reference, case.send.cpu(), case.receive_splits, case.send_splits)
            work.wait()
            wrong_by_gloo += int((case.received.cpu() != reference).sum())
        if len(flying) >= 6:
            work, case = flying.pop(order.randrange(len(flying)))  # waits out of order, differently on each rank
            work.wait()
            wrong += (case.received != case.right).sum()
        if number % 250 == 249:
            torch.cuda.synchronize()  # bounds the memory that waits for its stream
    for work, case in flying:
        work.wait()
        wrong += (case.received != case.right).sum()
    return int(wrong), wrong_by_gloo


def exact(cluster: Cluster, args: Any) -> str:
    """No wrong byte in thousands of random uneven exchanges."""
    group = new_group()
    wrong, wrong_by_gloo = run_random(cluster, group, args.exchanges)
    assert wrong == 0, f"{wrong} wrong bytes"
    assert wrong_by_gloo == 0, f"{wrong_by_gloo} bytes differ from gloo's"
    report = group.report()
    dist.destroy_process_group(group)
    return f"{args.exchanges} exchanges, 0 wrong bytes, {report}"


def hosts(cluster: Cluster, args: Any) -> str:
    """The same between ranks that take each other for other hosts."""
    count = min(300, args.exchanges)
    with own_host(cluster.rank):
        group = new_group()
        wrong, wrong_by_gloo = run_random(cluster, group, count)
    assert wrong == wrong_by_gloo == 0, f"{wrong} and {wrong_by_gloo} wrong bytes"
    dist.destroy_process_group(group)
    return f"{count} exchanges over the network, 0 wrong bytes"


def dtypes(cluster: Cluster, args: Any) -> str:
    """Every collective and dtype, small."""
    collectives = importlib.import_module("tests.transport.collectives")
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


def early_flag(cluster: Cluster, args: Any) -> str:
    """Chunks that are announced before they are copied must be seen as wrong bytes, or the checks above prove nothing."""
    global _serial
    _serial += 1
    store = dist.PrefixStore(f"early{_serial}", dist.distributed_c10d._get_default_store())
    mover = host_staged.HostStaged(
        store, cluster.rank, cluster.world, timedelta(seconds=20), cluster.device, transport.Options(), early_flag=True
    )
    bytes_of = table(cluster)
    wrong = 0
    for number in range(20):
        case = Case(cluster, bytes_of, number, 24 << 20)
        send = parts.Parts.split(case.send, case.send_splits, cluster.world, "send")
        receive = parts.Parts.split(case.received, case.receive_splits, cluster.world, "receive")
        mover.exchange("all_to_all", send, receive).wait()
        wrong += int((case.received != case.right).sum())
    cluster.meet()
    mover.close(10)
    total = sum(cluster.gather(wrong))
    assert total > 0, "the fault was not seen"
    return f"the fault shows as {wrong} wrong bytes here, {int(total)} in all"


# -- semantics ---------------------------------------------------------------------------------------------------------


def host_goes_on(cluster: Cluster, args: Any) -> str:
    """``wait()`` holds the current stream and not the host."""
    group, world = new_group(), cluster.world
    send = torch.full((world * 1000,), float(cluster.rank), device=cluster.device)
    received = torch.full_like(send, -1)
    dist.all_to_all_single(received, send, group=group)  # sets up the queue
    doubled = (
        received * 2
    )  # loads the kernel: a first launch waits for all streams, also for those that wait for a peer
    cluster.meet()
    received.fill_(-1)
    done = torch.cuda.Event()
    if cluster.rank == 0:
        dist.all_to_all_single(received, send, group=group, async_op=True).wait()
        doubled = received * 2  # after the exchange, in stream order
        done.record()
        time.sleep(0.05)
        assert not done.query(), "the stream did not wait for a peer that has not sent"
    dist.barrier()  # the others send only now: a host that blocks in wait() never comes here
    if cluster.rank != 0:
        dist.all_to_all_single(received, send, group=group)
        doubled = received * 2
    torch.cuda.synchronize()
    right = torch.arange(world, device=cluster.device).repeat_interleave(1000) * 2.0
    assert torch.equal(doubled, right), "what was computed after wait() did not see the result"
    dist.destroy_process_group(group)
    return "the stream waits, the host does not"


def dropped(cluster: Cluster, args: Any) -> str:
    """Tensors that the caller drops are not reused before the transfer is done."""
    group, world = new_group(), cluster.world
    results = []
    for number in range(40):
        send = torch.full((world << 20,), 10.0 * number + cluster.rank, device=cluster.device)
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=group, async_op=True)
        del send
        torch.full((world << 20,), -7.0, device=cluster.device)  # would land in the memory of the dropped tensor
        results.append((work, received))
    for number, (work, received) in enumerate(results):
        work.wait()
        right = (torch.arange(world, device=cluster.device) + 10.0 * number).repeat_interleave(1 << 20)
        assert torch.equal(received, right), f"exchange {number} sent memory that was used for something else"
    dist.destroy_process_group(group)
    return "40 dropped inputs arrived whole"


def priorities(cluster: Cluster, args: Any) -> str:
    """A small high-priority exchange, issued after a large low-priority one, is done first."""
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
    assert eventually(fast.is_completed, 20), "the high-priority exchange does not end"
    took, first = time.perf_counter() - began, not slow.is_completed()
    assert eventually(slow.is_completed, 20), "the low-priority exchange does not end"
    whole = time.perf_counter() - began
    assert first, "the low-priority exchange was done before the high-priority one"
    assert bool((large_in == 1).all()), "the low-priority exchange moved wrong bytes"
    assert bool((small_in == 1).all()), "the high-priority exchange moved wrong bytes"
    cluster.meet()
    dist.destroy_process_group(low)
    dist.destroy_process_group(high)
    return f"high {took * 1e3:.2f} ms beside the low one of {whole * 1e3:.1f} ms; alone {alone * 1e3:.2f} ms"


# -- the proof ---------------------------------------------------------------------------------------------------------


def proof(cluster: Cluster, args: Any) -> str:
    """While a kernel holds every SM, exchanges complete and a copy by a kernel of one block does not."""
    group, world = new_group(), cluster.world
    send = torch.full((world << 22,), float(cluster.rank), device=cluster.device)  # 16 MiB for each rank
    received = torch.full_like(send, -1)
    a, b = torch.ones(256, device=cluster.device), torch.zeros(256, device=cluster.device)
    right = torch.arange(world, device=cluster.device).repeat_interleave(1 << 22).float()
    control_stream, control = torch.cuda.Stream(cluster.device), torch.cuda.Event()
    # Everything once before: buffers are pinned and kernels are loaded only the first time.
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
    assert still_held, "the holding kernel had ended before the checks were over"
    assert complete, "the exchange did not complete while every SM was held"
    assert not kernel_ran, "a copy by a kernel of one block ran too: the SMs were not all held, nothing is proved"
    assert torch.equal(received, right), "the exchange under the held SMs moved wrong bytes"
    assert torch.equal(a, b), "the control never ran"
    dist.destroy_process_group(group)
    sizes = f"3 exchanges of {world * 16} MiB in {took * 1e3:.1f} ms"
    return f"{held} of {holder.blocks} blocks resident; {sizes}; the copy by a kernel stalled"


def profile(cluster: Cluster, args: Any) -> str:
    """The profiler sees copies on the transport's streams and no kernel."""
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
        return "NOT CHECKED: the profiler records nothing on the device here (run with one rank and without MPS)"
    assert any(event["cat"] == "kernel" for event in control), "the profiler misses kernels: nothing is proved"
    assert all(event["cat"] == "gpu_memcpy" for event in events), f"not only copies: {kinds}"
    for way in ("DtoH", "HtoD"):
        assert any(way in name for name in kinds), f"no {way} among {kinds}"
    streams = sorted({event["args"]["stream"] for event in events})
    assert len(streams) == 2, f"copies on streams {streams}, expected one out and one in"
    return f"{kinds} on streams {streams}, no kernel"


def death(cluster: Cluster, args: Any) -> str:
    """A rank that dies ends the others with an error that names it, also when their host waits for the device."""
    group, world = new_group(), cluster.world
    send = torch.ones(world << 20, device=cluster.device)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    cluster.meet()
    if cluster.rank == world - 1:
        print(f"rank {cluster.rank} death: leaves without a word", flush=True)
        os._exit(0)
    began, text = time.monotonic(), ""
    try:
        dist.all_to_all_single(received, send, group=group, async_op=True).wait()
        torch.cuda.synchronize()  # comes back, although the data never came
        dist.all_to_all_single(received, send, group=group)
    except transport.TransportError as error:
        text = str(error)
    took = time.monotonic() - began
    assert f"rank {world - 1}" in text, f"the dead rank should be named, not: {text!r}"
    assert took < 30, f"noticed after {took:.1f} s"
    return f"after {took:.2f} s: {text}"


SCENARIOS: dict[str, Callable[[Cluster, Any], str]] = {
    "dtypes": dtypes,
    "exact": exact,
    "early_flag": early_flag,
    "host_goes_on": host_goes_on,
    "dropped": dropped,
    "priorities": priorities,
    "proof": proof,
    "profile": profile,
    "hosts": hosts,
    "death": death,  # last: a rank is gone after it
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    parser.add_argument("--exchanges", type=int, default=10_000)
    parser.add_argument("--limit", type=float, default=90, help="seconds for one scenario")
    args = parser.parse_args()
    with limited(60):
        cluster = Cluster()
    if cluster.rank == 0:
        print(f"torch {torch.__version__}, {cluster.world} ranks, {transport.capabilities()}", flush=True)
    for name in args.scenarios:
        began = time.monotonic()
        try:
            with limited(args.limit):
                told = SCENARIOS[name](cluster, args)
        except Exception:
            print(f"rank {cluster.rank} {name}: FAILED\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # at once: the others are told by whoever started us
        print(f"rank {cluster.rank} {name}: ok, {told} [{time.monotonic() - began:.1f} s]", flush=True)
    os._exit(0)  # after "death" there is nobody left to say goodbye to


if __name__ == "__main__":
    main()
