"""Reads only the lengths of the histories from event data, for ``freescale plan``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm.auto import tqdm

from lightning_freescale.data.columns import RowLocation, ids, list_lengths
from lightning_freescale.data.sources import ParquetSource, Source, readable
from lightning_freescale.runtime.errors import InputError


def read_lengths(source: Source) -> NDArray[np.int64]:
    """``[users]`` number of events of each user, in no particular order."""
    counts, merged = [], 0
    progress = tqdm(
        _events_of_users(source), desc=f"reading {source.path.name}", unit=" events", unit_scale=True, delay=2
    )
    for users, events in progress:
        counts.append(pa.table({"user": users, "events": pa.array(events)}))
        progress.update(int(events.sum()) - 1)
        if (rows := sum(map(len, counts))) > 2 * merged + (1 << 22):  # keep about one row per user in memory
            counts, merged = [_merge(counts)], rows
    if not counts:
        raise InputError(f"{source.path}: the file holds no events")
    return np.asarray(_merge(counts)["events"])


def _merge(counts: list[pa.Table]) -> pa.Table:
    """One table with one row per user."""
    events = pa.concat_tables(counts, promote_options="permissive").group_by("user").aggregate([("events", "sum")])
    return events.rename_columns(["user", "events"])


def _events_of_users(source: Source) -> Iterator[tuple[pa.Array, NDArray[np.int64]]]:
    """Chunks of users and their numbers of events. A user may appear more than once."""
    if not isinstance(source, ParquetSource):
        for events in source.events():
            yield events.users, np.ones(len(events.users), dtype=np.int64)
        return
    first_row = 0
    for path in source.files():
        with readable(path), pq.ParquetFile(path) as file:
            roles, per_user = source.roles(file, path)
            columns = [name for name in (roles.user, roles.item if per_user else None) if name is not None]
            location = RowLocation(path)
            for batch in file.iter_batches(columns=columns):
                rows = np.arange(first_row, first_row + len(batch))
                users = pa.array(rows) if roles.user is None else ids(batch[roles.user], roles.user, location)
                yield users, list_lengths(batch[roles.item], roles.item, location) if per_user else np.ones_like(rows)
                first_row += len(batch)
                location = RowLocation(path, location.first_row + len(batch))
