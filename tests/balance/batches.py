"""Test data: a dataset of lengths, batches of a user's own type and of ``SeqBatch``, and their samples as plain values."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch


class LengthDataset:
    """A dataset that has only lengths, which are log-normal."""

    def __init__(self, size: int, seed: int = 0):
        self.lengths = np.minimum(np.random.default_rng(seed).lognormal(4, 1.2, size), 3000).astype(np.int64) + 1

    def __len__(self) -> int:
        return len(self.lengths)


class Label(NamedTuple):
    click: Tensor  # [B] bool
    vector: Tensor  # [B, 3] bfloat16


@dataclasses.dataclass(frozen=True)
class Ad:
    """A batch type of a user: nested and frozen, with several dtypes and both kinds of jagged tensors."""

    index: Tensor  # [B] int64
    features: KeyedJaggedTensor  # "a", "b", weighted, int32 lengths
    more: dict[str, JaggedTensor]  # "text": float64
    event_time: Tensor  # [sum of lengths of "b"] float32
    labels: Label
    image: Tensor  # [B, 2, 2] uint8
    nothing: None = None


def lengths_of(index: int) -> tuple[int, int, int]:
    rng = np.random.default_rng(index)
    return int(rng.integers(0, 5)), 2 + int(rng.lognormal(1.5, 1.0)), int(rng.integers(0, 4))


def ad_batch(indices: list[int]) -> Ad:
    """Return a batch of the samples ``indices``. Every value depends only on its sample."""
    n = len(indices)
    a, b, c = ([lengths_of(index)[key] for index in indices] for key in range(3))

    def values(lengths: list[int], key: int) -> Tensor:
        rows = [torch.arange(length) + 1000 * index + 100 * key for index, length in zip(indices, lengths, strict=True)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *rows])

    index = torch.tensor(indices, dtype=torch.int64)
    keyed = torch.cat([values(a, 0), values(b, 1)])
    return Ad(
        index=index,
        features=KeyedJaggedTensor(
            ["a", "b"], keyed, weights=keyed.float() / 7, lengths=torch.tensor(a + b, dtype=torch.int32), stride=n
        ),
        more={"text": JaggedTensor(values(c, 2).double() / 3, lengths=torch.tensor(c, dtype=torch.int64))},
        event_time=values(b, 3).float() / 11,
        labels=Label(index % 2 == 0, (index[:, None] * torch.ones(3)).bfloat16()),
        image=(index[:, None, None] + torch.arange(4).view(2, 2)).to(torch.uint8),
    )


def seq_batch(indices: list[int], targets: bool = False, feature: bool = True) -> SeqBatch:
    """Return a ``SeqBatch`` with an event feature and two negatives per sample."""
    lengths = [1 + lengths_of(index)[1] for index in indices]
    index = torch.repeat_interleave(torch.tensor(indices, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64))
    event = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(length) for length in lengths)])
    negatives = torch.tensor([[index + 1, index + 2] for index in indices], dtype=torch.int64).reshape(-1)
    parts = [(index * 7 + event) % 90, negatives % 90, *([event % 5] if feature else [])]
    counts = [lengths, [2] * len(indices), *([lengths] if feature else [])]
    return SeqBatch(
        KeyedJaggedTensor(
            [HISTORY, NEGATIVES, *(["action"] if feature else [])],
            torch.cat(parts),
            lengths=torch.tensor([length for part in counts for length in part], dtype=torch.int64),
            stride=len(indices),
        ),
        timestamps=index * 1000 + event,
        targets=torch.tensor(indices, dtype=torch.int64) if targets else None,
    )


def contents(batch: Any) -> list[tuple]:
    """Return the samples of a batch, each as a tuple of plain values."""
    if isinstance(batch, SeqBatch):
        per_event = batch.timestamps.split(batch.lengths.tolist())
        targets = [None] * batch.num_samples if batch.targets is None else batch.targets.tolist()
        keyed = [part for key in batch.features.keys() for part in [_split(batch.features[key])]]  # noqa: SIM118
        rows = zip(*keyed, [part.tolist() for part in per_event], targets, strict=True)
        return list(rows)
    features = [_split(batch.features[key]) for key in ("a", "b")]
    weights = [_split(batch.features[key], weights=True) for key in ("a", "b")]
    event_time = [part.tolist() for part in batch.event_time.split(batch.features["b"].lengths().tolist())]
    dense = (batch.index, batch.labels.click, batch.labels.vector, batch.image)
    return list(
        zip(
            *features, *weights, _split(batch.more["text"]), event_time, *(part.tolist() for part in dense), strict=True
        )
    )


def _split(jagged: JaggedTensor, weights: bool = False) -> list[list]:
    values = jagged.weights() if weights else jagged.values()
    return [part.tolist() for part in values.split(jagged.lengths().tolist())]
