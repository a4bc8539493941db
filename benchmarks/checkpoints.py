"""Checkpoints of a large table: how long a save holds the training up, what it writes, and how long a resume takes.

    python -m benchmarks.checkpoints [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--rows N] [--dim N]

Each variant trains some steps, saves, and does this again some times. The table has the medians of all saves but the first, which
is always a full one: full or incremental, in the training thread or asynchronous. An asynchronous variant then saves once more
and trains further steps, which are timed as long as the save is being written. At the end a new Trainer resumes from a save. The
time of a resume goes from the call of ``fit`` to the first step, so it includes the set-up.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale as fs
from benchmarks.harness import rank_setup, report
from benchmarks.harness.gpu_cluster import launcher, reserved_sms
from lightning_freescale.strategy.checkpoints.changes import changed_rows

VARIANTS = {
    "full": (False, False),
    "full, asynchronous": (False, True),
    "incremental": (True, False),
    "incremental, asynchronous": (True, True),
}
HISTORY = 64  # events of a sample
SAVES = 4  # of a training
STEPS_BESIDE = 20  # steps beside the last save of an asynchronous variant


class TableModel(pl.LightningModule):
    """One table. The loss is the mean of the rows that are looked up."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        config = EmbeddingConfig(name="item_table", embedding_dim=dim, num_embeddings=rows, feature_names=["history"])
        self.embeddings = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.scale = torch.nn.Parameter(torch.ones(dim))

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> torch.Tensor:
        return (self.embeddings(batch)["history"].values() * self.scale).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Batches(torch.utils.data.IterableDataset):
    """Random ids, equal in every run."""

    def __init__(self, rows: int, samples: int, steps: int, rank: int):
        self.rows, self.samples, self.steps, self.rank = rows, samples, steps, rank

    def __iter__(self) -> Any:
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            ids = torch.randint(self.rows, (self.samples * HISTORY,), generator=generator)
            yield KeyedJaggedTensor(["history"], ids, lengths=torch.full((self.samples,), HISTORY))


