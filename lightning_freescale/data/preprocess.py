"""Events in file order to users' histories in time order. Vectorised; memory holds the vocabularies and one chunk.

The file is read once and its columns are spilled as integers. A counting sort then brings each user's events together
in the memory-mapped result, and a last pass puts them in time order, a range of users at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_freescale.data.cache import save_arrays
from lightning_freescale.data.columns import TICKS_PER_SECOND
from lightning_freescale.data.histories import CHUNK, feature_file, user_chunks
from lightning_freescale.data.sources import Source
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.jagged import lengths_to_offsets
from lightning_freescale.runtime.log import log_once


def preprocess(source: Source, folder: Path, min_events: int = 3) -> None:
    """Write the histories of ``source`` into ``folder``.

    Users with fewer than ``min_events`` events are left out, and with them the items and feature values only they have.
    """
    features = list(source.feature_columns)
    with TemporaryDirectory(dir=folder, prefix="spill-") as scratch:
        table = _read(source, Path(scratch))
        counts = np.zeros(len(table.user_names), dtype=np.int64)
        for start in range(0, len(table.users), CHUNK):
            counts += np.bincount(table.users[start : start + CHUNK], minlength=len(counts))
        kept = counts >= min_events
        if not kept.any():
            raise InputError(f"{source.path}: none of {len(kept)} users has {min_events} events or more (min_events)")
        if dropped := int((~kept).sum()):
            log_once(
                f"{source.path.name}: {dropped} of {len(kept)} users have fewer than {min_events} events, left out"
            )
        user_ids, user_of_code = table.user_names.ranks(kept)
        lengths = np.empty(len(user_ids), dtype=np.int64)
        lengths[user_of_code[kept]] = counts[kept]
        offsets = lengths_to_offsets(lengths)

        events = int(offsets[-1])
        files = ["items", *(feature_file(at) for at in range(len(features)))]
        codes = [_create(folder / f"{file}.npy", events) for file in files]
        times = _create(folder / "timestamps.npy", events)
        used = _group_by_user(table, user_of_code, offsets, codes, times)
        vocabularies = [names.ranks(mask) for names, mask in zip(table.names, used, strict=True)]
        _sort_by_time(offsets, codes, [rank for _, rank in vocabularies], times)

    raw = {"item_ids": vocabularies[0][0], "user_ids": user_ids, "offsets": offsets}
    raw |= {feature_file(at, "values"): values for at, (values, _) in enumerate(vocabularies[1:])}
    save_arrays(folder, raw, features=features)


class Vocabulary:
    """The distinct raw values of a column, coded in order of appearance.

    Args:
        label: file and column, for messages.
        parse: what text may stand for: ``"id"``: integers, if all are written the one usual way; ``"value"``: numbers;
            ``None``: the values have their type already.
    """

    def __init__(self, label: str, parse: str | None):
        self.label, self.parse = label, parse
        self._known: pa.Array | None = None

    def __len__(self) -> int:
        return 0 if self._known is None else len(self._known)

    def encode(self, values: pa.Array) -> NDArray[np.int64]:
        """``[n]`` raw values to ``[n]`` codes; new values get new ones."""
        local = values.dictionary_encode()
        if self._known is None:
            self._known = local.dictionary.slice(0, 0)
        if self._known.type != local.dictionary.type:
            raise InputError(f"{self.label}: {self._known.type} first, {local.dictionary.type} in a later part or file")
        found = pc.index_in(local.dictionary, value_set=self._known)
        new = np.asarray(found.is_null())
        codes = np.asarray(found.fill_null(0)).astype(np.int64)
        codes[new] = len(self._known) + np.arange(new.sum())
        self._known = pa.concat_arrays([self._known, local.dictionary.filter(pa.array(new))])
        return codes[np.asarray(local.indices)]

    def ranks(self, used: NDArray[np.bool_]) -> tuple[NDArray, NDArray[np.int64]]:
        """The values whose codes are ``used [len(self)]``, sorted, and each code's place among them (-1: not used)."""
        assert self._known is not None
        values = self._known.filter(pa.array(used))
        raw = self._parsed(values) if self.parse else values
        array = raw.to_numpy(zero_copy_only=False)
        raw_sorted, places = np.unique(array.astype(str) if array.dtype == object else array, return_inverse=True)
        rank_of_code = np.full(len(used), -1, dtype=np.int64)
        rank_of_code[used] = places
        return raw_sorted, rank_of_code

    def _parsed(self, values: pa.Array) -> pa.Array:
        for kind in (pa.int64(), pa.float64()) if self.parse == "value" else (pa.int64(),):
            try:
                numbers = values.cast(kind)
            except pa.ArrowInvalid:
                continue
            if self.parse == "value":
                return numbers
            if not pc.all(pc.equal(numbers.cast(values.type), values)).as_py():
                return values  # "007" is not 7: keep what was written
            if (low := pc.min(numbers).as_py()) < 0:
                raise InputError(f"{self.label} is {low}; ids are not negative")
            return numbers
        return values


