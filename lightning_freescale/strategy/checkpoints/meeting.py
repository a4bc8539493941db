"""Saves while an exception is handled: only if all ranks come to save, and without a long wait for those that do not.

A save is a collective. When one rank fails, the others are in the middle of a step and never come. The ranks meet through
the rendezvous store, which answers when collectives do not.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_freescale.runtime.bounded import within

MEETING_SECONDS = 10.0  # How long a rank waits for the others.
AT_ONCE = 0.01  # The same, if it is known that not all ranks come. It still tells the others.
STORE_SECONDS = 2.0  # How long the store may take to answer beyond that.
_COUNTER = {"meetings": 0}


def all_ranks_came(rank: int, world_size: int, seconds: float = MEETING_SECONDS) -> bool:
    """Whether all ranks called this within ``seconds``. All ranks that call it get the same answer.

    Rank 0 decides when all have come. A rank that has waited too long decides that the save does not take place. The first
    decision counts.
    """
    _COUNTER["meetings"] += 1
    try:
        return within(seconds + STORE_SECONDS, lambda: _decision(_COUNTER["meetings"], rank, world_size, seconds))
    except Exception:  # The store ended with the process that hosts it, or its host cannot be reached.
        return False


def _decision(meeting: int, rank: int, world_size: int, seconds: float) -> bool:
    prefix = f"freescale/save_after_exception/{meeting}"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{prefix}/{rank}", "here")
    decision = "no"
    try:
        if rank == 0:
            store.wait([f"{prefix}/{other}" for other in range(1, world_size)], timedelta(seconds=seconds))
            decision = "yes"
        else:
            store.wait([f"{prefix}/decision"], timedelta(seconds=seconds))
    except Exception:  # A rank did not come in time.
        decision = "no"
    return store.compare_set(f"{prefix}/decision", "", decision) == b"yes"
