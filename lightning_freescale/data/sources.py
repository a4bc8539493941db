"""Files of events: Parquet, CSV and text pairs, read a few million events at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.data.cache import fingerprint
from lightning_freescale.data.columns import (
    TICKS_PER_SECOND,
    Place,
    Roles,
    TimeUnit,
    categories,
    find_roles,
    flatten_list,
    ids,
    is_list,
    list_lengths,
    require_column,
    ticks,
)
from lightning_freescale.data.histories import CHUNK
from lightning_freescale.runtime.errors import ConfigurationError, InputError

Format = Literal["parquet", "csv", "text"]
_CSV_BLOCK = 64 << 20  # bytes


@dataclass(frozen=True)
class Events:
    """A run of ``n`` events as they stand in a file.

    Attributes:
        users: raw ids: ``[n]``, or ``[rows]`` with ``lengths``.
        items: ``[n]`` raw ids.
        ticks: ``[n]`` microseconds.
        features: by name, ``[n]`` raw values.
        lengths: ``[rows]`` events of each row, ``None`` if every row is an event.
    """

    users: pa.Array
    items: pa.Array
    ticks: NDArray[np.int64]
    features: dict[str, pa.Array]
    lengths: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Source(ABC):
    """A file, or a folder of files, of events.

    Attributes:
        path: what to read.
        columns: role (``"user"``, ``"item"``, ``"time"``) to column; roles left out are looked for by usual names.
        feature_columns: categorical features of the events.
        time_unit: of numeric times.
    """

    path: Path
    columns: Mapping[str, str | None] = field(default_factory=dict)
    feature_columns: Sequence[str] = ()
    time_unit: TimeUnit = "s"

    def __post_init__(self) -> None:
        if taken := [name for name in self.feature_columns if name in (HISTORY, NEGATIVES)]:
            raise ConfigurationError(f"feature_columns: {taken[0]!r} is a key of the batch itself; rename the column")
        if len(set(self.feature_columns)) < len(self.feature_columns):
            raise ConfigurationError(f"feature_columns: a column twice in {list(self.feature_columns)}")

    # Text holds digits, not numbers: whether ids are integers is known once all of them have been seen.
    parses_text: ClassVar[bool] = False

    @abstractmethod
    def events(self) -> Iterator[Events]:
        """Read from the start. Raises :class:`InputError` for everything that is wrong with the file."""

    def files(self) -> list[Path]:
        return [self.path]

    def identity(self) -> dict[str, Any]:
        """All that the events depend on, as JSON types."""
        return {
            "source": type(self).__name__,
            "files": fingerprint(self.files()),
            "columns": dict(self.columns),
            "features": list(self.feature_columns),
            "time_unit": self.time_unit,
        }

    @property
    def num_events(self) -> int | None:
        """If known beforehand."""
        return None


@dataclass(frozen=True)
class ParquetSource(Source):
    """One row per user with list columns, or one row per event: the type of the item column tells."""

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

    def roles(self, file: pq.ParquetFile, path: Path) -> tuple[Roles, bool]:
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
        first_row = 0  # over all files: users without an id are numbered by it
        for path in self.files():
            with readable(path), pq.ParquetFile(path) as file:
                roles, per_user = self.roles(file, path)
                mean = max(1.0, sum(leaf_values(file, roles.item)) / max(1, file.metadata.num_rows))
                place = Place(path)
                read = self.rows_of_users if per_user else self._rows_of_events
                for batch in file.iter_batches(batch_size=max(1, int(CHUNK / mean)), columns=self.names(roles)):
                    yield read(batch, roles, place, first_row)
                    first_row += len(batch)
                    place = Place(path, place.first_row + len(batch))

    def names(self, roles: Roles) -> list[str]:
        """The columns to read."""
        return list(dict.fromkeys([*(name for name in roles if name is not None), *self.feature_columns]))

    def _rows_of_events(self, batch: pa.RecordBatch, roles: Roles, place: Place, first_row: int) -> Events:
        assert roles.user is not None
        position = np.arange(first_row, first_row + len(batch)) * TICKS_PER_SECOND
        return Events(
            users=ids(batch[roles.user], roles.user, place),
            items=ids(batch[roles.item], roles.item, place),
            ticks=ticks(batch[roles.time], roles.time, place, self.time_unit) if roles.time else position,
            features={name: categories(batch[name], name, place) for name in self.feature_columns},
        )

    def rows_of_users(self, batch: pa.RecordBatch, roles: Roles, place: Place, first_row: int) -> Events:
        """Events of rows that are users: lists flattened, plain feature columns repeated over the user's events."""
        lengths = list_lengths(batch[roles.item], roles.item, place)
        row_of_event = np.repeat(np.arange(len(batch)), lengths)
        within = place._replace(rows=row_of_event)

        def flat(name: str) -> pa.Array:
            return flatten_list(batch[name], name, lengths, roles.item, place)

        def feature(name: str) -> pa.Array:
            column = batch[name]
            if is_list(column.type):
                return categories(flat(name), name, within)
            return categories(column, name, place).take(pa.array(row_of_event))

        rows = np.arange(first_row, first_row + len(batch))
        position = np.arange(len(row_of_event)) * TICKS_PER_SECOND
        return Events(
            users=ids(batch[roles.user], roles.user, place) if roles.user else pa.array(rows),
            items=ids(flat(roles.item), roles.item, within),
            ticks=ticks(flat(roles.time), roles.time, within, self.time_unit) if roles.time else position,
            features={name: feature(name) for name in self.feature_columns},
            lengths=lengths,
        )


