"""GPU ranks that need torch and the compiled core only: they work where Lightning, TorchRec and FBGEMM are not installed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import sys
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import reserved_sms

ROOT = Path(__file__).resolve().parents[3]  # of the repository


def stub_package() -> None:
    """Make ``lightning_freescale.transport`` and ``.models.attention`` importable without the package's other dependencies.

    Importing ``lightning_freescale`` or ``lightning_freescale.models`` would import TorchRec and Lightning. This registers empty
    packages under these names. Their submodules are then imported without the code of the packages' ``__init__`` files.
    """
    sys.path.insert(0, str(ROOT))
    for name in ("lightning_freescale", "lightning_freescale.models"):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(ROOT / name.replace(".", "/"))]
            sys.modules[name] = package


class GpuRank:
    """This rank, its device, and collectives over gloo that coordinate the ranks. Creating it is a collective."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        reserved_sms.use(self.device)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world, timeout=timedelta(seconds=60))

    def meet(self) -> None:
        """Wait until the GPU work of every rank is done."""
        torch.cuda.synchronize()
        dist.barrier()

    def gather(self, value: float) -> list[float]:
        """The values of all ranks."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: float) -> float:
        """Mean over the ranks."""
        return statistics.mean(self.gather(value))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the process and print the stacks of all threads if the block takes longer than ``seconds``."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
