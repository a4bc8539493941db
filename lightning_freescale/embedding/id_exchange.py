"""The all-to-all of the ids of row-wise tables, with less work for the host than TorchRec's own.

The transfers are those of TorchRec, in the same order: the sizes, the lengths, the ids, and the weights if there are any. What
differs is the work around them:

- The sizes do not travel at all, if the headers of the batch have announced them (``announced_ids.py``). Otherwise they go to
  the device in one copy that the host does not wait for. TorchRec makes three copies and waits for each.
- The order in which arrived ids are sorted by feature depends on the batch sizes of the ranks alone, so it is kept.
- The number of arrived ids of each feature stays on the device. TorchRec waits for it, and the exchange does not need it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.runtime.streams import int64_on_device
from lightning_freescale.transport import direct_calls

KEPT_ORDERS = 16  # batch sizes that vary from step to step are not worth keeping


class RowWiseIds:
    """The exchange of the ids of one row-wise sharding group.

    Args:
        group: the process group.
        num_features: number of features ``T`` of the group.
    """

    def __init__(self, group: dist.ProcessGroup, num_features: int):
        self.group, self.num_features = group, num_features
        self.rank, self.world_size = group.rank(), group.size()
        self._orders: dict[tuple[int, ...], Tensor] = {}

    def send(self, divided: IdsByOwner, announced: AnnouncedSizes | None = None) -> SizesOfIds:
        """Start the exchange.

        Args:
            divided: the ids.
            announced: what arrives at this rank. Either all ranks know it or none does.
        """
        return SizesOfIds(self, divided, announced)

    def order(self, samples: list[int], device: torch.device) -> Tensor:
        """int32: where each part of what has arrived comes from, when it is ordered by feature and then by requester.

        Args:
            samples: ``[W]`` batch size of each requester. If all are equal, the parts are ``W * T`` rows of lengths. Otherwise
                they are single lengths.
        """
        key = tuple(samples)
        if key not in self._orders:
            if len(self._orders) >= KEPT_ORDERS:
                self._orders.clear()
            rows = np.arange(self.world_size * self.num_features).reshape(self.world_size, self.num_features).T.ravel()
            if len(set(samples)) > 1:
                sizes = np.repeat(samples, self.num_features)
                starts = sizes.cumsum() - sizes
                rows = np.concatenate([np.arange(starts[row], starts[row] + sizes[row]) for row in rows])
            self._orders[key] = int64_on_device(rows.tolist(), device).to(torch.int32)
        return self._orders[key]


class IdsByOwner(NamedTuple):
    """Ids that are ordered by owner, then by feature, then by sample. All features have the same batch size ``B``."""

    keys: list[str]  # [T] names of the features
    lengths: Tensor  # [W * T * B]
    values: Tensor  # [m]
    weights: Tensor | None  # [m]
    samples: int  # B
    by_owner: list[int] | None  # [W] number of ids; None if the host does not know it


class AnnouncedSizes(NamedTuple):
    """What arrives at this rank.

    Attributes:
        ids: ``[W]`` number of ids from each requester.
        samples: ``[W]`` batch size of each requester.
    """

    ids: list[int]
    samples: list[int]


class _DirectWait:
    """A wait without the range of the profiler that TorchRec opens in every wait, because the range takes the host some time."""

    def wait(self) -> Any:
        return self._wait_impl()  # type: ignore[attr-defined]


def wait_directly(awaitable: Awaitable[Any]) -> Any:
    """The same for an awaitable of TorchRec."""
    result = awaitable._wait_impl()
    for callback in awaitable.callbacks:
        result = callback(result)
    return result


class NoWaitDirect(_DirectWait, NoWait):
    """TorchRec's ``NoWait``: a result that is there already."""


class SizesOfIds(_DirectWait, Awaitable[KJTAllToAllTensorsAwaitable]):
    """The sizes of all transfers travel, unless they were announced. ``wait()`` starts to send the ids."""

    def __init__(self, ids: RowWiseIds, divided: IdsByOwner, announced: AnnouncedSizes | None = None):
        super().__init__()
        self._ids, self._keys, self._announced = ids, divided.keys, announced
        world, of_owner = ids.world_size, divided.samples * ids.num_features
        owned = divided.by_owner
        if owned is None:
            owned = divided.lengths.view(world, of_owner).sum(1).tolist()
        self._tensors, self._splits = [divided.lengths, divided.values], [[of_owner] * world, owned]
        if divided.weights is not None:
            self._tensors.append(divided.weights)
            self._splits.append(owned)
        if announced is not None:
            return
        by_rank = zip(*self._splits, [divided.samples] * world, strict=True)
        self._sent = int64_on_device([size for sizes in by_rank for size in sizes], divided.values.device)
        self._received = torch.empty_like(self._sent)
        self._work = direct_calls.start_all_to_all(self._received, self._sent, [], [], ids.group)

    def _wait_impl(self) -> ArrivingIds:
        if self._announced is not None:
            counts, samples = self._announced
            lengths = [number * self._ids.num_features for number in samples]
            splits = [lengths, *[counts] * (len(self._splits) - 1)]
            return ArrivingIds(self._ids, self._keys, self._tensors, self._splits, splits, samples)
        self._work.wait()
        columns = len(self._splits) + 1
        received = self._received.tolist()
        *splits, samples = (received[column::columns] for column in range(columns))
        return ArrivingIds(self._ids, self._keys, self._tensors, self._splits, splits, samples)


class ArrivingIds(_DirectWait, KJTAllToAllTensorsAwaitable):
    """The ids travel. ``wait()`` returns those that this rank owns, by feature and then by requester.

    TorchRec reads the attributes ``_input_splits``, ``_output_splits``, ``_recat`` and ``_stride_per_rank`` of its own class.
    """

    def __init__(
        self,
        ids: RowWiseIds,
        keys: list[str],
        tensors: list[Tensor],
        sent: list[list[int]],
        received: list[list[int]],
        samples: list[int],
    ):
        Awaitable.__init__(self)
        labels = ("lengths", "values", "weights")
        self._input_splits = dict(zip(labels, sent, strict=False))
        self._output_splits = dict(zip(labels, received, strict=False))
        self._stride_per_rank = samples
        self._recat = ids.order(samples, tensors[0].device)
        self._ids_keys = keys
        self._kept = tensors  # must stay alive until the transfers are complete
        self._arriving = [tensor.new_empty(sum(sizes)) for tensor, sizes in zip(tensors, received, strict=True)]
        self._works = [
            direct_calls.start_all_to_all(into, tensor, output, input, ids.group)
            for into, tensor, output, input in zip(self._arriving, tensors, received, sent, strict=True)
        ]

    def _wait_impl(self) -> KeyedJaggedTensor:
        for work in self._works:
            work.wait()
        lengths, values, weights = (*self._arriving, None)[:3]
        samples = self._stride_per_rank
        assert lengths is not None
        assert values is not None
        if len(self._ids_keys) == 1 or not any(samples):  # they are in order
            permuted = lengths, values, weights
        elif len(set(samples)) > 1:
            permuted = torch.ops.fbgemm.permute_1D_sparse_data(self._recat, lengths, values, weights, values.numel())
        else:
            rows = lengths.view(-1, samples[0])
            permuted = torch.ops.fbgemm.permute_2D_sparse_data(self._recat, rows, values, weights, values.numel())
        lengths, values, weights = permuted
        return KeyedJaggedTensor(self._ids_keys, values, weights, lengths=lengths.view(-1), stride=sum(samples))
