"""``SeqRecDataModule``: the data of a training, from a file or generated, as batches of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lightning_freescale.balance.planner import Planner
from lightning_freescale.balance.sampler import GlobalBatchSampler, SequentialBatchSampler, at_the_source
from lightning_freescale.data.cache import cached
from lightning_freescale.data.catalogue import Catalogue
from lightning_freescale.data.columns import TimeUnit
from lightning_freescale.data.dataset import HistoryDataset, WholeHistoryDataset
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.negatives import Distribution, NegativeSampler
from lightning_freescale.data.preprocess import read_histories
from lightning_freescale.data.raw_ids import check_ids, raw_item_ids
from lightning_freescale.data.samples import MIN_EVENTS
from lightning_freescale.data.sources import Format, ParquetSource, open_source
from lightning_freescale.data.stream import StreamDataset, StreamLoader
from lightning_freescale.data.stream_index import StreamIndex
from lightning_freescale.data.synthetic import Synthetic
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from lightning_freescale.runtime.log import log_once


class SeqRecDataMixin:
    """Data of a sequence recommender for a Trainer: one sample per user, whose last events are held out.

    The last event of a user is the target of the test, and the one before it the target of validation. The history of each comes
    before its target, so the test sees the validation event and training sees neither.

    The arguments must be equal on all ranks, because each rank computes from them which samples it reads.

    Args:
        data: ``"synthetic"``, a path, or :class:`~.histories.Histories`.
        batch_size: samples per rank and step. The global batch has ``batch_size * world_size`` samples.
        max_history: largest number of events of a sample; the latest events are used.
        balance: how to assign the samples of a global batch to ranks by their cost. ``"auto"`` follows the setting ``balance``
            of the strategy; other strategies than FreeScale's do not balance. ``"fixed"`` (equal sample counts), ``"variable"``
            (sample counts may differ), ``"zigzag"``, or a :class:`~lightning_freescale.balance.Planner` with more options, hold
            whatever the strategy. ``"off"`` or ``False`` ignores the cost. The samples of a step are the same in all cases. A
            stream is not balanced here but by the strategy.
        num_workers: processes per rank that collate batches; 0 collates in the training process.
        seed: the seed of shuffling and negatives, and of synthetic data.
        num_negatives: sampled negatives that each position of a training sample is scored against.
        negative_sets: the positions of a sample share up to this many sets of ``num_negatives``, one set for every 32 positions.
            More sets learn faster, and more rows travel between the ranks.
        negatives: ``"uniform"``, or ``"popularity"``, which is proportional to how often an item occurs in training.
        format: the format of a path, ``"parquet"``, ``"csv"`` or ``"text"``. By default the suffix decides (``.parquet``,
            ``.pq``, ``.csv``, ``.tsv``, ``.txt``). A folder must contain Parquet files.
        columns: the column of each role, ``{"user": ..., "item": ..., "time": ...}``. A missing role is found by its usual
            names (``user_id``, ``movieId``, ``timestamp``, ...). ``{"time": None}`` means that rows are in time order.
        feature_columns: the columns with categorical features of the events.
        time_unit: the unit of numeric times: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
        min_events: users with fewer events are left out. A user with three events is evaluated but teaches nothing.
        held_out: number of last events of each user that are not in training: 2, or 1 for the last event as the target of
            validation and no test data.
        synthetic: options of :class:`~.synthetic.Synthetic`.
        streaming: read Parquet files with one row per user during training, without preprocessing. Items and features must
            be integers that are rows of their tables; with ``ids="raw"`` items are any integers from 0 to 2^63 - 1.
        ids: the items in a batch. ``"dense"``: numbers from 0 to ``num_items - 1``. ``"raw"``: the ids of the file, for a
            table with zero-collision ids (:func:`lightning_freescale.zero_collision`); strings become 63 bits of their hash.
            :attr:`catalogue` has the ids of all items.
        num_items: rows of the item table, with ``streaming`` only. By default the largest item + 1.
        shuffle: permute the training samples in each epoch.
        drop_last: drop the last global training batch if it is not full.
        cache_dir: the folder for preprocessed data. By default ``$FREESCALE_CACHE`` or the user's cache folder.
    """

    trainer: Any  # set by LightningDataModule

    def __init__(
        self,
        data: str | PathLike[str] | Histories = "synthetic",
        *,
        batch_size: int,
        max_history: int,
        balance: str | bool | Planner = "auto",
        num_workers: int = 0,
        seed: int = 0,
        num_negatives: int = 64,
        negative_sets: int = 4,
        negatives: Distribution = "uniform",
        format: Format | None = None,
        columns: Mapping[str, str | None] | None = None,
        feature_columns: Sequence[str] = (),
        time_unit: TimeUnit = "s",
        min_events: int = MIN_EVENTS,
        held_out: int = 2,
        synthetic: Mapping[str, Any] | None = None,
        streaming: bool = False,
        ids: Literal["dense", "raw"] = "dense",
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
        if held_out not in (1, 2):
            raise ConfigurationError(f"held_out: must be 1 or 2, not {held_out}")
        if isinstance(feature_columns, str):
            raise ConfigurationError(f"feature_columns: must be a sequence of names, not {feature_columns!r}")
        if num_items is not None and not streaming:
            raise ConfigurationError("num_items: needs streaming=True; without streaming the items are counted")
        self.ids = check_ids(ids, num_items)
        self.data, self.batch_size, self.max_history = data, batch_size, max_history
        self.follows_strategy = balance == "auto"
        self.planner = None if self.follows_strategy else Planner.of(balance)
        self.num_workers, self.seed, self.shuffle, self.drop_last = num_workers, seed, shuffle, drop_last
        self.num_negatives, self.negative_sets, self.negatives = num_negatives, negative_sets, negatives
        self.held_out = held_out
        self.format, self.min_events, self.streaming, self._num_items = format, min_events, streaming, num_items
        self._source_options: dict[str, Any] = {
            "columns": dict(columns or {}),
            "feature_columns": tuple(feature_columns),
            "time_unit": time_unit,
        }
        self.synthetic = Synthetic(**{"seed": seed, **(synthetic or {})})
        self.cache_dir = None if cache_dir is None else Path(cache_dir)

    # ---- the data, prepared at the first use ---------------------------------------------------------------------
    @cached_property
    def histories(self) -> Histories:
        """The preprocessed data, memory-mapped. The first process builds them, the others wait for it."""
        if isinstance(self.data, Histories):
            return self.data
        if self.data == "synthetic":
            options = {"synthetic": asdict(self.synthetic)}
            return cached("synthetic", options, self._generate, Histories.load, self.cache_dir)
        source = open_source(self.data, self.format, **self._source_options)
        return read_histories(source, self.min_events, self.cache_dir)

    def _generate(self, folder: Path) -> None:
        self.synthetic.generate().save(folder)

    @cached_property
    def stream_index(self) -> StreamIndex:
        """The index of the files, with ``streaming`` only."""
        source = None
        if not isinstance(self.data, Histories) and self.data != "synthetic":
            source = open_source(self.data, self.format, **self._source_options)
        if not isinstance(source, ParquetSource):
            raise ConfigurationError(f"streaming: needs Parquet files, not {self.data!r}; set streaming=False")
        counted = self.negatives == "popularity"
        raw = self.ids == "raw"
        index = StreamIndex.of(source, self.min_events, counted, self.cache_dir, held_out=self.held_out, raw_ids=raw)
        if self._num_items is not None and self._num_items < index.num_items:
            raise InputError(
                f"num_items: {self._num_items}, but {source.path} holds item {index.num_items - 1}; raise num_items"
            )
        return index

    @property
    def num_items(self) -> int:
        """Number of rows of the item table."""
        if self.streaming:
            return self._num_items or self.stream_index.num_items
        return self.histories.num_items

    @cached_property
    def catalogue(self) -> NDArray[np.int64]:
        """``[num_items]``, the id of each item in the batches."""
        if self.ids == "dense":
            return np.arange(self.num_items)
        if not self.streaming:
            return raw_item_ids(self.histories.item_ids)
        assert self.stream_index.item_ids is not None
        return np.array(self.stream_index.item_ids)

    @property
    def _item_ids(self) -> NDArray[np.int64] | None:
        """The id of each item in the batches; ``None`` if the items keep their numbers."""
        return self.catalogue if self.ids == "raw" else None

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Number of rows of the table of each event feature."""
        return self.stream_index.feature_sizes if self.streaming else self.histories.feature_sizes

    @cached_property
    def item_counts(self) -> NDArray[np.int64]:
        """``[num_items]``, how often each item occurs in training, in the order of the catalogue.

        With ``streaming`` it needs ``negatives="popularity"``.
        """
        if not self.streaming:
            return self.histories.training_item_counts(self.held_out)
        if self.stream_index.item_counts is None:
            raise ConfigurationError("item_counts: a stream is counted with negatives='popularity' only")
        return self.stream_index.item_counts

    @property
    def validation_targets(self) -> NDArray[np.int64]:
        """``[num_users]``, the item that validation holds out for each user; not with ``streaming``."""
        return self.histories.items[self.histories.offsets[1:] - self.held_out]

    @property
    def item_ids(self) -> NDArray:
        """``[num_items]``, the id of each item in the data."""
        return self.catalogue if self.streaming else self.histories.item_ids

    @property
    def user_ids(self) -> NDArray:
        """``[num_users]``, the id of each user in the data; not with ``streaming``."""
        return self.histories.user_ids

    def state_dict(self) -> dict[str, Any]:
        """The ids behind the rows of the tables, and how the data are read. Lightning saves it in every checkpoint."""
        reading = {
            "max_history": self.max_history,
            "held_out": self.held_out,
            "ids": self.ids,
            "times": self._has_times(),
            **self._source_options,
        }
        if self.streaming:
            return {"reading": reading}
        return {"reading": reading, "catalogue": Catalogue.of(self.histories).state_dict()}

    def _has_times(self) -> bool:
        """Whether the events have times of their own. Otherwise they are in time order, a second apart."""
        is_text = not isinstance(self.data, Histories) and (self.format or Path(self.data).suffix) in ("text", ".txt")
        return not is_text and self._source_options["columns"].get("time", "") is not None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise :class:`InputError` if the rows of the tables stood for other items or features when the state was saved.

        With ``ids="raw"`` the table itself knows which row belongs to which item, so the items may differ.
        """
        if self.streaming or "catalogue" not in state_dict:
            return
        saved_ids = state_dict["reading"].get("ids", "dense")
        if saved_ids != self.ids:
            raise InputError(f"ids: {self.ids!r}, but the checkpoint was trained with {saved_ids!r}; use that")
        saved = Catalogue.from_state_dict(state_dict["catalogue"])
        if difference := saved.difference(Catalogue.of(self.histories), items=self.ids == "dense"):
            raise InputError(
                f"data: the checkpoint was trained with another catalogue ({difference}), so its rows stand for other items; "
                "use the data of that training"
            )

    # ---- Lightning's hooks ---------------------------------------------------------------------------------------
    def prepare_data(self) -> None:
        _ = self.stream_index if self.streaming else self.histories

    def train_dataloader(self) -> DataLoader:
        self._log_balance()
        # overfit_batches needs the same batches in each epoch; Lightning would replace a sampler that shuffles.
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        shuffle = self.shuffle and not overfit
        return self._loader(self._negative_sampler(), self.held_out - 1, shuffle, self.drop_last, training=True)

    def _log_balance(self) -> None:
        if self.planner is None or getattr(self.trainer, "world_size", 1) == 1:
            return
        if self.streaming:
            log_once(
                f"balance={self.planner.mode!r} of the data module has no effect on a stream, because its lengths are not known "
                "in advance; the setting balance= of the strategy applies"
            )
        else:
            log_once(at_the_source(self.planner))

    def val_dataloader(self) -> DataLoader:
        return self._loader(None, skip=self.held_out - 1, shuffle=False, drop_last=False)

    def test_dataloader(self) -> DataLoader:
        if self.held_out == 1:
            raise ConfigurationError(
                "held_out: 1 leaves no event for the test, because validation uses the last; set it to 2"
            )
        return self._loader(None, skip=0, shuffle=False, drop_last=False)

    def predict_dataloader(self) -> DataLoader:
        """The whole history of every user, with the last event."""
        if self.streaming:
            raise ConfigurationError("streaming: predictions need the ids of the users; set streaming=False")
        dataset = WholeHistoryDataset(self.histories, self.max_history, self._item_ids)
        return self._loader_of(dataset, shuffle=False, drop_last=False)

    def _negative_sampler(self) -> NegativeSampler:
        counts = self.item_counts if self.negatives == "popularity" else None
        return NegativeSampler(
            self.num_items, self.num_negatives, self.negatives, counts, self.seed, self.negative_sets
        )

    def _loader(
        self,
        negatives: NegativeSampler | None,
        skip: int,
        shuffle: bool,
        drop_last: bool,
        training: bool = False,
    ) -> DataLoader:
        if not self.streaming:
            dataset = HistoryDataset(self.histories, self.max_history, negatives, skip, self._item_ids)
            return self._loader_of(dataset, shuffle, drop_last, training)
        trainer, ranks = self.trainer, self._rank_options(drop_last)
        stream = StreamDataset(
            self.stream_index, self.batch_size, self.max_history, negatives, shuffle=shuffle, skip=skip, **ranks
        )
        epoch = (lambda: trainer.current_epoch) if trainer else None
        return StreamLoader(stream, epoch=epoch, **self._worker_options())

    def _loader_of(self, dataset: HistoryDataset, shuffle: bool, drop_last: bool, training: bool = False) -> DataLoader:
        kind = GlobalBatchSampler if shuffle else SequentialBatchSampler
        balance: dict[str, Any] = {}
        if training:
            balance = {"planner": self.planner, "follows_strategy": self.follows_strategy}
        sampler = kind(dataset, self.batch_size, **balance, **self._rank_options(drop_last))
        # Lightning creates the first iterator before it sets the epoch. After a resume the epoch is not 0.
        sampler.set_epoch(self.trainer.current_epoch if self.trainer else 0)
        return DataLoader(dataset, sampler=sampler, batch_size=None, **self._worker_options())

    def _rank_options(self, drop_last: bool) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "num_replicas": trainer.world_size if trainer else 1,
            "rank": trainer.global_rank if trainer else 0,
            "seed": self.seed,
            "drop_last": drop_last,
        }

    def _worker_options(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": self._on_cuda(),
        }

    def _on_cuda(self) -> bool:
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", torch.device("cpu"))
        return device.type == "cuda"


class SeqRecDataModule(SeqRecDataMixin, LightningDataModule):
    __doc__ = SeqRecDataMixin.__doc__
