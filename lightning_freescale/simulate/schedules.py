"""The order of compute and transfers in a step, for TorchRec and for FreeScale.

``embedding/schedule.py`` has the real schedule of FreeScale.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_freescale.simulate.events import (
    CONTENTION,
    DENSE,
    EMBEDDING,
    Array,
    SimulatedRanks,
    SimulatedTransfer,
)
from lightning_freescale.simulate.loads import RankLoads
from lightning_freescale.simulate.scenario import Cluster, ModelProfile, TrainingVariant

BUCKET_BYTES = 25 * 2**20  # dense gradients per AllReduce, as in DDP
MAX_BUCKETS = 8  # more buckets make the simulation slower and hardly change the result


class StepOperations:
    """The operations of a step that schedules put in order: its transfers and its compute."""

    def __init__(
        self, ranks: SimulatedRanks, cluster: Cluster, model: ModelProfile, variant: TrainingVariant, loads: RankLoads
    ):
        self.ranks, self.cluster, self.model, self.loads = ranks, cluster, model, loads
        self.steps = len(loads.compute)
        self._slowdown = 1.0 if variant.sm_free else cluster.nccl_slowdown
        self._beside = variant.schedule == "prioritized"  # whether the work on the tables runs beside compute

    def send_ids(self, step: int) -> SimulatedTransfer:
        return self._send(self.loads.rows[step] * self.model.id_bytes, urgent=True)

    def send_rows(self, step: int) -> SimulatedTransfer:
        """All rows of a batch from their owners to their requesters, or all gradients in the other direction."""
        size = self.loads.rows[step] * self.model.row_bytes + self._fixed_bytes()
        return self._send(size, urgent=True)

    def send_collision(self, step: int, after_gradients: SimulatedTransfer | None = None) -> SimulatedTransfer:
        """The gradients of the rows that collide. With ``after_gradients``, which are done: the rows, once they are updated."""
        size = self.loads.collision[step] * self.model.row_bytes + self._fixed_bytes()
        if after_gradients is None:
            return self._send(size, urgent=True)
        joined = np.maximum(after_gradients.done, self.ranks.now)
        return self._send(size, urgent=True, joined=joined, delay=self.model.collision_seconds)

    def send_exclusive(self, step: int, after: SimulatedTransfer | None = None) -> SimulatedTransfer:
        """The exclusive rows, or their gradients."""
        return self._send(self.loads.exclusive[step] * self.model.row_bytes, urgent=False, after=after)

    def _fixed_bytes(self) -> float:
        return self.model.fixed_bytes if self.cluster.ranks > 1 else 0.0

    def _send(
        self,
        size: Array,
        urgent: bool,
        joined: Array | None = None,
        after: SimulatedTransfer | None = None,
        delay: float = 0.0,
    ) -> SimulatedTransfer:
        seconds, slowdown = size / self.cluster.bandwidth, self._slowdown
        return self.ranks.send(seconds, urgent=urgent, slowdown=slowdown, joined=joined, after=after, delay=delay)

    def agree_on_ids(self) -> None:
        """The latency of the exchange of ids, with nothing beside it."""
        if self.cluster.ranks > 1:
            self.ranks.spend(self._all(self.model.id_seconds), EMBEDDING)

    def table_work(self, step: int, share: float, beside: bool) -> None:
        """A share of the look-ups and updates of a step, if this variant does it beside compute, or if it does not."""
        if beside == self._beside:
            seconds = self.model.table_seconds + self.model.row_seconds * self.loads.rows[step]
            self.ranks.spend(share * seconds, CONTENTION if beside else EMBEDDING)

    def forward(self, step: int) -> None:
        self.ranks.compute(self.model.forward * self.loads.compute[step])
        self.table_work(step, self.model.forward, beside=True)

    def backward(self, step: int) -> list[SimulatedTransfer]:
        """Compute the backward, and start an AllReduce after each bucket. Returns the AllReduces."""
        size = self.model.dense_bytes
        buckets = min(MAX_BUCKETS, self.model.buckets or max(1, round(size / BUCKET_BYTES)))
        seconds, latency = self.cluster.allreduce(size / buckets)
        reduces = []
        own_path = self._beside and self.cluster.reduce_path
        for _ in range(buckets):
            self.table_work(step, (1 - self.model.forward) / buckets, beside=True)
            self.ranks.compute((1 - self.model.forward) / buckets * self.loads.compute[step])
            if size and self.cluster.ranks > 1:
                slowdown = self.cluster.nccl_slowdown
                reduce = self.ranks.send(
                    self._all(seconds), urgent=True, slowdown=slowdown, latency=latency, own_path=own_path
                )
                reduces.append(reduce)
        return reduces

    def optimize(self, reduces: list[SimulatedTransfer]) -> None:
        """Wait for the AllReduces, then run the dense optimizer."""
        for reduce in reduces:
            self.ranks.wait(reduce, DENSE)
        self.ranks.compute(self._all(self.model.optimizer))
        self.ranks.spend(self._all(self.model.overhead), EMBEDDING)

    def _all(self, seconds: float) -> Array:
        """The same ``seconds`` for every rank."""
        return np.full(self.cluster.ranks, seconds)


def synchronous(operations: StepOperations, prefetch_ids: bool) -> Iterator[None]:
    """TorchRec: the compute waits for rows before forward and for gradients after backward. Yields after each step.

    Args:
        prefetch_ids: whether ids are sent one step early (``TrainPipelineSparseDist``), or at the start of their own step
            (``TrainPipelineBase``).
    """
    ranks = operations.ranks
    for step in range(operations.steps):
        if not prefetch_ids:
            operations.agree_on_ids()
        if not (prefetch_ids and step):
            ids = operations.send_ids(step)
        ranks.wait(ids, EMBEDDING)
        operations.table_work(step, 1 / 2, beside=False)
        ranks.wait(operations.send_rows(step), EMBEDDING)
        if prefetch_ids and step + 1 < operations.steps:
            ids = operations.send_ids(step + 1)
        operations.forward(step)
        reduces = operations.backward(step)
        ranks.wait(operations.send_rows(step), EMBEDDING)  # gradients
        operations.table_work(step, 1 / 2, beside=False)
        operations.optimize(reduces)
        yield


def prioritized(operations: StepOperations) -> Iterator[None]:
    """FreeScale: the compute waits for the gradients and rows of collisions; other transfers overlap with it.

    Yields after each step.
    """
    ranks = operations.ranks
    ranks.wait(operations.send_ids(0), EMBEDDING)
    needed = [operations.send_rows(0)]  # what the next forward waits for
    for step in range(operations.steps):
        last = step + 1 == operations.steps
        for transfer in needed:
            ranks.wait(transfer, EMBEDDING)
        late = operations.send_exclusive(step - 1) if step else None  # exclusive gradients of the previous step
        if step + 2 < operations.steps:
            operations.send_ids(step + 2)
        if not last:  # owners look up these rows once the late gradients have arrived, during forward and backward
            needed = [*([] if late is None else [late]), operations.send_exclusive(step + 1, after=late)]
        operations.forward(step)
        reduces = operations.backward(step)
        if last:  # there is no next batch: send all gradients at once
            ranks.wait(operations.send_rows(step), EMBEDDING)
        else:
            gradients = operations.send_collision(step)
            if operations.cluster.host_waits:
                ranks.wait(gradients, EMBEDDING)
            ranks.links.finish(gradients)
            needed += [gradients, operations.send_collision(step + 1, after_gradients=gradients)]
        operations.optimize(reduces)
        yield
