"""Stragglers, measured: how long ranks wait for each other's histories, before and after balancing.

    python -m benchmarks.straggler [--quick] [--json] [--output FILE]  # two ranks on this machine's CPU, short histories
    python -m benchmarks.straggler --ranks 4 --accelerator gpu --precision bf16-mixed --embedding-dim 256 --layers 4 --heads 4 \
        --max-history 8192 --batch-size 32  # one GPU as a cluster; under another launcher it takes its place there

An HSTU trains on the same global batches in several ways. On each rank and step the time of its own compute is taken, from the
arrival of the rows of its histories to their gradient: no communication is in between, neither forward nor backward. A rank is
idle from its own end to that of the slowest. With costs fitted online (``fit_costs``), the same batches are trained twice, and
what is learnt the first time shows the second. Histories are log-normal, mu 7.3 and sigma 1.2, scaled down for short ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher as cluster
from benchmarks.harness.gpu_cluster import reserved_sms as own_cores

Row = dict[str, Any]

COSTS = "Cost model against measured seconds: off, half of the steps to fit, half to test; online, by its own account"


def main() -> None:
    parser = report.make_parser(__doc__, quick="few steps")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, where no launcher has set RANK")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank")
    parser.add_argument("--max-history", type=int, default=1024)
    parser.add_argument("--embedding-dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--negatives", type=int, default=16)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--steps", type=int, help="measured in each way (default: 16, quick: 4)")
    parser.add_argument("--warmup", type=int, help="steps before them (default: 4, quick: 2)")
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.quick else 16)
    options.warmup = options.warmup or (2 if options.quick else 4)
    if "RANK" in os.environ:
        run(options)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        gpu = options.accelerator == "gpu"
        sys.exit(cluster.launch("benchmarks.straggler", sys.argv[1:], options.ranks, gpu=gpu, own_cores=gpu))


# ---- on a rank --------------------------------------------------------------------------------------------------------
def run(options: argparse.Namespace) -> None:
    os.environ.setdefault("NODE_RANK", os.environ["RANK"])
    os.environ.setdefault("LOCAL_RANK", "0")
    rank, options.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # Lightning clears them after a fit
    from lightning_freescale.balance import Planner

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    own_cores.use(torch.device("cuda" if options.accelerator == "gpu" else "cpu"))
    cache = Path(tempfile.gettempdir()) / "freescale-straggler"
    if options.accelerator == "gpu":
        train(options, cache, "off")  # builds the kernels: whoever is measured first would seem slow
    runs: dict[str, Run] = {"off": train(options, cache, "off")}
    sums, seconds = runs["off"].sums, runs["off"].seconds
    prior = runs["off"].cost_model
    fitted = prior.fit(sums.reshape(-1, 4), seconds.ravel())  # gathered by rank 0 for all: the same bits everywhere
    for name, planner in {
        "zigzag": Planner("zigzag", fitted),
        "fixed, cost by FLOPs": Planner("fixed", prior),
        "fixed": Planner("fixed", fitted),
        "variable": Planner("variable", fitted),
    }.items():
        runs[name] = train(options, cache, planner)
    runs["fixed, by exchange"] = train(options, cache, "off", exchange=Planner("fixed", fitted))
    runs["fixed, fitted online"] = train(options, cache, Planner("fixed", prior), online=True)
    if rank:
        return
    results: dict[str, Any] = {
        "setting": {key: str(value) for key, value in vars(options).items() if key not in ("json", "output")},
        "straggler": [row(name, found, runs["off"]) for name, found in runs.items()],
        "cost model": [*fit_errors(prior, sums, seconds), *filter(None, [runs["fixed, fitted online"].learnt])],
        "exchange": exchange_row(runs["fixed, by exchange"]),
    }
    device = torch.cuda.get_device_name() if options.accelerator == "gpu" else None
    report.publish(
        options,
        report.head("straggler", device and f"{device} as {options.ranks} ranks: {own_cores.describe()}") | results,
        {
            f"Measured on {sums.shape[1]} ranks, {len(seconds)} steps each": results["straggler"],
            COSTS: results["cost model"],
            "Exchange of samples, per step": [results["exchange"]],
        },
    )


class Run:
    """What one way of training showed, the same on every rank.

    Attributes:
        seconds: ``[steps, ranks]`` compute.
        sums: ``[steps, ranks, 4]`` of the samples, see ``CostModel.sums``.
        iteration: seconds of a step, everything included.
        cost_model: what the model says of itself.
        stats: of the exchange on rank 0, in the measured steps.
        learnt: the cost model fitted online; one rank has no use for it.
    """

    def __init__(
        self,
        seconds: Any,
        sums: Any,
        iteration: float,
        cost_model: Any,
        stats: Mapping[str, float] | None,
        learnt: Row | None,
    ):
        self.seconds, self.sums, self.iteration = np.array(seconds), np.array(sums), iteration
        self.cost_model, self.stats, self.learnt = cost_model, stats, learnt

    @property
    def idle(self) -> float:
        """Seconds for which a rank waits for the slowest in a step, mean of both."""
        return float((self.seconds.max(axis=1, keepdims=True) - self.seconds).mean())


def train(options: argparse.Namespace, cache: Path, balance: Any, exchange: Any = "off", online: bool = False) -> Run:
    """Train ``warmup + steps`` steps; ``balance`` at the source or by ``exchange``. With ``online``, twice. A collective."""
    import lightning.pytorch as pl
    import torch.distributed as dist

    import lightning_freescale as fs
    from benchmarks.harness.lightning_trainer import plain_trainer
    from lightning_freescale.balance import CostModel

    world = options.ranks
    os.environ.update(WORLD_SIZE=str(world))
    steps = options.warmup + options.steps
    pl.seed_everything(0, verbose=False)
    scale = min(1.0, options.max_history / 21_000)  # the same shape of tail, whatever the longest
    data = fs.SeqRecDataModule(
        batch_size=options.batch_size,
        max_history=options.max_history,
        balance=balance,
        num_negatives=options.negatives,
        shuffle=False,
        drop_last=True,
        cache_dir=cache,
        synthetic={
            "users": world * options.batch_size * steps,
            "items": options.items,
            "mean_length": float(np.exp(7.3 + 1.2**2 / 2) * scale),
            "sigma": 1.2,
            "max_length": options.max_history + 1,
        },
    )
    model = timed_hstu()(
        data.num_items,
        embedding_dim=options.embedding_dim,
        num_layers=options.layers,
        num_heads=options.heads,
        max_history=options.max_history,
    )
    last = 2 * steps if online else steps
    window = window_of(last - options.steps, last)
    trainer = plain_trainer(
        fs.FreeScaleStrategy(balance=exchange, prioritize=False, fit_costs=max(1, steps // 4) if online else False),
        world,
        options.accelerator == "gpu",
        precision=options.precision,
        max_steps=last,
        callbacks=[window],
    )
    trainer.fit(model, datamodule=data)
    seconds, sums = model.measured()
    mine = (seconds[-options.steps :], [row.tolist() for row in sums[-options.steps :]])
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    shared = [window.seconds / options.steps, window.stats, window.learnt]
    dist.broadcast_object_list(shared)
    return Run(
        np.array([part[0] for part in gathered]).T,
        np.array([part[1] for part in gathered]).transpose(1, 0, 2),
        shared[0],
        CostModel(*model.cost_coefficients()),
        shared[1],
        shared[2],
    )


def timed_hstu() -> Any:
    """The class is made late: importing the package takes seconds that the launcher need not spend."""
    from lightning_freescale.balance import CostModel
    from lightning_freescale.balance.pack import sample_sizes
    from lightning_freescale.batch.seq_batch import HISTORY
    from lightning_freescale.models import HSTU

    class TimedHSTU(HSTU):
        """Takes the time from the arrival of the histories' rows to their gradient."""

        def on_train_start(self) -> None:
            self.spans: list[tuple[Any, Any]] = []
            self.batches: list[Any] = []

        def encode(self, embedded: Any, batch: Any) -> Any:
            rows = embedded[HISTORY].values()
            start = mark(rows.device)
            rows.register_hook(lambda gradient: self.spans.append((start, mark(gradient.device))))
            self.batches.append(batch)
            return super().encode(embedded, batch)

        def measured(self) -> tuple[list[float], list[np.ndarray]]:
            """Of every step, seconds and sums."""
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            host = [batch.to(torch.device("cpu")) for batch in self.batches]
            return [between(*span) for span in self.spans], [CostModel.sums(*sample_sizes(batch)) for batch in host]

    return TimedHSTU


