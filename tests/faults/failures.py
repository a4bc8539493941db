"""Failures of a rank that is not killed: it hangs, or its memory is used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

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


FAILURES: dict[str, Callable[[torch.device], None]] = {"hang": hang, "memory": use_up_memory}


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
