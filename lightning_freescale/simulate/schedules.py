"""The order of a step, as TorchRec and FreeScale have it: see ``embedding/schedule.py`` for the real one of FreeScale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_freescale.simulate.events import DENSE, EMBEDDING, Array, Ranks, Transfer
from lightning_freescale.simulate.setting import BUCKET, MOST_BUCKETS, Cluster, Load, Model, Side


class Program:
    """What all schedules share: the transfers of a step and its compute.

    Args:
        ranks: where time passes.
    """

    def __init__(self, ranks: Ranks, cluster: Cluster, model: Model, side: Side, load: Load):
        self.ranks, self.cluster, self.model, self.load = ranks, cluster, model, load
        self.steps = len(load.compute)
        self._slows = 1.0 if side.sm_free else cluster.nccl_slowdown

    def send_ids(self, step: int) -> Transfer:
        return self._send(self.load.rows[step] * self.model.id_bytes, urgent=True)

    def send_rows(self, step: int) -> Transfer:
        """All rows of a batch to those who asked for them; gradients take the same way back."""
        return self._send(self.load.rows[step] * self.model.row_bytes, urgent=True)

    def send_collision(self, step: int, joined: Array | None = None) -> Transfer:
        return self._send(self.load.collision[step] * self.model.row_bytes, urgent=True, joined=joined)

    def send_exclusive(self, step: int, after: Transfer | None = None) -> Transfer:
        return self._send(self.load.exclusive[step] * self.model.row_bytes, urgent=False, after=after)

    def _send(self, size: Array, urgent: bool, joined: Array | None = None, after: Transfer | None = None) -> Transfer:
        seconds = size / self.cluster.bandwidth
        return self.ranks.send(seconds, urgent=urgent, slows=self._slows, joined=joined, after=after)

    def forward(self, step: int) -> None:
        self.ranks.compute(self.model.forward * self.load.compute[step])

    def backward(self, step: int) -> list[Transfer]:
        """Backward; its AllReduces leave bucket by bucket, the last at its end."""
        size = self.model.dense_bytes
        buckets = min(MOST_BUCKETS, max(1, round(size / BUCKET)))
        seconds, latency = self.cluster.allreduce(size / buckets)
        reduces = []
        for _ in range(buckets):
            self.ranks.compute((1 - self.model.forward) / buckets * self.load.compute[step])
            if size and self.cluster.ranks > 1:
                slows = self.cluster.nccl_slowdown
                reduces.append(self.ranks.send(self._each(seconds), urgent=True, slows=slows, latency=latency))
        return reduces

    def optimize(self, reduces: list[Transfer]) -> None:
        """The dense optimizer, once the gradients are summed."""
        for reduce in reduces:
            self.ranks.wait(reduce, DENSE)
        self.ranks.compute(self._each(self.model.optimizer))

    def _each(self, seconds: float) -> Array:
        return np.full(self.cluster.ranks, seconds)


def synchronous(program: Program, ids_ahead: bool) -> Iterator[None]:
    """TorchRec: rows before forward, gradients after backward, the compute waits for both. Yields after each step.

    Args:
        ids_ahead: ids go a step ahead (``TrainPipelineSparseDist``), not at the start of their step (``TrainPipelineBase``).
    """
    ranks, ids = program.ranks, program.send_ids(0)
    for step in range(program.steps):
        ranks.wait(ids, EMBEDDING)
        ranks.wait(program.send_rows(step), EMBEDDING)
        if ids_ahead and step + 1 < program.steps:
            ids = program.send_ids(step + 1)
        program.forward(step)
        reduces = program.backward(step)
        ranks.wait(program.send_rows(step), EMBEDDING)  # gradients
        program.optimize(reduces)
        if not ids_ahead and step + 1 < program.steps:
            ids = program.send_ids(step + 1)
        yield


def prioritized(program: Program) -> Iterator[None]:
    """FreeScale: collisions alone are waited for, gradients, then rows; all else travels behind compute. Yields each step."""
    ranks = program.ranks
    ranks.wait(program.send_ids(0), EMBEDDING)
    due = [program.send_rows(0)]  # what the next forward waits for
    for step in range(program.steps):
        last = step + 1 == program.steps
        for transfer in due:
            ranks.wait(transfer, EMBEDDING)
        late = program.send_exclusive(step - 1) if step else None  # gradients of the step before
        if step + 2 < program.steps:
            program.send_ids(step + 2)
        if not last:  # owners look these rows up when the late gradients are in, while forward and backward compute
            due = [*([] if late is None else [late]), program.send_exclusive(step + 1, after=late)]
        program.forward(step)
        reduces = program.backward(step)
        if last:  # no batch comes after: all gradients at once
            ranks.wait(program.send_rows(step), EMBEDDING)
        else:
            gradients = program.send_collision(step)
            if program.cluster.host_waits:
                ranks.wait(gradients, EMBEDDING)
            ranks.links.finish(gradients)
            due += [gradients, program.send_collision(step + 1, joined=np.maximum(gradients.done, ranks.now))]
        program.optimize(reduces)
        yield
