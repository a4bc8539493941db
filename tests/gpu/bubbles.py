"""Trains HSTU with synchronous exchange, and measures it with the monitor and with torch's profiler at the same time.

``test_cluster.py`` starts each rank. Rank 0 prints a line for each rank, for diagnosis, and one JSON line: the bubble of the
profiled steps as the monitor measures it, and as it follows from the trace (``tests/bubbles/profiled.py`` compares the two).

The model is large, so that its kernels take longer than their launches. Rows travel over NCCL, which is slow in the virtual
cluster, so that there is a bubble to measure. Every rank has SMs of its own. Otherwise a kernel of the model may wait until a
NCCL kernel of another rank frees SMs. The trace shows this as idle time, and the monitor counts it as slow compute.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch.profiler import ProfilerActivity, profile

import lightning_freescale as fs
from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import reserved_sms
from benchmarks.harness.lightning_trainer import plain_trainer
from lightning_freescale.bubbles.analysis import analyse
from lightning_freescale.bubbles.records import read_run
from lightning_freescale.bubbles.spans import Step
from lightning_freescale.models import HSTU
from tests.bubbles.profiled import Difference, Profiled, by_hand, compare, mark_step, total, useful

NODES = int(os.environ.get("WORLD_SIZE", "1"))  # Lightning removes the variable after a run


class Profiling(pl.Callback):
    """Profiles steps ``first`` to ``last``. The strategy adds the monitor after this callback, so both end a step together."""

    def __init__(self, first: int, last: int, trace: Path):
        self.first, self.last, self.trace = first, last, trace
        self._profile: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first - 1:  # start one step early, so that the start is complete at the first marker
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        elif batch_idx == self.last + 1:
            torch.cuda.synchronize()
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.trace))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.first - 1 <= batch_idx <= self.last:
            mark_step()


def train(options: argparse.Namespace, folder: Path, profiling: Profiling) -> Path:
    """Train, and return the folder of the monitor's records."""
    pl.seed_everything(3, verbose=False)
    steps = profiling.last + 3
    data = fs.SeqRecDataModule(
        "synthetic",
        batch_size=options.batch_size,
        max_history=options.max_history,
        balance="off",
        num_negatives=32,
        cache_dir=folder / "cache",
        synthetic={
            "users": options.batch_size * NODES * (steps + 4),
            "items": 50_000,
            "mean_length": options.mean_length,
            "max_length": options.max_history,
        },
    )
    model = HSTU(
        num_items=data.num_items, max_history=options.max_history, embedding_dim=256, num_layers=4, num_heads=4
    )
    trainer = plain_trainer(
        fs.FreeScaleStrategy(balance="off", prioritize=False, monitor=True),
        NODES,
        cuda=True,
        max_steps=steps,
        logger=CSVLogger(folder, name="", version="run"),
        log_every_n_steps=2 * steps,  # one interval: every step is recorded, and nothing is gathered before the end
        callbacks=[profiling],
    )
    trainer.fit(model, datamodule=data)
    return folder / "run"


def figures(rank: int, steps: list[Profiled], recorded: list[Step], bubble: list[float]) -> dict[str, Any]:
    """The figures of one rank: shares of the time of the profiled steps, and ms.

    Args:
        steps: the steps in the trace.
        recorded: the same steps as the monitor records them.
        bubble: their bubbles in seconds, as the monitor measures them.
    """
    wall = sum(step.wall for step in recorded)
    by_monitor = [compare(one, useful(step)) for one, step in zip(steps, recorded, strict=True)]
    all_useful = [compare(one, [(0.0, step.wall)]) for one, step in zip(steps, recorded, strict=True)]
    return {
        "rank": rank,
        "steps": len(steps),
        "monitor": sum(bubble) / wall,
        "by_hand": sum(step.bubble for step in steps) / sum(step.wall for step in steps),
        "wall_ms": 1e3 * wall / len(recorded),
        "wall_ms_by_hand": 1e3 * sum(step.wall for step in steps) / len(steps),
        **{name: sum(getattr(one, name) for one in by_monitor) / wall for name in Difference._fields},
        "model": sum(total(step.busy) for step in steps) / wall,
        "exchange_if_all_is_compute": sum(one.exchange_in_compute for one in all_useful) / wall,
        **{name: sum(getattr(step, name) for step in steps) / wall for name in ("elsewhere", "copying")},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-history", type=int, default=8192)
    parser.add_argument("--mean-length", type=float, default=2000.0)
    parser.add_argument("--first", type=int, default=8, help="first profiled step")
    parser.add_argument("--last", type=int, default=17, help="last profiled step")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures to this JSON file")
    options = parser.parse_args()
    reserved_sms.use(torch.device("cuda"))
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(os.environ.get("FOLDER") or tempfile.gettempdir())
    profiling = Profiling(options.first, options.last, folder / f"profile_{rank}.json")
    records = train(options, folder, profiling)
    dist.barrier()  # all ranks have closed their records
    run = read_run(records)
    indices = range(options.first, options.last + 1)
    bubble = analyse(run).bubbles.bubble[rank, [run.indices.index(index) for index in indices]]
    steps = by_hand(json.loads(profiling.trace.read_text())["traceEvents"])
    mine = figures(rank, steps, [run.step(index)[rank] for index in indices], bubble.tolist())
    everybody: list[Any] = [None] * NODES
    dist.all_gather_object(everybody, mine)
    if rank == 0:
        for one in everybody:
            print({name: round(value, 4) for name, value in one.items()}, flush=True)
        print("RESULT " + json.dumps(everybody), flush=True)
        if options.output:
            machine = f"{torch.cuda.get_device_name()} as {NODES} ranks: {reserved_sms.describe()}"
            head = report.head("profiler", machine, f"-m benchmarks.cluster {NODES} -- tests/gpu/bubbles.py")
            options.output.write_text(json.dumps(head | {"rows": everybody}, indent=1) + "\n")


if __name__ == "__main__":
    main()
