"""The emulated network in real time: correct bytes, no transfer faster than the wire, urgent transfers first."""

from __future__ import annotations

import queue
import time

import torch
import torch.distributed as dist

from benchmarks.harness.emulation.network import new_emulated_group
from benchmarks.harness.emulation.realtime_network import RealtimeGroup, RealtimeWire
from tests.ranks import run_ranks

BANDWIDTH = 4e5  # bytes a second; slow enough that a busy machine issues two transfers before the first one has ended


def exchange(rank: int) -> tuple[float, list[str]]:
    """Seconds of a transfer that nobody waited for, and the order in which a large and then an urgent transfer ended."""
    dist.init_process_group("gloo")
    wire = RealtimeWire(BANDWIDTH)
    urgent, large = (new_emulated_group(wire, priority, RealtimeGroup) for priority in (0, 1))
    sent, received = (
        torch.full((200_000,), float(rank)),
        torch.empty(200_000),
    )  # half of them for the other rank: 400 kB
    began, done = time.monotonic(), torch.futures.Future[float]()
    work = dist.all_to_all_single(received, sent, group=large, async_op=True)
    work.get_future().add_done_callback(lambda _: done.set_result(time.monotonic() - began))
    seconds = done.wait()
    assert work.is_completed()
    work.wait()
    assert received[:100_000].unique().tolist() == [0.0]
    assert received[100_000:].unique().tolist() == [1.0]

    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    works = {
        "large": dist.all_to_all_single(received, sent, group=large, async_op=True),
        "urgent": dist.all_to_all_single(torch.empty(8), sent[:8], group=urgent, async_op=True),
    }
    for name, one in works.items():
        one.get_future().add_done_callback(lambda _, name=name: order.put(name))
    for one in works.values():
        one.wait()
    return seconds, [order.get(timeout=20) for _ in works]


def test_transfers_take_the_time_of_the_wire_and_urgent_ones_go_first() -> None:
    for seconds, order in run_ranks(exchange):
        assert seconds >= 0.9 * 400_000 / BANDWIDTH
        assert order == ["urgent", "large"]
