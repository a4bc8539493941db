"""Cores of a rank's own, as far as there is no GPU: the library builds, and what it cannot do it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.harness.gpu_cluster import launcher as cluster
from benchmarks.harness.gpu_cluster import reserved_sms as own_cores

ASK = "import ctypes; ctypes.CDLL(None).cudaStreamCreateWithFlags(ctypes.byref(ctypes.c_void_p()), 1)"


@pytest.mark.parametrize("part", [None, "4", "4/4", "0/1000", "0/4"])
def test_a_process_that_cannot_have_its_part_ends(part: str | None) -> None:
    if part == "0/4" and cluster.has_gpu():
        pytest.skip("it can")
    env = {name: value for name, value in os.environ.items() if name != own_cores.PART}
    with own_cores.library() as built:
        env |= {"LD_PRELOAD": str(built)} | ({} if part is None else {own_cores.PART: part})
        done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -6  # aborted
    expected = "libcuda.so.1" if part == "0/4" else f"OWN_CORES is {part or 'not set'}; wanted PART/PARTS, as 0/4"
    assert done.stderr.startswith("own_cores: ")
    assert expected in done.stderr


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C compiler.*--share"), own_cores.library():
        pass


def test_a_rank_without_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(own_cores.PART, raising=False)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    assert own_cores.describe() == "25 % of its cores a rank"
    own_cores.use(torch.device("cpu"))  # nothing to do
