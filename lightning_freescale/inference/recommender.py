"""``Recommender``: the best items for histories of users, by a trained model on one device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.batch.plain_jagged import PlainTables
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.data.catalogue import Catalogue
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.preprocess import read_histories
from lightning_freescale.data.samples import SampleArrays, collate, events_before
from lightning_freescale.data.sources import open_source
from lightning_freescale.inference import model_file
from lightning_freescale.models.hstu import HSTU
from lightning_freescale.models.personalization import UserStates
from lightning_freescale.models.recommendation import Recommendations
from lightning_freescale.models.top_k import JaggedRows, Ranked
from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError, InputError
from lightning_freescale.runtime.jagged import gather, lengths_to_offsets
from lightning_freescale.runtime.log import log_once


class Recommender:
    """A trained model with plain tables on one device. It has the ids of the items, and knows how the data are read.

    ``Recommender.load("model.pt")`` reads the file of ``freescale export --inference``.

    Args:
        content: the entries of an exported file (:func:`.model_file.contents`).
        device: where the model computes.
        name: the file, for messages.
    """

    def __init__(self, content: Mapping[str, Any], device: str | torch.device = "cpu", name: str = "model"):
        self.device = torch.device(device)
        self.fingerprint: str = content["fingerprint"]
        self.reading: dict[str, Any] = dict(content["reading"])
        self.catalogue = Catalogue.from_state_dict(content["catalogue"])
        self.model = _build(content, name).to(self.device)
        if self.num_items != len(self.catalogue.item_ids):
            raise CheckpointError(
                f"{name}: {self.num_items} rows of items, but {len(self.catalogue.item_ids)} ids in the catalogue"
            )
        self.model.on_predict_start()

    @staticmethod
    def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Recommender:
        """Read an exported file. Raises :class:`CheckpointError` if it is of another kind, damaged or incomplete."""
        return Recommender(model_file.read(path), device, os.fspath(path))

    @property
    def num_items(self) -> int:
        """Size of the catalogue."""
        return self.model.num_items

    @property
    def max_history(self) -> int:
        """Only this many latest events of a user are used."""
        return int(self.reading["max_history"])

    @property
    def has_states(self) -> bool:
        """Whether the model has personal tokens, so that the states of users can be stored."""
        return self.model.personalization is not None

    def check_k(self, k: int, name: str = "k") -> int:
        """``k``. Raises :class:`ConfigurationError` unless so many items can be recommended."""
        if not 1 <= k <= self.num_items:
            raise ConfigurationError(f"{name}: must be from 1 to {self.num_items}, the number of items, not {k}")
        return k

    # ---- recommendations -------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def rank(
        self, samples: SampleArrays, k: int, *, filter_seen: bool = True, states: UserStates | None = None
    ) -> Ranked:
        """Row numbers and scores of the best ``k`` items after the last event of each sample, on the device.

        Args:
            samples: histories of ``B`` users, at least one event each. Items and features are rows of the model's tables.
            k: items per user.
            filter_seen: leave the items of the user's history out.
            states: states of these users (:meth:`compress`). They replace the first ``states.lengths [B]`` events of each
                sample, so that only the others are computed. At least one event must be left.
        """
        if states is None:
            batch = self._batch(samples)
            outputs = self.model.encode_last(self.model.embedding(batch.features), batch)
        else:
            batch = self._batch(recent_events(samples, states.lengths.cpu().numpy()))
            outputs = self.model.encode_recent(batch, states, last=True)
        seen = None
        if filter_seen:
            seen = JaggedRows(*(torch.from_numpy(part).to(self.device) for part in (samples.lengths, samples.items)))
        return self.model.best_items(outputs, k, seen)

    def recommend(
        self, samples: SampleArrays, k: int, *, filter_seen: bool = True, states: UserStates | None = None
    ) -> Recommendations:
        """:meth:`rank` with the raw ids of the items. The users have the numbers of ``samples``."""
        return self.named(self.rank(samples, k, filter_seen=filter_seen, states=states), samples.users)

    def named(self, ranked: Ranked, users: NDArray) -> Recommendations:
        """The items of ``ranked`` with their raw ids."""
        rows = ranked.rows.clamp(min=0).cpu().numpy()
        return Recommendations(users, self.catalogue.item_ids[rows], ranked.scores.cpu().numpy())

    # ---- states of users -------------------------------------------------------------------------------------------
    def history_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the ``lengths [B]`` events of each user a state stands for. The model must have personal tokens."""
        if self.model.personalization is None:
            raise ConfigurationError("states: the model has no personal tokens, so its users have no states")
        return self.model.personalization.cut.history_lengths(lengths)

    @torch.inference_mode()
    def compress(self, samples: SampleArrays) -> UserStates:
        """The states of the users after the history part of their events, as :meth:`history_lengths` cuts them."""
        return self.model.compress(self._batch(first_events(samples, self.history_lengths(samples.lengths))))

    # ---- data ------------------------------------------------------------------------------------------------------
    def read_events(
        self,
        path: str | os.PathLike[str],
        *,
        min_events: int = 1,
        format: str | None = None,
        columns: Mapping[str, str] | None = None,
        cache_dir: Path | None = None,
    ) -> Histories:
        """The events of a file, read as in the training, with the rows of the model. Unknown items are left out."""
        return read_events(
            self.reading,
            self.catalogue,
            path,
            min_events=min_events,
            format=format,
            columns=columns,
            cache_dir=cache_dir,
        )

    def batches(self, histories: Histories, batch_size: int) -> Iterator[SampleArrays]:
        """The latest events of all users of ``histories``, in their order."""
        columns = (histories.items, histories.timestamps, histories.features, histories.offsets)
        for start in range(0, histories.num_users, batch_size):
            users = np.arange(start, min(start + batch_size, histories.num_users))
            yield events_before(histories.offsets[users + 1], *columns, users, self.max_history)

    def _batch(self, samples: SampleArrays) -> SeqBatch:
        return collate(samples._replace(targets=None), None, epoch=0).to(self.device)


