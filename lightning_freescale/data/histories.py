"""``Histories``: what every source becomes. Flat, integer, memory-mapped, in time order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.data.cache import map_array, read_meta, save_arrays, whole
from lightning_freescale.runtime.errors import InputError

CHUNK = 1 << 22  # events handled at a time wherever the data may exceed memory


@dataclass(frozen=True, eq=False)
class Histories:
    """The events of ``U`` users, ``T`` in all, each user's in time order, one user after another.

    Attributes:
        items: ``[T]`` int64, in ``0 .. num_items - 1``.
        timestamps: ``[T]`` int64, seconds.
        offsets: ``[U + 1]`` int64; user ``u`` owns events ``offsets[u]`` to ``offsets[u + 1]``.
        item_ids: ``[num_items]``, the raw id of each item.
        user_ids: ``[U]``, the raw id of each user.
        features: by name, ``[T]`` int64 in ``0 .. feature_sizes[name] - 1``: categorical features of the events.
        feature_values: by name, the raw value of each code.
        folder: where the arrays are memory-mapped from, ``None`` if they are in memory.
    """

    items: NDArray[np.int64]
    timestamps: NDArray[np.int64]
    offsets: NDArray[np.int64]
    item_ids: NDArray
    user_ids: NDArray
    features: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    feature_values: Mapping[str, NDArray] = field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        events, users = len(self.items), self.num_users
        if users < 0 or self.offsets[0] != 0 or self.offsets[-1] != events or (np.diff(self.offsets) < 0).any():
            raise InputError(f"offsets: must grow from 0 to {events}, the number of events")
        if len(self.user_ids) != users:
            raise InputError(f"user_ids: {len(self.user_ids)} values for {users} users")
        for name, values in {"timestamps": self.timestamps, **self.features}.items():
            if len(values) != events:
                raise InputError(f"{name}: {len(values)} values for {events} events")
        if taken := {HISTORY, NEGATIVES} & set(self.features):
            raise InputError(f"features: {taken.pop()!r} is a key of the batch itself; rename the feature")
        if set(self.features) != set(self.feature_values):
            raise InputError(f"feature_values: {sorted(self.feature_values)}, features: {sorted(self.features)}")
        if self.folder is None:  # what was preprocessed is right by construction, and reading it all would take long
            _check_codes("items", self.items, self.num_items)
            for name, values in self.features.items():
                _check_codes(name, values, self.feature_sizes[name])

    def __reduce__(self) -> tuple[Callable, tuple]:
        if self.folder is not None:  # a worker process maps the same files; pickling would copy them
            return Histories.load, (self.folder,)
        columns = (self.items, self.timestamps, self.offsets, self.item_ids, self.user_ids)
        return Histories, (*columns, dict(self.features), dict(self.feature_values))

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_items(self) -> int:
        """Rows of the item table."""
        return len(self.item_ids)

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Rows of each feature's table."""
        return {name: len(values) for name, values in self.feature_values.items()}

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """``[U]``, the number of events of each user."""
        return np.diff(self.offsets)

    @cached_property
    def item_counts(self) -> NDArray[np.int64]:
        """``[num_items]``, how often each item occurs in training: the last event of every user is held out."""
        counts = np.zeros(self.num_items, dtype=np.int64)
        for start in range(0, len(self.items), CHUNK):
            counts += np.bincount(self.items[start : start + CHUNK], minlength=self.num_items)
        held_out = self.items[self.offsets[1:][self.lengths > 0] - 1]
        return counts - np.bincount(held_out, minlength=self.num_items)

    # ---- files ---------------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Write the arrays into a folder that :meth:`load` maps."""
        arrays = {name: getattr(self, name) for name in ("items", "timestamps", "offsets", "item_ids", "user_ids")}
        for at, name in enumerate(self.features):
            arrays[feature_file(at)] = self.features[name]
            arrays[feature_file(at, "values")] = self.feature_values[name]
        save_arrays(folder, arrays, features=list(self.features))

    @staticmethod
    def load(folder: Path) -> Histories:
        """Memory-map what :meth:`save` wrote. Raises :class:`~.cache.DamagedCache` if it is not whole."""
        names = read_meta(folder).get("features", [])
        with whole(folder):
            return Histories(
                items=map_array(folder, "items"),
                timestamps=map_array(folder, "timestamps"),
                offsets=map_array(folder, "offsets"),
                item_ids=map_array(folder, "item_ids"),
                user_ids=map_array(folder, "user_ids"),
                features={name: map_array(folder, feature_file(at)) for at, name in enumerate(names)},
                feature_values={name: map_array(folder, feature_file(at, "values")) for at, name in enumerate(names)},
                folder=folder,
            )


def _check_codes(name: str, codes: NDArray, size: int) -> None:
    if codes.dtype != np.int64:
        raise InputError(f"{name}: must be int64, not {codes.dtype}")
    if len(codes) and not 0 <= (low := codes.min()) <= (high := codes.max()) < size:
        raise InputError(f"{name}: {low if low < 0 else high} is outside 0 to {size - 1}, the codes there are")


def feature_file(at: int, kind: str = "codes") -> str:
    """File of the feature number ``at``: numbered, because a feature's name need not be a file name."""
    return f"feature_{at}_{kind}"


def user_chunks(offsets: NDArray[np.int64], events: int) -> list[tuple[int, int]]:
    """Split users into consecutive ranges of about ``events`` events, at least one user each."""
    goals = np.arange(0, offsets[-1], events)
    edges = np.unique(np.append(np.searchsorted(offsets, goals, side="left"), len(offsets) - 1))
    return [(int(first), int(last)) for first, last in pairwise(edges)]
