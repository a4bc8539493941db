"""How fast HSTU learns: HR@10 and NDCG@10 by epoch for settings of the recipe, and for a SASRec of the same size.

    python -m benchmarks.learning [FILE ...] [--quick] [--json] [--output FILE] [--device cpu|cuda] [--seeds 0 1 2] [--jobs 1]

One rank trains every variant from every seed: by default 8 layers of width 64 with 2 heads, histories of at most 200 events, 128
negatives per position, 128 samples per step, 50 epochs. The tables are trained by Adam on CUDA and by rowwise Adagrad on a CPU.
The last event of every user is ranked among all items, and training uses the events before it, as many published
implementations do. ``--jobs`` trainings run at the same time, each in a process of its own. The column of seconds is the wall
time of the training without validation; it is comparable between variants only if ``--jobs`` is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report

ROOT = Path(__file__).resolve().parents[1]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class LearningVariant:
    """What differs from the defaults of the package.

    Attributes:
        model: options of HSTU.
        data: options of the data module.
        tables: optimizer of the tables.
        precision: of the Trainer.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] | None = None
    precision: str | None = None


NO_DROPOUT = {"dropout": 0.0, "input_dropout": 0.0}
EARLIER = {"table_std": None, "scale_input": False, "linear_init": "torch", "betas": (0.9, 0.999), **NO_DROPOUT}
ADAM = {"optimizer": "adam", "lr": 1e-3, "betas": (0.9, 0.98)}
ADAGRAD = {"optimizer": "rowwise_adagrad", "lr": 0.02}
# A feed-forward layer after each layer, at equal work: 128 hidden units, or two of eight experts with 64 each.
DENSE = {"feed_forward": {"hidden": 128}}
EXPERTS = {"feed_forward": {"experts": 8, "top_k": 2, "hidden": 64}}
LEARNING_VARIANTS = {
    "relative": LearningVariant({"bias": "relative"}),
    "input": LearningVariant({"bias": "input"}),
    "sasrec": LearningVariant(),
    "1 set": LearningVariant(data={"negative_sets": 1}),
    "2 sets": LearningVariant(data={"negative_sets": 2}),
    "8 sets": LearningVariant(data={"negative_sets": 8}),
    "no dropout": LearningVariant(NO_DROPOUT),
    "rowwise_adagrad": LearningVariant(tables=ADAGRAD),
    "float32": LearningVariant(precision="32-true"),
    "dense": LearningVariant(DENSE),
    "experts": LearningVariant(EXPERTS),
    "earlier": LearningVariant(EARLIER, {"negative_sets": 1}),
}
SHOWN_EPOCHS = (5, 10, 20, 50, 100)
LOGGED = {
    "HR@10": "val/hr@10",
    "NDCG@10": "val/ndcg@10",
    "HR@50": "val/hr@50",
    "NDCG@50": "val/ndcg@50",
    "MRR": "val/mrr",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="a tiny model, two epochs, synthetic data if there is no file")
    parser.add_argument(
        "data", nargs="*", metavar="FILE", help="Parquet, CSV or text file of events; default synthetic"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--epochs", type=int, help="default 50")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default 0")
    parser.add_argument("--variants", nargs="+", choices=LEARNING_VARIANTS, default=list(LEARNING_VARIANTS))
    for name, value in {"layers": 8, "width": 64, "batch-size": 128, "negatives": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time; default 1")
    parser.add_argument("--limit", type=float, default=36_000, help="seconds after which trainings are stopped")
    parser.add_argument("--only", nargs=3, metavar=("FILE", "VARIANT", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.data = arguments.data or ["synthetic"]
    arguments.epochs = arguments.epochs or (2 if arguments.quick else 50)
    if arguments.quick:
        arguments.width, arguments.layers, arguments.batch_size = 16, 2, 32
    return arguments


# ---- one training ------------------------------------------------------------------------------------------------------------
def train(arguments: argparse.Namespace, source: str, variant: str, seed: int) -> Rows:
    """One training in this process. Prints and returns a row for each of ``SHOWN_EPOCHS`` and for the last epoch."""
    import lightning.pytorch as pl
    import torch

    import lightning_freescale as fs
    from benchmarks.harness.lightning_trainer import plain_trainer
    from benchmarks.harness.training.sasrec import SASRec
    from benchmarks.harness.training.step_timestamps import StepTimestamps, TimestampedHSTU

    chosen, cuda = LEARNING_VARIANTS[variant], arguments.device == "cuda"
    pl.seed_everything(seed, verbose=False)
    data = fs.SeqRecDataModule(
        source,
        batch_size=arguments.batch_size,
        max_history=200,
        num_negatives=arguments.negatives,
        held_out=1,
        seed=seed,
        synthetic={"users": 100}
        if arguments.quick
        else {"users": 6040, "items": 3416, "mean_length": 165.0, "seed": 0},
        cache_dir=Path(tempfile.gettempdir()) / "freescale-learning",
        **chosen.data,
    )
    kind = SASRec if variant == "sasrec" else TimestampedHSTU
    model = kind(
        data.num_items, embedding_dim=arguments.width, num_layers=arguments.layers, max_history=200, **chosen.model
    )
    model.timestamps = StepTimestamps(torch.device(arguments.device))
    epochs = _epoch_rows({"data": Path(source).name, "variant": variant, "seed": seed}, arguments.epochs)
    options: dict[str, Any] = {"precision": chosen.precision} if chosen.precision else {}
    options |= {"max_epochs": arguments.epochs, "callbacks": [epochs], "limit_val_batches": 1.0}
    options["check_val_every_n_epoch"] = 5 if arguments.epochs >= 5 else 1
    strategy = fs.FreeScaleStrategy(embedding_optimizer=chosen.tables or (ADAM if cuda else ADAGRAD))
    plain_trainer(strategy, ranks=1, cuda=cuda, **options).fit(model, datamodule=data)
    return epochs.rows


def _epoch_rows(labels: dict[str, Any], last: int) -> Any:
    """A callback that keeps and prints rows. It is made in a function: the parent process does not import Lightning."""
    import lightning.pytorch as pl

    class EpochRows(pl.Callback):
        def __init__(self) -> None:
            self.rows: Rows = []
            self._resumed = self._seconds = 0.0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self._resumed = time.perf_counter()

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self._seconds += time.perf_counter() - self._resumed

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            epoch = trainer.current_epoch + 1
            if epoch in SHOWN_EPOCHS or epoch == last:
                found = {name: float(trainer.callback_metrics[key]) for name, key in LOGGED.items()}
                self.rows.append({**labels, "epoch": epoch, **found, "seconds": self._seconds})
                print("ROW " + json.dumps(self.rows[-1]), flush=True)
            self._resumed = time.perf_counter()

    return EpochRows()


# ---- all trainings -----------------------------------------------------------------------------------------------------------
def train_all(arguments: argparse.Namespace) -> Rows:
    """Train every variant from every seed on every file, ``--jobs`` at a time. Writes ``--output`` after each training."""
    deadline = time.monotonic() + arguments.limit
    tasks = [
        (source, variant, str(seed))
        for seed in arguments.seeds
        for source in arguments.data
        for variant in arguments.variants
    ]
    rows: Rows = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(_train_in_a_process, task, deadline) for task in tasks]):
            rows += done.result()
            rows.sort(key=lambda row: (row["data"], list(LEARNING_VARIANTS).index(row["variant"]), row["seed"]))
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(_results(arguments, rows), indent=1) + "\n")
    return rows


