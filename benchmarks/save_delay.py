"""The delay of a training by asynchronous saves: the time of the steps around a save, against that of other steps.

    python -m benchmarks.save_delay [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--rows N] [--dim N]

An HSTU trains with all techniques, and the lengths of two batches alternate. Now and then the training saves a checkpoint
asynchronously. The time stamps are events of the GPU, so no step waits for the host on account of the measurement. On a CPU they
are times of the host.

"delay" is what a save takes from the training: the time of the step before the save, of the step after it and of one further
step, minus the median time of batches of the same lengths without a save. The first of these steps is included because the work
of a save on the compute stream comes before its end. "call" is the time of ``Trainer.save_checkpoint`` in the training thread.
On a GPU the device has work meanwhile, so the call delays the training only if it takes longer than that work. "slower beside"
is what each later step takes more, as long as the save is being written (a median). All times are means over the ranks. The
first save of a training is not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from numpy.typing import NDArray

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale as fs
from benchmarks.harness import rank_setup, report
from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.lightning_trainer import plain_trainer
from benchmarks.harness.training.bubble import POINTS
from benchmarks.harness.training.steadiness import WARM_UP_BATCHES
from benchmarks.harness.training.step_timestamps import StepTimestamps, TimestampCallback
from benchmarks.harness.training.variants import STRATEGIES, JobBatches, TrainingJob
from benchmarks.harness.variant_names import ALL
from benchmarks.harness.workload import LongTailWorkload

FOLDER = "FREESCALE_BENCHMARK_FOLDER"
WARM_UP_STEPS = 20
WINDOW = 3  # steps: the one before the save, the one after it, and a further one
SETTLING_STEPS = 8  # before the next save; the first of them are not compared
TIMEOUT = 300.0  # longest wait of a rank for another, seconds


class SaveCalls(pl.Callback):
    """Saves every ``period`` steps, and waits for the writing to end before the next save.

    Attributes:
        steps: the steps at whose end a save was called.
        written: for each of them, the first step after the save was written.
        seconds: the times of the calls.
    """

    def __init__(self, folder: Path, period: int):
        self._folder, self._period = folder, period
        self.steps: list[int] = []
        self.written: list[int] = []
        self.seconds: list[float] = []
        self.bytes = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        number, place = divmod(batch_idx - WARM_UP_STEPS, self._period)
        if number < 0:
            return
        if place == self._period - SETTLING_STEPS:  # The wait and the removal are not part of a step that counts.
            trainer.strategy.finish_saves()
            trainer.strategy.barrier()
            if trainer.is_global_zero:
                self.bytes = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
                shutil.rmtree(self._folder)  # The disk might not hold all saves.
            trainer.strategy.barrier()
        if len(self.written) < len(self.steps) and not trainer.strategy.saves_in_background:
            self.written.append(batch_idx + 1)
        if place == 0:
            self.steps.append(batch_idx)
            begin = time.perf_counter()
            trainer.save_checkpoint(self._folder / f"{number}.ckpt", weights_only=False)
            self.seconds.append(time.perf_counter() - begin)


def delays(
    step_ms: NDArray[np.float64], saves: Sequence[int], written: Sequence[int]
) -> tuple[float, list[float], list[float]]:
    """The time of a step without a save, what each save takes from the training, and what from each step beside it, in ms.

    Args:
        step_ms: ``[steps]`` time of each step; the lengths of two batches alternate.
        saves: the steps at whose end a save was called.
        written: for each of them, the first step after the save was written.

    >>> times = np.array([5.0, 7.0] * 8)
    >>> times[[5, 7]] += 1.5, 0.5
    >>> delays(times, saves=[4], written=[9])
    (6.0, [1.5], [0.25])
    """
    busy = np.zeros(len(step_ms), bool)
    for first, end in zip(saves, written, strict=True):
        busy[first:end] = True
    quiet = [
        statistics.median(step_ms[index] for index in range(batch, len(step_ms), WARM_UP_BATCHES) if not busy[index])
        for batch in range(WARM_UP_BATCHES)
    ]
    more = [float(ms - quiet[index % WARM_UP_BATCHES]) for index, ms in enumerate(step_ms)]
    beside = [more[first + WINDOW : end] for first, end in zip(saves, written, strict=True)]
    return (
        float(statistics.mean(quiet)),
        [sum(more[first : first + WINDOW]) for first in saves],
        [statistics.median(steps) if steps else 0.0 for steps in beside],
    )


def make_job(arguments: argparse.Namespace) -> TrainingJob:
    """The training. All its steps are steps of a warm-up in which the lengths of two batches alternate."""
    cuda = arguments.device == "cuda"
    workload = LongTailWorkload(
        samples=arguments.batch_size or (128 if cuda else 8),
        longest=arguments.longest or (8192 if cuda else 64),
        rows=arguments.rows or (8_000_000 if cuda else 20_000 if arguments.quick else 200_000),
        negatives=32 if cuda else 8,
    )
    layers, heads = (4, 4) if cuda else (1, 2)
    model = {"embedding_dim": arguments.dim or (128 if cuda else 32), "num_layers": layers, "num_heads": heads}
    steps = WARM_UP_STEPS + (arguments.saves + 1) * arguments.period
    rank, device = int(os.environ["RANK"]), rank_setup.use_device(arguments.device)
    return TrainingJob(device, rank, arguments.ranks, workload, model, steps, TIMEOUT, warm_up=steps, alternating=steps)


def train(job: TrainingJob, period: int, folder: Path) -> tuple[StepTimestamps, SaveCalls]:
    """Train with saves. A collective."""
    timestamps, saves = job.timestamps(ALL), SaveCalls(folder, period)
    trainer = plain_trainer(
        fs.FreeScaleStrategy(timeout=TIMEOUT, checkpoint="sharded", **STRATEGIES[ALL]),
        job.ranks,
        job.device.type == "cuda",
        max_steps=job.steps,
        callbacks=[saves, TimestampCallback(timestamps)],
        plugins=[AsyncCheckpointIO()],
    )
    trainer.fit(job.make_model(timestamps), train_dataloaders=JobBatches(job))
    return timestamps, saves


def run_rank(arguments: argparse.Namespace) -> int:
    """Train on this rank; rank 0 publishes the figures of all of them."""
    rank_setup.silence_libraries()
    job = make_job(arguments)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT))
    timestamps, saves = train(job, arguments.period, Path(os.environ[FOLDER]) / "saves")
    end = POINTS.index("end")
    ends = timestamps.seconds()[:, end]
    mine = {
        "step_ms": 1e3 * np.diff(ends, prepend=0.0),
        "written": saves.written,
        "call_ms": [1e3 * s for s in saves.seconds],
    }
    ranks: list[Any] = [None] * job.ranks
    dist.all_gather_object(ranks, mine)
    if job.rank == 0:
        _publish(arguments, job, saves, ranks)
    rank_setup.leave_group()
    return 0


def _publish(arguments: argparse.Namespace, job: TrainingJob, saves: SaveCalls, ranks: list[dict[str, Any]]) -> None:
    step_ms = np.mean([rank["step_ms"] for rank in ranks], axis=0)
    written = [max(steps) for steps in zip(*(rank["written"] for rank in ranks), strict=True)]
    # The first save also allocates what later ones use again, and the steps before it end the warm-up.
    first = saves.steps[0] + WARM_UP_BATCHES * (arguments.period // (2 * WARM_UP_BATCHES))
    saved, ended = ([step - first for step in steps[1:]] for steps in (saves.steps, written))
    quiet, delayed, beside = delays(step_ms[first:], saved, ended)
    calls = np.mean([rank["call_ms"] for rank in ranks], axis=0)[1:].tolist()
    rows = [
        {
            "save": number + 1,
            "delay_ms": delay,
            "delay_percent_of_step": 100 * delay / quiet,
            "call_ms": call,
            "steps_beside": end - step - 1,
            "slower_beside_ms": slower,
        }
        for number, (delay, call, step, end, slower) in enumerate(
            zip(delayed, calls, saved, ended, beside, strict=True)
        )
    ]
    median = statistics.median(delayed)
    summary = {"step_ms": quiet, "delay_ms": median, "delay_percent_of_step": 100 * median / quiet}
    table = job.workload.rows, job.model["embedding_dim"]
    report.publish(
        arguments,
        report.head("save_delay", rank_setup.describe_machine(job.device))
        | {"parameters": {key: value for key, value in vars(arguments).items() if key not in ("json", "output")}}
        | {"rows_of_table": table[0], "dim": table[1], "saved_bytes": saves.bytes, **summary}
        | {"rows": rows, "all_step_ms": step_ms.tolist()},
        {f"Asynchronous saves of a table of {table[0]:,} x {table[1]}, {job.ranks} ranks": rows},
        f"A step takes {quiet:.1f} ms. The median delay is {median:.2f} ms, {100 * median / quiet:.1f}% of a step. "
        f"A save writes {saves.bytes / 2**20:,.0f} MiB.",
    )


def main() -> int:
    parser = report.make_parser(__doc__, quick="a table of 20,000 rows")
    launcher.add_options(parser)
    parser.add_argument("--rows", type=int, help="rows of the table; default 8,000,000, on cpu 200,000")
    parser.add_argument("--dim", type=int, help="width of the table and the layers; default 128, on cpu 32")
    parser.add_argument("--longest", type=int, help="longest history in events; default 8192, on cpu 64")
    parser.add_argument("--batch-size", type=int, help="samples per rank; default 128, on cpu 8")
    parser.add_argument("--saves", type=int, default=8, help="saves that count; default 8")
    parser.add_argument("--period", type=int, default=64, help="steps from a save to the next one; default 64")
    parser.add_argument("--folder", help="where the checkpoints are written; default: the system's temporary folder")
    arguments = parser.parse_args()
    launcher.resolve_options(arguments)
    if "RANK" in os.environ:
        return run_rank(arguments)
    gpu = arguments.device == "cuda"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        os.environ[FOLDER] = folder
        return launcher.launch("benchmarks.save_delay", sys.argv[1:], arguments.ranks, gpu=gpu, timeout=500)


if __name__ == "__main__":
    sys.exit(main())
