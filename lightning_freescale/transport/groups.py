"""Process groups for exchanges, whose transfers come first or give way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from lightning_freescale.transport.backend import BACKEND_NAME
from lightning_freescale.transport.options import Options


def new_group(backend: str, priority: Literal["high", "low"], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of all ranks. A collective.

    Args:
        backend: as :func:`~lightning_freescale.transport.choose` names it; gloo has no priorities.
        timeout: of its exchanges, torch's default if absent.
    """
    options: Any = None
    if backend == BACKEND_NAME:
        options = Options(priority=priority)
    elif backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority == "high")
    group = dist.new_group(backend=backend, timeout=timeout, pg_options=options)
    assert isinstance(group, dist.ProcessGroup)  # and not the marker of a rank that is no member
    return group
