"""A DLRM on click logs of the shape of Criteo's: dense numbers, and one bag for each categorical feature."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from benchmarks.harness.training.step_timestamps import StepTimestamps, timed_loss
from benchmarks.harness.workload import seeded_generator

DENSE = 13
MULTI_HOT = 10  # ids of every fifth feature; the others have one
DOUBLINGS = 10  # the tables have 1, 2, 4, ... times the rows of the smallest one
BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256)  # hidden units of the two networks


@dataclass
class ClickBatch(Pipelineable):
    """The clicks of one rank and step. ``scale`` is the factor of its loss: 1, because all ranks have as many samples."""

    dense: Tensor  # [B, 13]
    features: KeyedJaggedTensor
    clicked: Tensor  # [B], 0 or 1
    scale: float = 1.0

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        dense, features, clicked = (part.to(device, non_blocking=non_blocking) for part in self._parts())
        return ClickBatch(dense, features, clicked)

    def pin_memory(self) -> ClickBatch:
        dense, features, clicked = (part.pin_memory() for part in self._parts())
        return ClickBatch(dense, features, clicked)

    def record_stream(self, stream: torch.Stream) -> None:
        for part in self._parts():
            part.record_stream(stream)

    def _parts(self) -> tuple[Any, ...]:
        return self.dense, self.features, self.clicked


@dataclass(frozen=True)
class ClickWorkload:
    """Batches of clicks. Small ids are frequent, as in real logs. All ranks and steps have the same amount of work.

    Args:
        samples: samples per rank and step.
        rows: rows of all tables together.
        clicks: number of categorical features.
    """

    samples: int
    rows: int
    clicks: int = 26
    seed: int = 0

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of the table of each feature."""
        sizes = [2 ** (number % DOUBLINGS) for number in range(self.clicks)]
        return {f"c{number}": max(4, self.rows * size // sum(sizes)) for number, size in enumerate(sizes)}

    def predicted(self, rank: int, step: int) -> int:
        return self.samples

    def batch(self, rank: int, step: int, ranks: int) -> ClickBatch:
        draw = seeded_generator(self.seed, rank, step)
        dense, ids, lengths = torch.randn(self.samples, DENSE, generator=draw), [], []
        for number, rows in enumerate(self.table_rows.values()):
            length = 1 if number % 5 else MULTI_HOT
            ids.append((torch.rand(length * self.samples, generator=draw).pow(3) * rows).long())
            lengths.append(torch.full((self.samples,), length))
        features = KeyedJaggedTensor(list(self.table_rows), torch.cat(ids), lengths=torch.cat(lengths))
        clicked = (dense[:, 0] + (ids[-1][: self.samples] % 2) > 0.5).float()
        return ClickBatch(dense, features, clicked)

    def ids(self, rank: int, step: int, ranks: int) -> Tensor:
        """Ids of the batch. Those of different tables are different numbers."""
        batch, offset, found = self.batch(rank, step, ranks), 0, []
        for name, rows in self.table_rows.items():
            found.append(batch.features[name].values() + offset)
            offset += rows
        return torch.cat(found)


class TimestampedDLRM(pl.LightningModule):
    """Pairwise dot products of the bags and the dense features, between two networks. Takes the time stamps of a step."""

    timestamps: StepTimestamps
    pairs: Tensor  # [2, number of pairs]

    def __init__(self, workload: ClickWorkload, embedding_dim: int) -> None:
        super().__init__()
        self.save_hyperparameters("embedding_dim")
        self.names = list(workload.table_rows)
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=embedding_dim, feature_names=[name])
            for name, rows in workload.table_rows.items()
        ]
        self.embedding = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        vectors = workload.clicks + 1
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        self.bottom = _network(DENSE, *BOTTOM, embedding_dim)
        self.top = _network(embedding_dim + vectors * (vectors - 1) // 2, *TOP, 1)

    def training_step(self, batch: ClickBatch, batch_idx: int) -> Tensor:
        return self.loss(self.embedding(batch.features), batch)

    def loss(self, embedded: Any, batch: ClickBatch) -> Tensor:
        pooled = embedded.values()
        samples = functools.partial(torch.tensor, len(batch.clicked), device=pooled.device)
        return timed_loss(self.timestamps, pooled, samples, lambda: self._loss(pooled, batch))

    def _loss(self, pooled: Tensor, batch: ClickBatch) -> Tensor:
        dense = self.bottom(batch.dense)
        vectors = torch.cat([dense[:, None], pooled.view(len(dense), len(self.names), -1).to(dense.dtype)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        score = self.top(torch.cat([dense, products.to(dense.dtype)], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(score.float(), batch.clicked)

    def random_rows(self, batch: ClickBatch, on_device: ClickBatch) -> KeyedTensor:
        """Pooled embeddings of a batch, drawn at random."""
        dim = self.hparams["embedding_dim"]
        shape = len(batch.clicked), dim * len(self.names)
        values = torch.randn(shape, device=on_device.dense.device, requires_grad=True)
        return KeyedTensor(self.names, [dim] * len(self.names), values)

    def flops_per_sample(self) -> float:
        """Of forward and backward. The backward of a product of matrices takes twice as many as its forward."""
        products = (len(self.names) + 1) ** 2 * self.hparams["embedding_dim"]
        layers = [module for module in self.modules() if isinstance(module, nn.Linear)]
        return 6.0 * (products + sum(layer.weight.numel() for layer in layers))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)  # with larger ones differences of rounding grow


def _network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
