"""Errors of CUDA and NCCL are told from others. They follow from the failure of another rank, and do not name it."""

from __future__ import annotations

import re

import torch

_DEVICE_ERROR = re.compile(r"CUDA (driver )?error: \S|\bcudaError[A-Z]|\bCUDA_ERROR_[A-Z]|Triton Error \[CUDA\]")
_NCCL_ERROR = re.compile(r"\bNCCL error\b|\bnccl[A-Z]\w*Error\b")


def tells_of_device_error(text: str) -> bool:
    """Whether ``text`` has the message of an error of CUDA or its driver."""
    return _DEVICE_ERROR.search(text) is not None


def is_device_error(error: BaseException) -> bool:
    """Whether ``error`` is one of CUDA or its driver, or reports one. A lack of memory is none: the device works after it."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or (
        isinstance(error, RuntimeError) and tells_of_device_error(str(error))
    )


def is_nccl_error(error: BaseException) -> bool:
    """Whether ``error`` is one of a transfer of NCCL, or reports one."""
    return isinstance(error, RuntimeError) and _NCCL_ERROR.search(str(error)) is not None
