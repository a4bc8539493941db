"""Asynchronous saves on a GPU: the tables are copied beside a backward. ``test_cluster.py`` starts each rank.

The copies come behind a long kernel on their stream, so that the training has to wait for them. Rank 0 prints one JSON line: for
each case, whether the copies of all ranks and saves equal the tables before that backward, bit for bit. In the negative control
the copies begin steps later.
"""

from __future__ import annotations

import json
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_freescale as fs
from benchmarks.harness.lightning_trainer import plain_trainer
from benchmarks.harness.rank_setup import use_device
from benchmarks.harness.training.variants import JobBatches, TrainingJob
from benchmarks.harness.workload import LongTailWorkload
from lightning_freescale.strategy.checkpoints import folder
from lightning_freescale.strategy.checkpoints.device_copy import LateCopies

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, SAVES = 14, (5, 9)
SLEEP_CYCLES = 100_000_000  # longer than a backward of this model
Shards = dict[str, torch.Tensor]


class SavesAndTables(pl.Callback):
    """Saves after some steps, and keeps the tables as they are before the next backward."""

    def __init__(self) -> None:
        self.tables: list[Shards] = []
        self._saved = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._saved = trainer.global_step in SAVES
        if self._saved:
            trainer.save_checkpoint(f"step_{trainer.global_step}.ckpt", weights_only=False)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if self._saved:  # On the stream of the tables, so that the device needs no wait that a training does not have.
            with trainer.strategy.schedule.modules[0].exchange.table_stream.work():
                self.tables.append(shards(module.state_dict()))
            self._saved = False


def shards(state: dict[str, Any]) -> Shards:
    """Copies of this rank's shards of all sharded tensors."""
    sharded = {name: value for name, value in state.items() if hasattr(value, "local_shards")}
    return {name: value.local_shards()[0].tensor.clone() for name, value in sharded.items()}


def run(in_time: bool) -> bool:
    """Train with saves. Return whether they hold what the tables were on this rank."""
    written: list[Shards] = []
    copy, check, save = LateCopies._copy, LateCopies.check, folder.save

    def copy_late(self: LateCopies) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        copy(self)

    LateCopies._copy = copy_late  # type: ignore[method-assign]
    if not in_time:  # The next save or the end of the training begins the copy.
        LateCopies.check = lambda self: None  # type: ignore[method-assign]
        fs.FreeScaleStrategy.copy_tables = lambda self: None  # type: ignore[method-assign]
        fs.FreeScaleStrategy._note_update = lambda self, kind: None  # type: ignore[method-assign]
    folder.save = lambda path, sharded, *_: written.append(shards(sharded["state_dict"]))
    os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning removes the variable after a run
    workload = LongTailWorkload(samples=64, longest=512, rows=200_000, negatives=8)
    model = {"embedding_dim": 64, "num_layers": 2, "num_heads": 2}
    job = TrainingJob(torch.device("cuda", 0), RANK, RANKS, workload, model, STEPS, 60.0)
    saves = SavesAndTables()
    strategy = fs.FreeScaleStrategy(checkpoint="sharded", prioritize=True, transport="host", timeout=60.0)
    options: dict[str, Any] = {"max_steps": STEPS, "callbacks": [saves], "plugins": [AsyncCheckpointIO()]}
    plain_trainer(strategy, RANKS, True, **options).fit(job.make_model(job.timestamps("")), JobBatches(job))
    LateCopies._copy, LateCopies.check, folder.save = copy, check, save  # type: ignore[method-assign]
    assert len(written) == len(saves.tables) == len(SAVES)
    assert all(shard.numel() for tables in saves.tables for shard in tables.values())
    return all(
        torch.equal(table.cpu(), found[name])
        for tables, found in zip(saves.tables, written, strict=True)
        for name, table in tables.items()
    )


if __name__ == "__main__":
    use_device("cuda")
    dist.init_process_group("nccl")
    results = {}
    for in_time in (True, False):
        equal: list[Any] = [None] * RANKS
        dist.all_gather_object(equal, run(in_time))
        results["in time" if in_time else "late"] = equal
    if RANK == 0:
        print("RESULT " + json.dumps(results), flush=True)
    dist.destroy_process_group()
