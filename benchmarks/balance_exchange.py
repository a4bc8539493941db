"""The exchange of samples between ranks: what it takes, and how much of that a step waits for.

    python -m benchmarks.balance_exchange [--quick] [--json] [--output FILE] [--ranks 2]
    python -m benchmarks.cluster 4 -- -m benchmarks.balance_exchange  # RANK and WORLD_SIZE are given: nodes of one device each

Trains the workload of ``freescale demo``, whose samples are moved at run time instead of at the source, and once more without
balancing. An exchange made in line would cost a step all of its time. In the background, some batches ahead, it costs what
training waits for it: at most the wait for a batch, and at most the time of its exchange. An epoch's first batches have no
step to hide behind; they are part of the mean, and shown on their own.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

import lightning_freescale as fs
from benchmarks.harness import report
from benchmarks.harness.lightning_trainer import plain_trainer
from lightning_freescale.cli import demo

GOAL = 0.01  # of a step
WAITS = ("waited", "exposed", "exchanging", "bytes_sent")


class Watch(pl.Callback):
    """Of every step: its seconds, from the end of the one before, and what its batch added to the exchange's sums."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []  # without the first of the training, in which everything is made
        self._since = 0.0
        self._before = dict.fromkeys(WAITS, 0.0)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        exchanges = trainer.strategy._balancer.exchanges
        sums = {name: float(getattr(exchanges[0].stats, name)) if exchanges else 0.0 for name in WAITS}
        taken = {name: sums[name] - self._before[name] for name in WAITS}
        self.steps.append({"index": index, "seconds": now - self._since, **taken})
        self._since, self._before = now, sums


def train(ranks: int, epochs: int, balance: str) -> list[list[dict[str, float]]]:
    """Steps of every rank. A collective."""
    options = demo.make_parser().parse_args([])
    cuda, given = torch.cuda.is_available(), "RANK" in os.environ
    if given:
        os.environ.update(
            NODE_RANK=os.environ["RANK"], WORLD_SIZE=str(ranks)
        )  # Lightning clears the latter after a fit
    demo.settle("cuda" if cuda else "cpu")
    pl.seed_everything(options.seed, verbose=False)
    data, model = demo.workload(options, balance="off")
    watch = Watch()
    trainer = plain_trainer(
        fs.FreeScaleStrategy(balance=balance, prioritize=False),  # type: ignore[arg-type]
        ranks if given else 1,
        cuda,
        devices=1 if given else ranks,
        precision="32-true",
        max_epochs=epochs,
        callbacks=[watch],
    )
    trainer.fit(model, datamodule=data)
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, watch.steps[1:])
    return everybody


def figures(steps: list[list[dict[str, float]]]) -> dict[str, float]:
    """Means of the rank that waits longest."""
    worst = max(steps, key=lambda own: sum(step["exposed"] for step in own))
    step = statistics.fmean(one["seconds"] for one in worst)
    first, rest = [one for one in worst if one["index"] == 0], [one for one in worst if one["index"] > 0]

    def mean(name: str, of: list[dict[str, float]]) -> float:
        return statistics.fmean(one[name] for one in of) if of else 0.0

    return {
        "steps": len(worst),
        "step ms": 1e3 * step,
        "in line ms": 1e3 * mean("exchanging", worst),
        "in line %": 100 * mean("exchanging", worst) / step,
        "exposed ms": 1e3 * mean("exposed", worst),
        "exposed %": 100 * mean("exposed", worst) / step,
        "exposed in an epoch's first step ms": 1e3 * mean("exposed", first),
        "exposed in the others %": 100 * mean("exposed", rest) / step,
        "waited for data ms": 1e3 * mean("waited", worst),
        "KiB sent": mean("bytes_sent", worst) / 1024,
    }


def main() -> None:
    parser = report.make_parser(__doc__, quick="two epochs")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, where no launcher has set RANK")
    parser.add_argument("--epochs", type=int, help="default: 5")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    epochs = arguments.epochs or (2 if arguments.quick else 5)
    off = train(ranks, epochs, "off")
    moved = figures(train(ranks, epochs, "fixed"))
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))):
        return
    moved["step ms without balancing"] = 1e3 * statistics.fmean(one["seconds"] for own in off for one in own)
    reached = "reached" if moved["exposed %"] < 100 * GOAL else "missed"
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results = {"ranks": ranks, "goal": {"exposed %": 100 * GOAL, "outcome": reached}, "exchange": moved}
    rows = [{"figure": name, "value": value} for name, value in moved.items()]
    report.publish(
        arguments,
        report.head("balance_exchange", machine) | results,
        {"Exchange of samples": rows},
        f"goal, less than {GOAL:.0%} of a step exposed: {reached}",
    )


if __name__ == "__main__":
    main()
