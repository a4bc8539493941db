"""The mean of a tensor over the ranks, by copy engines: an AllReduce that takes no SMs while the data travel.

Each rank averages one part of the tensor. It receives this part from all ranks, and then sends the mean to all ranks. Between the
two transfers runs a single kernel, on a stream of its own.

The ranks are added in the same order for every element, wherever the element lies in the tensor. With NCCL the order depends on
that place, so the result of NCCL depends on how gradients are divided into buckets, and this result does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.transport.backend import FreeScaleGroup
from lightning_freescale.transport.host_staged import HostStagedMover
from lightning_freescale.transport.rank_buffers import check_contiguous

PART_ALIGNMENT = 64  # elements: the part of each rank begins at a multiple, so that copies and kernels are fast


@dataclass(frozen=True)
class _Parts:
    """How tensors of one length are divided over the ranks.

    Attributes:
        begin, end: the part that this rank averages.
        starts: ``[world]`` bytes before the part of each rank.
        sent: ``[world]`` bytes of the part of each rank, 0 for this rank.
        own: ``[world]`` bytes of the part of this rank, 0 for this rank.
        received: ``[world, end - begin]`` this rank's part of the tensors of all ranks.
        rows: ``[world]`` addresses of the rows of ``received``.
    """

    begin: int
    end: int
    starts: list[int]
    sent: list[int]
    own: list[int]
    received: Tensor
    rows: list[int]


class RankMean:
    """Averages tensors over the ranks of a ``freescale`` group that nothing else uses.

    It keeps memory for each length of tensors that it has averaged, of that length and type.

    Args:
        group: the group. All ranks average the same tensors in the same order.
        device: where the tensors are.
    """

    def __init__(self, group: FreeScaleGroup, device: torch.device):
        self._rank, self._world, self._device = group.rank(), group.size(), device
        mover = group._mover(device)
        assert isinstance(mover, HostStagedMover), "gloo has an AllReduce of its own"
        self._mover = mover
        self._stream = SideStream(device, high_priority=True)
        self._known: dict[tuple[int, torch.dtype], _Parts] = {}

    def start(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Replace the values of ``tensor [n]`` by their mean over the ranks, after the work of the current stream.

        The caller keeps ``tensor`` until the future is complete, as DDP keeps its buckets.

        Returns:
            A future of ``tensor``. On CUDA its ``wait()`` makes the current stream wait. On a CPU it is complete.
        """
        tensor = check_contiguous(tensor, "tensor")
        on_cuda = self._device.type == "cuda"
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device] if on_cuda else None)
        with self._stream.work(compute=True):
            if tensor.numel():
                self._average(tensor)
            future.set_result(tensor)  # on CUDA it records the work of this stream
        return future

    def _average(self, tensor: Tensor) -> None:
        parts, move = self._parts(tensor), self._mover.move
        own, memory = tensor[parts.begin : parts.end], parts.received
        memory[self._rank].copy_(own)
        at = tensor.data_ptr()
        places = [at + start for start in parts.starts]
        move("all_reduce", places, parts.sent, parts.rows, parts.own)
        torch.mean(memory, 0, out=own)
        move("all_reduce", [places[self._rank]] * self._world, parts.own, places, parts.sent)

    def _parts(self, tensor: Tensor) -> _Parts:
        key = (tensor.numel(), tensor.dtype)
        if key not in self._known:
            sizes = divide(tensor.numel(), self._world)
            starts = list(accumulate(sizes, initial=0))
            begin, end, width = starts[self._rank], starts[self._rank + 1], tensor.element_size()
            received = tensor.new_empty((self._world, end - begin))
            others = [int(rank != self._rank) for rank in range(self._world)]
            self._known[key] = _Parts(
                begin,
                end,
                [start * width for start in starts[:-1]],
                [size * width * other for size, other in zip(sizes, others, strict=True)],
                [(end - begin) * width * other for other in others],
                received,
                [row.data_ptr() for row in received],
            )
        return self._known[key]


def divide(elements: int, world: int) -> list[int]:
    """``[world]`` the number of elements that each rank averages. The last ranks may have fewer, or none.

    >>> divide(1000, 4), divide(100, 4)
    ([256, 256, 256, 232], [64, 36, 0, 0])
    """
    share = -(-elements // (world * PART_ALIGNMENT)) * PART_ALIGNMENT
    return [max(0, min(share, elements - rank * share)) for rank in range(world)]


def average_gradients(model: DistributedDataParallel, mean: RankMean) -> None:
    """Let ``model`` average its gradients by ``mean``, instead of the AllReduce of its process group."""
    # A lambda has no annotations. DDP does not recognize those of this file, which are strings.
    model.register_comm_hook(mean, lambda mean, bucket: mean.start(bucket.buffer()))
