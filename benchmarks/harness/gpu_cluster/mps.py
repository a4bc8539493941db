"""NVIDIA's Multi-Process Service (MPS): kernels of several processes run on one GPU at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MPS_CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps(sm_percent: int) -> Iterator[dict[str, str]]:
    """Run an MPS daemon for the duration of the block.

    Args:
        sm_percent: upper limit on the share of the GPU's SMs that each process may use.

    Yields:
        The environment variables that the client processes need.
    """
    tool = shutil.which(MPS_CONTROL)
    if tool is None:
        raise RuntimeError(
            f"{MPS_CONTROL} is not installed. Without MPS the ranks cannot use one GPU at the same time: install the NVIDIA "
            "driver's utilities, or run on the CPU (--device cpu)"
        )
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = dict(os.environ) | variables
        subprocess.run([tool, "-d"], env=env, check=True, stdout=subprocess.DEVNULL)
        try:
            yield variables | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(sm_percent)}
        finally:
            subprocess.run([tool], env=env, input="quit\n", text=True, check=False, timeout=60, capture_output=True)


def server_log(variables: Mapping[str, str], lines: int = 20) -> str:
    """The end of the log of an MPS daemon's servers. It says which client has caused a fault of the GPU.

    Args:
        variables: what :func:`mps` has yielded. The daemon still runs.
        lines: number of lines at most.
    """
    log = Path(variables["CUDA_MPS_LOG_DIRECTORY"]) / "server.log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def server_processes(variables: Mapping[str, str]) -> list[int]:
    """The process ids of the servers of an MPS daemon. It starts a server when its first client comes.

    Args:
        variables: what :func:`mps` has yielded.
    """
    env = dict(os.environ) | dict(variables)
    command, question = [MPS_CONTROL], "get_server_list\n"
    done = subprocess.run(command, env=env, input=question, text=True, check=True, timeout=60, capture_output=True)
    return [int(word) for word in done.stdout.split() if word.isdigit()]
