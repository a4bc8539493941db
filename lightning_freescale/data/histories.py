"""``Histories``: what every source becomes. Flat, integer, memory-mapped, in time order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.data.batch import HISTORY, NEGATIVES
from lightning_freescale.errors import InputError

FORMAT_VERSION = 1
CHUNK = 1 << 22  # events handled at a time wherever the data may exceed memory
_META = "histories.json"


class DamagedHistories(InputError):
    """A folder that does not hold complete histories in this version's format."""


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
            raise DamagedHistories(f"offsets: must grow from 0 to {events}, the number of events")
        if len(self.user_ids) != users:
            raise DamagedHistories(f"user_ids: {len(self.user_ids)} values for {users} users")
        for name, values in {"timestamps": self.timestamps, **self.features}.items():
            if len(values) != events:
                raise DamagedHistories(f"{name}: {len(values)} values for {events} events")
        if taken := {HISTORY, NEGATIVES} & set(self.features):
            raise InputError(f"features: {taken.pop()!r} is a key of the batch itself; rename the feature")
        if set(self.features) != set(self.feature_values):
            raise DamagedHistories(f"feature_values: {sorted(self.feature_values)}, features: {sorted(self.features)}")

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
        """Write the arrays as ``.npy`` files, then a JSON that describes them: no JSON, no histories."""
        for name, array in self._files().items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        write_meta(folder, len(self.items), self.num_users, list(self.features))

    def _files(self) -> dict[str, NDArray]:
        files = {name: getattr(self, name) for name in ("items", "timestamps", "offsets", "item_ids", "user_ids")}
        for at, name in enumerate(self.features):
            files[feature_file(at)], files[feature_file(at, "values")] = self.features[name], self.feature_values[name]
        return files

    @staticmethod
    def load(folder: Path) -> Histories:
        """Memory-map what :meth:`save` wrote; :class:`DamagedHistories` if it is not whole or of another version."""
        try:
            meta = json.loads((folder / _META).read_text())
            if meta["version"] != FORMAT_VERSION:
                raise DamagedHistories(f"{folder}: format version {meta['version']}, this one reads {FORMAT_VERSION}")
            names: list[str] = meta["features"]

            def read(name: str) -> NDArray:
                # np.memmap objects are slow to index: keep the mapping, drop the subclass.
                return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))

            histories = Histories(
                items=read("items"),
                timestamps=read("timestamps"),
                offsets=read("offsets"),
                item_ids=read("item_ids"),
                user_ids=read("user_ids"),
                features={name: read(feature_file(at)) for at, name in enumerate(names)},
                feature_values={name: read(feature_file(at, "values")) for at, name in enumerate(names)},
                folder=folder,
            )
            if (len(histories.items), histories.num_users) != (meta["events"], meta["users"]):
                raise DamagedHistories(f"{folder}: the arrays do not fit {_META}")
            return histories
        except DamagedHistories:
            raise
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise DamagedHistories(f"{folder}: {type(error).__name__}: {error}") from error


def feature_file(at: int, kind: str = "codes") -> str:
    """File of the feature number ``at``: numbered, because a feature's name need not be a file name."""
    return f"feature_{at}_{kind}"


def write_meta(folder: Path, events: int, users: int, features: list[str]) -> None:
    meta: dict[str, Any] = {"version": FORMAT_VERSION, "events": events, "users": users, "features": features}
    (folder / _META).write_text(json.dumps(meta))


def user_chunks(offsets: NDArray[np.int64], events: int) -> list[tuple[int, int]]:
    """Split users into consecutive ranges of about ``events`` events, at least one user each."""
    goals = np.arange(0, offsets[-1], events)
    edges = np.unique(np.append(np.searchsorted(offsets, goals, side="left"), len(offsets) - 1))
    return [(int(first), int(last)) for first, last in pairwise(edges)]