def read_events(
    reading: Mapping[str, Any],
    catalogue: Catalogue,
    path: str | os.PathLike[str],
    *,
    min_events: int,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    cache_dir: Path | None = None,
) -> Histories:
    """The events of a file with the rows of ``catalogue``.

    Args:
        reading: names of columns, features and unit of times, as a data module saves them.
        catalogue: the items of the model.
        path: the file.
        min_events: users with fewer known events are left out.
        format: the format of the file; by default the suffix decides.
        columns: the column of a role, where it differs from ``reading``.
        cache_dir: folder for preprocessed data.
    """
    source = open_source(
        path,
        format,
        columns={**reading["columns"], **(columns or {})},
        feature_columns=tuple(reading["feature_columns"]),
        time_unit=reading["time_unit"],
    )
    histories, left_out = catalogue.recode(read_histories(source, min_events, cache_dir), min_events)
    if left_out:
        log_once(
            f"{source.path.name}: {left_out:,} events are left out: the model does not know their item or feature value, or "
            "their user has too few other events",
            logging.WARNING,
        )
    return histories


def window(sample: SampleArrays, first: int) -> SampleArrays:
    """The events of one user from number ``first`` on."""
    return _slices(sample, np.array([first]), sample.lengths - first)


def first_events(samples: SampleArrays, counts: NDArray[np.int64]) -> SampleArrays:
    """The first ``counts [B]`` events of each sample."""
    return _slices(samples, np.zeros_like(counts), counts)


def recent_events(samples: SampleArrays, counts: NDArray[np.int64]) -> SampleArrays:
    """The events of each sample without the first ``counts [B]``, of which one at least must be left."""
    if len(counts) != len(samples.lengths):
        raise InputError(f"states: of {len(counts)} users, but there are {len(samples.lengths)} samples")
    if (short := counts >= samples.lengths).any():
        at = int(short.argmax())
        raise InputError(
            f"states: the state of sample {at} stands for {counts[at]} events, but the sample has {samples.lengths[at]}; it "
            "needs at least one more"
        )
    return _slices(samples, counts, samples.lengths - counts)


def _slices(samples: SampleArrays, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> SampleArrays:
    starts = lengths_to_offsets(samples.lengths)[:-1] + starts
    return samples._replace(
        lengths=lengths,
        items=gather(samples.items, starts, lengths),
        timestamps=gather(samples.timestamps, starts, lengths),
        features={name: gather(values, starts, lengths) for name, values in samples.features.items()},
        targets=None,
    )


def _build(content: Mapping[str, Any], name: str) -> HSTU:
    """The model of ``content``, with tables of type ``nn.Embedding``. The tensors of ``content`` are not copied."""
    try:
        model = HSTU(**{**content["hyper_parameters"], "meta_tables": True})
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{name}: hyper_parameters: {error}; a newer version of the package wrote it") from error
    model.embedding = PlainTables(model.embedding.embedding_configs(), device=torch.device("meta"))
    weights: Mapping[str, Tensor] = content["weights"]
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{name}: incomplete or of another model: {error}") from error
    return model.requires_grad_(False).eval()
