"""The transport as the GPU checks use it, without importing Lightning, TorchRec and FBGEMM."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness.gpu_cluster.bare_ranks import stub_package

stub_package()  # must come before the imports below
transport = importlib.import_module("lightning_freescale.transport")
host_staged = importlib.import_module("lightning_freescale.transport.host_staged")
rank_buffers = importlib.import_module("lightning_freescale.transport.rank_buffers")
collectives = importlib.import_module("tests.transport.collectives")


def new_group(seconds: float = 20, **options: Any) -> Any:
    """A freescale group of all ranks whose other collectives use gloo. ``seconds`` is its timeout."""
    options = {"reductions": "gloo"} | options
    limit = timedelta(seconds=seconds)
    return dist.new_group(backend="freescale", pg_options=transport.Options(**options), timeout=limit)
