"""Trains HSTU with the Trainer, with synchronous and with prioritized exchange. ``test_cluster.py`` starts each rank.

Rank 0 prints one JSON line: for each run the losses, the ms of a step, the validation metrics, whether a checkpoint was written,
how many batches were planned in the step before, the limit of NCCL's CTAs for exclusive rows, and the peak memory. A rank that
makes no progress prints what it waits for, and ends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

import lightning_freescale as fs
from benchmarks.harness.lightning_trainer import plain_trainer
from benchmarks.harness.rank_setup import use_device
from lightning_freescale.models import HSTU
from lightning_freescale.models.layer_graphs.registry import plans_of
from lightning_freescale.transport.groups import NCCL_CTAS
from tests.gpu.sleeping_waits import sleep_in_waits
from tests.gpu.stall_watch import LaunchNotes, StallWatch, keep_transfers

NODES = int(os.environ.get("WORLD_SIZE", "1"))  # Lightning removes the variable after a run
RANK = int(os.environ.get("RANK", "0"))
STALL_SECONDS = 200.0  # The first step may compile kernels, while other tests do so, too.
LATER_STALL_SECONDS = 60.0  # after the first training


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.times: list[float] = []
        self.most_ctas: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        groups = trainer.strategy._exchange_mode._groups
        if groups is not None and dist.get_backend(groups.exclusive) == "nccl":
            self.most_ctas = groups.exclusive._get_backend(torch.device("cuda")).options.config.max_ctas

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def fit(
    prioritize: bool, steps: int, optimizer: str, folder: str, transport: Any, watch: StallWatch, graphs: bool = True
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    data = fs.SeqRecDataModule(
        "synthetic",
        batch_size=32,
        max_history=1000,
        balance="off",
        num_negatives=32,
        cache_dir=folder,
        synthetic={"users": 6000, "items": 50_000, "mean_length": 300, "max_length": 1000},
    )
    sizes = {"embedding_dim": 128, "num_layers": 3, "num_heads": 4}
    model = HSTU(num_items=data.num_items, max_history=1000, **sizes, cuda_graphs=graphs)
    strategy = fs.FreeScaleStrategy(
        balance="off",
        prioritize=prioritize,
        transport=transport,
        embedding_optimizer={"optimizer": optimizer, "lr": 0.01},
    )
    recorder = Recorder()
    trainer = plain_trainer(
        strategy,
        NODES,
        cuda=True,
        max_steps=steps,
        limit_val_batches=2,
        val_check_interval=steps // 2,
        check_val_every_n_epoch=None,
        callbacks=[recorder, watch],
    )
    trainer.fit(model, datamodule=data)
    path = os.path.join(folder, f"{optimizer}-{prioritize}.ckpt")
    trainer.save_checkpoint(path)
    hr = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
    half = len(recorder.times) // 2
    seconds = (recorder.times[-1] - recorder.times[half]) / (len(recorder.times) - 1 - half)
    return {
        "losses": [float(loss) for loss in recorder.losses],
        "ms": seconds * 1e3,
        "val": hr,
        "checkpoint": os.path.exists(path),
        "planned": plans_of[model.layers[0]].used,
        "most_ctas": recorder.most_ctas,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def start_watch() -> StallWatch:
    """Watch this rank from its start on."""
    sleep_in_waits()
    use_device("cuda")
    keep_transfers()
    notes = LaunchNotes()
    notes.watch_hstu()
    return StallWatch(STALL_SECONDS, notes)


def main() -> None:
    watch = start_watch()
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    folder = os.environ.get("FOLDER") or tempfile.gettempdir()
    results = {"synchronous": fit(False, steps, "adam", folder, "nccl", watch)}
    watch.limit(LATER_STALL_SECONDS)
    results |= {transport: fit(True, steps, "adam", folder, transport, watch) for transport in ("nccl", "host")}
    os.environ[NCCL_CTAS] = "1"
    results["nccl, 1 CTA"] = fit(True, steps, "adam", folder, "nccl", watch)
    results["sms"] = torch.cuda.get_device_properties("cuda").multi_processor_count
    if RANK == 0:
        print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
