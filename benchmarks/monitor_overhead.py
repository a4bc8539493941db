"""What watching costs: the time of steps that the monitor records against steps that it does not, in the same run.

    python -m benchmarks.monitor_overhead [--quick] [--json] [--output FILE] [--steps 240] [--ranks 2]

An HSTU on synthetic histories, synchronous exchange. Blocks of recorded and unrecorded steps alternate, so that both see the
same machine. By default the monitor records as few steps as it takes to stay below 0.5%; the last row is for that.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale as fs
from benchmarks import report
from lightning_freescale.bubbles.monitor import OVERHEAD, BubbleMonitor
from lightning_freescale.models import HSTU

BLOCK = 6  # steps
WARM_UP = 12


class Alternating(BubbleMonitor):
    """Records every step of every other block, and takes the time of all steps."""

    def __init__(self) -> None:
        super().__init__(every=1, image_every=0)
        self.steps: dict[bool, list[float]] = {True: [], False: []}  # seconds
        self.publishing: list[float] = []
        self.accounted: list[float] = []  # what the monitor itself believes recording a step takes, seconds
        self._last = 0.0

    def _records(self, index: int) -> bool:
        return index // BLOCK % 2 == 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        now = time.perf_counter()
        # The first and last steps of a block pay for the other kind too: opening, gathering, publishing.
        if batch_idx > WARM_UP and 0 < batch_idx % BLOCK < BLOCK - 1:
            self.steps[self._records(batch_idx)].append(now - self._last)
        self._last = now

    def _publish(self, trainer: Any, gathering: Any) -> dict[str, float]:
        self.accounted.append(gathering.steps[-1].counts["overhead"])
        began = time.perf_counter()
        values = super()._publish(trainer, gathering)
        self.publishing.append(time.perf_counter() - began)
        return values


def measure(ranks: int, steps: int) -> dict[str, float | int | str] | None:
    """Figures of rank 0; ``None`` on the other ranks."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    data = fs.SeqRecDataModule(
        batch_size=64 if cuda else 16,
        max_history=1024 if cuda else 256,
        balance="off",
        num_negatives=32,
        # Histories of one length: every step is the same work.
        synthetic={
            "users": (64 if cuda else 16) * ranks * (steps + 1),
            "mean_length": 100.0,
            "sigma": 0.0,
            "min_length": 1024 if cuda else 64,
            "max_length": 1024 if cuda else 64,
        },
    )
    monitor = Alternating()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=fs.FreeScaleStrategy(balance="off", prioritize=False),
            accelerator="cuda" if cuda else "cpu",
            devices=ranks,
            callbacks=[monitor],
            logger=TensorBoardLogger(folder),
            log_every_n_steps=2 * BLOCK,
            max_steps=steps,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            HSTU(data.num_items, embedding_dim=256 if cuda else 64, num_layers=4 if cuda else 2), datamodule=data
        )
    if not trainer.is_global_zero:
        return None
    plain, recorded, accounted, publishing = (
        1e3 * statistics.median(times)
        for times in (monitor.steps[False], monitor.steps[True], monitor.accounted, monitor.publishing)
    )
    every = max(1, math.ceil(accounted / plain / OVERHEAD))
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": ranks,
        "steps": steps,
        "step ms": plain,
        "recorded step ms": recorded,
        "recording ms, by the monitor's own account": accounted,
        "share of a recorded step": accounted / plain,
        "publishing ms per interval": publishing,
        "recorded by default, every": every,
        "overhead by default": accounted / plain / every + publishing / plain / 50,  # Lightning logs every 50 steps
    }


def main() -> None:
    parser = report.make_parser(__doc__, quick="60 steps")
    parser.add_argument("--steps", type=int, help="default: 240")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    results = measure(arguments.ranks, arguments.steps or (60 if arguments.quick else 240))
    if results is None:
        return
    rows = [{"figure": name, "value": value} for name, value in results.items()]
    machine = None if results["device"] == "cpu" else str(results["device"])
    report.publish(arguments, report.head("monitor_overhead", machine) | results, {"What watching costs": rows})


if __name__ == "__main__":
    main()
