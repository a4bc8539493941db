"""Which threads are inside a call of NCCL on the host. Their communicators must not be aborted: NCCL would free what they use.

The first transfer between two ranks connects them, and a call on the host waits for the other rank then. Python knows where each
thread is. A transfer that C++ code starts, such as an AllReduce of DDP, is not seen.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

NAME, DEVICE = "nccl", torch.device("cuda")
MAKES_A_GROUP = "_new_process_group_helper"
WAITS_FOR_DEVICE = frozenset({"barrier"})  # These calls wait for a kernel, which an abort ends.


def threads_in_nccl() -> list[str]:
    """The names of the threads that are inside a call of NCCL now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    inside = [ident for ident, frame in sys._current_frames().items() if _is_in_nccl(frame)]
    return [names.get(ident, f"thread {ident}") for ident in inside]


def _is_in_nccl(innermost: FrameType) -> bool:
    code = innermost.f_code
    if code.co_filename != dist.distributed_c10d.__file__ or code.co_name in WAITS_FOR_DEVICE:
        return False
    values = innermost.f_locals
    if code.co_name == MAKES_A_GROUP:
        return NAME in str(values.get("backend"))
    return "group" in values and _uses_nccl(values["group"])


def _uses_nccl(group: Any) -> bool:
    """Whether transfers of ``group`` use NCCL. ``None`` is the default group, as for torch."""
    group = dist.group.WORLD if group is None else group
    try:
        return bool(group._get_backend(DEVICE).name() == NAME)
    except Exception:  # The group has no backend for CUDA, or it was destroyed.
        return False
