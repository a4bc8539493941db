"""Cores of a rank's own, where ranks share one GPU.

MPS limits how many of the GPU's cores (streaming multiprocessors) a process uses, but not which: kernels of several ranks meet on
one core, and the same batch takes longer in one step than in another. Ranks of a cluster do not meet. With ``own_cores.c``, which
is built here and loaded before the CUDA runtime, all streams of a rank have the same cores, and no other rank has those.
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

if TYPE_CHECKING:  # a launcher has no use for it
    import torch

PART = "OWN_CORES"  # PART/PARTS, in the environment of a rank


@contextmanager
def library() -> Iterator[Path]:
    """Build what a rank must have in ``LD_PRELOAD``."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "no C compiler for cores of the ranks' own: install one, or limit their number alone (--share)"
        )
    with tempfile.TemporaryDirectory(prefix="own-cores-") as folder:
        built = Path(folder) / "own_cores.so"
        source = Path(__file__).with_name("reserved_sms.c")
        subprocess.run(
            [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True
        )
        yield built


def use(device: torch.device) -> None:
    """Let this thread's work on ``device`` run on the rank's own cores, if it was started with some.

    The default stream has all cores. Call this before anything is queued.
    """
    if device.type == "cuda" and PART in os.environ:
        import torch

        torch.cuda.set_stream(torch.cuda.Stream(device))


def describe() -> str:
    """What a rank has of the GPU, in words."""
    if PART in os.environ:
        return f"{ctypes.CDLL(None).own_cores()} cores of its own a rank"
    return f"{os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', '100')} % of its cores a rank"
