"""What every rank does before and after a measurement."""

from __future__ import annotations

import logging
import os
import platform
import warnings

import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import reserved_sms


def silence_libraries() -> None:
    """Hide warnings and all log messages below errors of the libraries."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)


def use_device(kind: str) -> torch.device:
    """Make this rank's device the current one."""
    if kind == "cpu":
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))  # Lightning reads the variable, too
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    reserved_sms.use(device)
    return device


def describe_machine(device: torch.device) -> str:
    """The hardware of a rank and its communication library, for the header of a result."""
    if device.type == "cpu":
        return f"{os.cpu_count()} cores ({platform.machine()}), gloo"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name(device)}, {reserved_sms.describe()}, NCCL {nccl}"


def leave_group() -> None:
    """Wait for all ranks, then leave the process group. A collective."""
    dist.barrier()
    dist.destroy_process_group()
