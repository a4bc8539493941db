"""What the ranks of a run tell each other when they end with an error.

The reports go through the rendezvous store, which answers when collectives do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_freescale.runtime.bounded import within
from lightning_freescale.runtime.errors import name_ranks
from lightning_freescale.runtime.store_connection import StoreConnection

REPORT_SECONDS = 2.0  # How long to wait until failing ranks have reported their errors, all together.
LEAST_REPORT_SECONDS = 0.05  # How long to wait for each of them at least.
LAST_SECONDS = 1.0  # How long rank 0 stays after its failure. The other ranks look at the store more often than that.


class Reports(NamedTuple):
    """What the other ranks have reported, in one line, and whether any of them has not."""

    text: str
    lacks_one: bool


class EndReports:
    """The reports of one run. What it leaves in the store is never found by a later one.

    Args:
        run: number of the run in this process. All ranks count the same.
        rank: this rank.
        world_size: number of ranks.
        timeout: the timeout of the strategy in seconds.
        connection: to the rendezvous store.

    Attributes:
        posted: whether the other ranks can read why this one ends.
        place: where this rank is in the training, for example "in epoch 3"; empty if that explains nothing.
    """

    def __init__(self, run: int, rank: int, world_size: int, timeout: float, connection: StoreConnection):
        self._prefix, self._rank, self._world_size = f"freescale/{run}", rank, world_size
        self._timeout, self._connection, self.posted = timeout, connection, False
        self.place = ""

    def post(self, error: BaseException, waited: bool = False) -> Any:
        """Report why this rank ends. Returns the connection to the store; raises if the store cannot be reached.

        Args:
            error: the reason.
            waited: whether this rank ends because it has waited for another one. Otherwise nobody need know where it was.
        """
        store, self.posted = self._connection.get(REPORT_SECONDS), True
        self.place = self.place if waited else ""
        report = f"{first_line(error)}\n{self.place}"
        within(REPORT_SECONDS, lambda: store.set(f"{self._prefix}/ended/{self._rank}", report))
        return store

    def of_others(self, store: Any, has_died: Callable[[int], bool]) -> Reports:
        """The reports of the other ranks. A rank without a report after a few seconds is stuck or dead.

        Args:
            store: what :meth:`post` has returned.
            has_died: whether a rank is known to be dead. Nobody waits for its report.
        """
        deadline = time.monotonic() + REPORT_SECONDS

        def report_of(rank: int) -> str:
            key, left = f"{self._prefix}/ended/{rank}", 0.0 if has_died(rank) else deadline - time.monotonic()
            store.wait([key], timedelta(seconds=max(left, LEAST_REPORT_SECONDS)))
            return store.get(key).decode()

        reports, lacks_one, places = [], False, {self._rank: self.place}
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            try:
                report, _, places[rank] = within(2 * REPORT_SECONDS, partial(report_of, rank)).partition("\n")
                reports.append(f"rank {rank} ended with {report}")
            except Exception:  # There is no report: this rank is the missing one.
                lacks_one = True
                missing = f"is missing: stuck or dead for {self._timeout:.0f} s"
                reports.append(f"rank {rank} {'has died' if has_died(rank) else missing}")
        return Reports("; ".join(reports) + _differing(places), lacks_one)

    def leave_last(self) -> None:
        """Rank 0, which may host the rendezvous store, waits a moment for the other ranks. They can still read reports.

        All ranks call it when they end with an exception. Each of the others notes that it needs the store no longer. Rank 0
        gives up after a second, because a dead rank notes nothing.
        """
        _, *others = (f"{self._prefix}/left/{rank}" for rank in range(self._world_size))
        with suppress(Exception):  # The store has ended. Nobody can use it then.
            store = dist.distributed_c10d._get_default_store()
            if self._rank:
                within(REPORT_SECONDS, lambda: store.set(others[self._rank - 1], ""))
            else:
                within(2 * LAST_SECONDS, lambda: store.wait(others, timedelta(seconds=LAST_SECONDS)))


def _differing(places: Mapping[int, str]) -> str:
    """Where the ranks were that have waited for each other, if they were at different places.

    >>> _differing({0: "in epoch 2", 2: "in a validation", 1: "in epoch 2", 3: ""})
    '. Ranks 0, 1 were in epoch 2, and rank 2 in a validation: all ranks must take the same steps'
    >>> _differing({0: "in epoch 2", 1: "in epoch 2"})
    ''
    """
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        if place:
            ranks.setdefault(place, []).append(rank)
    if len(ranks) < 2:
        return ""
    (first, some), *others = ranks.items()
    were = f"{name_ranks(some).capitalize()} {'were' if len(some) > 1 else 'was'} {first}"
    elsewhere = ", ".join(f"{name_ranks(some)} {place}" for place, some in others)
    return f". {were}, and {elsewhere}: all ranks must take the same steps"


def first_line(error: BaseException) -> str:
    """The type of ``error`` and the first line of its text."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]
