"""Where the monitor writes: the run folder that ``freescale report`` reads, and pictures of the timeline in TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_freescale.bubbles import picture
from lightning_freescale.bubbles.records import RecordWriter, rank_file, to_record
from lightning_freescale.bubbles.spans import Step
from lightning_freescale.runtime.log import log_once

ALL_STEPS_KEPT = 1000  # recorded steps. After that, the run folder gets the slowest and a typical step of each interval


class RunFolder:
    """The records of this rank in ``<log_dir>/freescale``. A run with ``fast_dev_run`` writes nothing.

    If the logger has no folder, the records lie beside the checkpoints, under the Trainer's ``default_root_dir``.

    Args:
        trainer: that trains. All ranks must call this together, because ``trainer.log_dir`` is a collective.
        offset: seconds to add to this rank's clock to get rank 0's time.
    """

    def __init__(self, trainer: Any, offset: float):
        self._offset, self._written = offset, 0
        self._writer: RecordWriter | None = None
        if not trainer.fast_dev_run:
            path = rank_file(_run_directory(trainer), trainer.global_rank)
            self._writer = RecordWriter(path, run_header(trainer))

    def write_interval(self, steps: Sequence[Step], wall: NDArray[np.float64]) -> None:
        """Write the steps of an interval: all of them at first, later two of them, the same two on every rank.

        Args:
            steps: of this rank.
            wall: ``[ranks, steps]`` seconds.
        """
        chosen = steps
        if self._written >= ALL_STEPS_KEPT:
            order = np.argsort(wall.max(axis=0), kind="stable")
            chosen = [steps[index] for index in sorted({order[-1], order[(len(order) - 1) // 2]})]
        for step in chosen:
            self.write(step)
        if self._writer is not None:
            self._writer.flush()

    def write(self, step: Step) -> None:
        if self._writer is not None:
            self._writer.write(to_record(step, self._offset))
            self._written += 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _run_directory(trainer: Any) -> Path:
    """The folder of this run, the same on all ranks. A collective."""
    directory = trainer.log_dir
    if directory is None:
        logger = trainer.loggers[0] if trainer.loggers else None
        version = getattr(logger, "version", None)
        names = [getattr(logger, "name", None), f"version_{version}" if isinstance(version, int) else version]
        directory = str(Path(trainer.default_root_dir, *(str(name) for name in names if name is not None)))
        directory = trainer.strategy.broadcast(directory)  # Some loggers have a name on rank 0 only.
        log_once(f"the logger has no folder, so the records for `freescale report` are in {directory}")
    return Path(directory)


def run_header(trainer: Any) -> dict[str, Any]:
    """The first line of a rank's file: rank, number of ranks, strategy with its settings, and device."""
    strategy = trainer.strategy
    settings = {name: getattr(strategy, f"_{name}", None) for name in ("balance", "prioritize", "transport")}
    plain = {
        name: value if isinstance(value, bool) else str(value) for name, value in settings.items() if value is not None
    }
    device = strategy.root_device
    return {
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "strategy": type(strategy).__name__,
        "settings": plain,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def open_image_loggers(trainer: Any) -> list[Any]:
    """The loggers of rank 0 that accept images; an empty list on other ranks.

    Opens their files, which is slow, so that this does not happen within a step.
    """
    if trainer.global_rank:
        return []
    loggers = [logger for logger in trainer.loggers if hasattr(getattr(logger, "experiment", None), "add_image")]
    if loggers and not picture.available():
        log_once("TensorBoard gets no pictures of the timeline, because Pillow is not installed (pip install pillow).")
        return []
    return loggers


def log_picture(loggers: Sequence[Any], steps: Sequence[Step], index: int, global_step: int) -> None:
    """Draw a step and send the picture to ``loggers``.

    Args:
        loggers: of :func:`open_image_loggers`.
        steps: the same step of every rank, on a common clock.
        index: of the step.
        global_step: under which the picture is logged.
    """
    if not loggers:
        return
    image = picture.draw(steps, title=f"step {index}")
    for logger in loggers:
        logger.experiment.add_image("bubble/timeline", image, global_step, dataformats="HWC")
