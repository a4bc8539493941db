"""A kernel that holds every SM of the GPU until the host ends it. It is launched through the driver."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

# Every block increments a counter and then spins until the host sets `release`, at most `limit` nanoseconds. Two blocks of
# 1024 threads fill an SM. The word `release` lies in device memory: blocks that poll host memory would fill the link to the
# host with their reads and slow every copy to the host down.
HOLD = b"""
.version 7.8
.target sm_80
.address_size 64

.visible .entry hold(.param .u64 release, .param .u64 resident, .param .u64 limit)
.maxntid 1024, 1, 1
.minnctapersm 2
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %d<7>;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
    ld.param.u64 %d1, [release];
    ld.param.u64 %d2, [resident];
    ld.param.u64 %d3, [limit];
    red.global.add.u32 [%d2], 1;
    mov.u64 %d4, %globaltimer;
AGAIN:
    ld.volatile.global.u32 %r2, [%d1];
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra END;
    mov.u64 %d5, %globaltimer;
    sub.u64 %d6, %d5, %d4;
    setp.gt.u64 %p3, %d6, %d3;
    @%p3 bra END;
    nanosleep.u32 1000;
    bra AGAIN;
END:
    bar.sync 0;
    ret;
}
"""


def eventually(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``done()`` is true, at most ``seconds``. Returns whether it became true."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


class Holder:
    """Runs the kernel on every SM that this process may use, at most ``seconds``."""

    def __init__(self, device: torch.device, seconds: float):
        self._driver = ctypes.CDLL("libcuda.so.1")
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(HOLD))
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, ctypes.c_char_p(b"hold"))
        self._release = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._resident = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._stream, self._side = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._limit = int(seconds * 1e9)
        self.blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        torch.cuda.synchronize()

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        assert result == 0, f"{name} failed with CUDA error {result}"

    def start(self) -> int:
        """Launch the kernel. Returns how many blocks are running shortly afterwards."""
        values = [ctypes.c_uint64(self._release.data_ptr()), ctypes.c_uint64(self._resident.data_ptr())]
        values.append(ctypes.c_uint64(self._limit))
        pointers = (ctypes.c_void_p * 3)(*[ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values])
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        self._call("cuLaunchKernel", self._kernel, self.blocks, 1, 1, 1024, 1, 1, 0, stream, pointers, None)
        time.sleep(0.05)
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            self._seen.copy_(self._resident, non_blocking=True)
            copied.record()
        assert eventually(copied.query, 5), "a plain copy to the host did not end while all SMs were held"
        return int(self._seen)

    def stop(self) -> None:
        """Make the kernel end. A copy engine writes the word, because no SM is free to do it."""
        with torch.cuda.stream(self._side):
            self._release.copy_(self._one, non_blocking=True)

    def running(self) -> bool:
        return not self._stream.query()
