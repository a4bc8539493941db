"""The demo: an HSTU learns to recommend, on two processes, in about a minute. Run as an example and by ``freescale demo``."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

import lightning_freescale as fs
from lightning_freescale.models import HSTU
from lightning_freescale.models.metrics import popularity_hit_rate


def run(options: argparse.Namespace) -> None:
    """Train, validate after every epoch, and say how well the model recommends."""
    accelerator, devices = choose_devices(options)
    settle(accelerator)
    pl.seed_everything(options.seed, verbose=False)

    data = fs.SeqRecDataModule(
        options.data,
        batch_size=options.batch_size,
        max_history=options.max_history,
        num_negatives=options.num_negatives,
        num_workers=options.num_workers,
        seed=options.seed,
    )
    model = HSTU(
        data.num_items,
        embedding_dim=options.embedding_dim,
        num_layers=options.layers,
        num_heads=options.heads,
        max_history=options.max_history,
        lr=options.lr,
    )
    speed = Throughput()
    checkpoint = ModelCheckpoint(monitor="val/hr@10", mode="max")
    trainer = pl.Trainer(
        strategy=options.strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        max_epochs=options.max_epochs,
        limit_train_batches=options.limit_train_batches,
        limit_val_batches=options.limit_val_batches,
        logger=TensorBoardLogger(options.log_dir, name="hstu", default_hp_metric=False),
        callbacks=[speed, checkpoint, ProgressBar(leave=True)],
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        print(introduction(data, options, trainer), flush=True)
    trainer.fit(model, datamodule=data, ckpt_path=options.ckpt_path)

    rate = speed.per_second(trainer)
    if trainer.is_global_zero:
        print(results(trainer, data, rate))
        print(next_commands(options.log_dir, checkpoint.best_model_path))


# ---- set-up -----------------------------------------------------------------------------------------------------------
def choose_devices(options: argparse.Namespace) -> tuple[str, int]:
    """Accelerator and processes per node: two GPUs, or the only one, or two processes on the CPU, unless told otherwise."""
    accelerator = options.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if options.devices != "auto":
        return accelerator, int(options.devices)
    return accelerator, min(2, torch.cuda.device_count()) if accelerator == "cuda" else 2


def settle(accelerator: str) -> None:
    """One thread per rank on the CPU, where ranks would fight for cores, and none of Lightning's advertisements."""
    if accelerator == "cpu":
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        logger = logging.getLogger(f"{namespace}.utilities.rank_zero")
        logger.addFilter(lambda record: "Tip: For seamless cloud" not in record.getMessage())


class ProgressBar(TQDMProgressBar):
    """Lightning's, without the number of the run."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in super().get_metrics(*args).items() if name != "v_num"}


class Throughput(Callback):
    """Samples per second of training, over all ranks; the time of validation is left out."""

    def __init__(self) -> None:
        self.samples, self.seconds, self._since = 0, 0.0, 0.0

    def on_train_epoch_start(self, *args: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: fs.SeqBatch, index: int
    ) -> None:
        now = time.perf_counter()
        self.samples += batch.num_samples
        self.seconds += now - self._since
        self._since = now

    def on_validation_end(self, *args: Any) -> None:
        self._since = time.perf_counter()

    def per_second(self, trainer: pl.Trainer) -> float:
        """The rate of the whole training, 0 if there was none. A collective."""
        strategy = trainer.strategy
        total = strategy.reduce(torch.tensor(float(self.samples), device=strategy.root_device), reduce_op="sum")
        return float(total) / self.seconds if self.seconds else 0.0


# ---- what is printed --------------------------------------------------------------------------------------------------
def introduction(data: fs.SeqRecDataModule, options: argparse.Namespace, trainer: pl.Trainer) -> str:
    histories = data.histories
    median, longest = int(torch.from_numpy(histories.lengths).median()), int(histories.lengths.max())
    return (
        f"\nData     {options.data}: {histories.num_users:,} users, {histories.num_items:,} items, "
        f"{len(histories.items):,} events; a history has {median} events in the median, {longest:,} at most\n"
        f"Model    HSTU of {options.layers} layers, {options.heads} heads, embeddings of {options.embedding_dim}\n"
        f'Trainer  strategy="{options.strategy}", {trainer.world_size} x {trainer.strategy.root_device.type}\n'
    )


def results(trainer: pl.Trainer, data: fs.SeqRecDataModule, samples_per_second: float) -> str:
    """A table of the last epoch's figures. The held-out item of every user is ranked among all items."""
    histories = data.histories
    held_out = torch.from_numpy(histories.items[histories.offsets[1:] - 1])
    popular = popularity_hit_rate(torch.from_numpy(histories.item_counts), held_out)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rows = [
        ("training loss, last step", metrics.get("train/loss"), ".3f"),
        ("validation loss", metrics.get("val/loss"), ".3f"),
        ("HR@10", metrics.get("val/hr@10"), ".3f"),
        ("  popularity recommender", popular, ".3f"),
        ("NDCG@10", metrics.get("val/ndcg@10"), ".3f"),
        ("samples/s", samples_per_second, ".0f"),
    ]
    cells = [(label, "-" if value is None else format(value, spec)) for label, value, spec in rows]
    return "\n".join(["", *(f"{label:<26}{cell:>8}" for label, cell in cells), ""])


