"""Trains HSTU with ``fit_costs`` on a GPU. ``test_cluster.py`` starts each rank.

Rank 0 prints one JSON line: for each variant the cost model of every rank, its error, the losses of all steps, and bytes on the
GPU when the training begins and at most.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

import lightning_freescale as fs
from benchmarks.harness.gpu_cluster import reserved_sms
from benchmarks.harness.lightning_trainer import plain_trainer
from lightning_freescale.balance import CostModel, Planner
from lightning_freescale.models import HSTU

NODES = int(os.environ.get("WORLD_SIZE", "1"))  # Lightning removes the variable after a run
RANK = int(os.environ.get("RANK", "0"))
# As if attention were the only cost. A few histories are long, and this model expects much longer steps with them. In truth the
# linear layers and the loss take most of the time. So the model is wrong by more than 10% in half of the steps, and a fit is
# better beyond any noise. With lengths that differ less, the noise decides.
WRONG = CostModel(linear=0.0, quadratic=1.0)
MEAN_LENGTH, SIGMA, MAX_HISTORY = 100, 1.5, 2048
BATCH_SIZE, NEGATIVES = 128, 64
EVERY = 8  # steps between two fits
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {"source": "off", "balance": "off", "prioritize": False, "fit_costs": False},
    "source": {"source": Planner("fixed", WRONG), "balance": "off", "prioritize": False, "fit_costs": EVERY},
    "source, prioritized": {
        "source": Planner("fixed", WRONG),
        "balance": "off",
        "prioritize": True,
        "fit_costs": EVERY,
    },
    "exchange, prioritized": {
        "source": "off",
        "balance": Planner("fixed", WRONG),
        "prioritize": True,
        "fit_costs": EVERY,
    },
}


class Recorder(pl.Callback):
    """Records the loss and the number of predicted positions of every step, on the device, the fitted cost model, and memory."""

    def __init__(self) -> None:
        self.totals: list[torch.Tensor] = []
        self.learnt: dict[str, float] = {}
        self.bytes = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        tokens = pl_module.num_predicted(batch).float()
        self.totals.append(torch.stack([outputs["loss"].detach().float() * tokens, tokens]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if (cost_fit := trainer.strategy._balancer.cost_fit) is not None:
            self.learnt = {**cost_fit.planner.cost_model.state_dict(), "error": cost_fit.error}


def fit(steps: int, folder: str, source: Any, **options: Any) -> dict[str, Any]:
    os.environ.update(WORLD_SIZE=str(NODES), RANK=str(RANK))
    pl.seed_everything(3, verbose=False)
    data = fs.SeqRecDataModule(
        "synthetic",
        batch_size=BATCH_SIZE,
        max_history=MAX_HISTORY,
        balance=source,
        num_negatives=NEGATIVES,
        cache_dir=folder,
        synthetic={
            "users": BATCH_SIZE * NODES * steps,
            "items": 50_000,
            "mean_length": MEAN_LENGTH,
            "sigma": SIGMA,
            "max_length": MAX_HISTORY,
        },
    )
    model = HSTU(num_items=data.num_items, max_history=MAX_HISTORY, embedding_dim=512, num_layers=4, num_heads=4)
    recorder = Recorder()
    trainer = plain_trainer(fs.FreeScaleStrategy(**options), NODES, cuda=True, max_steps=steps, callbacks=[recorder])
    trainer.fit(model, datamodule=data)
    totals = torch.stack(recorder.totals)
    dist.all_reduce(totals)
    learnt: list[Any] = [None] * NODES
    dist.all_gather_object(learnt, recorder.learnt)
    return {
        "learnt": learnt,
        "losses": (totals[:, 0] / totals[:, 1]).tolist(),
        "bytes": recorder.bytes,
        "most_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    folder = os.environ.get("FOLDER") or tempfile.gettempdir()
    reserved_sms.use(torch.device("cuda"))
    results = {name: fit(steps, folder, **variant) for name, variant in VARIANTS.items()}
    if RANK == 0:
        print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
