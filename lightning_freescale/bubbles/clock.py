"""Clocks: the offset of each rank's clock from rank 0's, and the offset of a device's clock from its host's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ROUND_TRIPS = 12  # per rank; only the fastest one is used


def clock_offset(
    group: dist.ProcessGroup | None, clock: Callable[[], float] = time.monotonic, rounds: int = ROUND_TRIPS
) -> float:
    """Seconds to add to this rank's clock to get rank 0's time. This is a collective, over a gloo group.

    Rank 0 sends a message to each rank in turn, and the rank answers with its own time. It read its clock somewhere between
    the send and the receive of rank 0, so the estimate is wrong by at most half the round trip. The shortest round trip is
    used. If the offset is smaller than that error, the ranks may share one clock (one machine), and the offset is set to 0.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ping, pong = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    offsets = torch.zeros(world, dtype=torch.float64)
    for peer in range(1, world):
        if rank not in (0, peer):
            continue
        best = (float("inf"), 0.0)
        for _ in range(rounds):
            if rank == 0:
                sent = clock()
                dist.send(ping, group=group, group_dst=peer)
                dist.recv(pong, group=group, group_src=peer)
                received = clock()
                best = min(best, (received - sent, (sent + received) / 2 - pong.item()))
            else:
                dist.recv(ping, group=group, group_src=0)
                pong[0] = clock()
                dist.send(pong, group=group, group_dst=0)
        if rank == 0:
            round_trip, offset = best
            offsets[peer] = offset if abs(offset) > round_trip / 2 else 0.0
    dist.broadcast(offsets, group=group, group_src=0)
    return offsets[rank].item()


class DeviceClock:
    """Converts the times of CUDA events to the host's clock.

    At the start of every recorded step, the host reads its clock and then records an event on a stream that is always idle
    (a clock sample). The device may reach this event late, because streams share its hardware queues, but never early. So the
    sample with the smallest delay of all samples is the most accurate one.
    """

    DRIFT = 1e-4  # seconds per second by which the clocks may drift apart: an old sample is trusted that much less

    def __init__(self) -> None:
        self._time = -math.inf

    def sample(self, host: float, elapsed: float) -> float:
        """The time of a clock sample's event on the host's clock.

        Args:
            host: seconds, read just before the event was recorded.
            elapsed: seconds on the device since the event of the previous sample; any number for the first sample.
        """
        self._time = max(host, self._time + elapsed * (1 - self.DRIFT))
        return self._time
