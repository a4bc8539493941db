"""A Lightning Trainer for benchmarks: every rank is a node with one device, and the Trainer only trains."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


def plain_trainer(strategy: Any, ranks: int, cuda: bool, **options: Any) -> pl.Trainer:
    """A Trainer without logger, checkpoints, progress bar and validation; bfloat16 on CUDA.

    Args:
        options: options of the Trainer; they replace these defaults.
    """
    defaults = {
        "accelerator": "gpu" if cuda else "cpu",
        "devices": 1,
        "num_nodes": ranks,
        "precision": "bf16-mixed" if cuda else "32-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **(defaults | options))
