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
# A training has at most four groups of its own: rows and gradients with high and with low priority, ids, and events of experts.
# They get half of the SMs. The rest is left to torch's group, with the AllReduce.
SHARE_OF_SMS = 8


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
        beside_compute: whether the transfers run beside compute. The user can limit their CTAs, see :func:`chosen_ctas`.
    """
    options: Any = None
    if backend == BACKEND_NAME:
        options = Options(priority=priority)
    elif backend == "nccl":
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        options = nccl_options(priority, beside_compute, sms)
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


def nccl_options(priority: Literal["high", "low"], beside_compute: bool, sms: int) -> Any:
    """The options of a NCCL group on a GPU with ``sms`` SMs, see :func:`new_group`."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority == "high")
    most, chosen = fitting_ctas(sms), chosen_ctas()
    log_once(
        f"NCCL has at most {most} CTAs for each process group of this strategy, so that the kernels of all groups fit on the "
        f"{sms} SMs of the GPU"
    )
    if beside_compute and chosen is not None:
        most = chosen
        log_once(f"{NCCL_CTAS}: NCCL moves rows beside the compute with at most {most} CTAs")
    options.config.max_ctas = most  # also of its point-to-point transfers, rounded up to a power of two
    return options


def fitting_ctas(sms: int) -> int:
    """The most CTAs of one group, a power of two: four groups together have half of the ``sms`` SMs.

    A CTA of NCCL takes an SM until the transfer ends, in which all ranks must take part. If the kernels of all groups did not fit
    on the GPU at the same time, ranks could start them in different orders, and would wait for one another without end.

    >>> [fitting_ctas(sms) for sms in (4, 58, 108, 132)]
    [1, 4, 8, 16]
    """
    return 1 << max(sms // SHARE_OF_SMS, 1).bit_length() - 1


def chosen_ctas() -> int | None:
    """The most CTAs with which NCCL moves rows beside the compute, if the user has chosen a number.

    NCCL starts two for each peer on another host, or more, and these rows have time until the end of the backward.
    """
    most = from_environment(NCCL_CTAS, 0)
    if most < 1 and NCCL_CTAS in os.environ:
        raise ConfigurationError(f"the environment variable {NCCL_CTAS}={most}: must be at least 1")
    return most or None
