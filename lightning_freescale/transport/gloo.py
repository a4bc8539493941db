"""Movement of CPU tensors over an inner gloo group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_freescale.transport.rank_buffers import RankBuffers


class _Unpacked(dist._Work):
    """An exchange into a staging buffer, followed by the copy into the caller's tensors."""

    def __init__(self, work: Any, staging: Tensor, target: RankBuffers):
        super().__init__()

        def unpack(arrived: Any) -> list[Tensor]:
            arrived.value()  # raises what gloo raised
            for part, source in zip(target.parts, staging.split(target.sizes), strict=True):
                part.copy_(source)
            return target.parts

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
    """Moves bytes over gloo, which knows a few dtypes alone; the caller hands in uint8 views."""

    def __init__(self, group: Any):
        self._group = group

    def exchange(self, kind: str, send: RankBuffers, receive: RankBuffers) -> Any:
        """Part ``i`` of ``send`` goes to rank ``i``; part ``i`` of ``receive`` comes from rank ``i``."""
        target = receive.whole if receive.whole is not None else torch.empty(receive.total, dtype=torch.uint8)
        work = self._group.alltoall_base(target, send.joined(), receive.sizes, send.sizes)
        return work if receive.whole is not None else _Unpacked(work, target, receive)
