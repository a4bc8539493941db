"""Stragglers: how long ranks wait for the slowest rank, measured without and with balancing.

    python -m benchmarks.straggler [--quick] [--json] [--output FILE]  # two ranks on the CPU, short histories
    python -m benchmarks.straggler --ranks 4 --accelerator gpu --precision bf16-mixed --embedding-dim 256 --layers 4 --heads 4 \
        --max-history 8192 --batch-size 32  # one GPU as a cluster

An HSTU trains on the same global batches with several balancing modes. On each rank and step, the compute time is measured from
the arrival of the histories' rows to their gradient. There is no communication in between, neither in forward nor in backward. A
rank is idle from its own end of this interval to that of the slowest rank. With costs fitted online (``fit_costs``), the same
batches are trained twice: costs are learned in the first pass and measured in the second. Lengths of histories are log-normal
(mu 7.3, sigma 1.2), scaled down with ``--max-history``. Under another launcher each process is one of that launcher's ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import rank_setup, report
from benchmarks.harness.gpu_cluster import launcher, reserved_sms

Row = dict[str, Any]

COST_TITLE = "Cost model and measured seconds: fitted to half of the steps without balancing, error on the other half"


def main() -> None:
    parser = report.make_parser(__doc__, quick="few steps")
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes to start if no launcher has set RANK (default 2)"
    )
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu", help="default cpu")
    parser.add_argument("--precision", default="32-true", help="precision of the Trainer (default 32-true)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank (default 16)")
    parser.add_argument("--max-history", type=int, default=1024, help="longest history in events (default 1024)")
    parser.add_argument("--embedding-dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--negatives", type=int, default=16, help="sampled negatives per sample (default 16)")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--steps", type=int, help="measured steps per mode (default 16, with --quick 4)")
    parser.add_argument("--warmup", type=int, help="steps before the measured ones (default 4, with --quick 2)")
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.quick else 16)
    options.warmup = options.warmup or (2 if options.quick else 4)
    if "RANK" in os.environ:
        run_rank(options)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        gpu = options.accelerator == "gpu"
        sys.exit(launcher.launch("benchmarks.straggler", sys.argv[1:], options.ranks, gpu=gpu))


# ---- on a rank --------------------------------------------------------------------------------------------------------
def run_rank(options: argparse.Namespace) -> None:
    """Train in all modes as one of the ranks; rank 0 reports."""
    os.environ.setdefault("NODE_RANK", os.environ["RANK"])
    os.environ.setdefault("LOCAL_RANK", "0")
    rank, options.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # Lightning deletes them after a fit
    from lightning_freescale.balance import Planner

    rank_setup.silence_libraries()
    reserved_sms.use(torch.device("cuda" if options.accelerator == "gpu" else "cpu"))
    cache = Path(tempfile.gettempdir()) / "freescale-straggler"
    if options.accelerator == "gpu":
        train(options, cache, "off")  # compiles the kernels, so that the first measured mode is not slower
    runs: dict[str, ModeFigures] = {"off": train(options, cache, "off")}
    sums, seconds = runs["off"].sums, runs["off"].seconds
    prior = runs["off"].cost_model
    fitted = prior.fit(sums.reshape(-1, 4), seconds.ravel())  # from gathered values: the same bits on every rank
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
        "straggler": [mode_row(name, found, runs["off"]) for name, found in runs.items()],
        "cost model": [*fit_errors(prior, sums, seconds), *filter(None, [runs["fixed, fitted online"].learnt])],
        "exchange": exchange_row(runs["fixed, by exchange"]),
    }
    device = torch.cuda.get_device_name() if options.accelerator == "gpu" else None
    report.publish(
        options,
        report.head("straggler", device and f"{device} as {options.ranks} ranks: {reserved_sms.describe()}") | results,
        {
            f"Measured on {sums.shape[1]} ranks, {len(seconds)} steps per mode": results["straggler"],
            COST_TITLE: results["cost model"],
            "Exchange of samples between ranks, per step": [results["exchange"]],
        },
    )


class ModeFigures:
    """What was measured with one balancing mode, equal on every rank.

    Attributes:
        seconds: ``[steps, ranks]`` compute.
        sums: ``[steps, ranks, 4]`` sums over the samples, see ``CostModel.sums``.
        iteration: seconds of a whole step.
        cost_model: cost model from the model's FLOPs.
        stats: statistics of the sample exchange on rank 0 in the measured steps.
        learnt: the cost model fitted online; ``None`` with one rank.
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
        """Seconds that a rank waits for the slowest rank, mean over steps and ranks."""
        return float((self.seconds.max(axis=1, keepdims=True) - self.seconds).mean())


