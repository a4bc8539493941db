"""The exchange of samples between ranks for balancing: how long it takes, and how long a step waits for it.

    python -m benchmarks.balance_exchange [--quick] [--json] [--output FILE] [--ranks 2]
    python -m benchmarks.cluster 4 -- -m benchmarks.balance_exchange  # under a launcher that sets RANK and WORLD_SIZE

Trains the workload of ``freescale demo`` twice: with samples exchanged at run time, and without balancing. If training
waited for every exchange, a step would take longer by the whole time of the exchange. The exchange runs in the
background for batches ahead, so a step only waits for what is left of it: at most the wait for a batch, and at most the
time of its exchange. The first batches of an epoch have no step to hide behind. They are part of the mean and are also
reported separately.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

import lightning_freescale as fs
from benchmarks.harness import rank_setup, report
from benchmarks.harness.labels import label
from benchmarks.harness.lightning_trainer import plain_trainer
from lightning_freescale.cli import demo

LARGEST_EXPOSED_SHARE = 0.01  # largest exposed share of a step
SUMS = ("waited", "exposed", "exchanging", "bytes_sent")


class StepRecorder(pl.Callback):
    """Records the time of every step and what its batch added to the statistics of the exchange."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._since = 0.0
        self._before = dict.fromkeys(SUMS, 0.0)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        exchanges = trainer.strategy._balancer.exchanges
        sums = {name: float(getattr(exchanges[0].stats, name)) if exchanges else 0.0 for name in SUMS}
        taken = {name: sums[name] - self._before[name] for name in SUMS}
        self.steps.append({"index": index, "seconds": now - self._since, **taken})
        self._since, self._before = now, sums


def train(ranks: int, epochs: int, balance: str) -> list[list[dict[str, float]]]:
    """Train, and return the steps of every rank without the first one, which sets everything up. A collective."""
    options = demo.make_parser().parse_args([])
    cuda, given = torch.cuda.is_available(), "RANK" in os.environ
    if given:
        # Lightning deletes WORLD_SIZE after a fit.
        os.environ.update(NODE_RANK=os.environ["RANK"], WORLD_SIZE=str(ranks))
    demo.configure_process("cuda" if cuda else "cpu")
    pl.seed_everything(options.seed, verbose=False)
    data, model = demo.workload(options, balance="off")
    recorder = StepRecorder()
    trainer = plain_trainer(
        fs.FreeScaleStrategy(balance=balance, prioritize=False),  # type: ignore[arg-type]
        ranks if given else 1,
        cuda,
        devices=1 if given else ranks,
        precision="32-true",
        max_epochs=epochs,
        callbacks=[recorder],
    )
    trainer.fit(model, datamodule=data)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, recorder.steps[1:])
    return gathered


def figures(steps: list[list[dict[str, float]]]) -> dict[str, float]:
    """Means over the steps of the rank that waits longest."""
    worst = max(steps, key=lambda own: sum(step["exposed"] for step in own))
    step = statistics.fmean(one["seconds"] for one in worst)
    first, others = [one for one in worst if one["index"] == 0], [one for one in worst if one["index"] > 0]

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
        "exposed in the others %": 100 * mean("exposed", others) / step,
        "waited for data ms": 1e3 * mean("waited", worst),
        "KiB sent": mean("bytes_sent", worst) / 1024,
    }


def main() -> None:
    parser = report.make_parser(__doc__, quick="two epochs")
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes to start if no launcher has set RANK (default 2)"
    )
    parser.add_argument("--epochs", type=int, help="default: 5")
    arguments = parser.parse_args()
    rank_setup.silence_libraries()
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    epochs = arguments.epochs or (2 if arguments.quick else 5)
    off = train(ranks, epochs, "off")
    moved = figures(train(ranks, epochs, "fixed"))
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))):
        return
    moved["step ms without balancing"] = 1e3 * statistics.fmean(one["seconds"] for own in off for one in own)
    outcome = "reached" if moved["exposed %"] < 100 * LARGEST_EXPOSED_SHARE else "missed"
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results = {
        "ranks": ranks,
        "goal": {"exposed %": 100 * LARGEST_EXPOSED_SHARE, "outcome": outcome},
        "exchange": moved,
    }
    rows = [{"figure": label(name), "value": value} for name, value in moved.items()]
    report.publish(
        arguments,
        report.head("balance_exchange", machine) | results,
        {"Exchange of samples between ranks": rows},
        f"goal, less than {LARGEST_EXPOSED_SHARE:.0%} of a step exposed: {outcome}",
    )


if __name__ == "__main__":
    main()
