"""Your own model: this script uses only the name of the strategy from this package.

The model predicts whether a user buys a candidate item. It has three features in two embedding tables: the items that the user
viewed, the shops that the user visited, and the candidate. The candidate and the viewed items share a table.

    python examples/own_model.py                                      # Lightning starts the second process
    torchrun --standalone --nproc-per-node 2 examples/own_model.py    # torchrun starts both processes
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import lightning_freescale  # noqa: F401 - registers strategy="freescale"

ITEMS, SHOPS, DIM = 400, 40, 32
FEATURES = ["viewed", "candidate", "shops"]


@dataclass
class Batch:
    """What the DataLoader yields."""

    features: KeyedJaggedTensor  # ids of each feature; a sample may have any number of them
    bought: Tensor  # [B], 0 or 1


class Visits(Dataset):
    """Synthetic data: a user has one of ten tastes, views items of that taste (``id % 10``), and buys only such candidates."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[list[Tensor], float]:
        draw = torch.Generator().manual_seed(index)
        taste, other = torch.randint(10, (2,), generator=draw).tolist()
        candidate_taste = taste if index % 2 else other
        count = int(torch.randint(1, 40, (), generator=draw))  # number of views of this user
        viewed = torch.randint(ITEMS // 10, (count,), generator=draw) * 10 + taste
        candidate = torch.randint(ITEMS // 10, (1,), generator=draw) * 10 + candidate_taste
        shops = torch.randint(SHOPS // 10, (count,), generator=draw) * 10 + taste
        return [viewed, candidate, shops], float(candidate_taste == taste)


def collate(samples: list[tuple[list[Tensor], float]]) -> Batch:
    # The ids of all samples of the first feature come first, then those of the second feature, and so on.
    ids = [sample[feature] for feature in range(len(FEATURES)) for sample, _ in samples]
    lengths = torch.tensor([len(part) for part in ids])
    features = KeyedJaggedTensor(FEATURES, torch.cat(ids), lengths=lengths)
    return Batch(features, torch.tensor([bought for _, bought in samples]))


class Shopper(L.LightningModule):
    """Averages the rows of each feature, and feeds them to a small dense network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(  # the strategy finds this module and shards its tables
            tables=[
                EmbeddingConfig(
                    name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["viewed", "candidate"]
                ),
                EmbeddingConfig(name="shop", num_embeddings=SHOPS, embedding_dim=DIM, feature_names=["shops"]),
            ]
        )
        self.head = nn.Sequential(nn.Linear(3 * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.tables(features)  # for each feature: values [sum(lengths), DIM] and lengths [B]
        viewed, candidate, shops = (
            torch.segment_reduce(rows[name].values(), "mean", lengths=rows[name].lengths()) for name in FEATURES
        )
        return self.head(torch.cat([viewed * candidate, shops * candidate, candidate], dim=1)).squeeze(1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch.features), batch.bought)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        right = (self(batch.features) > 0) == (batch.bought > 0.5)
        self.log("accuracy", right.float().mean(), prog_bar=True, sync_dist=True, batch_size=len(right))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)  # updates the head; the tables are updated during backward


if __name__ == "__main__":
    L.seed_everything(0)
    # For GPUs, use accelerator="cuda", devices=8. For other settings of the tables, use
    # strategy=FreeScaleStrategy(embedding_optimizer=...).
    trainer = L.Trainer(strategy="freescale", accelerator="cpu", devices=2, max_epochs=2, log_every_n_steps=10)
    train, test = Subset(Visits(), range(3200)), Subset(Visits(), range(3200, 4000))
    trainer.fit(
        Shopper(),
        DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate),
        DataLoader(test, batch_size=64, collate_fn=collate),
    )
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
