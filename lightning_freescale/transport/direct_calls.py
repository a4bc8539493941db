"""An all-to-all of tensors that are known to fit, without the checks that ``torch.distributed`` makes in every call."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

_METHOD = (
    "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
)  # before torch 2.13
_OPTIONS: Any = dist.AllToAllOptions()
_OPTIONS.asyncOp = True


def start_all_to_all(
    received: Tensor, sent: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """``torch.distributed.all_to_all_single`` with ``async_op=True``.

    Args:
        received: ``[sum(receive), ...]``, or of the shape of ``sent`` without counts.
        sent: ``[sum(send), ...]`` of the same type. It must stay alive until the transfer is complete.
        receive, send: ``[W]`` rows from and for each rank; empty if they are all equal.
    """
    work: dist.Work = getattr(group, _METHOD)(received, sent, receive, send, _OPTIONS)
    return work
