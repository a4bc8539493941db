"""Parquet files with one row per user, read a piece at a time, and an index of them that says who can read what.

One pass over the files, cached, finds how many events each row has, checks the columns and counts the items.
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

from lightning_freescale.data.cache import cached, map_array, read_meta, save_arrays, whole
from lightning_freescale.data.columns import Place
from lightning_freescale.data.histories import CHUNK
from lightning_freescale.data.preprocess import time_order
from lightning_freescale.data.sources import Events, ParquetSource, leaf_values, readable
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.jagged import lengths_to_offsets

_MAX_ID = 1 << 31  # an id beyond is no row of a table but a hash


class Piece(NamedTuple):
    """Consecutive rows of a row group, about ``CHUNK`` events: what is read, and shuffled, at a time."""

    file: int
    group: int
    row: int  # the first, within the file
    rows: int


_ROWS = Piece._fields.index("rows")


@dataclass(frozen=True)
class StreamIndex:
    """What one pass over the files of a :class:`ParquetSource` told.

    Attributes:
        source: the files.
        lengths: ``[R]`` int64, events of each row, over all files.
        pieces: ``[P, 4]`` int64, see :class:`Piece`; together all ``R`` rows, in order.
        min_events: rows with fewer are left out.
        num_items: largest item + 1.
        feature_sizes: by name, largest value + 1.
        item_counts: ``[num_items]``, how often each item occurs in training; ``None`` if they were not counted.
    """

    source: ParquetSource
    lengths: NDArray[np.int64]
    pieces: NDArray[np.int64]
    min_events: int
    num_items: int
    feature_sizes: dict[str, int]
    item_counts: NDArray[np.int64] | None

    @staticmethod
    def of(
        source: ParquetSource, min_events: int = 3, count_items: bool = False, cache_dir: Path | None = None
    ) -> StreamIndex:
        """The index of ``source``, from the cache if it is there."""
        identity = {"stream": source.identity(), "min_events": min_events, "count_items": count_items}

        def build(folder: Path) -> None:
            index = _scan(source, min_events, count_items)
            arrays = {"lengths": index.lengths, "pieces": index.pieces}
            arrays |= {} if index.item_counts is None else {"item_counts": index.item_counts}
            save_arrays(folder, arrays, num_items=index.num_items, feature_sizes=index.feature_sizes)

        def load(folder: Path) -> StreamIndex:
            meta = read_meta(folder)
            lengths, pieces = map_array(folder, "lengths"), map_array(folder, "pieces")
            counts = map_array(folder, "item_counts") if count_items else None
            with whole(folder):
                if pieces[:, _ROWS].sum() != len(lengths):
                    raise ValueError("pieces and lengths do not fit")
                return StreamIndex(
                    source, lengths, pieces, min_events, meta["num_items"], meta["feature_sizes"], counts
                )

        return cached(f"{source.path.stem}-stream", identity, build, load, cache_dir)


def _scan(source: ParquetSource, min_events: int, count_items: bool) -> StreamIndex:
    pieces: list[Piece] = []
    lengths: list[NDArray[np.int64]] = []
    num_items, counts = 0, np.zeros(0, dtype=np.int64)
    sizes = dict.fromkeys(source.feature_columns, 0)
    for number, path in enumerate(source.files()):
        own = _pieces_of(source, number, path)
        progress = tqdm(own, desc=f"scanning {path.name}", unit="piece", delay=2)
        for piece, events in zip(progress, read_pieces(source, own), strict=True):
            assert events.lengths is not None
            place = Place(path, piece.row, np.repeat(np.arange(piece.rows), events.lengths))
            items = _codes(events.items, "items", place)
            num_items = max(num_items, int(items.max(initial=-1)) + 1)
            if count_items:
                trained = items[time_order(events.ticks, events.lengths)][_in_training(events.lengths, min_events)]
                counts = np.bincount(trained, minlength=num_items) + np.pad(counts, (0, num_items - len(counts)))
            for name, values in events.features.items():
                codes = _codes(values, name, place)
                sizes[name] = max(sizes[name], int(codes.max(initial=-1)) + 1)
            lengths.append(events.lengths)
        pieces += own
    if not pieces:
        raise InputError(f"{source.path}: holds no rows")
    return StreamIndex(
        source,
        lengths=np.concatenate(lengths),
        pieces=np.array(pieces, dtype=np.int64),
        min_events=min_events,
        num_items=num_items,
        feature_sizes=sizes,
        item_counts=counts if count_items else None,
    )


def _in_training(lengths: NDArray[np.int64], min_events: int) -> NDArray[np.bool_]:
    """``[sum(lengths)]``: all events but the last of rows that are not left out."""
    mask = np.repeat(lengths >= min_events, lengths)
    mask[(lengths_to_offsets(lengths)[1:] - 1)[lengths > 0]] = False
    return mask


def _pieces_of(source: ParquetSource, number: int, path: Path) -> list[Piece]:
    pieces = []
    with readable(path), pq.ParquetFile(path) as file:
        roles, per_user = source.roles(file, path)
        if not per_user:
            raise InputError(
                f"{path}: streaming needs one row per user, but {roles.item!r} has no list per row; "
                "use streaming=False, which groups events by user"
            )
        for group, (first, rows, step) in enumerate(_steps(file, roles.item)):
            for start in range(0, rows, step):
                pieces.append(Piece(number, group, first + start, min(step, rows - start)))
    return pieces


def _steps(file: pq.ParquetFile, item: str) -> list[tuple[int, int, int]]:
    """For each row group its first row, its number of rows, and how many of them make a piece."""
    rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    first = lengths_to_offsets(np.array(rows, dtype=np.int64))[:-1].tolist()
    steps = [max(1, n * CHUNK // max(1, values)) for n, values in zip(rows, leaf_values(file, item), strict=True)]
    return list(zip(first, rows, steps, strict=True))


def read_pieces(source: ParquetSource, pieces: Iterable[Piece], threads: bool = True) -> Iterator[Events]:
    """The events of pieces; those of a row group in order, together. What stands before them in it is decoded, too."""
    files = source.files()
    for (number, group), together in groupby(pieces, key=lambda piece: (piece.file, piece.group)):
        path = files[number]
        with readable(path), pq.ParquetFile(path, pre_buffer=False) as file:
            roles = source.roles(file, path)[0]._replace(user=None)
            wanted = [piece.row for piece in together]
            row, _, step = _steps(file, roles.item)[group]
            columns = source.names(roles)
            for batch in file.iter_batches(batch_size=step, row_groups=[group], columns=columns, use_threads=threads):
                if row in wanted:
                    yield source.rows_of_users(batch, roles, Place(path, row), row)
                if (row := row + len(batch)) > wanted[-1]:
                    break


def _codes(values: pa.Array, column: str, place: Place) -> NDArray[np.int64]:
    """Values that are rows of a table already: a stream has no vocabulary."""
    if not pa.types.is_integer(values.type):
        raise InputError(
            f"{place.path}: column {column!r} has type {values.type}; streaming needs ids in 0 to the table's size - 1; "
            "encode them, or use streaming=False, which does"
        )
    codes = np.asarray(values)
    if len(codes) and not 0 <= codes.min() <= codes.max() < _MAX_ID:
        at = int(((codes < 0) | (codes >= _MAX_ID)).argmax())
        raise InputError(
            f"{place.path}: {column} is {codes[at]} at row {place.row(at)}; streaming needs ids from 0 to the table's size - 1"
        )
    return codes