def mark(device: torch.device) -> Any:
    """A moment, in the time of the device."""
    if device.type != "cuda":
        return time.thread_time()  # ranks share cores, with whatever else runs here: wall time would measure that
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def window_of(first: int, last: int) -> Any:
    """A callback that takes the time from the start of step ``first`` to the end of step ``last - 1``."""
    import lightning.pytorch as pl

    class Window(pl.Callback):
        seconds = 0.0
        stats: dict[str, float] | None = None
        learnt: Row | None = None

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == first:
                self.seconds = -self._now(module)
                self._before = self._sums(trainer)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step == last:
                self.seconds += self._now(module)
                self.stats = {name: value - self._before[name] for name, value in self._sums(trainer).items()}
                if (online := trainer.strategy._balancer.online) is not None:
                    model = online.planner.cost_model.state_dict()
                    self.learnt = {"cost": "fitted online", **model, "error %": 100 * online.error}

        def _sums(self, trainer: Any) -> dict[str, float]:
            exchanges = trainer.strategy._balancer.exchanges
            return dict(vars(exchanges[0].stats)) if exchanges else {}

        def _now(self, module: Any) -> float:
            if module.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

    return Window()


# ---- figures ----------------------------------------------------------------------------------------------------------
def row(name: str, run: Run, off: Run) -> Row:
    slowest = float(run.seconds.max(axis=1).mean())
    return {
        "balance": name,
        "compute ms": 1e3 * float(run.seconds.mean()),
        "slowest ms": 1e3 * slowest,
        "iteration ms": 1e3 * run.iteration,
        "idle ms": 1e3 * run.idle,
        "straggler %": 100 * run.idle / run.iteration,
        "of slowest %": 100 * run.idle / slowest,
        "times less": off.idle / run.idle if run.idle else 1.0,  # one rank waits for nobody
    }