@dataclass
class _Table:
    """The columns of a source as integers, in file order, memory-mapped.

    Attributes:
        users, ticks: ``[N]``.
        codes: ``[N]`` each: items, then the features.
        user_names, names: what the codes stand for.
    """

    users: NDArray[np.int64]
    ticks: NDArray[np.int64]
    codes: Sequence[NDArray[np.int64]]
    user_names: Vocabulary
    names: list[Vocabulary]


def _read(source: Source, scratch: Path) -> _Table:
    def vocabulary(column: str, kind: str) -> Vocabulary:
        return Vocabulary(f"{source.path}: {column}", kind if source.parses_text else None)

    user_names = vocabulary("user", "id")
    names = [vocabulary("item", "id"), *(vocabulary(name, "value") for name in source.feature_columns)]
    paths = [scratch / f"{at}.bin" for at in range(2 + len(names))]
    total = 0
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(None, f"reading {source.path.name}", source.num_events))
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for events in source.events():
            users = user_names.encode(events.users)
            users = users if events.lengths is None else np.repeat(users, events.lengths)
            raw = [events.items, *events.features.values()]
            coded = [column.encode(values) for column, values in zip(names, raw, strict=True)]
            for file, column in zip(files, [users, events.ticks, *coded], strict=True):
                column.astype(np.int64, copy=False).tofile(file)
            total += len(users)
            progress.update(len(users))
    if total == 0:
        raise InputError(f"{source.path}: holds no events")
    users, ticks, *codes = (np.memmap(path, dtype=np.int64, mode="r") for path in paths)
    return _Table(users, ticks, codes, user_names, names)


def _group_by_user(
    table: _Table,
    user_of_code: NDArray[np.int64],
    offsets: NDArray[np.int64],
    codes: Sequence[NDArray[np.int64]],
    times: NDArray[np.int64],
) -> list[NDArray[np.bool_]]:
    """Copy the events of kept users to their places, in file order within a user; returns each column's used codes."""
    used = [np.zeros(len(names), dtype=bool) for names in table.names]
    cursor = offsets[:-1].copy()  # where each user's next event goes
    for start in _progress(range(0, len(table.users), CHUNK), "grouping by user"):
        chunk = slice(start, start + CHUNK)
        users = user_of_code[table.users[chunk]]
        order = np.argsort(users, kind="stable")
        order = order[np.searchsorted(users, 0, sorter=order) :]  # users left out are -1
        if not len(order):
            continue
        users = users[order]
        heads = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
        runs = np.diff(np.append(heads, len(users)))
        place = cursor[users] + np.arange(len(users)) - np.repeat(heads, runs)
        cursor[users[heads]] += runs
        times[place] = table.ticks[chunk][order]
        for out, column, mask in zip(codes, table.codes, used, strict=True):
            values = column[chunk][order]
            out[place] = values
            mask[values] = True
    return used


def _sort_by_time(
    offsets: NDArray[np.int64],
    codes: Sequence[NDArray[np.int64]],
    ranks: Sequence[NDArray[np.int64]],
    times: NDArray[np.int64],
) -> None:
    """Put each user's events in time order, ties as they stand; codes become ranks and ticks seconds. In place."""
    for first, last in _progress(user_chunks(offsets, CHUNK), "sorting by time"):
        span = slice(offsets[first], offsets[last])
        ticks = times[span]
        order = time_order(ticks, np.diff(offsets[first : last + 1]))
        times[span] = ticks[order] // TICKS_PER_SECOND
        for column, rank in zip(codes, ranks, strict=True):
            column[span] = rank[column[span][order]]


def time_order(ticks: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """An index that puts each user's events, ``ticks [sum(lengths)]``, in time order; ties stay as they are."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    late = (np.diff(ticks) < 0) & (owners[1:] == owners[:-1])
    return np.lexsort((ticks, owners)) if late.any() else slice(None)


def _create(path: Path, events: int) -> NDArray[np.int64]:
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(events,))


def _progress(steps: Any, title: str, total: int | None = None) -> tqdm:
    """A progress bar for work that takes more than two seconds."""
    return tqdm(steps, desc=title, total=total, unit=" events" if steps is None else "it", unit_scale=True, delay=2)
