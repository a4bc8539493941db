"""An HSTU with context features of each sample beside the history. Their rows are pooled by an ``EmbeddingBagCollection``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor

from benchmarks.harness.training.step_timestamps import TimestampedHSTU
from benchmarks.harness.workload import ContextBatch
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch

CONTEXT = "context"


def context_tables(names: Sequence[str], rows: int, dim: int) -> EmbeddingBagCollection:
    """One table for each context feature, on the meta device."""
    tables = [
        EmbeddingBagConfig(name=f"{name}_table", num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name in names
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def with_context(embedded: Mapping[str, Any], pooled: Any) -> dict[str, Any]:
    """The embeddings of the events and the pooled ones, as :meth:`ContextHSTU.loss` takes them. Waits for both."""
    return {HISTORY: embedded[HISTORY], NEGATIVES: embedded[NEGATIVES], CONTEXT: pooled.values()}


class ContextHSTU(TimestampedHSTU):
    """Adds the pooled embeddings of a sample to the embedding of each of its events."""

    context: EmbeddingBagCollection

    def training_step(self, batch: ContextBatch, batch_idx: int) -> Tensor:  # type: ignore[override]
        self.prepare(batch)
        rows, pooled = self.embedding(batch.features), self.context(batch.context)
        return self.loss(with_context(rows, pooled), batch)

    def random_rows(self, batch: SeqBatch, on_device: SeqBatch) -> dict[str, Any]:
        assert isinstance(batch, ContextBatch)
        assert batch.context is not None
        width = len(batch.context.keys()) * self.hparams["embedding_dim"]
        pooled = torch.randn(batch.num_samples, width, device=on_device.timestamps.device, requires_grad=True)
        return super().random_rows(batch, on_device) | {CONTEXT: pooled}

    def encode(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """The pooled embeddings are ``embedded["context"]``, ``[B, features * D]``."""
        history = embedded[HISTORY]
        pooled = embedded[CONTEXT].unflatten(1, (-1, self.hparams["embedding_dim"])).sum(dim=1)
        events = torch.repeat_interleave(pooled, batch.lengths, dim=0, output_size=len(history.values()))
        return super().encode(
            {**embedded, HISTORY: JaggedTensor(history.values() + events, lengths=history.lengths())}, batch
        )