class Saves(pl.Callback):
    """Saves every ``steps`` steps, and notes the times of the saves, without the first one, and of the steps."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps = folder, steps
        self.stalls: list[float] = []  # seconds, as all of these
        self.completes: list[float] = []
        self.step_seconds: list[float] = []
        self.beside: list[float] = []  # of steps while a save is being written
        self.began = 0.0
        self._last = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._synchronize(trainer)
        now = time.perf_counter()
        if trainer.strategy.saves_in_background:
            self.beside.append(now - self._last)
        elif batch_idx > 1:
            self.step_seconds.append(now - self._last)
        number, left = divmod(trainer.global_step, self.steps)
        if left == 0 and number == SAVES + 1:
            trainer.save_checkpoint(self.folder / f"{number}.ckpt")
        elif left == 0 and number <= SAVES:
            trainer.strategy.barrier()
            begin = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{number}.ckpt")
            self._synchronize(trainer)
            stall = time.perf_counter() - begin
            trainer.strategy.finish_saves()
            if number > 1:
                self.stalls.append(stall)
                self.completes.append(time.perf_counter() - begin)
        self._last = time.perf_counter()

    @staticmethod
    def _synchronize(trainer: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()


def fit(arguments: argparse.Namespace, folder: Path, variant: str, resume: Path | None = None) -> Saves:
    incremental, asynchronous = VARIANTS[variant]
    further = 1 if resume else arguments.steps + STEPS_BESIDE if asynchronous else 0
    saves = Saves(folder, arguments.steps)
    trainer = pl.Trainer(
        strategy=fs.FreeScaleStrategy(checkpoint=fs.Incremental() if incremental else "sharded", balance="off"),
        accelerator=arguments.device,
        devices=1,
        num_nodes=arguments.ranks,
        callbacks=[saves],
        plugins=[AsyncCheckpointIO()] if asynchronous else [],
        max_steps=SAVES * arguments.steps + further,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(1, verbose=False)
    steps = SAVES * arguments.steps + further + 4
    data = Batches(arguments.rows, arguments.samples, steps, int(os.environ["RANK"]))
    begin = time.perf_counter()
    model = TableModel(arguments.rows, arguments.dim)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=resume)
    saves.began -= begin
    return saves


def written_bytes(path: Path, since: Path) -> int:
    """The bytes of the checkpoint ``path`` that are not linked from ``since``."""
    known = {file.stat().st_ino for file in since.iterdir()}
    return sum(file.stat().st_size for file in path.iterdir() if file.stat().st_ino not in known)


def measure(arguments: argparse.Namespace, root: Path) -> tuple[list[dict[str, Any]], float]:
    """A row for each variant, and the median time of a step in ms."""
    rows, steps = [], []
    for number, variant in enumerate(arguments.variants):
        folder = root / str(number)
        saves = fit(arguments, folder, variant)
        steps += saves.step_seconds
        last = folder / f"{SAVES}.ckpt"
        resumed = fit(arguments, folder / "resumed", variant, last)
        rows.append(
            {
                "save": variant,
                "stall_ms": 1e3 * statistics.median(saves.stalls),
                "complete_ms": 1e3 * statistics.median(saves.completes),
                "step_beside_ms": 1e3 * statistics.median(saves.beside) if saves.beside else None,
                "written_mib": written_bytes(last, folder / "1.ckpt") / 2**20,
                "load_ms": 1e3 * resumed.began,
            }
        )
        torch.distributed.barrier()
        if int(os.environ["RANK"]) == 0:
            shutil.rmtree(folder)
    step_ms = 1e3 * statistics.median(steps)
    return [row | {"stall_percent_of_step": 100 * row["stall_ms"] / step_ms} for row in rows], step_ms


def cost_of_finding(arguments: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """How long it takes to find the changed rows of a shard, in ms: by a comparison in host memory, which a save does, and by a
    mark for every id in every step, which it does not do."""
    rows = arguments.rows // arguments.ranks
    before = torch.zeros(rows, arguments.dim)
    now, marks = before.clone(), torch.zeros(rows, dtype=torch.bool, device=device)
    ids = torch.randint(rows, (arguments.samples * HISTORY,), device=device)
    now[ids.cpu()] = 1.0

    def median_ms(action: Callable[[], Any], times: int) -> float:
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(seconds)

    compare = median_ms(lambda: changed_rows(before, now), 3)
    return {"compare_ms": compare, "mark_ms": median_ms(lambda: marks.index_fill_(0, ids, True), 20)}


def changed_percent(arguments: argparse.Namespace) -> float:
    """The share of the rows that differ between the first save and the last one."""
    seen = torch.zeros(arguments.rows, dtype=torch.bool)
    for rank in range(arguments.ranks):
        for step, batch in enumerate(Batches(arguments.rows, arguments.samples, SAVES * arguments.steps, rank)):
            if step >= arguments.steps:
                seen[batch.values()] = True
    return 100 * float(seen.float().mean())


def main() -> int:
    parser = report.make_parser(__doc__, quick="a table of 20,000 rows")
    launcher.add_options(parser)
    parser.add_argument("--rows", type=int, help="rows of the table; default 1,000,000")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=5, help="steps between two saves")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="default: all")
    parser.add_argument("--folder", help="where the checkpoints are written; default: the system's temporary folder")
    arguments = parser.parse_args()
    launcher.resolve_options(arguments)
    arguments.rows = arguments.rows or (20_000 if arguments.quick else 1_000_000)
    if "RANK" not in os.environ:
        gpu = arguments.device == "cuda"
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            os.environ["FREESCALE_BENCHMARK_FOLDER"] = folder
            return launcher.launch(
                "benchmarks.checkpoints", sys.argv[1:], arguments.ranks, gpu=gpu, timeout=500, reserve_sms=gpu
            )
    rank_setup.silence_libraries()
    device = rank_setup.use_device(arguments.device)
    rows, step_ms = measure(arguments, Path(os.environ["FREESCALE_BENCHMARK_FOLDER"]))
    finding = cost_of_finding(arguments, device)
    if int(os.environ["RANK"]) == 0:
        machine = f"{torch.cuda.get_device_name()}, {reserved_sms.describe()}" if device.type == "cuda" else None
        names = ("rows", "dim", "ranks", "samples", "steps")
        parameters = {name: getattr(arguments, name) for name in names} | {
            "changed_percent": changed_percent(arguments)
        }
        report.publish(
            arguments,
            report.head("checkpoints", machine)
            | {"parameters": parameters, "step_ms": step_ms, "finding": finding, "rows": rows},
            {f"Saves of a table of {arguments.rows:,} x {arguments.dim}, {arguments.ranks} ranks": rows},
            f"A step takes {step_ms:.1f} ms. {parameters['changed_percent']:.1f}% of the rows have changed since the full save. "
            f"To compare a shard takes {finding['compare_ms']:.0f} ms, to mark the ids of a step {finding['mark_ms']:.3f} ms.",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
