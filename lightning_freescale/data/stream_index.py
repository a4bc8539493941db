"""``StreamIndex``: what must be known about Parquet files with one row per user before they are streamed.

One pass over the files finds the number of events of each row, checks the columns, and counts the items. The result is
cached. The files are read in slices of row groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_freescale.data.cache import cached, damage_detected, map_array, read_meta, save_arrays
from lightning_freescale.data.columns import RowLocation
from lightning_freescale.data.histories import CHUNK_EVENTS, time_order
from lightning_freescale.data.raw_ids import CountedIds
from lightning_freescale.data.sources import Events, ParquetSource, readable
from lightning_freescale.data.sources.parquet import leaf_values
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.jagged import lengths_to_offsets

_MAX_ID = 1 << 31  # a larger id is probably a hash and not the row of a table
_SLICES_FILE = "pieces"  # the name in caches of earlier versions, too


class RowGroupSlice(NamedTuple):
    """Consecutive rows of a Parquet row group with about ``CHUNK_EVENTS`` events. Reading and shuffling use whole slices.

    Attributes:
        file: number of the file.
        group: number of the row group in the file.
        row: the first row, counted from the start of the file.
        rows: number of rows.
    """

    file: int
    group: int
    row: int
    rows: int


@dataclass(frozen=True)
class StreamIndex:
    """The result of one pass over the files of a :class:`ParquetSource`.

    Attributes:
        source: the files.
        lengths: ``[R]`` int64, events of each row of all files.
        slices: ``[P, 4]`` int64, the fields of each :class:`RowGroupSlice`. Together they have all ``R`` rows, in order.
        min_events: rows with fewer events are left out of the training.
        num_items: largest item + 1.
        feature_sizes: by name, largest value + 1.
        item_counts: ``[num_items]``, how often each item occurs in training, that is without the ``held_out`` last events of
            every row; ``None`` if items were not counted.
        item_ids: ``[num_items]`` int64, sorted, with ``raw_ids``: the ids of the items; ``num_items`` is then their number.
    """

    source: ParquetSource
    lengths: NDArray[np.int64]
    slices: NDArray[np.int64]
    min_events: int
    num_items: int
    feature_sizes: dict[str, int]
    item_counts: NDArray[np.int64] | None
    item_ids: NDArray[np.int64] | None = None

    @staticmethod
    def of(
        source: ParquetSource,
        min_events: int = 3,
        count_items: bool = False,
        cache_dir: Path | None = None,
        held_out: int = 1,
        raw_ids: bool = False,
    ) -> StreamIndex:
        """Return the index of ``source``, from the cache if it has one."""
        identity = {"stream": source.identity(), "min_events": min_events, "count_items": count_items}
        if count_items:
            identity["held_out"] = held_out
        if raw_ids:
            identity["raw_ids"] = True

        def build(folder: Path) -> None:
            index = _scan(source, min_events, count_items, held_out, raw_ids)
            arrays = {"lengths": index.lengths, _SLICES_FILE: index.slices}
            arrays |= {} if index.item_counts is None else {"item_counts": index.item_counts}
            arrays |= {} if index.item_ids is None else {"item_ids": index.item_ids}
            save_arrays(folder, arrays, num_items=index.num_items, feature_sizes=index.feature_sizes)

        def load(folder: Path) -> StreamIndex:
            meta = read_meta(folder)
            lengths, slices = map_array(folder, "lengths"), map_array(folder, _SLICES_FILE)
            counts = map_array(folder, "item_counts") if count_items else None
            ids = map_array(folder, "item_ids") if raw_ids else None
            with damage_detected(folder):
                if slices[:, RowGroupSlice._fields.index("rows")].sum() != len(lengths):
                    raise ValueError("the slices do not have as many rows as there are lengths")
                return StreamIndex(
                    source, lengths, slices, min_events, meta["num_items"], meta["feature_sizes"], counts, ids
                )

        return cached(f"{source.path.stem}-stream", identity, build, load, cache_dir)


def _scan(
    source: ParquetSource, min_events: int, count_items: bool, held_out: int, raw_ids: bool = False
) -> StreamIndex:
    """Read all files once to build their index."""
    slices: list[RowGroupSlice] = []
    lengths: list[NDArray[np.int64]] = []
    num_items, counts = 0, np.zeros(0, dtype=np.int64)
    raw = CountedIds()
    sizes = dict.fromkeys(source.feature_columns, 0)
    for number, path in enumerate(source.files()):
        own = _slices_of_file(source, number, path)
        progress = tqdm(own, desc=f"scanning {path.name}", unit="slice", delay=2)
        for part, events in zip(progress, read_slices(source, own), strict=True):
            assert events.lengths is not None
            location = RowLocation(path, part.row, np.repeat(np.arange(part.rows), events.lengths))
            items = _codes(events.items, "items", location, raw_ids)
            trained = items[:0]
            if count_items:
                in_training = _in_training(events.lengths, min_events, held_out)
                trained = items[time_order(events.ticks, events.lengths)][in_training]
            if raw_ids:
                raw.add(items, trained)
            else:
                num_items = max(num_items, int(items.max(initial=-1)) + 1)
                counts = np.bincount(trained, minlength=num_items) + np.pad(counts, (0, num_items - len(counts)))
            for name, values in events.features.items():
                codes = _codes(values, name, location)
                sizes[name] = max(sizes[name], int(codes.max(initial=-1)) + 1)
            lengths.append(events.lengths)
        slices += own
    if not slices:
        raise InputError(f"{source.path}: holds no rows")
    return StreamIndex(
        source,
        lengths=np.concatenate(lengths),
        slices=np.array(slices, dtype=np.int64),
        min_events=min_events,
        num_items=len(raw.ids) if raw_ids else num_items,
        feature_sizes=sizes,
        item_counts=(raw.counts if raw_ids else counts) if count_items else None,
        item_ids=raw.ids if raw_ids else None,
    )


def _in_training(lengths: NDArray[np.int64], min_events: int, held_out: int) -> NDArray[np.bool_]:
    """Return a mask ``[sum(lengths)]`` of the events in training, that is of the rows with enough events.

    All events of such a row but the ``held_out`` last are in training.
    """
    mask = np.repeat(lengths >= min_events, lengths)
    ends = lengths_to_offsets(lengths)[1:]
    for back in range(1, held_out + 1):
        mask[(ends - back)[lengths >= back]] = False
    return mask


def _slices_of_file(source: ParquetSource, number: int, path: Path) -> list[RowGroupSlice]:
    slices = []
    with readable(path), pq.ParquetFile(path) as file:
        roles, per_user = source.roles(file, path)
        if not per_user:
            raise InputError(
                f"{path}: streaming needs one row per user, but column {roles.item!r} does not hold lists; "
                "set streaming=False, which groups events by user"
            )
        for group, (first, rows, step) in enumerate(_row_groups(file, roles.item)):
            for start in range(0, rows, step):
                slices.append(RowGroupSlice(number, group, first + start, min(step, rows - start)))
    return slices


def _row_groups(file: pq.ParquetFile, item: str) -> list[tuple[int, int, int]]:
    """Return for each row group its first row, its number of rows, and the rows of each of its slices but the last."""
    rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    first = lengths_to_offsets(np.array(rows, dtype=np.int64))[:-1].tolist()
    steps = [
        max(1, n * CHUNK_EVENTS // max(1, values)) for n, values in zip(rows, leaf_values(file, item), strict=True)
    ]
    return list(zip(first, rows, steps, strict=True))


def read_slices(source: ParquetSource, slices: Iterable[RowGroupSlice], threads: bool = True) -> Iterator[Events]:
    """Yield the events of each slice.

    Reading a slice decodes its row group from the start. So slices of one row group must follow each other, in row order.

    Args:
        source: the files.
        slices: what to read.
        threads: whether Arrow may use several threads.
    """
    files = source.files()
    for (number, group), together in groupby(slices, key=lambda part: (part.file, part.group)):
        path = files[number]
        with readable(path), pq.ParquetFile(path, pre_buffer=False) as file:
            roles = source.roles(file, path)[0]._replace(user=None)
            wanted = [part.row for part in together]
            row, _, step = _row_groups(file, roles.item)[group]
            columns = source.names(roles)
            for batch in file.iter_batches(batch_size=step, row_groups=[group], columns=columns, use_threads=threads):
                if row in wanted:
                    yield source.rows_of_users(batch, roles, RowLocation(path, row), row)
                if (row := row + len(batch)) > wanted[-1]:
                    break


def _codes(values: pa.Array, column: str, location: RowLocation, raw_ids: bool = False) -> NDArray[np.int64]:
    """Return the values as rows of a table. A stream has no vocabulary, so they must be such rows already.

    Args:
        raw_ids: they may also be any integers from 0 to 2^63 - 1.
    """
    limit, wanted = (
        (1 << 63, "integers from 0 to 2^63 - 1") if raw_ids else (_MAX_ID, "ids from 0 to the table's size - 1")
    )
    if not pa.types.is_integer(values.type):
        raise InputError(
            f"{location.path}: column {column!r} has type {values.type}; streaming needs {wanted}; "
            "encode them, or set streaming=False, which does so"
        )
    codes = np.asarray(values)
    if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < limit:
        at = int(((codes < 0) | (codes > limit - 1)).argmax())
        raise InputError(
            f"{location.path}: {column} is {codes[at]} at row {location.row(at)}; streaming needs {wanted}"
        )
    return codes.astype(np.int64, copy=False) if raw_ids else codes