def _train_in_a_process(task: tuple[str, str, str], deadline: float) -> Rows:
    """The rows of one training; those before the deadline if it takes longer."""
    left = deadline - time.monotonic()
    if left <= 0:
        return []
    command = [sys.executable, "-m", "benchmarks.learning", *sys.argv[1:], "--only", *task]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=left, check=True)
        printed = done.stdout
    except subprocess.TimeoutExpired as expired:
        print(f"{' '.join(task)}: stopped at the limit", file=sys.stderr, flush=True)
        printed = expired.stdout or b""
    except subprocess.CalledProcessError as failed:
        print(f"{' '.join(task)}: failed with status {failed.returncode}", file=sys.stderr, flush=True)
        printed = failed.stdout or b""
    return [json.loads(line[4:]) for line in printed.decode().splitlines() if line.startswith("ROW ")]


def _results(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    machine = None
    if arguments.device == "cuda":
        import torch

        machine = torch.cuda.get_device_name()
    names = ("device", "epochs", "layers", "width", "batch_size", "negatives", "jobs")
    parameters = {name: getattr(arguments, name) for name in names}
    return report.head("learning", machine) | {"parameters": parameters, "rows": rows}


def main() -> int:
    arguments = parse()
    if arguments.only:
        import torch

        torch.set_num_threads(1)
        source, variant, seed = arguments.only
        train(arguments, source, variant, int(seed))
        return 0
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        arguments.data = [str(Path(source).resolve()) if Path(source).exists() else source for source in arguments.data]
        rows = train_all(arguments)
    report.publish(arguments, _results(arguments, rows), {"Quality of HSTU by epoch": rows} if rows else {})
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
