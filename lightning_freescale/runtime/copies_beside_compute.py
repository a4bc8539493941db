"""Copies within a GPU that leave its SMs to compute.

CUDA copies memory of one device by a kernel, which is fast and takes time from the kernels beside it. Since CUDA 12.8 a batch of
copies can have a flag that prefers the overlap with compute: the driver may then use a copy engine.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import current_stream_handle

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``. The two locations are hints for managed memory, and stay 0."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def _batch_copy() -> Callable[..., int] | None:
    """``cuMemcpyBatchAsync`` of the driver with the arguments of CUDA 13; ``None`` if the driver does not have it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        call: Callable[..., int] = driver.cuMemcpyBatchAsync_v2
        return call
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        return None
    failed = ctypes.c_size_t()

    def with_index_of_failure(*arguments: Any) -> int:  # CUDA 12.8 and 12.9 also return which copy has failed
        status: int = driver.cuMemcpyBatchAsync(*arguments[:-1], ctypes.byref(failed), arguments[-1])
        return status

    return with_index_of_failure


def can_overlap(target: Tensor, source: Tensor) -> bool:
    """Whether the copy is one of bytes within a GPU."""
    alike = target.dtype == source.dtype and target.shape == source.shape and target.device == source.device
    return alike and source.is_cuda and target.is_contiguous() and source.is_contiguous() and source.numel() > 0


@torch.no_grad()
def copy_beside_compute(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first one, on the current stream, which must not be the default stream.

    Tensors that are not in one piece of memory of the same GPU are copied as ``Tensor.copy_`` does it. So are all of them if the
    driver cannot do it otherwise.
    """
    engine = [(target, source) for target, source in pairs if can_overlap(target, source)]
    others = [(target, source) for target, source in pairs if not can_overlap(target, source)]
    if engine and not _copy_in_batch(engine):
        others = list(pairs)
    for target, source in others:
        target.copy_(source, non_blocking=True)


def _copy_in_batch(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the driver has taken the copies. If not, nothing was copied."""
    call = _batch_copy()
    if call is None:
        log_once("copies of tables within the GPU use its SMs, because the CUDA driver is older than 12.8")
        return False
    count = len(pairs)
    targets, sources = ((ctypes.c_uint64 * count)(*(pair[side].data_ptr() for pair in pairs)) for side in (0, 1))
    sizes = (ctypes.c_size_t * count)(*(source.nbytes for _, source in pairs))
    attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE)
    stream = ctypes.c_void_p(current_stream_handle(pairs[0][1].device))
    first_of_attributes = ctypes.c_size_t(0)
    status = call(
        targets,
        sources,
        sizes,
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        ctypes.byref(first_of_attributes),
        ctypes.c_size_t(1),
        stream,
    )
    if status:
        log_once(
            f"copies of tables within the GPU use its SMs, because the CUDA driver returned error {status} for a batch"
        )
    return not status
