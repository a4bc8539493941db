"""Reserves SMs of a shared GPU for each rank.

MPS limits how many SMs a process uses, but not which ones. Kernels of several ranks then share SMs, and the same batch
takes longer in one step than in another. Ranks of a real cluster do not share SMs. ``reserved_sms.c`` is compiled here
and loaded before the CUDA runtime. With it, all streams of a rank except the default stream use the same SMs, and no
other rank uses those.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launcher does not need torch
    import torch

PART = "RESERVED_SMS"  # environment variable of a rank, PART/PARTS: "1/4" is the second of four equal parts


@contextmanager
def build_library() -> Iterator[Path]:
    """Compile the library that a rank must have in ``LD_PRELOAD``. It exists for the duration of the block."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "no C compiler was found, and reserving SMs for each rank needs one: install a compiler, or only limit the number of "
            "SMs (--share)"
        )
    with tempfile.TemporaryDirectory(prefix="reserved-sms-") as folder:
        built = Path(folder) / "reserved_sms.so"
        source = Path(__file__).with_name("reserved_sms.c")
        subprocess.run(
            [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True
        )
        yield built


def use(device: torch.device) -> None:
    """Make this thread's work on ``device`` run on the reserved SMs, if the rank has any.

    The default stream uses all SMs, so this switches to another stream. Call it before any work is launched.
    """
    if device.type == "cuda" and PART in os.environ:
        import torch

        torch.cuda.set_stream(torch.cuda.Stream(device))


def count() -> int:
    """Number of the SMs that are reserved for this rank."""
    return ctypes.CDLL(None).reserved_sms()


def describe() -> str:
    """Which part of the GPU a rank uses, for the description of the machine."""
    if PART in os.environ:
        return f"{count()} SMs reserved per rank"
    return f"at most {os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', '100')}% of the SMs per rank, not reserved"
