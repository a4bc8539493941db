"""Failures of a rank that is not killed: it hangs, its memory is used up, or the server through which it uses the GPU dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch

from benchmarks.harness.gpu_cluster.mps import mps, server_processes
from tests.faults.training import append_record

LONG = 3600.0  # seconds
CLOCK = 2e9  # cycles of a GPU in a second, about


def hang(device: torch.device) -> None:
    """Never go on: on a GPU in a kernel, on a CPU in the training thread."""
    if device.type == "cuda":
        torch.cuda._sleep(int(LONG * CLOCK))
    else:
        time.sleep(LONG)


def use_up_memory(device: torch.device) -> None:
    """Ask the allocator for more memory than any machine has."""
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


@contextmanager
def mps_clients() -> Iterator[None]:
    """Processes that are started inside use the GPU as clients of an MPS daemon, which runs as long as the block."""
    with mps(sm_percent=100) as variables, patch.dict(os.environ, variables):
        yield


def end_mps_servers() -> int:
    """Kill the MPS servers of this process's daemon with SIGKILL, and return how many there were. The daemon goes on."""
    ended = 0
    for pid in server_processes({}):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            ended += 1
    return ended


def lose_mps_server(device: torch.device) -> None:
    """Kill the server through which all ranks use the GPU."""
    if not end_mps_servers():
        raise RuntimeError(f"the ranks do not use {device} through MPS: its control daemon lists no server")


FAILURES: dict[str, Callable[[torch.device], None]] = {"hang": hang, "memory": use_up_memory, "mps": lose_mps_server}
HITS_ALL_RANKS = frozenset({"mps"})  # Every rank fails by itself, and no rank is the victim.
NEEDS_CUDA = frozenset({"mps"})


class Failure(pl.Callback):
    """Lets ``victim`` fail before the backward pass of its step number ``step``, and notes it in the record ``kind``."""

    def __init__(self, kind: str, victim: int, step: int, folder: Path, attempt: int):
        self.kind, self.victim, self.steps_left = kind, victim, step
        self.folder, self.attempt = folder, attempt

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Any) -> None:
        self.steps_left -= trainer.global_rank == self.victim
        if self.steps_left == 0:
            append_record(self.folder, self.attempt, self.victim, self.kind, {"step": trainer.global_step})
            FAILURES[self.kind](trainer.strategy.root_device)