def parquet_files(path: Path) -> list[Path]:
    """The file, or those of the folder, in the order of their names."""
    if not path.is_dir():
        return [path]
    if not (files := sorted(path.rglob("*.parquet"))):
        raise InputError(f"data: the folder {path} holds no .parquet file")
    return files


def leaf_values(file: pq.ParquetFile, column: str) -> list[int]:
    """Values in each row group of a column, with lists all of their elements. From the metadata alone."""
    metadata = file.metadata
    paths = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
    leaf = next(at for at, path in enumerate(paths) if path == column or path.startswith(f"{column}."))
    return [metadata.row_group(group).column(leaf).num_values for group in range(metadata.num_row_groups)]


@dataclass(frozen=True)
class CsvSource(Source):
    """One row per event, a header names the columns. MovieLens' ``ratings.csv`` needs no further options."""

    parses_text: ClassVar[bool] = True

    def events(self) -> Iterator[Events]:
        delimiter = "\t" if self.path.suffix == ".tsv" else ","
        with readable(self.path):
            parse = csv.ParseOptions(delimiter=delimiter)
            with csv.open_csv(self.path, parse_options=parse) as header:
                available = header.schema.names
            roles = find_roles(available, self.columns, self.path, user_optional=False)
            for name in self.feature_columns:
                require_column(name, available, self.path)
            assert roles.user is not None
            text = dict.fromkeys([roles.user, roles.item, *self.feature_columns], pa.large_string())
            convert = csv.ConvertOptions(
                include_columns=[*text, *([roles.time] if roles.time and roles.time not in text else [])],
                column_types=text,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            )
            place = Place(self.path)
            for batch in csv.open_csv(self.path, csv.ReadOptions(block_size=_CSV_BLOCK), parse, convert):
                position = np.arange(place.first_row, place.first_row + len(batch)) * TICKS_PER_SECOND
                yield Events(
                    users=ids(batch[roles.user], roles.user, place),
                    items=ids(batch[roles.item], roles.item, place),
                    ticks=ticks(batch[roles.time], roles.time, place, self.time_unit) if roles.time else position,
                    features={name: categories(batch[name], name, place) for name in self.feature_columns},
                )
                place = Place(self.path, place.first_row + len(batch))


@dataclass(frozen=True)
class TextSource(Source):
    """A user and an item per line, separated by blanks, each user's lines in time order: line numbers are the times."""

    parses_text: ClassVar[bool] = True

    def events(self) -> Iterator[Events]:
        if self.columns or self.feature_columns:
            raise ConfigurationError(
                f"columns: {self.path.name} is text, it has a user and an item per line and no names"
            )
        first_line = 1
        # One column: a delimiter that no text has, no quotes.
        parse = csv.ParseOptions(delimiter="\x1f", quote_char=False, ignore_empty_lines=False)
        read = csv.ReadOptions(column_names=["line"], block_size=_CSV_BLOCK)
        convert = csv.ConvertOptions(column_types={"line": pa.large_string()})
        with readable(self.path):
            for batch in csv.open_csv(self.path, read, parse, convert):
                lines = pc.utf8_trim_whitespace(batch["line"])
                filled = np.flatnonzero(np.asarray(pc.not_equal(lines, "")))
                words = pc.utf8_split_whitespace(lines.take(pa.array(filled)))
                counts = np.asarray(pc.list_value_length(words))
                if (wrong := counts != 2).any():
                    at = int(filled[wrong.argmax()])
                    raise InputError(
                        f"{self.path}: line {first_line + at} is {lines[at].as_py()!r}; a line holds a user and an item"
                    )
                pairs = words.flatten()
                yield Events(
                    users=pairs.take(pa.array(np.arange(0, len(pairs), 2))),
                    items=pairs.take(pa.array(np.arange(1, len(pairs), 2))),
                    ticks=(first_line + filled) * TICKS_PER_SECOND,
                    features={},
                )
                first_line += len(batch)


_SOURCES: dict[str, type[Source]] = {"parquet": ParquetSource, "csv": CsvSource, "text": TextSource}
_SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text"}


def open_source(path: str | PathLike[str], format: str | None = None, **options: Any) -> Source:
    """The source for a path: by ``format``, else by the suffix; a folder is one of Parquet files."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"data: {path} does not exist")
    if format is None:
        format = "parquet" if path.is_dir() else _SUFFIXES.get(path.suffix.lower())
        if format is None:
            raise InputError(
                f"data: cannot tell the format of {path} by its suffix; pass format= ({', '.join(_SOURCES)})"
            )
    if format not in _SOURCES:
        raise ConfigurationError(f"format: {format!r} is unknown; choose one of {', '.join(_SOURCES)}")
    return _SOURCES[format](path, **options)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say which file it was that could not be read."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
