"""``freescale demo``: trains an HSTU recommender on two processes, with the baseline and with FreeScale.

``freescale demo`` and ``make demo`` train with both strategies on the same data, and compare the bubbles of the two runs. This
takes about two minutes. ``examples/train_hstu.py`` trains with one strategy.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

import lightning_freescale as fs
from lightning_freescale.cli.demo_callbacks import DemoProgressBar, LossRecorder, ThroughputMeter
from lightning_freescale.cli.demo_output import FinishedTraining, comparison, introduction, next_commands, results
from lightning_freescale.models import HSTU

BASELINE_STRATEGY, FREESCALE_STRATEGY, BOTH_STRATEGIES = "freescale_sync", "freescale", "both"
LENGTH_SIGMA = (
    1.5  # of the log-normal history lengths: a few histories are twenty times as long as the median, as in real logs
)


def main(argv: Sequence[str] | None = None, prog: str | None = None, strategy: str = BOTH_STRATEGIES) -> None:
    """Run the demo.

    Args:
        argv: options; by default those of the process.
        prog: name of the command in its help.
        strategy: the default of ``--strategy``.
    """
    parser = make_parser(prog, strategy)
    options = parser.parse_args(argv)
    if options.strategy == BOTH_STRATEGIES and options.ckpt_path:
        parser.error(
            "--ckpt-path: a checkpoint can resume only one training; "
            f"choose --strategy {FREESCALE_STRATEGY} or {BASELINE_STRATEGY}"
        )
    run(options)


def run(options: argparse.Namespace) -> None:
    """Train, print how well the model recommends and, with both strategies, compare them."""
    accelerator, devices = choose_devices(options)
    configure_process(accelerator)
    strategies = [BASELINE_STRATEGY, FREESCALE_STRATEGY] if options.strategy == BOTH_STRATEGIES else [options.strategy]
    trainings: list[FinishedTraining] = []
    for strategy in strategies:
        trainings.append(train(options, strategy, accelerator, devices, first=not trainings))
    last = trainings[-1]
    if not last.trainer.is_global_zero:
        return
    print(results(trainings))
    if len(trainings) == 2:
        print(comparison(trainings, Path(options.log_dir) / "report.html"))
    print(next_commands(options.log_dir, last.checkpoint))


def workload(options: argparse.Namespace, balance: Literal["fixed", "off"]) -> tuple[fs.SeqRecDataModule, HSTU]:
    """The data and the model. Synthetic histories have a long tail of lengths."""
    data = fs.SeqRecDataModule(
        options.data,
        batch_size=options.batch_size,
        max_history=options.max_history,
        balance=balance,
        num_negatives=options.num_negatives,
        num_workers=options.num_workers,
        seed=options.seed,
        synthetic={"sigma": LENGTH_SIGMA},
    )
    model = HSTU(
        data.num_items,
        embedding_dim=options.embedding_dim,
        num_layers=options.layers,
        num_heads=options.heads,
        max_history=options.max_history,
        lr=options.lr,
    )
    return data, model


def train(options: argparse.Namespace, strategy: str, accelerator: str, devices: int, first: bool) -> FinishedTraining:
    """Train with ``strategy``. Every strategy gets the same data, initial weights and global batches."""
    pl.seed_everything(options.seed, verbose=False)
    data, model = workload(options, balance="off" if strategy == BASELINE_STRATEGY else "fixed")
    throughput, losses = ThroughputMeter(), LossRecorder()
    checkpoint = ModelCheckpoint(monitor="val/hr@10", mode="max")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        max_epochs=options.max_epochs,
        limit_train_batches=options.limit_train_batches,
        limit_val_batches=options.limit_val_batches,
        logger=TensorBoardLogger(options.log_dir, name=strategy, default_hp_metric=False),
        callbacks=[throughput, losses, checkpoint, fs.BubbleMonitor(), DemoProgressBar(leave=True)],
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        print(introduction(data, options, trainer, strategy, first), flush=True)
    trainer.fit(model, datamodule=data, ckpt_path=options.ckpt_path)
    folder = trainer.log_dir
    assert folder is not None
    return FinishedTraining(
        strategy,
        trainer,
        data,
        folder,
        checkpoint.best_model_path,
        losses.of_global_batches(trainer),
        throughput.rate(trainer),
    )


# ---- devices ----------------------------------------------------------------------------------------------------------
def choose_devices(options: argparse.Namespace) -> tuple[str, int]:
    """Accelerator, and processes per node. The default is two GPUs, or one GPU if there is only one, or two CPU processes."""
    accelerator = options.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if options.devices != "auto":
        return accelerator, int(options.devices)
    return accelerator, min(2, torch.cuda.device_count()) if accelerator == "cuda" else 2


def configure_process(accelerator: str) -> None:
    """Use one thread per rank on the CPU, where ranks share the cores, and hide Lightning's advertisements."""
    if accelerator == "cpu":
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        logger = logging.getLogger(f"{namespace}.utilities.rank_zero")
        logger.addFilter(lambda record: "Tip: For seamless cloud" not in record.getMessage())


