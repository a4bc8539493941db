"""Exchanges of CPU tensors over an inner gloo group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_freescale.transport.rank_buffers import RankBuffers


class _UnpackedWork(dist._Work):
    """An exchange into a staging buffer, followed by the copy into the caller's tensors."""

    def __init__(self, work: Any, staging: Tensor, target: RankBuffers):
        super().__init__()

        def unpack(arrived: Any) -> list[Tensor]:
            arrived.value()  # raises the error of gloo, if there is one
            for buffer, source in zip(target.buffers, staging.split(target.sizes), strict=True):
                buffer.copy_(source)
            return target.buffers

        self._future = work.get_future().then(unpack)

    @override
    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True

    @override
    def is_completed(self) -> bool:
        return self._future.done()

    @override
    def get_future(self) -> Any:
        return self._future


class GlooMover:
    """Moves bytes over gloo. The tensors are uint8 views, because gloo supports only a few dtypes."""

    def __init__(self, group: Any):
        self._group = group

    def exchange(self, kind: str, send: RankBuffers, receive: RankBuffers) -> Any:
        """Send ``send.buffers[i]`` to rank ``i``, and receive ``receive.buffers[i]`` from rank ``i``. Returns a c10d Work.

        Args:
            kind: the name of the collective. Only :class:`HostStagedMover` uses it, in its messages.
        """
        target = receive.whole if receive.whole is not None else torch.empty(receive.total, dtype=torch.uint8)
        work = self._group.alltoall_base(target, send.joined(), receive.sizes, send.sizes)
        return work if receive.whole is not None else _UnpackedWork(work, target, receive)
