"""The work of the host in a step of the exchange: CPU time, Python calls, torch operators and collectives, by part of the step.

    python -m benchmarks.exchange_host_work [--quick] [--json] [--output FILE] [--ranks 2] [--rounds 3]

An HSTU is trained on CPU ranks with batches so small that Python and the dispatch of operators take most of the time. Each round
trains it with the prioritized exchange and with TorchRec's synchronous exchange, in alternating order. "CPU ms" is the time of
the main thread: for each part, the median over the steps of each round, and then over the rounds. Two further trainings with
each exchange count Python calls (of functions written in Python and in C) and torch operators. The counts are means over the
steps. A collective is an operator, too. All figures are those of rank 0.

The parts of a step exclude each other. "exchange" parts are methods of ``ExchangeSchedule`` and of the sharded module. "strategy
hooks" are the other work of the strategy. "input" is the work for the batches ahead. "model" is the training step of the model,
"backward" the autograd engine, which sends gradients too, and "Lightning and optimizer" is all the rest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torchrec.distributed.embedding import EmbeddingCollectionAwaitable, ShardedEmbeddingCollection

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale as fs
from benchmarks.harness import rank_setup, report
from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.host_counters import PythonCalls, TorchOperators
from benchmarks.harness.lightning_trainer import plain_trainer
from lightning_freescale.embedding.gradient_return import GradientReturn
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.scheduled_module import ScheduledModule
from lightning_freescale.models import HSTU
from lightning_freescale.strategy.prefetch import PrefetchLoader

WARM_UP_STEPS = 20
PRIORITIZED, SYNCHRONOUS = "prioritized", "TorchRec, synchronous"
REST = "Lightning and optimizer"
EXCHANGE = ("exchange: begin step", "exchange: forward", "exchange: before backward", "exchange: in backward",
            "exchange: after backward")  # fmt: skip
PARTS = (*EXCHANGE, "strategy hooks", "input", "model", "backward", REST)
HOOKS = ("batch_to_device", "on_train_batch_start", "training_step", "pre_backward", "post_backward")
STRATEGY = type(fs.FreeScaleStrategy())
METHODS: tuple[tuple[Any, str, str], ...] = (
    (ExchangeSchedule, "begin_step", EXCHANGE[0]),
    (ScheduledModule, "forward", EXCHANGE[1]),
    (ShardedEmbeddingCollection, "forward", EXCHANGE[1]),
    (EmbeddingCollectionAwaitable, "_wait_impl", EXCHANGE[1]),
    (ExchangeSchedule, "before_backward", EXCHANGE[2]),
    (GradientReturn, "hand_over", EXCHANGE[3]),
    (ExchangeSchedule, "after_backward", EXCHANGE[4]),
    *((STRATEGY, name, "strategy hooks") for name in (*HOOKS, "backward")),
    (PrefetchLoader, "_fill", "input"),
    (HSTU, "training_step", "model"),
    (HSTU, "backward", "backward"),
)


Charges = Counter[tuple[str, str]]  # what was counted, by counter and part


class StepParts:
    """Charges what counters count to the innermost part of the step that runs.

    Args:
        read: the present values of the counters, by name.
    """

    def __init__(self, read: Callable[[], dict[str, float]]):
        self.read, self.part = read, REST
        self.charged: Charges = Counter()
        self._last = read()

    def enter(self, part: str) -> str:
        """Charge the work so far to the part that ran, and continue with ``part``. Returns the part that ran."""
        for name, value in self.read().items():
            self.charged[name, self.part] += value - self._last[name]  # type: ignore[assignment]
        before, self.part = self.part, part
        self._last = self.read()
        return before

    def take(self) -> Charges:
        """What was charged since the last call, by counter and part."""
        self.enter(self.part)
        taken, self.charged = self.charged, Counter()
        return taken


@contextmanager
def divided_by(parts: StepParts) -> Iterator[None]:
    """Inside, the methods of :data:`METHODS` tell ``parts`` when they begin and end."""
    own = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in METHODS]
    for owner, name, part in METHODS:
        setattr(owner, name, _with_part(getattr(owner, name), part, parts))
    try:
        yield
    finally:
        for owner, name, method in own:
            delattr(owner, name) if method is None else setattr(owner, name, method)


def _with_part(method: Callable[..., Any], part: str, parts: StepParts) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        before = parts.enter(part)
        try:
            return method(*arguments, **options)
        finally:
            parts.enter(before)

    return run


class Steps(pl.Callback):
    """What was charged in each step after the warm-up."""

    def __init__(self, parts: StepParts):
        self.parts, self.steps = parts, list[Charges]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        taken = self.parts.take()
        if batch_idx >= WARM_UP_STEPS:
            self.steps.append(taken)


def train(arguments: argparse.Namespace, side: str, parts: StepParts) -> list[Charges]:
    """Train with one exchange. Returns what was charged in each step."""
    pl.seed_everything(1, verbose=False)
    steps = arguments.steps + WARM_UP_STEPS
    data = fs.SeqRecDataModule(
        batch_size=4,
        max_history=8,
        balance="off",
        num_negatives=4,
        synthetic={"users": 4 * arguments.ranks * (steps + 8), "items": 1000, "min_length": 4, "max_length": 9},
    )
    model = HSTU(data.num_items, embedding_dim=16, num_layers=1, max_history=8)
    strategy = fs.FreeScaleStrategy(balance="off", prioritize=side == PRIORITIZED)
    counted = Steps(parts)
    with divided_by(parts):
        plain_trainer(strategy, arguments.ranks, cuda=False, max_steps=steps, callbacks=[counted]).fit(
            model, datamodule=data
        )
    return counted.steps


def counts(arguments: argparse.Namespace, side: str) -> dict[str, dict[str, float]]:
    """Python calls, operators and collectives of a step, by part."""
    found: dict[str, dict[str, float]] = {}
    for counter in (PythonCalls(), TorchOperators()):
        with counter:
            steps = train(arguments, side, StepParts(counter.read))
        for name in counter.read():
            found[name] = {part: statistics.mean(step[name, part] for step in steps) for part in PARTS}
    return found


def cpu_time(arguments: argparse.Namespace, side: str) -> dict[str, float]:
    """Milliseconds of the main thread in a step, by part."""
    steps = train(arguments, side, StepParts(lambda: {"ms": 1e3 * time.thread_time()}))
    return {part: statistics.median(step["ms", part] for step in steps) for part in PARTS}


def results(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each part of each side, and a sum."""
    times: dict[str, list[dict[str, float]]] = {PRIORITIZED: [], SYNCHRONOUS: []}
    for number in range(arguments.rounds):
        for side in list(times)[:: 1 if number % 2 == 0 else -1]:
            times[side].append(cpu_time(arguments, side))
    rows = []
    for side, rounds in times.items():
        counted = counts(arguments, side)
        of_side: list[dict[str, Any]] = [
            {"side": side, "part": part, "CPU ms": statistics.median(found[part] for found in rounds)}
            | {name: found[part] for name, found in counted.items()}
            for part in PARTS
        ]
        rows += [row for row in of_side if row["Python calls"]]
        for title, summed in (("all exchange parts", EXCHANGE), ("step", PARTS)):
            rows.append({"side": side, "part": title})
            for name in ("CPU ms", *counted):
                rows[-1][name] = sum(row[name] for row in of_side if row["part"] in summed)
            totals = [sum(found[part] for part in summed) for found in rounds]
            rows[-1] |= {"CPU ms, rounds": [round(total, 3) for total in totals]}
    return rows


def main() -> int:
    parser = report.make_parser(__doc__, quick="20 steps, one round")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--steps", type=int, help="counted steps of a training; default 200")
    parser.add_argument("--rounds", type=int, help="default 3")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (20 if arguments.quick else 200)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    if "RANK" not in os.environ:
        return launcher.launch("benchmarks.exchange_host_work", sys.argv[1:], arguments.ranks, gpu=False, timeout=600)
    rank_setup.silence_libraries()
    rank_setup.use_device("cpu")
    rows = results(arguments)
    if int(os.environ["RANK"]) == 0:
        setting = {"ranks": arguments.ranks, "steps": arguments.steps, "rounds": arguments.rounds}
        shown = [{name: value for name, value in row.items() if not name.endswith("rounds")} for row in rows]
        report.publish(
            arguments,
            report.head("exchange_host_work") | setting | {"rows": rows},
            {f"Host work of a step, {arguments.ranks} ranks": shown},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
