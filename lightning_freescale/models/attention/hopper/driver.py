"""Start kernels and describe tensors to the copy engine through the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .compiler import compiled
from .config import Config, config

_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle by bytes
_BOX_ROWS = 64


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()}")


def use_device(device: int) -> None:
    """Make the context that PyTorch uses on ``device`` current in this thread; autograd's threads start without one."""
    context = ctypes.c_void_p()
    _check(_cuda().cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _check(_cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(_cuda().cuCtxSetCurrent(context))


class TensorMap:
    """Description of a ``[rows, heads, width]`` tensor for the copy engine; it copies boxes of 64 rows of one head."""

    def __init__(self, pointer: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> None:
        rows, heads, width = shape
        box = min(width, 64)
        head_stride = strides[1] if heads > 1 else width
        self._memory = ctypes.create_string_buffer(192)
        self.address = (ctypes.addressof(self._memory) + 63) // 64 * 64
        status = _cuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            _TYPES[dtype],
            3,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * 3)(width, heads, rows),
            (ctypes.c_uint64 * 2)(2 * head_stride, 2 * strides[0]),
            (ctypes.c_uint32 * 3)(box, 1, _BOX_ROWS),
            (ctypes.c_uint32 * 3)(1, 1, 1),
            0,
            _SWIZZLES[2 * box],
            3,
            0,
        )
        _check(status)


@functools.lru_cache(maxsize=4096)
def _tensor_map(pointer: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> TensorMap:
    return TensorMap(pointer, dtype, shape, strides)


def tensor_map(x: Tensor) -> TensorMap:
    """The map of ``x``. It describes addresses, not values, so it is kept for other tensors at the same place."""
    return _tensor_map(x.data_ptr(), x.dtype, x.shape, x.stride())


class BiasArguments(ctypes.Structure):
    """``struct Bias`` of ``bias.cuh``; all zero without bias."""

    _fields_ = (
        ("position", ctypes.c_void_p),
        ("time", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("positions", ctypes.c_int),
        ("times", ctypes.c_int),
    )


class SiluPart(ctypes.Structure):
    """``struct Part`` of ``silu.cuh``."""

    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("grad_stride", ctypes.c_int64),
        ("before_stride", ctypes.c_int64),
        ("share_stride", ctypes.c_int64),
    )

    @classmethod
    def of(cls, *tensors: Tensor) -> SiluPart:
        """The gradient, the input of the SiLU, and the shares of a sum over the rows."""
        return cls(*(x.data_ptr() for x in tensors), *(x.stride(0) for x in tensors))


class SiluArguments(ctypes.Structure):
    """``struct Parts`` of ``silu.cuh``."""

    _fields_ = (("q", SiluPart), ("k", SiluPart), ("v", SiluPart))


class Kernels:
    """The kernels of one :class:`Config` on one device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._module = ctypes.c_void_p()
        self._binary = compiled(config.options())
        _check(_cuda().cuModuleLoadData(ctypes.byref(self._module), self._binary))
        self._functions: dict[str, ctypes.c_void_p] = {}

    def _function(self, name: str, shared: int) -> ctypes.c_void_p:
        if name not in self._functions:
            function = ctypes.c_void_p()
            _check(_cuda().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
            if shared:
                _check(_cuda().cuFuncSetAttribute(function, _SHARED_LIMIT, shared))
            self._functions[name] = function
        return self._functions[name]

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0) -> None:
        """Start a kernel on the current stream. Arguments: tensors, tensor maps, ``ctypes`` values."""
        values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
        places = [x.address if isinstance(x, TensorMap) else ctypes.addressof(x) for x in values]
        pointers = (ctypes.c_void_p * len(places))(*places)
        # torch.cuda.current_stream takes ten times as long, because it makes an object.
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
        function = self._function(name, shared)
        _check(_cuda().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, pointers, None))


_loaded: dict[tuple[int, int, bool, bool, int], Kernels] = {}


def kernels(qk: int, v: int, half: bool, bias: bool, device: int) -> Kernels:
    """The kernels of these head widths for device number ``device``, which must be the current one."""
    key = (qk, v, half, bias, device)
    if key not in _loaded:
        _loaded[key] = Kernels(config(qk, v, half, bias))
    return _loaded[key]
