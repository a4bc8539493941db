"""One clock for all ranks: each measures how far its own is from rank 0's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ROUNDS = 12  # the fastest of these round trips counts


def clock_offset(
    group: dist.ProcessGroup | None, clock: Callable[[], float] = time.monotonic, rounds: int = ROUNDS
) -> float:
    """Seconds to add to this rank's clock to get rank 0's. A collective, over a gloo group.

    Rank 0 sends to each rank in turn, which answers with its time. The answer was given somewhere between sending and
    receiving: half the round trip is the most the estimate can be wrong, so the shortest one is kept. A rank whose clock may
    be rank 0's own by that measure (one machine) gets 0 exactly, which no round trip could tell as well.
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
