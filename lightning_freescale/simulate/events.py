"""Time on many ranks that run one program: an engine and a link each, for all ranks at once in arrays ``[ranks]``.

    ranks = Ranks(2, latency=0.0)
    ranks.compute(np.array([1.0, 3.0]))
    rows = ranks.send(np.array([0.5, 0.5]), urgent=True)   # joined at 1 and at 3: starts at 3, when all have joined
    ranks.wait(rows, "exposed_embedding")                  # both go on at 3.5; rank 0 has waited 2 for rank 1, and 0.5 more

Each operation stands for one event of every rank, in program order. A link works out what it carries when only as far as
somebody waits for it. That is exact: a rank that waits starts nothing that could overtake.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STRAGGLER, EMBEDDING, DENSE, CONTENTION = "straggler", "exposed_embedding", "exposed_dense", "contention"
# As in bubbles/attribution.py. Contention is compute slowed by a transfer beside it: a monitor sees it as compute.
PARTS = (STRAGGLER, EMBEDDING, DENSE, CONTENTION)


class Transfer:
    """A collective: it starts on all links when the last rank has joined it, and ends on each by itself.

    Args:
        seconds: ``[ranks]`` that each link takes for it.
        joined: ``[ranks]`` when each rank joins.
        latency: seconds from the last to join to the first byte.
        urgent: goes before, and in the middle of, those that are not.
        slows: time of compute beside it over its time alone.
        after: a rank joins when this one has arrived there, too; not for urgent ones.
    """

    def __init__(
        self, seconds: Array, joined: Array, latency: float, urgent: bool, slows: float, after: Transfer | None
    ):
        if urgent and after is not None:
            raise ValueError("after: an urgent transfer cannot wait for another; wait for it, then send")
        self.left = np.array(seconds, dtype=np.float64)
        self.done = np.full(len(self.left), np.inf)  # when it has arrived, once known
        self.urgent, self.slows = urgent, slows
        self._joined, self._latency, self._after = joined, latency, after

    def joined(self) -> float:
        """When the last rank joins; infinite while that is not known."""
        last = float(self._joined.max())
        return last if self._after is None else max(last, float(self._after.done.max()))

    def ready(self) -> float:
        """When its first byte can go."""
        return self.joined() + self._latency

    def not_before(self, carried: Array) -> float:
        """A time that :meth:`ready` cannot come before, from the times ``carried [ranks]`` up to which links are known."""
        if self._after is None or np.isfinite(self.ready()):
            return self.ready()
        reached = np.where(np.isinf(self._after.done), np.maximum(carried, self._after.ready()), self._after.done)
        return max(float(self._joined.max()), float(reached.max())) + self._latency


class Links:
    """One link a rank, both ways at once: urgent transfers in order of issue, then the others in order of issue."""

    def __init__(self, ranks: int):
        self._carried = np.zeros(ranks)  # up to when it is known what each link carries
        self.pending: list[Transfer] = []  # in order of issue

    def finish(self, target: Transfer) -> None:
        """Carry on until ``target`` has arrived everywhere."""
        while (open_ := np.isinf(target.done)).any():
            if not self._carry(open_):
                raise RuntimeError("a transfer waits for one that is never sent")
        self.pending = [transfer for transfer in self.pending if np.isinf(transfer.done).any()]

    def busy(self) -> list[tuple[Array, Array, float]]:
        """Start and end ``[ranks]`` of what is under way on each link, and how it slows compute; one after another."""
        end, spans = self._carried, []
        for transfer in self.pending:
            start = np.maximum(end, transfer.not_before(self._carried))
            left = np.where(np.isinf(transfer.done), transfer.left, 0.0)
            end = np.where(left > 0, start + left, end)
            spans.append((np.where(left > 0, start, end), end, transfer.slows))
        return spans

    def _carry(self, ranks: NDArray[np.bool_]) -> bool:
        """One event on each of ``ranks``: a transfer ends, or is interrupted. Returns whether any came nearer its end."""
        (urgent, urgent_at), (other, other_at) = self._heads(True), self._heads(False)
        # A head whose start is not known yet cannot be served, nor may the link move past the earliest moment for it.
        known = np.array([np.isfinite(transfer.ready()) for transfer in self.pending] + [True])
        limit = np.where(known[other], np.inf, other_at)
        startable = np.where(known[other], other_at, np.inf)
        start = np.maximum(self._carried, np.minimum(urgent_at, startable))
        ranks = ranks & np.isfinite(start) & (start <= np.maximum(limit, self._carried))
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
            self._carried[mine] = np.where(cut, urgent_at, end)[mine]
        return bool(ranks.any())

    def _heads(self, urgent: bool) -> tuple[NDArray[np.int64], Array]:
        """Of each rank, the first transfer of a class that has not arrived: its place in ``pending``, -1 if there is none;
        and when it can start, or the earliest moment if that is not known."""
        place = np.full(len(self._carried), -1)
        start = np.full(len(self._carried), np.inf)
        for index in reversed(range(len(self.pending))):
            transfer = self.pending[index]
            if transfer.urgent == urgent:
                open_ = np.isinf(transfer.done)
                place[open_] = index
                start[open_] = transfer.not_before(self._carried)
        return place, start


class Ranks:
    """Engines of all ranks, and what became of their time.

    Attributes:
        now: ``[ranks]`` seconds, when each engine is free.
        useful: ``[ranks]`` seconds of compute, by its time alone.
        parts: ``[ranks]`` seconds by the names in ``PARTS``; with ``useful`` they add up to ``now``.
    """

    def __init__(self, ranks: int, latency: float):
        self.now, self.useful = np.zeros(ranks), np.zeros(ranks)
        self.parts = {name: np.zeros(ranks) for name in PARTS}
        self._latency, self.links = latency, Links(ranks)

    def compute(self, seconds: Array) -> None:
        """Compute that takes ``seconds [ranks]`` alone, and longer beside transfers that slow it."""
        time, left = self.now, np.array(seconds, dtype=np.float64)
        slowed = any(transfer.slows > 1 for transfer in self.links.pending)
        for start, end, slows in self.links.busy() if slowed else ():
            alone = np.minimum(left, np.maximum(start - time, 0.0))
            time, left = time + alone, left - alone
            beside = np.minimum(left * slows, np.maximum(end - np.maximum(start, time), 0.0))
            time, left = time + beside, left - beside / slows
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
        slows: float = 1.0,
        joined: Array | None = None,
        after: Transfer | None = None,
        latency: float | None = None,
    ) -> Transfer:
        """Start a transfer in the background; see :class:`Transfer`. Ranks join it now unless told otherwise."""
        latency = self._latency if latency is None else latency
        transfer = Transfer(seconds, self.now if joined is None else joined, latency, urgent, slows, after)
        self.links.pending.append(transfer)
        return transfer

    def wait(self, transfer: Transfer, part: str) -> None:
        """Engines stand still until a transfer has arrived: for the last to join it, then for the link, which is ``part``."""
        self.links.finish(transfer)
        waited = np.maximum(transfer.done - self.now, 0.0)
        straggling = np.clip(transfer.joined() - self.now, 0.0, waited)
        self.parts[STRAGGLER] = self.parts[STRAGGLER] + straggling
        self.parts[part] = self.parts[part] + waited - straggling
        self.now = self.now + waited
