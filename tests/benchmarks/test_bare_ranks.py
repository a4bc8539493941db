"""``stub_package``: transport and attention are importable where Lightning, TorchRec and FBGEMM are not installed."""

from __future__ import annotations

import subprocess
import sys

from tests.benchmarks.command import ROOT

IMPORT = """
import importlib, sys
sys.path.insert(0, {root!r})
for name in ("lightning", "pytorch_lightning", "torchrec", "fbgemm_gpu"):
    sys.modules[name] = None  # every import of it fails
import benchmarks.sm_free
from benchmarks.harness.gpu_cluster.bare_ranks import stub_package
stub_package()
transport = importlib.import_module("lightning_freescale.transport")
importlib.import_module("lightning_freescale.transport.host_staged")
assert transport.Options(reductions="gloo")
assert transport.capabilities()
import torch
attention = importlib.import_module("lightning_freescale.models.attention")
x, offsets, times = torch.randn(3, 1, 4), torch.tensor([0, 3]), torch.arange(3)
assert attention.hstu_attention(x, x, x, offsets, times, torch.zeros(8), torch.zeros(8)).shape == x.shape
"""


def test_transport_and_attention_without_the_other_dependencies() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(root=str(ROOT))], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
