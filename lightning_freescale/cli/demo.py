"""The demo: an HSTU learns to recommend, on two processes, with the baseline and with FreeScale, in about two minutes.

``freescale demo`` and ``make demo`` train both ways on the same data and put the reports of their bubbles side by side;
``examples/train_hstu.py`` trains one way.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

import lightning_freescale as fs
from lightning_freescale.bubbles.analysis import Analysis, analyse
from lightning_freescale.bubbles.records import read_run
from lightning_freescale.cli import report
from lightning_freescale.models import HSTU
from lightning_freescale.models.metrics import popularity_hit_rate

BASELINE, FREESCALE, BOTH = "freescale_sync", "freescale", "both"
TAIL = 1.5  # spread of the synthetic histories' lengths: a few are twenty times the median, as in real logs
SAME_LOSS = 1e-3  # relative: balancing sums in another order, and training amplifies the rounding step by step
ALIKE = 0.05  # relative: the useful work of both ways is the same; if it took longer in one, the machine was busy


def run(options: argparse.Namespace) -> None:
    """Train, validate after every epoch, and say how well the model recommends; both ways, compare them."""
    accelerator, devices = choose_devices(options)
    settle(accelerator)
    strategies = [BASELINE, FREESCALE] if options.strategy == BOTH else [options.strategy]
    trained: list[Trained] = []
    for strategy in strategies:
        trained.append(train(options, strategy, accelerator, devices, first=not trained))
    last = trained[-1]
    if not last.trainer.is_global_zero:
        return
    print(results(trained))
    if len(trained) == 2:
        print(comparison(trained, Path(options.log_dir) / "report.html"))
    print(next_commands(options.log_dir, last.checkpoint))


@dataclass(frozen=True)
class Trained:
    """What is left of one training."""

    strategy: str
    trainer: pl.Trainer
    data: fs.SeqRecDataModule
    folder: str  # of its logs
    checkpoint: str
    losses: Tensor  # [steps], of the global batch
    samples_per_second: float


def workload(options: argparse.Namespace, balance: Literal["fixed", "off"]) -> tuple[fs.SeqRecDataModule, HSTU]:
    """What is trained: histories with a long tail, balanced at the source or not, and an HSTU."""
    data = fs.SeqRecDataModule(
        options.data,
        batch_size=options.batch_size,
        max_history=options.max_history,
        balance=balance,
        num_negatives=options.num_negatives,
        num_workers=options.num_workers,
        seed=options.seed,
        synthetic={"sigma": TAIL},
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


def train(options: argparse.Namespace, strategy: str, accelerator: str, devices: int, first: bool) -> Trained:
    """One training from the seed on: data, initial weights and batches are the same for every strategy."""
    pl.seed_everything(options.seed, verbose=False)
    data, model = workload(options, balance="off" if strategy == BASELINE else "fixed")
    speed, losses = Throughput(), Losses()
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
        callbacks=[speed, losses, checkpoint, fs.BubbleMonitor(), ProgressBar(leave=True)],
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        print(introduction(data, options, trainer, strategy, first), flush=True)
    trainer.fit(model, datamodule=data, ckpt_path=options.ckpt_path)
    folder = trainer.log_dir
    assert folder is not None
    return Trained(
        strategy, trainer, data, folder, checkpoint.best_model_path, losses.of_all_ranks(trainer), speed.rate(trainer)
    )


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

    def rate(self, trainer: pl.Trainer) -> float:
        """Samples per second of the whole training, 0 if there was none. A collective."""
        strategy = trainer.strategy
        total = strategy.reduce(torch.tensor(float(self.samples), device=strategy.root_device), reduce_op="sum")
        return float(total) / self.seconds if self.seconds else 0.0


class Losses(Callback):
    """The loss of every step. The strategy has weighted a rank's loss by its share: their mean is the global batch's."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        self._seen.append(loss.detach())

    def of_all_ranks(self, trainer: pl.Trainer) -> Tensor:
        """``[steps]`` float64. A collective."""
        strategy = trainer.strategy
        mine = torch.stack(self._seen).double() if self._seen else torch.zeros(0, device=strategy.root_device).double()
        reduced = strategy.reduce(mine, reduce_op="mean")
        assert isinstance(reduced, Tensor)
        return reduced.cpu()


# ---- what is printed --------------------------------------------------------------------------------------------------
def introduction(
    data: fs.SeqRecDataModule, options: argparse.Namespace, trainer: pl.Trainer, strategy: str, first: bool
) -> str:
    line = f'Trainer  strategy="{strategy}", {trainer.world_size} x {trainer.strategy.root_device.type}\n'
    if not first:
        return f"\nThe same once more\n{line}"
    histories = data.histories
    median, longest = int(torch.from_numpy(histories.lengths).median()), int(histories.lengths.max())
    return (
        f"\nData     {options.data}: {histories.num_users:,} users, {histories.num_items:,} items, "
        f"{len(histories.items):,} events; a history has {median} events in the median, {longest:,} at most\n"
        f"Model    HSTU of {options.layers} layers, {options.heads} heads, embeddings of {options.embedding_dim}\n"
        f"{line}"
    )


