"""Data: sources, the preprocessed form, batches, samplers and the data module."""

from lightning_freescale.balance.sampler import GlobalBatchSampler
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.data.datamodule import SeqRecDataMixin, SeqRecDataModule
from lightning_freescale.data.dataset import HistoryDataset
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.negatives import NegativeSampler
from lightning_freescale.data.stream import StreamDataset, StreamLoader
from lightning_freescale.data.synthetic import Synthetic

__all__ = [
    "GlobalBatchSampler",
    "Histories",
    "HistoryDataset",
    "NegativeSampler",
    "SeqBatch",
    "SeqRecDataMixin",
    "SeqRecDataModule",
    "StreamDataset",
    "StreamLoader",
    "Synthetic",
]
