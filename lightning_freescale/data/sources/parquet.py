"""``ParquetSource``: events from Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_freescale.data.columns import (
    TICKS_PER_SECOND,
    ColumnRoles,
    RowLocation,
    categories,
    find_roles,
    flatten_list,
    ids,
    is_list,
    list_lengths,
    require_column,
    ticks,
)
from lightning_freescale.data.histories import CHUNK_EVENTS
from lightning_freescale.data.sources.base import Events, Source, readable
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.log import log_once


@dataclass(frozen=True)
class ParquetSource(Source):
    """One row per user if the item column holds lists, else one row per event."""

    def files(self) -> list[Path]:
        return parquet_files(self.path)

    @property
    def num_events(self) -> int:
        with readable(self.path):
            return sum(self._leaf_values(file) for file in self.files())

    def _leaf_values(self, path: Path) -> int:
        with pq.ParquetFile(path) as file:
            roles, _ = self.roles(file, path)
            return sum(leaf_values(file, roles.item))

    def roles(self, file: pq.ParquetFile, path: Path) -> tuple[ColumnRoles, bool]:
        """Return the roles of the columns, and whether the file has one row per user."""
        schema = file.schema_arrow
        lists = [name for name in schema.names if is_list(schema.field(name).type)]
        roles = find_roles(schema.names, self.columns, path, user_optional=bool(lists))
        for name in self.feature_columns:
            require_column(name, schema.names, path)
        per_user = roles.item in lists
        if roles.user is None and not per_user:
            raise InputError(
                f"{path}: no user column, and {roles.item!r} has no list per row (columns: {schema.names})"
            )
        return roles, per_user

    def events(self) -> Iterator[Events]:
        first_row = 0  # counts the rows of all files; without a user column it is the id of the user
        for path in self.files():
            with readable(path), pq.ParquetFile(path) as file:
                roles, per_user = self.roles(file, path)
                mean = max(1.0, sum(leaf_values(file, roles.item)) / max(1, file.metadata.num_rows))
                location = RowLocation(path)
                read = self.rows_of_users if per_user else self._rows_of_events
                for batch in file.iter_batches(batch_size=max(1, int(CHUNK_EVENTS / mean)), columns=self.names(roles)):
                    yield read(batch, roles, location, first_row)
                    first_row += len(batch)
                    location = RowLocation(path, location.first_row + len(batch))

    def names(self, roles: ColumnRoles) -> list[str]:
        """Return the columns to read."""
        return list(dict.fromkeys([*(name for name in roles if name is not None), *self.feature_columns]))

    def _rows_of_events(
        self, batch: pa.RecordBatch, roles: ColumnRoles, location: RowLocation, first_row: int
    ) -> Events:
        assert roles.user is not None
        position = np.arange(first_row, first_row + len(batch)) * TICKS_PER_SECOND
        return Events(
            users=ids(batch[roles.user], roles.user, location),
            items=ids(batch[roles.item], roles.item, location),
            ticks=ticks(batch[roles.time], roles.time, location, self.time_unit) if roles.time else position,
            features={name: categories(batch[name], name, location) for name in self.feature_columns},
        )

    def rows_of_users(self, batch: pa.RecordBatch, roles: ColumnRoles, location: RowLocation, first_row: int) -> Events:
        """Return the events of a batch with one row per user. A feature without lists is repeated for each event."""
        lengths = list_lengths(batch[roles.item], roles.item, location)
        row_of_event = np.repeat(np.arange(len(batch)), lengths)
        within = location._replace(rows=row_of_event)

        def flat(name: str) -> pa.Array:
            return flatten_list(batch[name], name, lengths, roles.item, location)

        def feature(name: str) -> pa.Array:
            column = batch[name]
            if is_list(column.type):
                return categories(flat(name), name, within)
            return categories(column, name, location).take(pa.array(row_of_event))

        rows = np.arange(first_row, first_row + len(batch))
        position = np.arange(len(row_of_event)) * TICKS_PER_SECOND
        return Events(
            users=ids(batch[roles.user], roles.user, location) if roles.user else pa.array(rows),
            items=ids(flat(roles.item), roles.item, within),
            ticks=ticks(flat(roles.time), roles.time, within, self.time_unit) if roles.time else position,
            features={name: feature(name) for name in self.feature_columns},
            lengths=lengths,
        )


def parquet_files(path: Path) -> list[Path]:
    """Return the file itself, or the Parquet files of the folder in the order of their names.

    Names that begin with an underscore or a dot are left out, also those of folders. Spark, Delta and file managers use them for
    files that are unfinished, or that are no data.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("*.parquet"))
    files = [file for file in found if not any(part[0] in "_." for part in file.relative_to(path).parts)]
    if len(files) < len(found):
        left_out = next(file for file in found if file not in files)
        log_once(
            f"{path.name}: {len(found) - len(files)} files whose names begin with _ or . are left out ({left_out})"
        )
    if not files:
        raise InputError(f"data: the folder {path} holds no .parquet file")
    return files


def leaf_values(file: pq.ParquetFile, column: str) -> list[int]:
    """Return the number of values of a column in each row group, from the metadata. Elements of lists count singly."""
    metadata = file.metadata
    paths = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
    leaf = next(at for at, path in enumerate(paths) if path == column or path.startswith(f"{column}."))
    return [metadata.row_group(group).column(leaf).num_values for group in range(metadata.num_row_groups)]