def next_commands(log_dir: str, checkpoint: str) -> str:
    lines = [f"See the curves:      {_command('tensorboard')} --logdir {log_dir}"]
    if checkpoint:
        lines.append(f"Take the model out:  {_command('freescale')} export '{_short(checkpoint)}' hstu.pt")
    return "\n".join(lines)


def _command(name: str) -> str:
    """How to call a program of this Python environment from the user's shell."""
    program = Path(sys.executable).with_name(name)
    return name if shutil.which(name) == str(program) else _short(str(program))


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


# ---- options ----------------------------------------------------------------------------------------------------------
def number(text: str) -> int | float | None:
    """A number of batches, a share of them, or all: what Lightning's limits take."""
    if text == "all":
        return None
    return float(text) if "." in text else int(text)


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [options]",
        description="Train an HSTU recommender with sharded embeddings. Without options: synthetic data, two processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data", metavar="PATH", default="synthetic", help="'synthetic', or a Parquet, CSV or text file of events"
    )
    group.add_argument("--batch-size", type=int, metavar="N", default=32, help="samples per process and step")
    group.add_argument(
        "--max-history", type=int, metavar="N", default=256, help="events kept of each history, the latest"
    )
    group.add_argument("--num-negatives", type=int, metavar="N", default=64, help="sampled negatives of each sample")
    group.add_argument(
        "--num-workers", type=int, metavar="N", default=0, help="processes per rank that prepare batches"
    )
    group = parser.add_argument_group("model")
    group.add_argument("--embedding-dim", type=int, metavar="N", default=64, help="width of tables and layers")
    group.add_argument("--layers", type=int, metavar="N", default=2, help="HSTU layers")
    group.add_argument("--heads", type=int, metavar="N", default=2, help="attention heads")
    group.add_argument("--lr", type=float, metavar="RATE", default=1e-3, help="learning rate of the dense part")
    group = parser.add_argument_group("trainer")
    group.add_argument(
        "--strategy",
        choices=["freescale", "freescale_sync"],
        default="freescale",
        help="_sync: sharding alone, the baseline",
    )
    group.add_argument("--accelerator", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    group.add_argument(
        "--devices", metavar="N", default="auto", help="processes per node; auto: 2, or 1 where there is one GPU"
    )
    group.add_argument("--num-nodes", type=int, metavar="N", default=1, help="machines")
    group.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true", help="of the dense part")
    group.add_argument("--max-epochs", type=int, metavar="N", default=5, help="passes over the data")
    group.add_argument(
        "--limit-train-batches", type=number, metavar="N", default="all", help="steps per epoch, or a share (0.1)"
    )
    group.add_argument(
        "--limit-val-batches", type=number, metavar="N", default="all", help="validation steps, or a share"
    )
    group.add_argument("--ckpt-path", metavar="PATH", help="checkpoint to resume from")
    group.add_argument("--log-dir", metavar="DIR", default="runs", help="where logs and checkpoints go")
    group.add_argument("--seed", type=int, metavar="N", default=0, help="of data, weights and shuffling")
    return parser


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    run(make_parser(prog).parse_args(argv))
