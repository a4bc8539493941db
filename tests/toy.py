"""A small user's model and data, as a newcomer would write them: nothing in here knows about this package."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

ROWS = {"item": 96, "shop": 40}
DIM = 8
FEATURES = {"clicks": "item", "carts": "item", "shops": "shop"}  # two features share a table


@dataclasses.dataclass
class Batch:
    index: Tensor
    features: KeyedJaggedTensor
    label: Tensor


class Samples(Dataset):
    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, list[Tensor], float]:
        generator = torch.Generator().manual_seed(index)
        values = []
        for table in FEATURES.values():
            length = int(torch.randint(0, 6, (1,), generator=generator))
            values.append(torch.randint(0, ROWS[table], (length,), generator=generator))
        return index, values, float(index % 2)


def collate(samples: list[tuple[int, list[Tensor], float]]) -> Batch:
    index, values, label = zip(*samples, strict=True)
    by_feature = [part for feature in zip(*values, strict=True) for part in feature]
    lengths = torch.tensor([len(part) for part in by_feature])
    features = KeyedJaggedTensor(list(FEATURES), torch.cat(by_feature), lengths=lengths)
    return Batch(torch.tensor(index), features, torch.tensor(label))


def loader(size: int = 24, batch_size: int = 2, shuffle: bool = True, **kwargs: Any) -> DataLoader:
    return DataLoader(Samples(size), batch_size=batch_size, collate_fn=collate, shuffle=shuffle, **kwargs)


class Model(pl.LightningModule):
    """Sequence embeddings (mean of tanh) and pooled embeddings of the same features, two tables each."""

    def __init__(self, bags: bool = False, device: str = "cpu", lr: float = 0.05, data_type: DataType = DataType.FP32):
        super().__init__()
        self.lr = lr
        kind, config = (EmbeddingBagCollection, EmbeddingBagConfig) if bags else (EmbeddingCollection, EmbeddingConfig)
        tables = [
            config(
                name=name,
                embedding_dim=DIM,
                num_embeddings=rows,
                feature_names=[f for f, t in FEATURES.items() if t == name],
                data_type=data_type,
            )
            for name, rows in ROWS.items()
        ]
        self.embeddings = kind(tables=tables, device=torch.device(device))
        self.bags = bags
        self.head = nn.Sequential(nn.Linear(len(FEATURES) * DIM, 16), nn.ReLU(), nn.Linear(16, 1))
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if self.bags:
            pooled = self.embeddings(features).values().float()
        else:
            rows = self.embeddings(features)
            pooled = torch.cat([mean(rows[key]) for key in FEATURES], dim=1)
        return self.head(pooled).squeeze(-1)

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch.features), batch.label)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(batch.index.tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch.label))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Model):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def leaves(batch: Any) -> list[Any]:
    """The batches inside any nesting of lists and mappings."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    return [leaf for part in batch for leaf in leaves(part)] if isinstance(batch, (list, tuple)) else [batch]


def mean(jagged: Any) -> Tensor:
    """Mean over the events of each sample, ``[B, D]``."""
    lengths = jagged.lengths()
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    total = torch.zeros(len(lengths), DIM).index_add(0, sample, torch.tanh(jagged.values().float()))
    return total / lengths.clamp(min=1)[:, None]


def trainer(strategy: Any, world: int, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "strategy": strategy,
        "devices": world,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "limit_val_batches": 0,
    }
    return pl.Trainer(**(options | kwargs))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict with sharded tables put together again. A collective."""
    whole = {}
    for key, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            full = torch.zeros(value.size())
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                full[row : row + rows, column : column + columns] = shard.tensor
            torch.distributed.all_reduce(full)
            value = full
        whole[key] = value.clone()
    return whole


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise equality of two state dicts."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
