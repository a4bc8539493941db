"""``python -m tests.soak --steps 10000``: a long training with validations, saves and reloads, in which nothing may grow.

Every 500 steps the ranks validate, save an incremental checkpoint asynchronously, and note what their processes hold and how fast
they were. From time to time the Trainer ends, and a new one resumes from the last checkpoint in the same process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_freescale as fs
from benchmarks.harness.report import head
from tests import toy
from tests.ranks import run_ranks

RANKS = 2
BATCH = 4
MAX_GROWTH_MIB = 48  # The allocator's pools and the rendezvous store grow a little.


def held() -> dict[str, int]:
    """What this process holds at the moment."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        # Only what this process maps: other processes use the folder, too.
        "shared memory": Path("/proc/self/maps").read_text().count("/dev/shm/"),
        "process groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "MiB": resident_pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


class Notes(pl.Callback):
    """Notes what the process holds, and the steps per second, after every interval."""

    def __init__(self, every: int):
        self.every, self.found = every, []  # type: ignore[var-annotated]
        self._begin: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, index: int) -> None:
        module.seen.clear()  # The toy model keeps a record for other tests.
        module.losses.clear()
        if trainer.global_step % self.every == self.every // 2:  # Between two saves.
            now = time.monotonic()
            if self._begin is not None:
                self.found.append({"step": trainer.global_step, "rate": self.every / (now - self._begin), **held()})
            self._begin = time.monotonic()

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._begin = None  # The time of a reload is no time of steps.


def train(rank: int, steps: int, every: int, reload: int, folder: str) -> list[dict[str, Any]]:
    """Train ``steps`` steps, with a new Trainer every ``reload`` steps. Return the notes."""
    pl.seed_everything(1, verbose=False)
    notes = Notes(every)
    for end in range(reload, steps + reload, reload):
        saves = pl.callbacks.ModelCheckpoint(
            dirpath=folder, every_n_train_steps=every, monitor="step", mode="max", save_top_k=2, save_last=True
        )
        trainer = toy.trainer(
            fs.FreeScaleStrategy(checkpoint=fs.Incremental(full_every=4), prioritize=True, timeout=60),
            RANKS,
            max_epochs=-1,
            max_steps=min(end, steps),
            val_check_interval=every,
            check_val_every_n_epoch=None,
            limit_val_batches=2,
            enable_checkpointing=True,
            callbacks=[saves, notes],
            plugins=[AsyncCheckpointIO()],
        )
        trainer.fit(toy.Model(), toy.loader(512, BATCH), toy.loader(8, BATCH, shuffle=False), ckpt_path="last")
        assert trainer.global_step == min(end, steps)
    return notes.found


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The growth from the second quarter of the notes to the last one, and the change of the rate."""
    quarter = max(len(found) // 4, 1)
    early, late = found[quarter : 2 * quarter], found[-quarter:]

    def median(part: list[dict[str, Any]], name: str) -> float:
        return statistics.median(note[name] for note in part)

    names = [name for name in found[0] if name not in ("step", "rate")]
    return {
        "grown": {name: median(late, name) - median(early, name) for name in names},
        "steps_per_second": median(late, "rate"),
        "rate_change_percent": 100 * (median(late, "rate") / median(early, "rate") - 1),
    }


def problems(summary: dict[str, Any]) -> list[str]:
    """What must not grow and did. The rate is reported only, because other processes of the machine change it."""
    return [
        f"{name}: {grown:+g}"
        for name, grown in summary["grown"].items()
        if grown > (MAX_GROWTH_MIB if name == "MiB" else 0)
    ]


def soak(steps: int, every: int, reload: int) -> list[dict[str, Any]]:
    """For each rank the summary, with its problems."""
    with tempfile.TemporaryDirectory() as folder:
        notes = run_ranks(train, RANKS, (steps, every, reload, folder), timeout=120 + steps)
    return [
        {"rank": rank, **(found := summarise(note)), "problems": problems(found)} for rank, note in enumerate(notes)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="steps between two saves, validations and notes")
    parser.add_argument("--reload", type=int, default=2500, help="steps after which a new Trainer resumes")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    if options.steps < 3 * options.every:
        parser.error(
            f"--steps {options.steps}: needs at least three notes, one after each --every {options.every} steps"
        )
    begin = time.monotonic()
    rows = soak(options.steps, options.every, options.reload)
    result = {**head("soak", script="-m tests.soak"), "steps": options.steps, "ranks": RANKS, "rows": rows}
    result["minutes"] = (time.monotonic() - begin) / 60
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
