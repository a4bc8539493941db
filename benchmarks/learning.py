"""How fast HSTU learns: HR@10 and NDCG@10 by epoch for settings of the model, and for a SASRec of the same size.

    python -m benchmarks.learning FILE [--quick] [--json] [--output FILE] [--epochs N] [--seeds N ...] [--variants NAME ...]

One rank on a CPU trains every variant from every seed: 2 layers of width 64, histories of at most 200 events, 128 negatives per
sample, 32 samples per step, tables with rowwise Adagrad. The last event of every user is ranked among all items, and training
uses the events before it, as many published implementations do.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report

EARLIER = {"table_std": None, "scale_input": False, "linear_init": "torch", "betas": (0.9, 0.999)}
LEARNING_VARIANTS: dict[str, dict[str, Any]] = {
    "relative": {},
    "input": {"bias": "input"},
    "dropout": {"dropout": 0.2, "input_dropout": 0.2},
    "earlier": EARLIER,
    "sasrec": {},
}
SHOWN_EPOCHS = (1, 5, 10, 20, 50, 100)
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
        "data", nargs="?", default="synthetic", metavar="FILE", help="Parquet, CSV or text file of events"
    )
    parser.add_argument("--epochs", type=int, help="default 20")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default 0")
    parser.add_argument("--variants", nargs="+", choices=LEARNING_VARIANTS, default=list(LEARNING_VARIANTS))
    arguments = parser.parse_args(argv)
    arguments.epochs = arguments.epochs or (2 if arguments.quick else 20)
    return arguments


def train(arguments: argparse.Namespace, variant: str, seed: int) -> list[dict[str, Any]]:
    """One training. Returns a row for each of ``SHOWN_EPOCHS`` and for the last epoch."""
    import lightning.pytorch as pl
    import torch

    import lightning_freescale as fs
    from benchmarks.harness.lightning_trainer import plain_trainer
    from benchmarks.harness.training.sasrec import SASRec
    from benchmarks.harness.training.step_timestamps import StepTimestamps, TimestampedHSTU

    pl.seed_everything(seed, verbose=False)
    data = fs.SeqRecDataModule(
        arguments.data,
        batch_size=32,
        max_history=200,
        num_negatives=128,
        held_out=1,
        seed=seed,
        synthetic={"users": 100} if arguments.quick else None,
        cache_dir=Path(tempfile.gettempdir()) / "freescale-learning",
    )
    kind = SASRec if variant == "sasrec" else TimestampedHSTU
    width = 16 if arguments.quick else 64
    model = kind(data.num_items, embedding_dim=width, max_history=200, **LEARNING_VARIANTS[variant])
    model.timestamps = StepTimestamps(torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    start = time.process_time()

    class Epochs(pl.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            epoch = trainer.current_epoch + 1
            if epoch in SHOWN_EPOCHS or epoch == arguments.epochs:
                found = {name: float(trainer.callback_metrics[key]) for name, key in LOGGED.items()}
                seconds = time.process_time() - start
                rows.append({"variant": variant, "seed": seed, "epoch": epoch, **found, "CPU seconds": seconds})

    options = {"max_epochs": arguments.epochs, "callbacks": [Epochs()], "limit_val_batches": 1.0}
    plain_trainer(fs.FreeScaleStrategy(), ranks=1, cuda=False, **options).fit(model, datamodule=data)
    return rows


def main() -> int:
    arguments = parse()
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        rows = [
            row for variant in arguments.variants for seed in arguments.seeds for row in train(arguments, variant, seed)
        ]
    report.publish(arguments, report.head("learning") | {"rows": rows}, {"Quality of HSTU by epoch": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
