"""Process groups for exchanges, of high or low priority."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.process_groups import bounded_connect, new_gloo_group
from lightning_freescale.transport.backend import BACKEND_NAME
from lightning_freescale.transport.options import Options, from_environment

NCCL_CTAS = "FREESCALE_NCCL_CTAS"


def new_group(
    backend: str,
    priority: Literal["high", "low"],
    timeout: timedelta | None = None,
    beside_compute: bool = False,
) -> dist.ProcessGroup:
    """Make a group of all ranks. This is a collective: every rank must call it.

    Args:
        backend: a backend that :func:`~lightning_freescale.transport.choose` returned, for example ``"nccl"``.
        priority: transfers of a ``"high"`` group overtake those of a ``"low"`` group. With gloo it has no effect.
        timeout: how long one exchange may take; torch's default if it is None.
        beside_compute: whether the transfers run beside compute, so that NCCL should leave the SMs to it, see :func:`most_ctas`.
    """
    options: Any = None
    if backend == BACKEND_NAME:
        options = Options(priority=priority)
    elif backend == "nccl":
        options = nccl_options(priority, beside_compute)
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


def nccl_options(priority: Literal["high", "low"], beside_compute: bool) -> Any:
    """The options of a NCCL group, see :func:`new_group`."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority == "high")
    most = most_ctas()
    if beside_compute and most is not None:
        options.config.max_ctas = most  # also of its point-to-point transfers, rounded up to a power of two
        log_once(f"{NCCL_CTAS}: NCCL moves rows beside the compute with at most {most} CTAs")
    return options


def most_ctas() -> int | None:
    """The most CTAs with which NCCL moves rows beside the compute. None leaves the number to NCCL.

    A CTA of NCCL takes an SM for as long as the transfer lasts. NCCL starts two for each peer on another host, or more, and these
    rows have time until the end of the backward.
    """
    most = from_environment(NCCL_CTAS, 0)
    if most < 1 and NCCL_CTAS in os.environ:
        raise ConfigurationError(f"the environment variable {NCCL_CTAS}={most}: must be at least 1")
    return most or None
