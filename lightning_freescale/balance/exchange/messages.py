"""``RankMessages``: the messages that the ranks send each other to exchange samples. All of them are collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_freescale.balance.exchange.packing import pack_samples, packed_sizes
from lightning_freescale.balance.exchange.split_batch import LengthColumns, SplitBatch


class ReceivedSamples(NamedTuple):
    """The ``m`` samples that this rank has after an exchange, ordered by source rank, then by their order there.

    Attributes:
        lengths: ``[m, S + 1]`` int64, see :class:`SplitBatch`.
        packed: the bytes of all samples.
        bytes_sent: bytes that this rank sent to other ranks.
    """

    lengths: NDArray[np.int64]
    packed: NDArray[np.uint8]
    bytes_sent: int


class RankMessages:
    """Communication between the ranks of a gloo process group that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``[world_size, ...]``: the ``values [...]`` of every rank. Their shapes must be equal."""
        mine = torch.from_numpy(values)
        received = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(received, mine, group=self.group)
        return torch.stack(received).numpy()

    def gather_rows(self, values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``[sum(counts), k]``: the rows ``values [counts[rank], k]`` of every rank, ordered by rank."""
        padded = np.zeros((counts.max(), values.shape[1]), dtype=np.int64)
        padded[: len(values)] = values
        return np.concatenate([rows[:count] for rows, count in zip(self.gather(padded), counts, strict=True)])

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the object ``value`` of every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def exchange_samples(
        self, split: SplitBatch, columns: Sequence[LengthColumns], destinations: Sequence[NDArray[np.int64]]
    ) -> ReceivedSamples:
        """Send every sample to its rank: first the lengths of the samples, then their bytes.

        Args:
            split: the local batch of this rank.
            columns: how many rows of each tensor a sample has, as the ranks agreed.
            destinations: for each source rank, the destination rank of each of its samples.
        """
        own = destinations[self.rank]
        order = np.argsort(own, kind="stable")
        sent = np.bincount(own, minlength=self.world_size)
        received = np.array([(ranks == self.rank).sum() for ranks in destinations])
        width = split.lengths.shape[1]
        lengths = self._all_to_all(split.lengths[order].ravel(), sent * width, received * width).reshape(-1, width)

        packed, sample_bytes = pack_samples(split, columns, order)
        bytes_sent = _sum_groups(sample_bytes, sent)
        bytes_received = _sum_groups(packed_sizes(split, columns, lengths).sum(axis=1), received)
        packed = self._all_to_all(packed, bytes_sent, bytes_received)
        to_others = int(bytes_sent.sum() - bytes_sent[self.rank])
        to_others += lengths.itemsize * width * int(sent.sum() - sent[self.rank])
        return ReceivedSamples(lengths, packed, to_others)

    def _all_to_all(self, values: NDArray, sent: NDArray[np.int64], received: NDArray[np.int64]) -> NDArray:
        """Send ``sent[rank]`` of the ``values`` to each rank; return the ``received[rank]`` values of each rank."""
        out = torch.empty(int(received.sum()), dtype=torch.from_numpy(values).dtype)
        dist.all_to_all_single(out, torch.from_numpy(values), received.tolist(), sent.tolist(), group=self.group)
        return out.numpy()


def _sum_groups(values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the first ``counts[0]`` values, of the next ``counts[1]`` values, and so on."""
    totals = np.concatenate([[0], np.cumsum(values)])
    return np.diff(totals[np.concatenate([[0], np.cumsum(counts)])])
