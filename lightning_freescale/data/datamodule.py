"""``SeqRecDataModule``: from a file, or nothing, to batches of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_freescale.balance.planner import Planner
from lightning_freescale.balance.sampler import GlobalBatchSampler, SequentialBatchSampler
from lightning_freescale.data.cache import cached
from lightning_freescale.data.columns import TimeUnit
from lightning_freescale.data.dataset import MIN_EVENTS, HistoryDataset
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.negatives import Distribution, NegativeSampler
from lightning_freescale.data.preprocess import preprocess
from lightning_freescale.data.rowgroups import StreamIndex
from lightning_freescale.data.sources import Format, ParquetSource, open_source
from lightning_freescale.data.stream import StreamDataset, StreamLoader
from lightning_freescale.data.synthetic import Synthetic
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from lightning_freescale.runtime.log import log_once


class SeqRecDataMixin:
    """Sequence recommendation data for a Trainer: leave-one-out, one sample per user.

    Everything the ranks must agree on is a function of the arguments, so they are to be equal on all ranks.

    Args:
        data: ``"synthetic"``, a path, or :class:`~.histories.Histories`.
        batch_size: samples per rank and step; the global batch has ``batch_size * world_size``.
        max_history: events kept of each history, the latest.
        balance: how the samples of a global batch are dealt to the ranks by their cost: ``"fixed"`` (equal sample counts),
            ``"variable"`` (counts as they come), ``"zigzag"``, or a :class:`~lightning_freescale.balance.Planner`, which
            says more; ``"off"`` deals them like cards. The samples of a step are the same with all of them. A stream
            cannot be balanced here: the strategy does it.
        num_workers: processes per rank that collate batches; 0 collates in the training process.
        seed: of shuffling and negatives, and of synthetic data.
        num_negatives: sampled negatives of each training sample.
        negatives: ``"uniform"``, or ``"popularity"``: as often as the items occur in training.
        format: of a path, ``"parquet"``, ``"csv"`` or ``"text"``; by default told by the suffix (``.parquet``,
            ``.csv``, ``.tsv``, ``.txt``), a folder being one of Parquet files.
        columns: column of each role, ``{"user": ..., "item": ..., "time": ...}``; a role left out is looked for by its
            usual names (``user_id``, ``movieId``, ``timestamp``, ...). ``{"time": None}`` says: rows are in time order.
        feature_columns: categorical features of the events.
        time_unit: of numeric times: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
        min_events: users with fewer events are left out.
        synthetic: options of :class:`~.synthetic.Synthetic`.
        streaming: read Parquet files with one row per user as training goes on, instead of preprocessing them. Items and
            features must be integers from 0, rows of their tables.
        num_items: rows of the item table, with ``streaming``; by default the largest item + 1.
        shuffle: permute the training samples anew each epoch.
        drop_last: leave out a last global training batch that is not full.
        cache_dir: where preprocessed data are kept; default ``$FREESCALE_CACHE`` or the user's cache folder.
    """

    trainer: Any  # of LightningDataModule

    def __init__(
        self,
        data: str | PathLike[str] | Histories = "synthetic",
        *,
        batch_size: int,
        max_history: int,
        balance: str | Planner = "fixed",
        num_workers: int = 0,
        seed: int = 0,
        num_negatives: int = 64,
        negatives: Distribution = "uniform",
        format: Format | None = None,
        columns: Mapping[str, str | None] | None = None,
        feature_columns: Sequence[str] = (),
        time_unit: TimeUnit = "s",
        min_events: int = MIN_EVENTS,
        synthetic: Mapping[str, Any] | None = None,
        streaming: bool = False,
        num_items: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        cache_dir: str | PathLike[str] | None = None,
    ):
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("max_history", max_history, 2),
            ("min_events", min_events, MIN_EVENTS),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ConfigurationError(f"{name}: must be at least {least}, not {value}")
        if isinstance(feature_columns, str):
            raise ConfigurationError(f"feature_columns: a sequence of names, not {feature_columns!r}")
        if num_items is not None and not streaming:
            raise ConfigurationError("num_items: only with streaming=True; otherwise the items are counted")
        self.data, self.batch_size, self.max_history = data, batch_size, max_history
        self.planner = Planner.of(balance)
        self.num_workers, self.seed, self.shuffle, self.drop_last = num_workers, seed, shuffle, drop_last
        self.num_negatives, self.negatives = num_negatives, negatives
        self.format, self.min_events, self.streaming, self._num_items = format, min_events, streaming, num_items
        self._source_options = {
            "columns": dict(columns or {}),
            "feature_columns": tuple(feature_columns),
            "time_unit": time_unit,
        }
        self.synthetic = Synthetic(**{"seed": seed, **(synthetic or {})})
        self.cache_dir = None if cache_dir is None else Path(cache_dir)

    # ---- the data, prepared when they are first asked for ---------------------------------------------------------
    @cached_property
    def histories(self) -> Histories:
        """The preprocessed data, memory-mapped. The first process to ask builds them, the others wait."""
        if isinstance(self.data, Histories):
            return self.data
        if self.data == "synthetic":
            options = {"synthetic": asdict(self.synthetic)}
            return cached("synthetic", options, self._generate, Histories.load, self.cache_dir)
        source = open_source(self.data, self.format, **self._source_options)
        identity = {**source.identity(), "min_events": self.min_events}
        read = partial(preprocess, source, min_events=self.min_events)
        return cached(source.path.stem, identity, read, Histories.load, self.cache_dir)

    def _generate(self, folder: Path) -> None:
        self.synthetic.generate().save(folder)

    @cached_property
    def stream_index(self) -> StreamIndex:
        """With ``streaming``: what is known of the files beforehand."""
        source = None
        if not isinstance(self.data, Histories) and self.data != "synthetic":
            source = open_source(self.data, self.format, **self._source_options)
        if not isinstance(source, ParquetSource):
            raise ConfigurationError(f"streaming: reads Parquet files, not {self.data!r}; set streaming=False")
        index = StreamIndex.of(source, self.min_events, self.negatives == "popularity", self.cache_dir)
        if self._num_items is not None and self._num_items < index.num_items:
            raise InputError(f"num_items: {self._num_items}, but {source.path} holds item {index.num_items - 1}")
        return index

    @property
    def num_items(self) -> int:
        """Rows of the item table."""
        if self.streaming:
            return self._num_items or self.stream_index.num_items
        return self.histories.num_items

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Rows of each event feature's table."""
        return self.stream_index.feature_sizes if self.streaming else self.histories.feature_sizes

    # ---- Lightning's hooks ---------------------------------------------------------------------------------------
    def prepare_data(self) -> None:
        _ = self.stream_index if self.streaming else self.histories

    def train_dataloader(self) -> DataLoader:
        self._say_balance()
        # What overfits must see the same batches each epoch; Lightning would replace a sampler that shuffles.
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        return self._loader(self._negative_sampler(), self.shuffle and not overfit, self.drop_last, self.planner)

    def _say_balance(self) -> None:
        if self.planner is None or getattr(self.trainer, "world_size", 1) == 1:
            return
        mode = f"balance={self.planner.mode!r}"
        if self.streaming:
            log_once(
                f"{mode}: the lengths of a stream are not known beforehand; it is balanced if the strategy does so"
            )
        else:
            log_once(f"{mode}: balanced at the source, every rank reads the samples that make its work equal")

    def val_dataloader(self) -> DataLoader:
        return self._loader(None, shuffle=False, drop_last=False)

    def _negative_sampler(self) -> NegativeSampler:
        counts = None
        if self.negatives == "popularity":
            counts = self.stream_index.item_counts if self.streaming else self.histories.item_counts
        return NegativeSampler(self.num_items, self.num_negatives, self.negatives, counts, self.seed)

    def _loader(
        self, negatives: NegativeSampler | None, shuffle: bool, drop_last: bool, planner: Planner | None = None
    ) -> DataLoader:
        trainer = self.trainer
        ranks: dict[str, Any] = {
            "num_replicas": trainer.world_size if trainer else 1,
            "rank": trainer.global_rank if trainer else 0,
            "seed": self.seed,
            "drop_last": drop_last,
        }
        workers: dict[str, Any] = {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": self._on_cuda(),
        }
        if self.streaming:
            stream = StreamDataset(
                self.stream_index, self.batch_size, self.max_history, negatives, shuffle=shuffle, **ranks
            )
            return StreamLoader(stream, epoch=(lambda: trainer.current_epoch) if trainer else None, **workers)
        dataset = HistoryDataset(self.histories, self.max_history, negatives)
        kind = GlobalBatchSampler if shuffle else SequentialBatchSampler
        sampler = kind(dataset, self.batch_size, planner=planner, **ranks)
        # Lightning opens the first epoch's iterator before it sets the epoch; after a resume that is not epoch 0.
        sampler.set_epoch(trainer.current_epoch if trainer else 0)
        return DataLoader(dataset, sampler=sampler, batch_size=None, **workers)

    def _on_cuda(self) -> bool:
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", torch.device("cpu"))
        return device.type == "cuda"


class SeqRecDataModule(SeqRecDataMixin, LightningDataModule):
    __doc__ = SeqRecDataMixin.__doc__
