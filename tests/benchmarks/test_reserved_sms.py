"""Reserved SMs without a GPU: the library compiles, and a process without its SMs ends with a message."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.harness.gpu_cluster import launcher, reserved_sms

CREATE_STREAM = "import ctypes; ctypes.CDLL(None).cudaStreamCreateWithFlags(ctypes.byref(ctypes.c_void_p()), 1)"


@pytest.mark.parametrize("part", [None, "4", "4/4", "0/1000", "0/4"])
def test_a_process_without_its_part_ends_with_a_message(part: str | None) -> None:
    if part == "0/4" and launcher.has_gpu():
        pytest.skip("the GPU has this part")
    env = {name: value for name, value in os.environ.items() if name != reserved_sms.PART}
    with reserved_sms.build_library() as built:
        env |= {"LD_PRELOAD": str(built)} | ({} if part is None else {reserved_sms.PART: part})
        done = subprocess.run(
            [sys.executable, "-c", CREATE_STREAM], env=env, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == -6  # aborted
    expected = (
        "libcuda.so.1"
        if part == "0/4"
        else f"RESERVED_SMS is {part or 'not set'}; expected PART/PARTS, for example 0/4"
    )
    assert done.stderr.startswith("reserved_sms: ")
    assert expected in done.stderr


def test_without_a_compiler_the_error_suggests_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C compiler.*--share"), reserved_sms.build_library():
        pass


def test_description_of_a_rank_without_reserved_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(reserved_sms.PART, raising=False)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    assert reserved_sms.describe() == "at most 25% of the SMs per rank, not reserved"
    reserved_sms.use(torch.device("cpu"))  # does nothing
