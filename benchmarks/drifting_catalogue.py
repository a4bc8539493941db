"""A catalogue that drifts: HR@10 with zero-collision ids, with ``id % rows`` in a table of the same size, and without a limit.

    python -m benchmarks.drifting_catalogue [FILE] [--quick] [--json] [--output FILE]

Runs on one core. In the last half of the steps, every batch is first evaluated and then trained on. The figures are means over
these steps and over the seeds, and the noise is the standard error over the seeds. A young item came at most 10 steps before.

Without FILE: 768 items are on sale, 12 of each kind, and a session mostly looks at items of one kind. In every step some
items are replaced by others of their kind, with new 64-bit ids, and the old ones are never seen again. The last item of each
session is ranked among all items on sale.

With FILE, a file of events with times: the events are played in time order, once (``harness/time_order.py``). Each event of a
session is ranked among all items that came before. The table has 1.33 rows for each item that is live: that has been seen in
the last 25 steps. An item that comes back later begins anew.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_freescale as fs
from benchmarks.harness import report
from benchmarks.harness.lightning_trainer import plain_trainer
from benchmarks.harness.rank_setup import silence_libraries
from benchmarks.harness.time_order import Step, most_live_items, play_sessions, read_sessions
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models import HSTU
from lightning_freescale.models.norm import unit_rows

PLACES, KIND, ROWS = 768, 12, 1024  # items on sale, of one kind; a load of 0.75, without the items that have left
NEW_ITEMS = 4  # items that are replaced in each step
SESSIONS, EVENTS, DRAWN = 32, 12, 48  # of a batch: sessions, events of each, sampled negatives of each
YOUNG, TTL, TTL_OF_FILE = 10, 12, 50  # steps
UNLIMITED, ZERO_COLLISION, LRU, MODULO = (
    "a row for every id",
    "zero-collision ids",
    'the same, evict="lru"',
    "id % rows",
)


def play(steps: int, seed: int) -> list[Step]:
    """All steps, in time order."""
    chance = np.random.default_rng(seed)
    shelf, born = chance.integers(0, 2**62, PLACES), np.full(PLACES, -steps)
    played = []
    for step in range(steps):
        changed = chance.choice(PLACES, NEW_ITEMS, replace=False)
        shelf[changed], born[changed] = chance.integers(0, 2**62, NEW_ITEMS), step
        first = chance.integers(0, PLACES // KIND, (SESSIONS, 1)) * KIND
        same_kind = chance.random((SESSIONS, EVENTS)) < 0.9
        anything = chance.integers(0, PLACES, (SESSIONS, EVENTS))
        places = np.where(same_kind, first + chance.integers(0, KIND, (SESSIONS, EVENTS)), anything)
        drawn = chance.integers(0, PLACES, (SESSIONS, DRAWN))
        values = torch.from_numpy(np.concatenate([shelf[places[:, :-1]].ravel(), shelf[drawn].ravel()]))
        lengths = torch.tensor([EVENTS - 1] * SESSIONS + [DRAWN] * SESSIONS)
        features = KeyedJaggedTensor([HISTORY, NEGATIVES], values, lengths=lengths, stride=SESSIONS)
        times = torch.arange(EVENTS - 1).repeat(SESSIONS)
        played.append(
            Step(
                SeqBatch(features, times, None),
                torch.arange(1, SESSIONS + 1) * (EVENTS - 1) - 1,
                torch.from_numpy(places[:, -1]),
                torch.from_numpy(shelf.copy()),
                torch.from_numpy(step - born),
            )
        )
    return played


class Evaluated(HSTU):
    """Evaluates each batch of the last half of the steps before it trains on it.

    Args:
        variant: how ids get rows.
        steps: all steps, of which step ``batch_idx`` belongs to batch ``batch_idx``.
        rows: rows of the table, unless every id has one.
        ttl: time to live of zero-collision ids, in steps.
    """

    def __init__(self, variant: str, steps: list[Step], seed: int, rows: int = ROWS, ttl: int = TTL):
        numbers = torch.cat([step.shelf for step in steps] + [step.batch.features.values() for step in steps]).unique()
        super().__init__(
            len(numbers) if variant == UNLIMITED else rows,
            embedding_dim=32,
            num_layers=1,
            max_history=EVENTS,
            lr=3e-3,
        )
        self.variant, self.steps, self.numbers, self.rows = variant, steps, numbers, rows
        self.hits: list[
            tuple[Tensor, Tensor]
        ] = []  # by step: whether the target is among the first ten, whether it is young
        if variant == ZERO_COLLISION:
            ids = fs.ZeroCollision(buckets=1, evict="ttl", ttl=ttl, insert=[HISTORY], std=0.02, seed=seed)
            self.embedding: Any = fs.zero_collision(self.embedding, {"item": ids})

    def rows_of(self, ids: Tensor) -> Tensor:
        """What the table gets for ids."""
        if self.variant == UNLIMITED:
            return torch.searchsorted(self.numbers, ids)
        return ids % self.rows if self.variant == MODULO else ids

    def training_step(self, batch: SeqBatch, batch_idx: int) -> Tensor:
        if batch_idx >= len(self.steps) // 2:
            with torch.no_grad():
                self._evaluate_step(batch, self.steps[batch_idx])
        return super().training_step(batch, batch_idx)

    def mapped(self, batch: SeqBatch) -> SeqBatch:
        """The batch as the table gets it."""
        features = batch.features
        mapped = KeyedJaggedTensor(
            features.keys(), self.rows_of(features.values()), lengths=features.lengths(), stride=features.stride()
        )
        return SeqBatch(mapped, batch.timestamps, None)

    def _evaluate_step(self, batch: SeqBatch, step: Step) -> None:
        outputs = self.encode(self.embedding(batch.features), batch)[step.positions]
        lengths = torch.tensor([len(step.shelf), 0])
        shelf = KeyedJaggedTensor([HISTORY, NEGATIVES], self.rows_of(step.shelf), lengths=lengths, stride=1)
        scores = outputs @ unit_rows(self.embedding(shelf)[HISTORY].values()).mT
        target = scores.gather(1, step.targets[:, None])
        better, equal = (scores > target).sum(1), (scores == target).sum(1) - 1
        self.hits.append((better + equal / 2 < 10, step.age[step.targets] <= YOUNG))


def hit_rates(variant: str, played: list[Step], seed: int, rows: int = ROWS, ttl: int = TTL) -> tuple[float, float]:
    """HR@10 in percent in the last half of the steps, of all targets and of young ones."""
    pl.seed_everything(seed, verbose=False)
    model = Evaluated(variant, played, seed, rows, ttl)
    batches = [model.mapped(step.batch) for step in played]
    loader: DataLoader = DataLoader(batches, batch_size=None, shuffle=False)  # type: ignore[arg-type]
    strategy = fs.FreeScaleStrategy(prioritize=False, balance="off", embedding_optimizer={"lr": 0.05})
    plain_trainer(strategy, ranks=1, cuda=False, max_epochs=1, use_distributed_sampler=False).fit(model, loader)
    hits, young = (torch.cat(parts) for parts in zip(*model.hits, strict=True))
    return 100 * hits.float().mean().item(), 100 * hits[young].float().mean().item()


def summarize(rates: Mapping[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    rows = []
    for variant, found in rates.items():
        values = np.array(found)  # [seeds, 2]
        noise = values.std(axis=0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.full(2, np.nan)
        rows.append(
            {
                "ids": variant,
                "HR@10 %": float(values[:, 0].mean()),
                "noise": float(noise[0]),
                "young items, HR@10 %": float(values[:, 1].mean()),
                "noise of these": float(noise[1]),
            }
        )
    return rows


def synthetic_results(quick: bool) -> dict[str, Any]:
    steps, seeds = (40, 1) if quick else (600, 3)
    rates = {
        variant: [hit_rates(variant, play(steps, seed), seed) for seed in range(seeds)]
        for variant in (UNLIMITED, ZERO_COLLISION, MODULO)
    }
    shape = {"places": PLACES, "rows": ROWS, "ids": steps * NEW_ITEMS + PLACES, "steps": steps, "ttl": TTL}
    return shape | {"seeds": seeds, "quality": summarize(rates)}


def file_results(path: Path, quick: bool) -> dict[str, Any]:
    sessions = read_sessions(path, EVENTS)
    if quick:
        sessions = sessions[:1000]
    seeds = 1 if quick else 3
    live = most_live_items(sessions, SESSIONS * TTL_OF_FILE)
    rows = -(-4 * live // 3)
    rates: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        played = play_sessions(sessions, SESSIONS, DRAWN, SESSIONS * TTL_OF_FILE, seed)
        for variant in (UNLIMITED, ZERO_COLLISION, MODULO):
            rates.setdefault(variant, []).append(hit_rates(variant, played, seed, rows, TTL_OF_FILE))
    shape = {"file": path.name, "places": live, "rows": rows, "ids": len(np.unique(np.concatenate(sessions)))}
    return shape | {"steps": len(played), "ttl": TTL_OF_FILE, "seeds": seeds, "quality": summarize(rates)}


def main() -> None:
    parser = report.make_parser(__doc__, quick="one seed, few steps")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a file of events with times")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # Lightning reads it
    silence_libraries()
    found = file_results(arguments.file, arguments.quick) if arguments.file else synthetic_results(arguments.quick)
    machine = f"one of {os.cpu_count()} cores ({platform.machine()})"
    title = f"{found['places']} live items, {found['rows']} rows, {found['steps']} steps, {found['ids']:,} ids in all"
    report.publish(arguments, report.head("drifting_catalogue", machine) | found, {title: found["quality"]})


if __name__ == "__main__":
    main()