def train(
    options: argparse.Namespace, cache: Path, balance: Any, exchange: Any = "off", online: bool = False
) -> ModeFigures:
    """Train ``warmup + steps`` steps, with ``online`` twice. A collective.

    Args:
        balance: balancing mode or planner of the data module: samples are assigned to ranks when they are loaded.
        exchange: balancing mode or planner of the strategy: samples are exchanged between ranks.
        online: fit the costs while training.
    """
    import lightning.pytorch as pl
    import torch.distributed as dist

    import lightning_freescale as fs
    from benchmarks.harness.lightning_trainer import plain_trainer
    from lightning_freescale.balance import CostModel

    world = options.ranks
    os.environ.update(WORLD_SIZE=str(world))
    steps = options.warmup + options.steps
    pl.seed_everything(0, verbose=False)
    data = _data_module(options, cache, balance)
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
    return ModeFigures(
        np.array([part[0] for part in gathered]).T,
        np.array([part[1] for part in gathered]).transpose(1, 0, 2),
        shared[0],
        CostModel(*model.cost_coefficients()),
        shared[1],
        shared[2],
    )


def _data_module(options: argparse.Namespace, cache: Path, balance: Any) -> Any:
    """Log-normal histories for ``warmup + steps`` global batches, always in the same order."""
    import lightning_freescale as fs

    scale = min(1.0, options.max_history / 21_000)  # keeps the shape of the distribution for shorter histories
    return fs.SeqRecDataModule(
        batch_size=options.batch_size,
        max_history=options.max_history,
        balance=balance,
        num_negatives=options.negatives,
        shuffle=False,
        drop_last=True,
        cache_dir=cache,
        synthetic={
            "users": options.ranks * options.batch_size * (options.warmup + options.steps),
            "items": options.items,
            "mean_length": float(np.exp(7.3 + 1.2**2 / 2) * scale),
            "sigma": 1.2,
            "max_length": options.max_history + 1,
        },
    )


def timed_hstu() -> Any:
    """A class that measures its compute. It is made in a function, because the launcher does not need its slow imports."""
    from lightning_freescale.balance import CostModel
    from lightning_freescale.balance.sample_sizes import sample_sizes
    from lightning_freescale.batch.seq_batch import HISTORY
    from lightning_freescale.models import HSTU

    class TimedHSTU(HSTU):
        """Measures the time from the arrival of the histories' rows to their gradient."""

        def on_train_start(self) -> None:
            self.spans: list[tuple[Any, Any]] = []
            self.batches: list[Any] = []

        def encode(self, embedded: Any, batch: Any) -> Any:
            rows = embedded[HISTORY].values()
            start = timestamp(rows.device)
            rows.register_hook(lambda gradient: self.spans.append((start, timestamp(gradient.device))))
            self.batches.append(batch)
            return super().encode(embedded, batch)

        def measured(self) -> tuple[list[float], list[np.ndarray]]:
            """Seconds and sums of every step."""
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            host = [batch.to(torch.device("cpu")) for batch in self.batches]
            return [between(*span) for span in self.spans], [CostModel().sums(*sample_sizes(batch)) for batch in host]

    return TimedHSTU


def timestamp(device: torch.device) -> Any:
    """A time stamp of the device: an event on CUDA, CPU time of this thread otherwise."""
    if device.type != "cuda":
        return time.thread_time()  # not wall time: ranks and other processes share the cores
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Seconds between two time stamps."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def window_of(first: int, last: int) -> Any:
    """A callback that measures the time from the start of step ``first`` to the end of step ``last - 1``."""
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
                if (online := trainer.strategy._balancer.cost_fit) is not None:
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
def mode_row(name: str, run: ModeFigures, off: ModeFigures) -> Row:
    """Figures of one balancing mode."""
    slowest = float(run.seconds.max(axis=1).mean())
    return {
        "balance": name,
        "compute ms": 1e3 * float(run.seconds.mean()),
        "slowest ms": 1e3 * slowest,
        "iteration ms": 1e3 * run.iteration,
        "idle ms": 1e3 * run.idle,
        "straggler %": 100 * run.idle / run.iteration,
        "of slowest %": 100 * run.idle / slowest,
        "times less": off.idle / run.idle if run.idle else 1.0,  # a single rank never waits
    }


def fit_errors(prior: Any, sums: np.ndarray, seconds: np.ndarray) -> list[Row]:
    """Median relative error on odd steps of the fit to even steps, and of the FLOPs scaled to the mean time of even steps."""
    even, odd = (np.s_[::2], np.s_[1::2])
    train, test = ((sums[part].reshape(-1, 4), seconds[part].ravel()) for part in (even, odd))
    fitted = prior.fit(*train)
    return [
        {"cost": name, **model.state_dict(), "error %": 100 * model.error(*test)}
        for name, model in {"FLOPs, scaled": prior.in_unit_of(*train), "fitted": fitted}.items()
    ]


def exchange_row(run: ModeFigures) -> Row:
    """Figures of the sample exchange, per step."""
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
