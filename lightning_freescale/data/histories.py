"""``Histories``: the preprocessed form of all data: the events of each user as flat integer arrays, in time order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.data.cache import damage_detected, map_array, read_meta, save_arrays
from lightning_freescale.runtime.errors import InputError

CHUNK_EVENTS = 1 << 22  # events processed at a time, because all events may not fit into memory


@dataclass(frozen=True, eq=False)
class Histories:
    """The ``T`` events of ``U`` users. The events of each user are in time order, one user after another.

    Attributes:
        items: ``[T]`` int64, from 0 to ``num_items - 1``.
        timestamps: ``[T]`` int64, seconds.
        offsets: ``[U + 1]`` int64; user ``u`` owns events ``offsets[u]`` to ``offsets[u + 1]``.
        item_ids: ``[num_items]``, the raw id of each item.
        user_ids: ``[U]``, the raw id of each user.
        features: categorical features of the events, by name: codes ``[T]`` int64 from 0 to ``feature_sizes[name] - 1``.
        feature_values: by name, the raw value of each code.
        folder: the folder of the memory-mapped arrays; ``None`` if they are in memory.
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
            raise InputError(f"features: {taken.pop()!r} is a reserved key of the batch; rename the feature")
        if set(self.features) != set(self.feature_values):
            raise InputError(
                f"feature_values: has {sorted(self.feature_values)}, but features has {sorted(self.features)}"
            )
        if self.folder is None:  # preprocessed codes are correct, and a check would read all files
            _check_codes("items", self.items, self.num_items)
            for name, values in self.features.items():
                _check_codes(name, values, self.feature_sizes[name])

    def __reduce__(self) -> tuple[Callable, tuple]:
        if self.folder is not None:  # a worker process maps the same files instead of a copy
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
        """``[num_items]``, how often each item occurs, without the last event of every user."""
        return self.training_item_counts(held_out=1)

    def training_item_counts(self, held_out: int) -> NDArray[np.int64]:
        """``[num_items]``, how often each item occurs in training, that is without the ``held_out`` last events of every user."""
        counts = np.zeros(self.num_items, dtype=np.int64)
        for start in range(0, len(self.items), CHUNK_EVENTS):
            counts += np.bincount(self.items[start : start + CHUNK_EVENTS], minlength=self.num_items)
        for back in range(1, held_out + 1):
            events = self.items[(self.offsets[1:] - back)[self.lengths >= back]]
            counts -= np.bincount(events, minlength=self.num_items)
        return counts

    # ---- files ---------------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Write the arrays into ``folder``, for :meth:`load`."""
        arrays = {name: getattr(self, name) for name in ("items", "timestamps", "offsets", "item_ids", "user_ids")}
        for at, name in enumerate(self.features):
            arrays[feature_file(at)] = self.features[name]
            arrays[feature_file(at, "values")] = self.feature_values[name]
        save_arrays(folder, arrays, features=list(self.features))

    @staticmethod
    def load(folder: Path) -> Histories:
        """Memory-map the arrays that :meth:`save` wrote. Raises :class:`~.cache.DamagedCache` if some are missing."""
        names = read_meta(folder).get("features", [])
        with damage_detected(folder):
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
        raise InputError(f"{name}: {low if low < 0 else high} is outside 0 to {size - 1}, the valid codes")


def feature_file(at: int, kind: str = "codes") -> str:
    """Return the file name of feature ``at``. It has a number, because the name of a feature may not be a valid file name."""
    return f"feature_{at}_{kind}"


def user_chunks(offsets: NDArray[np.int64], events: int) -> list[tuple[int, int]]:
    """Split users into consecutive ranges ``(first, end)`` of about ``events`` events and at least one user each."""
    goals = np.arange(0, offsets[-1], events)
    edges = np.unique(np.append(np.searchsorted(offsets, goals, side="left"), len(offsets) - 1))
    return [(int(first), int(last)) for first, last in pairwise(edges)]


def time_order(ticks: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return an index that puts the events of each user in time order. Events of equal time keep their order.

    Args:
        ticks: ``[sum(lengths)]`` time of each event, one user after another.
        lengths: events of each user.
    """
    users = np.repeat(np.arange(len(lengths)), lengths)
    out_of_order = (np.diff(ticks) < 0) & (users[1:] == users[:-1])
    return np.lexsort((ticks, users)) if out_of_order.any() else slice(None)
