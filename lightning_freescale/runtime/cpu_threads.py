"""The number of CPU threads of PyTorch in a process that trains on a GPU.

PyTorch divides operations on CPU tensors of more than about 32,000 elements, such as those on the ids of a batch, between OpenMP
threads. After each operation these threads occupy their cores for a while, because they wait for the next one without sleeping.
The cores are then missing to the threads that launch kernels and move data, and every step takes longer.
"""

from __future__ import annotations

import os

import torch

from lightning_freescale.runtime.log import log_once

VARIABLE = "OMP_NUM_THREADS"


def were_chosen() -> bool:
    """Whether the environment sets the number of threads. Lightning sets it, too, when it starts the ranks."""
    return VARIABLE in os.environ


def use_one(device: torch.device) -> None:
    """On a GPU, let PyTorch use one CPU thread, as torchrun does. On a CPU the number stays as it is."""
    if device.type == "cuda" and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        log_once(
            f"PyTorch uses one CPU thread in each process, because its threads slow the launches of kernels; set {VARIABLE} to "
            "choose another number"
        )
