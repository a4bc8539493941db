"""Overhead of the bubble monitor: the time of steps that it records and of steps that it does not, in the same run.

    python -m benchmarks.monitor_overhead [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--strategy NAME]

Trains an HSTU on synthetic histories of equal length, so that every step does the same work. Blocks of recorded and
unrecorded steps alternate, so that both run under the same conditions. By default the monitor records only as many
steps as keep its own estimate of its cost below 0.5% of the time; the last rows of the table show that setting. The
script starts its ranks itself, on CUDA on one GPU as a cluster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale as fs
from benchmarks.harness import rank_setup, report
from benchmarks.harness.gpu_cluster import launcher, reserved_sms
from benchmarks.harness.labels import label
from lightning_freescale.bubbles.monitor import BubbleMonitor
from lightning_freescale.bubbles.overhead import sampling_period
from lightning_freescale.models import HSTU

BLOCK = 8  # steps
PUBLISHING_STEPS = 4  # first steps of a block, in which the monitor still publishes the previous block
LAST_WARM_UP_STEP = 16  # number of the last step that does not count


class AlternatingMonitor(BubbleMonitor):
    """Records every step of every other block, and takes the times of all steps."""

    def __init__(self) -> None:
        super().__init__(every=1, image_every=0)
        self.steps: dict[bool, list[float]] = {True: [], False: []}  # seconds, by whether the step was recorded
        self.publishing: list[float] = []
        self.accounted: list[float] = []  # the monitor's own estimate of the cost of recording a step, seconds
        self._last = 0.0

    def _records(self, index: int) -> bool:
        return index // BLOCK % 2 == 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        now = time.perf_counter()
        # The last step of a block prepares the first step of the next block, so it does not count either.
        if batch_idx > LAST_WARM_UP_STEP and PUBLISHING_STEPS <= batch_idx % BLOCK < BLOCK - 1:
            self.steps[self._records(batch_idx)].append(now - self._last)
        self._last = now

    def _publish(self, trainer: Any, gathering: Any) -> dict[str, float]:
        self.accounted.append(gathering.steps[-1].counts["overhead"])
        began = time.perf_counter()
        values = super()._publish(trainer, gathering)
        self.publishing.append(time.perf_counter() - began)
        return values


def measure(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Train, and return the figures on rank 0; ``None`` on the other ranks."""
    cuda, ranks, steps = arguments.device == "cuda", arguments.ranks, arguments.steps
    torch.set_num_threads(1)
    reserved_sms.use(torch.device(arguments.device))
    pl.seed_everything(1, verbose=False)
    batch_size, length = (64, 1024) if cuda else (16, 64)
    data = fs.SeqRecDataModule(
        batch_size=batch_size,
        max_history=length,
        balance="off",
        num_negatives=32,
        synthetic={
            "users": batch_size * ranks * (steps + 4),
            "mean_length": 100.0,
            "sigma": 0.0,
            "min_length": length,
            "max_length": length,
        },
    )
    monitor = AlternatingMonitor()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=fs.FreeScaleStrategy(balance="off", prioritize=arguments.strategy == "freescale"),
            accelerator="cuda" if cuda else "cpu",
            devices=1,
            num_nodes=ranks,
            precision="bf16-mixed" if cuda else "32-true",
            callbacks=[monitor],
            logger=TensorBoardLogger(folder),
            log_every_n_steps=2 * BLOCK,
            max_steps=steps,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = HSTU(data.num_items, embedding_dim=256 if cuda else 64, num_layers=4 if cuda else 2, max_history=length)
        trainer.fit(model, datamodule=data)
    if not trainer.is_global_zero:
        return None
    plain, recorded, accounted, publishing = (
        1e3 * statistics.median(times)
        for times in (monitor.steps[False], monitor.steps[True], monitor.accounted, monitor.publishing)
    )
    every = sampling_period(accounted / plain)
    return {
        "step ms": plain,
        "recorded step ms": recorded,
        "recorded over other steps": recorded / plain,
        "recording ms, by the monitor's own account": accounted,
        "share of a recorded step": accounted / plain,
        "publishing ms per interval": publishing,
        "recorded by default, every": every,
        "overhead by default, by that account": accounted / plain / every
        + publishing / plain / 50,  # the logging interval
        "overhead by default, by step times": (recorded / plain - 1) / every + publishing / plain / 50,
    }


def main() -> int:
    parser = report.make_parser(__doc__, quick="60 steps")
    parser.add_argument("--steps", type=int, help="training steps; default 240")
    launcher.add_options(parser)
    parser.add_argument(
        "--strategy", choices=("freescale", "freescale_sync"), default="freescale_sync", help="default freescale_sync"
    )
    arguments = parser.parse_args()
    launcher.resolve_options(arguments)
    arguments.steps = arguments.steps or (60 if arguments.quick else 240)
    if "RANK" not in os.environ:
        gpu = arguments.device == "cuda"
        return launcher.launch("benchmarks.monitor_overhead", sys.argv[1:], arguments.ranks, gpu=gpu, timeout=300)
    rank_setup.silence_libraries()
    results = measure(arguments)
    if results is not None:
        machine = f"{torch.cuda.get_device_name()}, {reserved_sms.describe()}" if arguments.device == "cuda" else None
        setting = {"strategy": arguments.strategy, "ranks": arguments.ranks, "steps": arguments.steps}
        rows = [{"figure": label(name), "value": value} for name, value in results.items()]
        figures = report.head("monitor_overhead", machine) | setting | {"results": results}
        report.publish(arguments, figures, {f"Overhead of the monitor, {_listed(setting)}": rows})
    return 0


def _listed(setting: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


if __name__ == "__main__":
    sys.exit(main())
