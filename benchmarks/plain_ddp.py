"""A model without tables: a step with the strategy ``freescale`` against a step with ``ddp``.

    python -m benchmarks.plain_ddp [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--rounds N]

The model is small, so that a step is mostly Lightning's and the strategy's own work. In each round both strategies train it
one after the other, with and without a logger. The table has the median time of a step on rank 0, its CPU time, and the ratios
of the rounds. CPU time depends less on what else the machine does.
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
from lightning.pytorch.loggers import CSVLogger

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale as fs
from benchmarks.harness import rank_setup, report
from benchmarks.harness.gpu_cluster import launcher, reserved_sms

WARM_UP_STEPS = 20
WIDTH = 64


class DenseModel(pl.LightningModule):
    """Two linear layers. It logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class StepTimes(pl.Callback):
    """The wall time and the CPU time of every step after the warm-up, in seconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._last = (0.0, 0.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter(), time.process_time()
        if batch_idx >= WARM_UP_STEPS:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = now


def train(arguments: argparse.Namespace, strategy: str, logger: bool) -> StepTimes:
    cuda = arguments.device == "cuda"
    pl.seed_everything(1, verbose=False)
    times = StepTimes()
    samples = torch.randn(16 * (arguments.steps + WARM_UP_STEPS) * arguments.ranks, WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=fs.FreeScaleStrategy() if strategy == "freescale" else strategy,
            accelerator="cuda" if cuda else "cpu",
            devices=1,
            num_nodes=arguments.ranks,
            callbacks=[times],
            logger=CSVLogger(folder) if logger else False,
            max_steps=arguments.steps + WARM_UP_STEPS,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(DenseModel(), torch.utils.data.DataLoader(samples, batch_size=16))  # type: ignore[arg-type]
    return times


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row with and one without a logger."""
    rows = []
    for logger in (False, True):
        wall: dict[str, list[float]] = {"ddp": [], "freescale": []}
        cpu: dict[str, list[float]] = {"ddp": [], "freescale": []}
        for round_number in range(arguments.rounds):
            order = ("ddp", "freescale") if round_number % 2 == 0 else ("freescale", "ddp")
            for strategy in order:
                times = train(arguments, strategy, logger)
                wall[strategy].append(1e3 * statistics.median(times.wall))
                cpu[strategy].append(1e3 * statistics.mean(times.cpu))
        row: dict[str, Any] = {"logger": "CSVLogger" if logger else "none"}
        for name, found in (("step", wall), ("CPU time", cpu)):
            ratios = [ours / theirs for ours, theirs in zip(found["freescale"], found["ddp"], strict=True)]
            row |= {
                f"{name} ms, ddp": statistics.median(found["ddp"]),
                f"{name} ms, freescale": statistics.median(found["freescale"]),
                f"{name} ratio": statistics.median(ratios),
                f"{name} ratio, rounds": ratios,
            }
        rows.append(row)
    return rows


def main() -> int:
    parser = report.make_parser(__doc__, quick="20 steps, one round")
    launcher.add_options(parser)
    parser.add_argument("--steps", type=int, help="counted steps of a training; default 300")
    parser.add_argument("--rounds", type=int, help="default 5")
    arguments = parser.parse_args()
    launcher.resolve_options(arguments)
    arguments.steps = arguments.steps or (20 if arguments.quick else 300)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    if "RANK" not in os.environ:
        gpu = arguments.device == "cuda"
        return launcher.launch("benchmarks.plain_ddp", sys.argv[1:], arguments.ranks, gpu=gpu, timeout=300)
    rank_setup.silence_libraries()
    device = rank_setup.use_device(arguments.device)
    rows = measure(arguments)
    if int(os.environ["RANK"]) == 0:
        machine = f"{torch.cuda.get_device_name()}, {reserved_sms.describe()}" if device.type == "cuda" else None
        setting = {"ranks": arguments.ranks, "steps": arguments.steps, "rounds": arguments.rounds}
        shown = [{name: value for name, value in row.items() if not name.endswith("rounds")} for row in rows]
        report.publish(
            arguments,
            report.head("plain_ddp", machine) | setting | {"rows": rows},
            {f"A step without tables, {arguments.ranks} ranks": shown},
            "The ratios are medians of the rounds. Each round compares freescale with ddp.",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
