"""The order of compute and transfers in a step, for TorchRec and for FreeScale.

``embedding/schedule.py`` has the real schedule of FreeScale.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_freescale.simulate.events import DENSE, EMBEDDING, Array, SimulatedRanks, SimulatedTransfer
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

    def send_ids(self, step: int) -> SimulatedTransfer:
        return self._send(self.loads.rows[step] * self.model.id_bytes, urgent=True)

    def send_rows(self, step: int) -> SimulatedTransfer:
        """All rows of a batch from their owners to their requesters, or all gradients in the other direction."""
        return self._send(self.loads.rows[step] * self.model.row_bytes, urgent=True)

    def send_collision(self, step: int, joined: Array | None = None) -> SimulatedTransfer:
        """The rows that collide, or their gradients."""
        return self._send(self.loads.collision[step] * self.model.row_bytes, urgent=True, joined=joined)

    def send_exclusive(self, step: int, after: SimulatedTransfer | None = None) -> SimulatedTransfer:
        """The exclusive rows, or their gradients."""
        return self._send(self.loads.exclusive[step] * self.model.row_bytes, urgent=False, after=after)

    def _send(
        self, size: Array, urgent: bool, joined: Array | None = None, after: SimulatedTransfer | None = None
    ) -> SimulatedTransfer:
        seconds = size / self.cluster.bandwidth
        return self.ranks.send(seconds, urgent=urgent, slowdown=self._slowdown, joined=joined, after=after)

    def forward(self, step: int) -> None:
        self.ranks.compute(self.model.forward * self.loads.compute[step])

    def backward(self, step: int) -> list[SimulatedTransfer]:
        """Compute the backward, and start an AllReduce after each bucket. Returns the AllReduces."""
        size = self.model.dense_bytes
        buckets = min(MAX_BUCKETS, max(1, round(size / BUCKET_BYTES)))
        seconds, latency = self.cluster.allreduce(size / buckets)
        reduces = []
        for _ in range(buckets):
            self.ranks.compute((1 - self.model.forward) / buckets * self.loads.compute[step])
            if size and self.cluster.ranks > 1:
                slowdown = self.cluster.nccl_slowdown
                reduces.append(self.ranks.send(self._all(seconds), urgent=True, slowdown=slowdown, latency=latency))
        return reduces

    def optimize(self, reduces: list[SimulatedTransfer]) -> None:
        """Wait for the AllReduces, then run the dense optimizer."""
        for reduce in reduces:
            self.ranks.wait(reduce, DENSE)
        self.ranks.compute(self._all(self.model.optimizer))

    def _all(self, seconds: float) -> Array:
        """The same ``seconds`` for every rank."""
        return np.full(self.cluster.ranks, seconds)


def synchronous(operations: StepOperations, prefetch_ids: bool) -> Iterator[None]:
    """TorchRec: the compute waits for rows before forward and for gradients after backward. Yields after each step.

    Args:
        prefetch_ids: whether ids are sent one step early (``TrainPipelineSparseDist``), or at the start of their own step
            (``TrainPipelineBase``).
    """
    ranks, ids = operations.ranks, operations.send_ids(0)
    for step in range(operations.steps):
        ranks.wait(ids, EMBEDDING)
        ranks.wait(operations.send_rows(step), EMBEDDING)
        if prefetch_ids and step + 1 < operations.steps:
            ids = operations.send_ids(step + 1)
        operations.forward(step)
        reduces = operations.backward(step)
        ranks.wait(operations.send_rows(step), EMBEDDING)  # gradients
        operations.optimize(reduces)
        if not prefetch_ids and step + 1 < operations.steps:
            ids = operations.send_ids(step + 1)
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
            needed += [gradients, operations.send_collision(step + 1, joined=np.maximum(gradients.done, ranks.now))]
        operations.optimize(reduces)
        yield
