"""Simulated time of ranks that run the same program. Each rank has an engine and a link; arrays ``[ranks]`` hold all of them.

    ranks = SimulatedRanks(2, latency=0.0)
    ranks.compute(np.array([1.0, 3.0]))
    rows = ranks.send(np.array([0.5, 0.5]), urgent=True)   # the ranks join at 1 and at 3: the transfer starts at 3
    ranks.wait(rows, "exposed_embedding")                  # both continue at 3.5; rank 0 waited 2 for rank 1, then 0.5

Each operation is one event of every rank, in program order. The times of transfers on a link are computed only when a rank
waits for one of them, and only up to that transfer. This is exact, because a rank that waits starts no transfer that could
come first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STRAGGLER, EMBEDDING, DENSE, CONTENTION = "straggler", "exposed_embedding", "exposed_dense", "contention"
# The first three are parts of the bubble in ``bubbles/attribution.py`` too. Contention is the time by which transfers slow down
# compute, and of look-ups and updates beside it. The monitor cannot tell it from compute.
BUBBLE_PARTS = (STRAGGLER, EMBEDDING, DENSE, CONTENTION)


class SimulatedTransfer:
    """A collective. It starts on all links when the last rank has joined it, and ends on each link separately.

    Args:
        seconds: ``[ranks]`` seconds that each link takes.
        joined: ``[ranks]`` times at which the ranks join.
        latency: seconds from the moment at which the last rank joins to the first byte.
        urgent: whether it goes before, and interrupts, transfers that are not urgent.
        slowdown: time of compute during the transfer over its time without the transfer.
        after: a transfer that must be done on all ranks first; not allowed for an urgent transfer.
    """

    def __init__(
        self,
        seconds: Array,
        joined: Array,
        latency: float,
        urgent: bool,
        slowdown: float,
        after: SimulatedTransfer | None,
    ):
        if urgent and after is not None:
            raise ValueError(
                "after: an urgent transfer cannot follow another transfer. Wait for the other transfer, then send."
            )
        self.left = np.array(seconds, dtype=np.float64)
        self.done = np.full(len(self.left), np.inf)  # when the transfer is done; inf while that is not known
        self.urgent, self.slowdown = urgent, slowdown
        self._joined, self._latency, self._after = joined, latency, after
        self.links: SimulatedLinks | None = None  # the links that carry it

    def joined(self) -> float:
        """Time at which the last rank joins; inf while that is not known."""
        last = float(self._joined.max())
        return last if self._after is None else max(last, float(self._after.done.max()))

    def ready(self) -> float:
        """Earliest time of the first byte; inf while that is not known."""
        return self.joined() + self._latency

    def earliest(self, known: Array) -> float:
        """A lower bound of :meth:`ready`, from the times ``known [ranks]`` up to which the traffic of the links is known."""
        if self._after is None or np.isfinite(self.ready()):
            return self.ready()
        reached = np.where(np.isinf(self._after.done), np.maximum(known, self._after.ready()), self._after.done)
        return max(float(self._joined.max()), float(reached.max())) + self._latency


class SimulatedLinks:
    """One full-duplex link per rank. It carries urgent transfers in the order of their start, then the others in that order."""

    def __init__(self, ranks: int):
        self._known = np.zeros(ranks)  # time up to which the traffic of each link is known
        self.pending: list[SimulatedTransfer] = []  # not done on all ranks; in the order of their start

    def finish(self, target: SimulatedTransfer) -> None:
        """Compute the traffic of the links until ``target`` is done on all ranks."""
        while (open_ := np.isinf(target.done)).any():
            if not self._advance(open_):
                raise RuntimeError("a transfer waits for another transfer that was never sent")
        self.pending = [transfer for transfer in self.pending if np.isinf(transfer.done).any()]

    def busy(self) -> list[tuple[Array, Array, float]]:
        """Start ``[ranks]``, end ``[ranks]`` and slowdown of each pending transfer if no other comes, in order of time."""
        end, spans = self._known, []
        for transfer in self.pending:
            start = np.maximum(end, transfer.earliest(self._known))
            left = np.where(np.isinf(transfer.done), transfer.left, 0.0)
            end = np.where(left > 0, start + left, end)
            spans.append((np.where(left > 0, start, end), end, transfer.slowdown))
        return spans

    def _advance(self, ranks: NDArray[np.bool_]) -> bool:
        """Advance each link of ``ranks`` by one event: a transfer ends or is interrupted. Returns whether any link advanced."""
        (urgent, urgent_at), (other, other_at) = self._heads(True), self._heads(False)
        # A first transfer whose start is not known yet cannot run, and the link must not advance past its earliest start.
        known = np.array([np.isfinite(transfer.ready()) for transfer in self.pending] + [True])
        limit = np.where(known[other], np.inf, other_at)
        startable = np.where(known[other], other_at, np.inf)
        start = np.maximum(self._known, np.minimum(urgent_at, startable))
        ranks = ranks & np.isfinite(start) & (start <= np.maximum(limit, self._known))
        first = urgent_at <= start
        for index, transfer in enumerate(self.pending):
            mine = ranks & np.where(first, urgent == index, other == index)
            if not mine.any():
                continue
            end = start + transfer.left
            cut = mine & ~first & (urgent_at < end)
            transfer.left[cut] -= urgent_at[cut] - start[cut]
            whole = mine & ~cut
            transfer.left[whole], transfer.done[whole] = 0.0, end[whole]
            self._known[mine] = np.where(cut, urgent_at, end)[mine]
        return bool(ranks.any())

    def _heads(self, urgent: bool) -> tuple[NDArray[np.int64], Array]:
        """The first urgent, or first other, transfer of each rank that is not done.

        Returns:
            ``[ranks]`` its index in ``pending``, -1 if there is none; ``[ranks]`` its start, or a lower bound of it.
        """
        place = np.full(len(self._known), -1)
        start = np.full(len(self._known), np.inf)
        for index in reversed(range(len(self.pending))):
            transfer = self.pending[index]
            if transfer.urgent == urgent:
                open_ = np.isinf(transfer.done)
                place[open_] = index
                start[open_] = transfer.earliest(self._known)
        return place, start


class SimulatedRanks:
    """The engines and links of all ranks, and how the engines spend their time.

    Attributes:
        now: ``[ranks]`` seconds, the current time of each engine.
        useful: ``[ranks]`` seconds of compute, without slowdown by transfers.
        parts: ``[ranks]`` seconds by the names in ``BUBBLE_PARTS``; with ``useful`` they add up to ``now``.
    """

    def __init__(self, ranks: int, latency: float):
        self.now, self.useful = np.zeros(ranks), np.zeros(ranks)
        self.parts = {name: np.zeros(ranks) for name in BUBBLE_PARTS}
        self._latency, self.links = latency, SimulatedLinks(ranks)
        self._reduce_links = SimulatedLinks(ranks)  # for AllReduces that have a path of their own

    def compute(self, seconds: Array) -> None:
        """Compute for ``seconds [ranks]``, and longer during transfers that slow it down."""
        time, left = self.now, np.array(seconds, dtype=np.float64)
        slowed = any(transfer.slowdown > 1 for transfer in self.links.pending)
        for start, end, slowdown in self.links.busy() if slowed else ():
            alone = np.minimum(left, np.maximum(start - time, 0.0))
            time, left = time + alone, left - alone
            beside = np.minimum(left * slowdown, np.maximum(end - np.maximum(start, time), 0.0))
            time, left = time + beside, left - beside / slowdown
        time = time + left
        self.useful = self.useful + seconds
        if slowed:
            self.parts[CONTENTION] = self.parts[CONTENTION] + np.maximum(time - self.now - seconds, 0.0)
        self.now = time

    def send(
        self,
        seconds: Array,
        *,
        urgent: bool,
        slowdown: float = 1.0,
        joined: Array | None = None,
        after: SimulatedTransfer | None = None,
        latency: float | None = None,
        delay: float = 0.0,
        own_path: bool = False,
    ) -> SimulatedTransfer:
        """Start a transfer in the background, see :class:`SimulatedTransfer`. By default the ranks join it now.

        Args:
            delay: further seconds of latency.
            own_path: whether it shares no link with other transfers, but with others of this kind. It slows down no compute.
        """
        latency = self._latency if latency is None else latency
        joined = self.now if joined is None else joined
        transfer = SimulatedTransfer(seconds, joined, latency + delay, urgent, slowdown, after)
        transfer.links = self._reduce_links if own_path else self.links
        transfer.links.pending.append(transfer)
        return transfer

    def spend(self, seconds: Array, part: str) -> None:
        """Make the engines do other work than compute for ``seconds [ranks]``, which counts as ``part`` of the bubble."""
        self.now, self.parts[part] = self.now + seconds, self.parts[part] + seconds

    def wait(self, transfer: SimulatedTransfer, part: str) -> None:
        """Make the engines wait for a transfer. The wait for the last rank is ``straggler``, the remaining wait is ``part``."""
        (transfer.links or self.links).finish(transfer)
        waited = np.maximum(transfer.done - self.now, 0.0)
        straggling = np.clip(transfer.joined() - self.now, 0.0, waited)
        self.parts[STRAGGLER] = self.parts[STRAGGLER] + straggling
        self.parts[part] = self.parts[part] + waited - straggling
        self.now = self.now + waited
