"""``RankMessages``: the messages that the ranks send each other to exchange samples. All of them are collectives.

Every operator and every wait in this thread lets the training thread and this thread take turns with the GIL, which slows the
training down. So a batch takes two messages, a gather and an all-to-all. Both call the process group directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import AllgatherOptions

from lightning_freescale.balance.exchange.packing import pack_samples
from lightning_freescale.balance.exchange.split_batch import LengthColumns, SplitBatch
from lightning_freescale.transport.direct_calls import start_all_to_all

HEADER = 3  # numbers at the start of an announcement
ROW = 3  # numbers of a sample: history length, candidate count and bytes

_GATHER = (
    "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
)  # before torch 2.13


class Announced(NamedTuple):
    """What all ranks have announced about their next batches.

    Attributes:
        statuses: ``[world_size]``.
        planners: ``[world_size]``, how many planners each rank has.
        counts: ``[world_size]`` samples of each rank.
        rows: ``[sum(counts), ROW]``, ordered by rank; ``None`` if the message had too little room for the rows of a rank.
    """

    statuses: NDArray[np.int64]
    planners: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64] | None


class ReceivedSamples(NamedTuple):
    """The ``m`` samples that this rank has after an exchange, ordered by source rank, then by their order there.

    Attributes:
        packed: the bytes of all samples.
        sizes: ``[m]`` bytes of each sample.
        bytes_sent: bytes that this rank sent to other ranks.
    """

    packed: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    bytes_sent: int


class RankMessages:
    """Communication between the ranks of a gloo process group that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def announce(
        self, status: int, planners: int, count: int, rows: NDArray[np.int64] | None, capacity: int
    ) -> Announced:
        """Tell the other ranks about the next batch of this rank.

        Args:
            status: whether there is a batch.
            planners: the number of planners of this rank.
            count: the number of samples of the batch.
            rows: ``[count, ROW]``, not sent if ``count`` is more than ``capacity``. Required otherwise, unless it is 0.
            capacity: the number of samples that the message has room for; equal on all ranks.
        """
        message = np.zeros(HEADER + capacity * ROW, dtype=np.int64)
        message[:HEADER] = status, planners, count
        if rows is not None and count <= capacity:
            message[HEADER:][: rows.size] = rows.ravel()
        received = self._gather(message)
        statuses, all_planners, counts = received[:, :HEADER].T
        fit = counts.max() <= capacity
        return Announced(statuses, all_planners, counts, _rows(received[:, HEADER:], counts) if fit else None)

    def gather_rows(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``[sum(counts), ROW]``: the rows ``[counts[rank], ROW]`` of every rank, ordered by rank."""
        message = np.zeros(counts.max() * ROW, dtype=np.int64)
        message[: rows.size] = rows.ravel()
        return _rows(self._gather(message), counts)

    def _gather(self, message: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``[world_size, n]``: the ``message [n]`` of every rank."""
        received = np.empty(self.world_size * len(message), dtype=np.int64)
        # These tensors end here. If gloo held the last references, its thread would need the GIL to release the arrays.
        into, own = torch.from_numpy(received), torch.from_numpy(message)
        getattr(self.group, _GATHER)(into, own, AllgatherOptions()).wait()
        return received.reshape(self.world_size, -1)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the object ``value`` of every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def exchange_samples(
        self,
        split: SplitBatch,
        columns: Sequence[LengthColumns],
        sizes: NDArray[np.int64],
        current: NDArray[np.int64],
        assigned: NDArray[np.int64],
    ) -> ReceivedSamples:
        """Send every sample to its rank.

        Args:
            split: the local batch of this rank.
            columns: how many rows of each tensor a sample has, as the ranks agreed.
            sizes: bytes of all samples of all ranks, ordered by rank.
            current: the rank of each sample so far, in ascending order.
            assigned: the rank of each sample after the exchange.
        """
        first = int(np.searchsorted(current, self.rank))
        own, mine = slice(first, first + split.num_samples), np.flatnonzero(assigned == self.rank)
        destinations, mine_sizes = assigned[own], sizes[mine]
        sent = np.bincount(destinations, sizes[own], self.world_size).astype(np.int64)
        received = np.bincount(current[mine], mine_sizes, self.world_size).astype(np.int64)
        packed = pack_samples(split, columns, np.argsort(destinations, kind="stable"), int(sent.sum()))
        out = np.empty(int(received.sum()), dtype=np.uint8)
        into, own_bytes = torch.from_numpy(out), torch.from_numpy(packed)  # They end here, as in ``_gather``.
        start_all_to_all(into, own_bytes, received.tolist(), sent.tolist(), self.group).wait()
        return ReceivedSamples(out, mine_sizes, int(sent.sum() - sent[self.rank]))


def _rows(received: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first ``counts[rank]`` rows of every rank, without the padding behind them.

    Args:
        received: ``[world_size, capacity * ROW]``.
        counts: ``[world_size]``.
    """
    by_rank = received.reshape(len(counts), -1, ROW) if received.size else received.reshape(len(counts), 0, ROW)
    return by_rank[np.arange(by_rank.shape[1]) < counts[:, None]]