# ---- options ----------------------------------------------------------------------------------------------------------
def batch_limit(text: str) -> int | float | None:
    """A number of batches (``10``), a share of the batches (``0.1``), or ``all``, as Lightning's limits take them."""
    if text == "all":
        return None
    return float(text) if "." in text else int(text)


def make_parser(prog: str | None = None, strategy: str = BOTH_STRATEGIES) -> argparse.ArgumentParser:
    """The options of the demo; ``strategy`` is the default of ``--strategy``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [options]",
        description="Train an HSTU recommender with sharded embedding tables. Without options, it trains on synthetic data, "
        "on two processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_data_options(parser.add_argument_group("data"))
    _add_model_options(parser.add_argument_group("model"))
    _add_trainer_options(parser.add_argument_group("trainer"), strategy)
    return parser


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", metavar="PATH", default="synthetic", help="'synthetic', or a Parquet, CSV or text file of events"
    )
    group.add_argument("--batch-size", type=int, metavar="N", default=16, help="samples per process and step")
    group.add_argument(
        "--max-history", type=int, metavar="N", default=1024, help="keep the latest N events of each history"
    )
    group.add_argument("--num-negatives", type=int, metavar="N", default=64, help="sampled negatives per position")
    group.add_argument(
        "--num-workers", type=int, metavar="N", default=0, help="DataLoader workers of each process; 0: none"
    )


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--embedding-dim", type=int, metavar="N", default=64, help="width of the tables and of the layers"
    )
    group.add_argument("--layers", type=int, metavar="N", default=2, help="number of HSTU layers")
    group.add_argument("--heads", type=int, metavar="N", default=2, help="number of attention heads")
    group.add_argument("--lr", type=float, metavar="RATE", default=1e-3, help="learning rate of the dense parameters")


def _add_trainer_options(group: argparse._ArgumentGroup, strategy: str) -> None:
    group.add_argument(
        "--strategy",
        choices=[FREESCALE_STRATEGY, BASELINE_STRATEGY, BOTH_STRATEGIES],
        default=strategy,
        help=f"{BASELINE_STRATEGY}: the baseline, with sharded tables but no other technique; {BOTH_STRATEGIES}: train with "
        f"the baseline, then with {FREESCALE_STRATEGY}, and compare the runs",
    )
    group.add_argument("--accelerator", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    group.add_argument(
        "--devices", metavar="N", default="auto", help="processes per node; auto: 2, or 1 if there is only one GPU"
    )
    group.add_argument("--num-nodes", type=int, metavar="N", default=1, help="number of machines")
    group.add_argument(
        "--precision",
        choices=["32-true", "bf16-mixed"],
        default="32-true",
        help="precision of the dense part of the model",
    )
    group.add_argument("--max-epochs", type=int, metavar="N", default=3, help="number of epochs")
    group.add_argument(
        "--limit-train-batches",
        type=batch_limit,
        metavar="N",
        default="all",
        help="training batches per epoch: a number, or a share such as 0.1",
    )
    group.add_argument(
        "--limit-val-batches",
        type=batch_limit,
        metavar="N",
        default="all",
        help="validation batches: a number, or a share such as 0.1",
    )
    group.add_argument("--ckpt-path", metavar="PATH", help="checkpoint to resume from")
    group.add_argument("--log-dir", metavar="DIR", default="runs", help="folder of logs and checkpoints")
    group.add_argument(
        "--seed", type=int, metavar="N", default=0, help="seed of the data, the weights and the shuffling"
    )
