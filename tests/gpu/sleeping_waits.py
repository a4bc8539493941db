"""The host sleeps while it waits for the GPU. By default such a wait keeps a core busy, and tests share the cores."""

from __future__ import annotations

import ctypes

_BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC


def sleep_in_waits(ordinal: int = 0) -> None:
    """Let this process sleep in its waits for a GPU. Call it before CUDA is used.

    Raises:
        RuntimeError: if the driver refuses it.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuInit(0) or driver.cuDevicePrimaryCtxSetFlags_v2(ordinal, _BLOCKING_SYNC)
    if status:
        raise RuntimeError(f"the CUDA driver returned the error {status}")
