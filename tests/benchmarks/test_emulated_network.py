"""The emulated network: bytes arrive intact and on time, urgent ones first. Time is virtual, so times are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.emulation.clock import VirtualClock
from benchmarks.harness.emulation.network import Wire, new_emulated_group
from tests.ranks import run_ranks

BANDWIDTH, LATENCY, CHUNK = 1e6, 0.01, 1e-3  # bytes/s, s, s


def on_wire(rank: int, check: Callable[..., Any], *priorities: int) -> Any:
    dist.init_process_group("gloo")
    clock = VirtualClock()
    wire = Wire(clock, BANDWIDTH, LATENCY, CHUNK)
    return check(rank, clock, *(new_emulated_group(wire, priority) for priority in priorities))


def start(group: Any, megabytes: float) -> Any:
    """An all-to-all of this size to each of the two ranks (half of it stays on the rank)."""
    sent = torch.zeros(2 * round(megabytes * 1e6), dtype=torch.uint8)
    return dist.all_to_all_single(torch.empty_like(sent), sent, group=group, async_op=True)


def times(clock: VirtualClock, *works: Any) -> list[float]:
    arrived = []
    for work in works:
        work.wait()
        arrived.append(round(clock.now(), 6))
    return arrived


# ---- bytes -----------------------------------------------------------------------------------------------------------------
def uneven_exchange(rank: int, clock: VirtualClock, group: Any) -> Any:
    send = [[2, 3], [0, 4]][rank]
    receive = [[2, 0], [3, 4]][rank]
    sent = torch.arange(sum(send) * 3).view(-1, 3) + 100 * rank
    received = torch.empty(sum(receive), 3, dtype=torch.int64)
    dist.all_to_all_single(received, sent, receive, send, group=group)
    reduced = torch.full((2,), float(rank + 1))
    dist.all_reduce(reduced, group=group)
    dist.barrier(group=group)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, rank, group=group)
    return received.tolist(), clock.now(), reduced.tolist(), objects


def test_uneven_parts_arrive_and_other_collectives_take_no_time() -> None:
    (first, after, *others), (second, after_too, *_) = run_ranks(on_wire, args=(uneven_exchange, 0))
    assert first == [[0, 1, 2], [3, 4, 5]]
    assert second == [
        [6, 7, 8],
        [9, 10, 11],
        [12, 13, 14],
        [100, 101, 102],
        [103, 104, 105],
        [106, 107, 108],
        [109, 110, 111],
    ]
    assert others == [[3.0, 3.0], [0, 1]]
    assert after == pytest.approx(LATENCY + 3 * 24 / BANDWIDTH)  # three rows go from rank 0 to rank 1
    assert after_too == after


# ---- time ------------------------------------------------------------------------------------------------------------------
def one_after_another(rank: int, clock: VirtualClock, group: Any) -> list[float]:
    return times(clock, start(group, 1.0), start(group, 0.5), start(group, 0.0))


def test_latency_and_bandwidth_in_order() -> None:
    for arrived in run_ranks(on_wire, args=(one_after_another, 0)):
        assert arrived == [1.01, 1.51, 1.51]


def behind_compute(rank: int, clock: VirtualClock, group: Any) -> list[float]:
    work = start(group, 1.0)
    clock.wait_until(5.0)
    done = work.is_completed()
    return [*times(clock, work), float(done), *times(clock, start(group, 1.0))]


def test_a_transfer_that_ended_during_compute_needs_no_wait() -> None:
    for arrived in run_ranks(on_wire, args=(behind_compute, 0)):
        assert arrived == [5.0, 1.0, 6.01]


def late_peer(rank: int, clock: VirtualClock, group: Any) -> list[float]:
    clock.wait_until(3.0 * rank)
    return times(clock, start(group, 1.0))


def test_no_transfer_starts_before_the_last_rank_joins() -> None:
    assert run_ranks(on_wire, args=(late_peer, 0)) == [[4.01], [4.01]]


def overtaking(rank: int, clock: VirtualClock, urgent: Any, bulk: Any) -> list[float]:
    bulky = start(bulk, 1.0)
    clock.wait_until(0.5)
    return times(clock, start(urgent, 0.1), bulky)


def test_urgent_transfers_overtake_large_ones() -> None:
    for arrived in run_ranks(on_wire, args=(overtaking, 0, 1)):
        assert arrived == [pytest.approx(0.61, abs=CHUNK), pytest.approx(1.11)]  # the large one ends 0.1 s later


def test_transfers_of_equal_priority_share_the_wire() -> None:
    for arrived in run_ranks(on_wire, args=(overtaking, 0, 0)):
        assert arrived == [pytest.approx(0.71, abs=2 * CHUNK), pytest.approx(1.11)]


def test_with_reversed_priorities_the_small_transfer_waits() -> None:
    for arrived in run_ranks(on_wire, args=(overtaking, 1, 0)):
        assert arrived == [pytest.approx(1.11), pytest.approx(1.11)]


def overtaking_after_is_completed(rank: int, clock: VirtualClock, urgent: Any, bulk: Any) -> list[float]:
    bulky = start(bulk, 1.0)
    clock.wait_until(0.5)
    assert not bulky.is_completed()
    return times(clock, start(urgent, 0.1), bulky)


def test_is_completed_does_not_change_the_schedule() -> None:
    assert run_ranks(on_wire, args=(overtaking_after_is_completed, 0, 1)) == run_ranks(on_wire, args=(overtaking, 0, 1))


def reduce_beside_exchanges(rank: int, clock: VirtualClock, group: Any) -> float:
    total = torch.zeros(1)
    for _ in range(2000):
        work = start(group, 64e-6)
        total += 1
        dist.all_reduce(total, group=group)
        work.wait()
        total /= 2
    return total.item()


def test_gloo_is_not_called_with_the_gil_held() -> None:
    # gloo's threads take the GIL to release an exchanged tensor while they hold gloo's lock. A thread that holds the GIL must
    # therefore not wait for gloo's lock. The base class's allreduce does, and hangs here.
    assert run_ranks(on_wire, args=(reduce_beside_exchanges, 0)) == [2000.0, 2000.0]
