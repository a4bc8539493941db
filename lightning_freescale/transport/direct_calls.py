"""An all-to-all of tensors that are known to fit, without the checks that ``torch.distributed`` makes in every call."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from lightning_freescale.transport.backend import FreeScaleGroup

_METHOD = (
    "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
)  # before torch 2.13
_OPTIONS: Any = dist.AllToAllOptions()
_OPTIONS.asyncOp = True


def start_all_to_all(
    received: Tensor,
    sent: Tensor,
    receive: list[int],
    send: list[int],
    group: dist.ProcessGroup,
    in_stream_order: bool = False,
) -> dist.Work:
    """``torch.distributed.all_to_all_single`` with ``async_op=True``.

    Args:
        received: ``[sum(receive), ...]``, or of the shape of ``sent`` without counts.
        sent: ``[sum(send), ...]`` of the same type. It must stay alive until the transfer is complete.
        receive, send: ``[W]`` rows from and for each rank; empty if they are all equal.
        in_stream_order: if the group can, run on the current stream, see :meth:`HostStagedMover.exchange`.
    """
    if in_stream_order and isinstance(group, FreeScaleGroup):
        return cast(dist.Work, group.all_to_all_in_parts(received, sent, receive, send, True))
    work: dist.Work = getattr(group, _METHOD)(received, sent, receive, send, _OPTIONS)
    return work
