"""Process groups for exchanges, of high or low priority."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_freescale.runtime.process_groups import bounded_connect, new_gloo_group
from lightning_freescale.transport.backend import BACKEND_NAME
from lightning_freescale.transport.options import Options


def new_group(backend: str, priority: Literal["high", "low"], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a group of all ranks. This is a collective: every rank must call it.

    Args:
        backend: a backend that :func:`~lightning_freescale.transport.choose` returned, for example ``"nccl"``.
        priority: transfers of a ``"high"`` group overtake those of a ``"low"`` group. With gloo it has no effect.
        timeout: how long one exchange may take; torch's default if it is None.
    """
    options: Any = None
    if backend == BACKEND_NAME:
        options = Options(priority=priority)
    elif backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority == "high")
    if backend == "gloo":
        return new_gloo_group(timeout)

    def make() -> Any:
        return dist.new_group(backend=backend, timeout=timeout, pg_options=options)

    if backend == "nccl" and timeout is not None:  # NCCL may wait without end for a rank that dies.
        group = bounded_connect(make, timeout, torch.device("cuda", torch.cuda.current_device()))
    else:
        group = make()
    assert isinstance(group, dist.ProcessGroup)  # new_group returns something else on ranks that are not members
    return group
