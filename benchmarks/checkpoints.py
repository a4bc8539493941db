"""Checkpoints of a large table: how long a save holds the training up, what it writes, and how long a resume takes.

    python -m benchmarks.checkpoints [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--rows N] [--dim N]

Each variant trains some steps, saves, and does this again some times. The table has the medians of all saves but the first, which
is always a full one: full or incremental, in the training thread or asynchronous. An asynchronous variant then saves once more
and trains further steps, which are timed as long as the save is being written. At the end a new Trainer resumes from a save. The
time of a resume goes from the call of ``fit`` to the first step, so it includes the set-up.

The stall is the time of a save with a wait for the device after it. A training does not wait for the device:
``benchmarks.save_delay`` measures what it loses by an asynchronous save. Rank 0 writes its progress to stderr.

A second table says where the training thread spends the time of the shortest save from the third one on. The times include
what the timing itself takes, a few microseconds for each call. ``--saves`` sets the number of saves.

The last variant makes copies in host memory. A folder in ``/dev/shm`` for each rank stands for the memory of a host. The resume
from copies is timed once more without the folder of the last rank.
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
from benchmarks.harness.save_parts import DEVICE, SaveParts
from lightning_freescale.embedding.mode_trial import FIRST_TRIAL_STEPS
from lightning_freescale.runtime import last_resort
from lightning_freescale.strategy.checkpoints.changes import changed_rows

COPIES = "copy in host memory"
VARIANTS = {
    "full": (False, False),
    "full, asynchronous": (False, True),
    "incremental": (True, False),
    "incremental, asynchronous": (True, True),
    COPIES: (False, True),
}
MEMORY = "FREESCALE_BENCHMARK_MEMORY"  # the folder in host memory
HISTORY = 64  # events of a sample
STEPS_BESIDE = 20  # steps beside the last save of an asynchronous variant
END_SECONDS = 60.0  # How long the end of a rank may take. It prints where its threads are if it takes longer.
BEGIN = time.perf_counter()


class TableModel(pl.LightningModule):
    """One table, and some dense layers of four weights each. The loss is the mean of what they make of the rows."""

    def __init__(self, rows: int, dim: int, layers: int):
        super().__init__()
        config = EmbeddingConfig(name="item_table", embedding_dim=dim, num_embeddings=rows, feature_names=["history"])
        self.embeddings = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.scale = torch.nn.Parameter(torch.ones(dim))
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.LayerNorm(dim)) for _ in range(layers))
        )

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> torch.Tensor:
        return self.layers(self.embeddings(batch)["history"].values() * self.scale).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.001)


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
    """Saves every ``steps`` steps after the warm-up. Notes the times of the saves, without the first one, and of the steps."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, memory: Path | None):
        self.folder, self.memory = folder, memory
        self.warm_up, self.steps, self.saves = arguments.warm_up, arguments.steps, arguments.saves
        self.parts = SaveParts()
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
        number, left = divmod(trainer.global_step - self.warm_up, self.steps)
        if left == 0 and number == self.saves + 1:
            self._save(trainer, number)
        elif left == 0 and 0 < number <= self.saves:
            trainer.strategy.barrier()
            with self.parts.of_a_save() as parts:
                begin = time.perf_counter()
                self._save(trainer, number)
                called = time.perf_counter()
                self._synchronize(trainer)
                stall = time.perf_counter() - begin
                parts[DEVICE] = begin + stall - called
            trainer.strategy.finish_saves()
            if number > 1:
                self.stalls.append(stall)
                self.completes.append(time.perf_counter() - begin)
        self._last = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.memory is not None:  # The strategy is about to remove the copies.
            trainer.strategy.finish_saves()
            self.memory.rename(kept(self.memory))

    def _save(self, trainer: Any, number: int) -> None:
        if self.memory is None:
            trainer.save_checkpoint(self.folder / f"{number}.ckpt", weights_only=False)
        else:
            trainer.strategy.keep_copy(trainer)

    @staticmethod
    def _synchronize(trainer: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()


def memory_of(rank: int) -> Path:
    """The folder that stands for the memory of the host of a rank."""
    return Path(os.environ[MEMORY]) / f"host_{rank}"


def kept(memory: Path) -> Path:
    return memory.with_name(f"{memory.name}_kept")


def fit(arguments: argparse.Namespace, folder: Path, variant: str, resume: Path | None = None) -> Saves:
    incremental, asynchronous = VARIANTS[variant]
    last_save = arguments.steps if asynchronous else 0  # steps before it
    further = 1 if resume else last_save + STEPS_BESIDE if asynchronous else 0
    memory, copies = None, None
    if variant == COPIES:
        memory = memory_of(int(os.environ["RANK"]))
        if resume:  # The last copy is newer than the save from which the other variants resume.
            memory, further = kept(memory), last_save + 1
        memory.mkdir(exist_ok=True)
        copies = fs.HostCopies(every_n_steps=1 << 30, folder=str(memory), run="benchmark")  # The callback makes them.
    saves = Saves(folder, arguments, memory)
    steps = arguments.warm_up + arguments.saves * arguments.steps
    trainer = pl.Trainer(
        strategy=fs.FreeScaleStrategy(
            checkpoint=fs.Incremental() if incremental else "sharded", host_copies=copies, balance="off"
        ),
        accelerator=arguments.device,
        devices=1,
        num_nodes=arguments.ranks,
        callbacks=[saves],
        plugins=[AsyncCheckpointIO()] if asynchronous and copies is None else [],
        max_steps=steps + further,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(1, verbose=False)
    data = Batches(arguments.rows, arguments.samples, steps + further + 4, int(os.environ["RANK"]))
    begin = time.perf_counter()
    model = TableModel(arguments.rows, arguments.dim, arguments.layers)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=None if copies else resume)
    saves.began -= begin
    return saves


def written_bytes(path: Path, since: Path) -> int:
    """The bytes of the checkpoint ``path`` that are not linked from ``since``."""
    known = {file.stat().st_ino for file in since.iterdir()}
    return sum(file.stat().st_size for file in path.iterdir() if file.stat().st_ino not in known)


def copy_bytes(ranks: int) -> int:
    """The bytes of the newest copy on all hosts together."""
    found = [path for rank in range(ranks) for path in kept(memory_of(rank)).glob("*/step=*")]
    newest = max(int(path.name.partition("=")[2]) for path in found)
    return sum(file.stat().st_size for path in found if path.name == f"step={newest}" for file in path.iterdir())


def measure(arguments: argparse.Namespace, root: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """A row for each variant, one with the parts of its stall, and the median time of a step in ms."""
    rows, parts, steps = [], [], []
    for number, variant in enumerate(arguments.variants):
        folder = root / str(number)
        progress(f"{variant}: training with saves")
        saves = fit(arguments, folder, variant)
        steps += saves.step_seconds
        parts.append({"save": variant} | {f"{name} ms": ms for name, ms in saves.parts.of_the_shortest().items()})
        last = folder / f"{arguments.saves}.ckpt"
        progress(f"{variant}: resume")
        torch.distributed.barrier()
        written = copy_bytes(arguments.ranks) if variant == COPIES else written_bytes(last, folder / "1.ckpt")
        resumed = fit(arguments, folder / "resumed", variant, last)
        lost_ms = resume_without_a_host(arguments, folder) if variant == COPIES else None
        rows.append(
            {
                "save": variant,
                "stall_ms": 1e3 * statistics.median(saves.stalls),
                "shortest_stall_ms": 1e3 * min(saves.stalls),
                "complete_ms": 1e3 * statistics.median(saves.completes),
                "step_beside_ms": 1e3 * statistics.median(saves.beside) if saves.beside else None,
                "written_mib": written / 2**20,
                "load_ms": 1e3 * resumed.began,
                "load_without_a_host_ms": lost_ms,
            }
        )
        progress(f"{variant}: the files are removed")
        torch.distributed.barrier()
        if int(os.environ["RANK"]) == 0:
            shutil.rmtree(folder, ignore_errors=variant == COPIES)  # Copies lie elsewhere.
    step_ms = 1e3 * statistics.median(steps)
    return [row | {"stall_percent_of_step": 100 * row["stall_ms"] / step_ms} for row in rows], parts, step_ms


def progress(text: str) -> None:
    if int(os.environ["RANK"]) == 0:
        print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", file=sys.stderr, flush=True)


def resume_without_a_host(arguments: argparse.Namespace, folder: Path) -> float:
    """How long a resume from copies takes after the loss of the last rank's host, in ms. A resume has taken place before."""
    rank = int(os.environ["RANK"])
    own = kept(memory_of(rank))
    if rank == arguments.ranks - 1:
        shutil.rmtree(kept(own))
    else:
        kept(own).rename(own)
    torch.distributed.barrier()
    milliseconds = 1e3 * fit(arguments, folder / "resumed", COPIES, folder).began
    shutil.rmtree(kept(own))
    return milliseconds


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
        first, last = (arguments.warm_up + number * arguments.steps for number in (1, arguments.saves))
        for step, batch in enumerate(Batches(arguments.rows, arguments.samples, last, rank)):
            if step >= first:
                seen[batch.values()] = True
    return 100 * float(seen.float().mean())


def _transposed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each column but the first, whose values become the columns."""
    first, *others = rows[0]
    return [{"part": name} | {str(row[first]): row[name] for row in rows} for name in others]


def main() -> int:
    parser = report.make_parser(__doc__, quick="a table of 20,000 rows")
    launcher.add_options(parser)
    parser.add_argument("--rows", type=int, help="rows of the table; default 1,000,000")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0, help="dense layers")
    parser.add_argument("--samples", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=5, help="steps between two saves")
    parser.add_argument("--saves", type=int, default=4, help="saves of a training")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="default: all")
    parser.add_argument("--folder", help="where the checkpoints are written; default: the system's temporary folder")
    parser.add_argument("--memory", default="/dev/shm", help="where copies in host memory are written")
    arguments = parser.parse_args()
    launcher.resolve_options(arguments)
    arguments.rows = arguments.rows or (20_000 if arguments.quick else 1_000_000)
    arguments.warm_up = (
        0 if arguments.quick else FIRST_TRIAL_STEPS
    )  # The choice of the exchange is made in these steps.
    if "RANK" not in os.environ:
        gpu = arguments.device == "cuda"
        with (
            tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
            tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
        ):
            os.environ |= {"FREESCALE_BENCHMARK_FOLDER": folder, MEMORY: memory}
            return launcher.launch("benchmarks.checkpoints", sys.argv[1:], arguments.ranks, gpu=gpu, timeout=500)
    rank_setup.silence_libraries()
    device = rank_setup.use_device(arguments.device)
    rows, parts, step_ms = measure(arguments, Path(os.environ["FREESCALE_BENCHMARK_FOLDER"]))
    progress("the changed rows of a shard are found")
    finding = cost_of_finding(arguments, device)
    if int(os.environ["RANK"]) == 0:
        machine = f"{torch.cuda.get_device_name()}, {reserved_sms.describe()}" if device.type == "cuda" else None
        names = ("rows", "dim", "layers", "ranks", "samples", "steps", "saves", "warm_up")
        parameters = {name: getattr(arguments, name) for name in names} | {
            "changed_percent": changed_percent(arguments)
        }
        report.publish(
            arguments,
            report.head("checkpoints", machine)
            | {"parameters": parameters, "step_ms": step_ms, "finding": finding, "rows": rows, "parts": parts},
            {
                f"Saves of a table of {arguments.rows:,} x {arguments.dim}, {arguments.ranks} ranks": rows,
                "The shortest save of the training thread of rank 0, by part": _transposed(parts),
            },
            f"A step takes {step_ms:.1f} ms. {parameters['changed_percent']:.1f}% of the rows have changed since the full save. "
            f"To compare a shard takes {finding['compare_ms']:.0f} ms, to mark the ids of a step {finding['mark_ms']:.3f} ms.",
        )
    # Otherwise the ranks that end first close connections that rank 0 still uses, and its end may wait for them.
    progress("the ranks leave their process group")
    rank_setup.leave_group()
    progress("the process ends")
    last_resort.limit_the_end(END_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
