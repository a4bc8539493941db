"""``preprocess``: turns the events of a source into the histories of its users, in time order.

1. Read the source once, and write its columns to temporary files as integers.
2. Bring the events of each user together, with a counting sort into the memory-mapped result.
3. Put the events of each user in time order, for a range of users at a time.

All steps are vectorised. Memory holds only the vocabularies and one chunk of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_freescale.data.cache import cached, save_arrays
from lightning_freescale.data.columns import TICKS_PER_SECOND
from lightning_freescale.data.histories import CHUNK_EVENTS, Histories, feature_file, time_order, user_chunks
from lightning_freescale.data.sources import Source
from lightning_freescale.data.vocabulary import Vocabulary
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.jagged import lengths_to_offsets
from lightning_freescale.runtime.log import log_once


def preprocess(source: Source, folder: Path, min_events: int = 3) -> None:
    """Write the histories of ``source`` into ``folder``, for :meth:`Histories.load`.

    Users with fewer than ``min_events`` events are left out, and so are items and feature values that only they have.
    """
    features = list(source.feature_columns)
    with TemporaryDirectory(dir=folder, prefix="spill-") as scratch:
        table = _read(source, Path(scratch))
        counts = np.zeros(len(table.user_vocabulary), dtype=np.int64)
        for start in range(0, len(table.users), CHUNK_EVENTS):
            counts += np.bincount(table.users[start : start + CHUNK_EVENTS], minlength=len(counts))
        kept = counts >= min_events
        if not kept.any():
            raise InputError(
                f"{source.path}: none of {len(kept)} users has {min_events} events or more; lower min_events"
            )
        if dropped := int((~kept).sum()):
            log_once(
                f"{source.path.name}: {dropped} of {len(kept)} users have fewer than {min_events} events and are left out"
            )
        user_ids, user_of_code = table.user_vocabulary.sort(kept)
        lengths = np.empty(len(user_ids), dtype=np.int64)
        lengths[user_of_code[kept]] = counts[kept]
        offsets = lengths_to_offsets(lengths)

        events = int(offsets[-1])
        files = ["items", *(feature_file(at) for at in range(len(features)))]
        codes = [_create(folder / f"{file}.npy", events) for file in files]
        times = _create(folder / "timestamps.npy", events)
        used = _group_by_user(table, user_of_code, offsets, codes, times)
        vocabularies = [vocabulary.sort(mask) for vocabulary, mask in zip(table.vocabularies, used, strict=True)]
        _sort_by_time(offsets, codes, [new_code for _, new_code in vocabularies], times)

    raw = {"item_ids": vocabularies[0][0], "user_ids": user_ids, "offsets": offsets}
    raw |= {feature_file(at, "values"): values for at, (values, _) in enumerate(vocabularies[1:])}
    save_arrays(folder, raw, features=features)


def read_histories(source: Source, min_events: int, cache_dir: Path | None = None) -> Histories:
    """The histories of ``source``, memory-mapped from the cache. The first process preprocesses them, the others wait for it."""
    identity = {**source.identity(), "min_events": min_events}
    build = partial(preprocess, source, min_events=min_events)
    return cached(source.path.stem, identity, build, Histories.load, cache_dir)


@dataclass
class _Table:
    """The columns of a source as memory-mapped integers, in file order.

    Attributes:
        users: ``[N]`` code of the user of each event.
        ticks: ``[N]`` time of each event, in microseconds.
        codes: ``[N]`` each: the codes of the items, then those of each feature.
        user_vocabulary: the raw user id of each code.
        vocabularies: the raw value of each code, for each entry of ``codes``.
    """

    users: NDArray[np.int64]
    ticks: NDArray[np.int64]
    codes: Sequence[NDArray[np.int64]]
    user_vocabulary: Vocabulary
    vocabularies: list[Vocabulary]


def _read(source: Source, scratch: Path) -> _Table:
    """Read all events, and write their columns as integers into the folder ``scratch``."""

    def vocabulary(column: str, kind: str) -> Vocabulary:
        return Vocabulary(f"{source.path}: {column}", kind if source.parses_text else None)

    user_vocabulary = vocabulary("user", "id")
    vocabularies = [vocabulary("item", "id"), *(vocabulary(name, "value") for name in source.feature_columns)]
    paths = [scratch / f"{at}.bin" for at in range(2 + len(vocabularies))]
    total = 0
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(None, f"reading {source.path.name}", source.num_events))
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for events in source.events():
            users = user_vocabulary.encode(events.users)
            users = users if events.lengths is None else np.repeat(users, events.lengths)
            raw = [events.items, *events.features.values()]
            coded = [column.encode(values) for column, values in zip(vocabularies, raw, strict=True)]
            for file, column in zip(files, [users, events.ticks, *coded], strict=True):
                column.astype(np.int64, copy=False).tofile(file)
            total += len(users)
            progress.update(len(users))
    if total == 0:
        raise InputError(f"{source.path}: holds no events")
    users, ticks, *codes = (np.memmap(path, dtype=np.int64, mode="r") for path in paths)
    return _Table(users, ticks, codes, user_vocabulary, vocabularies)


def _group_by_user(
    table: _Table,
    user_of_code: NDArray[np.int64],
    offsets: NDArray[np.int64],
    codes: Sequence[NDArray[np.int64]],
    times: NDArray[np.int64],
) -> list[NDArray[np.bool_]]:
    """Copy the events of the kept users, one user after another, in file order within a user.

    Args:
        table: all events.
        user_of_code: the user number of each code; -1 for users that are left out.
        offsets: ``[U + 1]``, the range of each user in the result.
        codes, times: the arrays to fill.

    Returns:
        For each column which of its codes occur.
    """
    used = [np.zeros(len(vocabulary), dtype=bool) for vocabulary in table.vocabularies]
    cursor = offsets[:-1].copy()  # the position of the next event of each user
    for start in _progress(range(0, len(table.users), CHUNK_EVENTS), "grouping by user"):
        chunk = slice(start, start + CHUNK_EVENTS)
        users = user_of_code[table.users[chunk]]
        order = np.argsort(users, kind="stable")
        order = order[np.searchsorted(users, 0, sorter=order) :]  # drop users that are left out
        if not len(order):
            continue
        users = users[order]
        heads = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
        counts = np.diff(np.append(heads, len(users)))
        position = cursor[users] + np.arange(len(users)) - np.repeat(heads, counts)
        cursor[users[heads]] += counts
        times[position] = table.ticks[chunk][order]
        for out, column, mask in zip(codes, table.codes, used, strict=True):
            values = column[chunk][order]
            out[position] = values
            mask[values] = True
    return used


def _sort_by_time(
    offsets: NDArray[np.int64],
    codes: Sequence[NDArray[np.int64]],
    new_codes: Sequence[NDArray[np.int64]],
    times: NDArray[np.int64],
) -> None:
    """Put the events of each user in time order, in place. Also replace codes by new codes, and ticks by seconds."""
    for first, last in _progress(user_chunks(offsets, CHUNK_EVENTS), "sorting by time"):
        span = slice(offsets[first], offsets[last])
        ticks = times[span]
        order = time_order(ticks, np.diff(offsets[first : last + 1]))
        times[span] = ticks[order] // TICKS_PER_SECOND
        for column, new_code in zip(codes, new_codes, strict=True):
            column[span] = new_code[column[span][order]]


def _create(path: Path, events: int) -> NDArray[np.int64]:
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(events,))


def _progress(steps: Any, title: str, total: int | None = None) -> tqdm:
    """Return a progress bar, which appears if the work takes more than two seconds."""
    return tqdm(steps, desc=title, total=total, unit=" events" if steps is None else "it", unit_scale=True, delay=2)
