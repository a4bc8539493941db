"""A DLRM: 13 dense features and 26 bags, trained with both strategies, and the reports side by side.

The script makes data of the shape of Criteo's click logs: dense numbers, and 26 categorical features with tables of very
different sizes. The label depends on some of them, so there is something to learn.

    python examples/dlrm.py                          # two processes on the CPU
    python examples/dlrm.py --steps 200 --batch-size 256

On a CPU the exchange and the computation share the same cores, so the time of a step says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import lightning_freescale as fs

DENSE, DIM = 13, 16
CATEGORIES = [f"c{number}" for number in range(26)]
ROWS = {name: 20 * 2 ** (number % 10) for number, name in enumerate(CATEGORIES)}  # 20 to 10,240 rows


@dataclass
class ClickBatch:
    """What the DataLoader yields."""

    dense: Tensor  # [B, 13]
    features: KeyedJaggedTensor  # ids of 26 features
    clicked: Tensor  # [B], 0 or 1


class Clicks(Dataset):
    """Synthetic clicks. Small ids are frequent, as in real logs. Some features have several ids."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, list[Tensor], float]:
        draw = torch.Generator().manual_seed(index)
        dense = torch.randn(DENSE, generator=draw)
        ids = []
        for number, rows in enumerate(ROWS.values()):
            count = 1 if number % 5 else int(torch.randint(0, 4, (), generator=draw))
            ids.append((torch.rand(count, generator=draw).pow(3) * rows).long())
        score = dense[0] + (1.0 if int(ids[1][0]) % 2 else -1.0) + (1.0 if int(ids[7][0]) % 3 else -1.0)
        return dense, ids, float(score > 0)


def collate(samples: list[tuple[Tensor, list[Tensor], float]]) -> ClickBatch:
    dense, ids, clicked = zip(*samples, strict=True)
    by_feature = [of_sample[number] for number in range(len(CATEGORIES)) for of_sample in ids]
    lengths = torch.tensor([len(part) for part in by_feature])
    features = KeyedJaggedTensor(CATEGORIES, torch.cat(by_feature), lengths=lengths)
    return ClickBatch(torch.stack(dense), features, torch.tensor(clicked))


class DLRM(L.LightningModule):
    """Pairwise dot products of the 26 bags and the dense features, and a small network over them."""

    pairs: Tensor  # [2, number of pairs]

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
                for name, rows in ROWS.items()
            ]
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM))
        vectors = len(CATEGORIES) + 1
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        self.top = nn.Sequential(nn.Linear(DIM + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def forward(self, batch: ClickBatch) -> Tensor:
        dense = self.bottom(batch.dense)
        pooled = self.bags(batch.features).values().view(len(dense), len(CATEGORIES), DIM)
        vectors = torch.cat([dense[:, None], pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)

    def training_step(self, batch: ClickBatch, batch_idx: int) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch.clicked)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class StepReport(L.Callback):
    """Notes when steps end, how many pieces of bags were exchanged, and how many of them waited for the batch before."""

    def __init__(self) -> None:
        self.counts = (0, 0)
        self.ends: list[float] = []

    def milliseconds(self) -> float:
        """The median time of a step. The first steps, which create kernels and connections, do not count much in it."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends)) * 1e3

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        schedule = trainer.strategy.schedule  # type: ignore[attr-defined]
        if schedule is not None:
            stats = schedule.modules[0].exchange.stats
            self.counts = (stats.rows, stats.collisions)


def train(prioritize: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training. Table-wise tables, because row-wise bags over gloo need batches of the same size: see docs/exchange.md."""
    L.seed_everything(0, verbose=False)
    model, report = DLRM(), StepReport()
    strategy = fs.FreeScaleStrategy(
        sharding="table_wise",
        balance="off",
        prioritize=prioritize,
        embedding_optimizer={"optimizer": "rowwise_adagrad", "lr": 0.05},
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=-1,
        max_steps=arguments.steps,
        callbacks=[report],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Clicks(arguments.samples), batch_size=arguments.batch_size, shuffle=True, collate_fn=collate)
    trainer.fit(model, data)
    last = model.losses[-max(1, arguments.steps // 10) :]
    return {
        "rank": trainer.global_rank,
        "losses": model.losses,
        "row": [
            f"{model.losses[0]:.4f}",
            f"{sum(last) / len(last):.4f}",
            f"{report.milliseconds():.1f}",
            f"{report.counts[1] / report.counts[0]:.0%}" if report.counts[0] else "-",
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of each rank")
    parser.add_argument("--samples", type=int, default=20_000)
    options = parser.parse_args()
    results = {"freescale_sync": train(False, options), "freescale": train(True, options)}
    if results["freescale"]["rank"] == 0:
        names = ["strategy", "first loss", "last loss", "ms a step", "bags that wait"]
        rows = [names, *([name, *result["row"]] for name, result in results.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        same = results["freescale"]["losses"] == results["freescale_sync"]["losses"]
        print(f"losses of all {options.steps} steps: {'equal bit for bit' if same else 'different'}")