def results(trained: Sequence[Trained]) -> str:
    """A table of the last epoch's figures, a column each. The held-out item of every user is ranked among all items."""
    histories = trained[0].data.histories
    held_out = torch.from_numpy(histories.items[histories.offsets[1:] - 1])
    popular = popularity_hit_rate(torch.from_numpy(histories.item_counts), held_out)
    metrics = [{name: float(value) for name, value in one.trainer.callback_metrics.items()} for one in trained]
    rows: list[tuple[str, list[float | None], str]] = [
        ("training loss, last step", [float(one.losses[-1]) if len(one.losses) else None for one in trained], ".3f"),
        ("validation loss", [found.get("val/loss") for found in metrics], ".3f"),
        ("HR@10", [found.get("val/hr@10") for found in metrics], ".3f"),
        ("  popularity recommender", [popular] * len(trained), ".3f"),
        ("NDCG@10", [found.get("val/ndcg@10") for found in metrics], ".3f"),
        ("samples/s", [one.samples_per_second for one in trained], ".0f"),
    ]
    head = [["", *(one.strategy for one in trained)]] if len(trained) > 1 else []
    cells = [
        [name, *("-" if value is None else format(value, spec) for value in values)] for name, values, spec in rows
    ]
    return f"\n{report.table([*head, *cells])}\n"


def comparison(trained: Sequence[Trained], page: Path) -> str:
    """Both trainings' losses and bubbles; the page with every step goes to ``page``."""
    runs = [read_run(Path(one.folder)) for one in trained]
    common = sorted(
        set(runs[0].indices) & set(runs[1].indices)
    )  # how many steps are recorded follows the machine's load
    first, second = analyses = [analyse(run.only(common)) for run in runs]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report.page(analyses))
    losses = same_losses(trained[0].losses, trained[1].losses)
    return (
        f"{losses}\n\n{report.compare(first, second)}\n\n{verdict(first, second)}\n\n"
        f"See every step:      {_short(str(page.resolve()))} (open it in a browser)"
    )


def same_losses(first: Tensor, second: Tensor) -> str:
    """Whether two trainings had the same losses ``[steps]``, in a sentence."""
    if len(first) != len(second):
        return f"The trainings took different numbers of steps, {len(first)} and {len(second)}."
    apart = float(((first - second).abs() / first.abs().clamp(min=1e-12)).max()) if len(first) else 0.0
    if apart == 0.0:
        return f"Losses of all {len(first)} steps: equal, bit for bit."
    if apart <= SAME_LOSS:
        return f"Losses of all {len(first)} steps: equal up to rounding, apart by at most {apart:.0e} of their size."
    return f"Losses DIFFER, by up to {apart:.1e} of their size: this should not be."


def verdict(first: Analysis, second: Analysis) -> str:
    """What became of the wait for stragglers and of the step; and, where the machine disturbed both, that it did."""
    shares = [f"{one.summary['bubble/straggler']:.0%}" for one in (first, second)]
    text = (
        f"Wait for stragglers: {shares[0]} to {shares[1]} of the ranks' time. "
        f"A step: {first.ms('wall'):.0f} to {second.ms('wall'):.0f} ms."
    )
    before, after = first.ms("useful"), second.ms("useful")
    if abs(after / before - 1) <= ALIKE and second.ms("wall") < first.ms("wall"):
        return text
    return (
        f"{text}\nThe useful work is the same, but took {before:.0f} and {after:.0f} ms: ranks on one machine compete for "
        "its cores and\nmemory, with each other and with whatever else runs there. Compare shares rather than times."
    )


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


def make_parser(prog: str | None = None, strategy: str = BOTH) -> argparse.ArgumentParser:
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
    group.add_argument("--batch-size", type=int, metavar="N", default=16, help="samples per process and step")
    group.add_argument(
        "--max-history", type=int, metavar="N", default=1024, help="events kept of each history, the latest"
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
        choices=[FREESCALE, BASELINE, BOTH],
        default=strategy,
        help="_sync: sharding alone, the baseline; both: one after the other, compared",
    )
    group.add_argument("--accelerator", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    group.add_argument(
        "--devices", metavar="N", default="auto", help="processes per node; auto: 2, or 1 where there is one GPU"
    )
    group.add_argument("--num-nodes", type=int, metavar="N", default=1, help="machines")
    group.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true", help="of the dense part")
    group.add_argument("--max-epochs", type=int, metavar="N", default=3, help="passes over the data")
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


def main(argv: Sequence[str] | None = None, prog: str | None = None, strategy: str = BOTH) -> None:
    """Args:
    strategy: the default of ``--strategy``.
    """
    parser = make_parser(prog, strategy)
    options = parser.parse_args(argv)
    if options.strategy == BOTH and options.ckpt_path:
        parser.error(f"--ckpt-path: a checkpoint goes on one way; choose --strategy {FREESCALE} or {BASELINE}")
    run(options)
