"""``Planners``: the planners that a loader has received, as long as a rank may need them."""

from __future__ import annotations

from lightning_freescale.balance.planner import Planner


class Planners:
    """The planners of one rank, numbered from 1. Ranks may receive a new one at different batches.

    The training thread adds planners while the exchange thread uses them.

    Attributes:
        count: how many planners this rank has received.
    """

    def __init__(self, first: Planner):
        self.count = 1
        self._kept = {1: first}

    @property
    def latest(self) -> Planner:
        return self._kept[self.count]

    @property
    def kept(self) -> int:
        """How many planners are in memory."""
        return len(self._kept)

    def add(self, planner: Planner) -> None:
        self._kept[self.count + 1] = planner
        self.count += 1  # last: the other thread may use it from now on

    def use(self, number: int) -> Planner:
        """Return the planner with this number, and forget those before it. ``number`` never becomes smaller."""
        for old in list(self._kept):
            if old < number:
                del self._kept[old]
        return self._kept[number]
