"""Trains HSTU on raw ids with the Trainer, with both exchanges, validation, a checkpoint and its export.

``test_cluster.py`` starts each rank. Rank 0 prints one JSON line: for each run the losses, the validation metrics and what the
checkpoint has, and how many ids and ages differ between the two runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.parquet as pq
from torch import Tensor

import lightning_freescale as fs
from benchmarks.harness.lightning_trainer import plain_trainer
from benchmarks.harness.rank_setup import use_device
from lightning_freescale.models import HSTU
from tests.gpu.sleeping_waits import sleep_in_waits

NODES = int(os.environ.get("WORLD_SIZE", "1"))  # Lightning removes the variable after a run
RANK = int(os.environ.get("RANK", "0"))
ROWS = 1 << 13


class CatalogueHSTU(HSTU):
    def __init__(self, **options: Any):
        super().__init__(ROWS, **options)
        ids = fs.ZeroCollision(buckets=64, max_probe=32, evict="ttl", ttl=3, insert=["history"], std=0.02)
        self.embedding: Any = fs.zero_collision(self.embedding, {"item": ids})


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())


def fit(prioritize: bool, steps: int, folder: Path, cuda: bool) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    data = fs.SeqRecDataModule(
        "synthetic",
        batch_size=16,
        max_history=200,
        balance="off",
        num_negatives=16,
        ids="raw",
        cache_dir=folder,
        synthetic={"users": 2000, "items": 20_000, "mean_length": 60, "max_length": 200},
    )
    model = CatalogueHSTU(max_history=200, embedding_dim=64, num_layers=2, num_heads=2)
    strategy = fs.FreeScaleStrategy(
        balance="off", prioritize=prioritize, embedding_optimizer={"optimizer": "rowwise_adagrad", "lr": 0.01}
    )
    recorder = Recorder()
    trainer = plain_trainer(
        strategy,
        NODES,
        cuda=cuda,
        max_steps=steps,
        limit_val_batches=2,
        val_check_interval=steps // 2,
        check_val_every_n_epoch=None,
        callbacks=[recorder],
    )
    trainer.fit(model, datamodule=data)
    path = folder / f"prioritized-{prioritize}.ckpt"
    trainer.save_checkpoint(path)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
    return {"losses": [float(loss) for loss in recorder.losses], "val": metrics}


def exported(folder: Path, prioritize: bool) -> tuple[dict[str, Tensor], int]:
    """Identities and ages of the checkpoint, and the number of ids in the exported file."""
    weights = fs.export(folder / f"prioritized-{prioritize}.ckpt", folder / f"{prioritize}.pt")
    integers = {key: value.cpu() for key, value in weights.items() if "_hash_zch" in key}
    return integers, pq.read_table(folder / f"{prioritize}.item.ids.parquet").num_rows


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    cuda = sys.argv[2:] != ["cpu"]
    if cuda:
        sleep_in_waits()
        use_device("cuda")
    folder = Path(os.environ.get("FOLDER") or tempfile.gettempdir())
    results: dict[str, Any] = {str(mode): fit(mode, steps, folder, cuda) for mode in (True, False)}
    if RANK == 0:
        (a, ids), (b, _) = (exported(folder, mode) for mode in (True, False))
        assert a.keys() == b.keys()
        results |= {"ids": ids, "differ": sum(int((a[key] != b[key]).sum()) for key in a)}
        print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