def fit_errors(prior: Any, sums: np.ndarray, seconds: np.ndarray) -> list[Row]:
    """Median relative error on odd steps: of the fit to even steps, and of FLOPs alone, scaled to the mean."""
    even, odd = (np.s_[::2], np.s_[1::2])
    train, test = ((sums[part].reshape(-1, 4), seconds[part].ravel()) for part in (even, odd))
    fitted = prior.fit(*train)
    return [
        {"cost": name, **model.state_dict(), "error %": 100 * model.error(*test)}
        for name, model in {"FLOPs, scaled": prior.in_unit_of(*train), "fitted": fitted}.items()
    ]


def exchange_row(run: Run) -> Row:
    stats = run.stats or {}
    batches = max(1, int(stats.get("batches", 0)))
    per_batch = {name: stats.get(name, 0.0) / batches for name in ("waited", "exposed", "exchanging", "bytes_sent")}
    return {
        "iteration ms": 1e3 * run.iteration,
        "exchange ms": 1e3 * per_batch["exchanging"],
        "on the critical path ms": 1e3 * per_batch["exposed"],
        "of an iteration %": 100 * per_batch["exposed"] / run.iteration,
        "waited for data ms": 1e3 * per_batch["waited"],
        "KiB sent": per_batch["bytes_sent"] / 1024,
    }


if __name__ == "__main__":
    main()
