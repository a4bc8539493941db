"""Converts columns of a file to ids, times and categories, and refuses bad values with their row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import ConfigurationError, InputError
from lightning_freescale.runtime.log import log_once

TimeUnit = Literal["s", "ms", "us", "ns"]
TICKS_PER_SECOND = 1_000_000  # a tick is a microsecond: events are sorted by ticks, and stored with seconds
YEAR_10000 = 253_402_300_800  # in seconds; a later time has another unit
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_USUAL_NAMES = {  # in lower case and without underscores
    "user": ("user", "userid", "uid"),
    "item": ("item", "itemid", "items", "itemids", "movieid", "history"),
    "time": ("timestamp", "timestamps", "time", "times", "ts"),
}


class ColumnRoles(NamedTuple):
    """The column of each role. ``user`` may be ``None`` if a row is a user; ``time`` if rows are in time order."""

    user: str | None
    item: str
    time: str | None


class RowLocation(NamedTuple):
    """The location of ``n`` values in a file, for error messages. Rows count from 0, without the header.

    Attributes:
        path: the file.
        first_row: the row of the first value.
        rows: ``[n]`` row of each value, counted from ``first_row``, for elements of lists. By default value ``i`` is in row
            ``first_row + i``.
    """

    path: Path
    first_row: int = 0
    rows: NDArray[np.int64] | None = None

    def row(self, at: int) -> int:
        """Return the row of value ``at``."""
        return self.first_row + int(at if self.rows is None else self.rows[at])


def find_roles(
    available: Iterable[str], named: Mapping[str, str | None], path: Path, user_optional: bool
) -> ColumnRoles:
    """Return the column of each role: as the caller named it, or a column with a usual name.

    Args:
        available: the columns of the file.
        named: the column of each role (``"user"``, ``"item"``, ``"time"``). A time of ``None`` means that rows are in time
            order.
        path: the file, for messages.
        user_optional: whether the file may have no user column, because each row is a user.
    """
    available = list(available)
    if unknown := set(named) - set(_USUAL_NAMES):
        raise ConfigurationError(f"columns: {unknown.pop()!r} is not a role; the roles are {', '.join(_USUAL_NAMES)}")
    found: dict[str, str | None] = {}
    for role, names in _USUAL_NAMES.items():
        if role in named:
            column = found[role] = named[role]
            if column is not None:
                require_column(column, available, path)
            continue
        usual = [column for column in available if column.lower().replace("_", "") in names]
        if len(usual) == 1:
            found[role] = usual[0]
        elif role == "user" and user_optional and not usual:
            found[role] = None
        else:
            problem = (
                f"columns {usual} could each be the {role}" if usual else f"no column has a usual name of the {role}"
            )
            hint = f", or pass columns={{{role!r}: None}} if rows are in time order" if role == "time" else ""
            raise InputError(
                f"{path}: {problem}; name the column with columns={{{role!r}: ...}}{hint} (columns: {', '.join(available)})"
            )
    if found["item"] is None or (found["user"] is None and not user_optional):
        raise ConfigurationError(f"columns: {path.name} needs a user and an item column, not {dict(named)}")
    if guessed := [f"{column!r} as the {role}" for role, column in found.items() if column and role not in named]:
        log_once(f"{path.name}: found column {', '.join(guessed)}, by usual names; pass columns= to change this")
    return ColumnRoles(found["user"], found["item"], found["time"])


def require_column(column: str, available: Iterable[str], path: Path) -> None:
    """Raise :class:`InputError` if the file does not have the column."""
    if column not in (available := list(available)):
        raise InputError(f"{path}: no column {column!r} (columns: {', '.join(available)})")


def ids(values: pa.Array, column: str, location: RowLocation) -> pa.Array:
    """Return raw ids as int64 or large_string. Refuse null and negative ids."""
    values = _plain(values)
    _no_nulls(values, column, location)
    if pa.types.is_integer(values.type):
        values = _cast(values, pa.int64(), column, location)
        if len(values) and (low := np.asarray(values)).min() < 0:
            row = int((low < 0).argmax())
            raise InputError(
                f"{location.path}: {column} is {low[row]} at row {location.row(row)}; ids must not be negative"
            )
        return values
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values.cast(pa.large_string())
    raise InputError(f"{location.path}: column {column!r} has type {values.type}; ids must be integers or strings")


def categories(values: pa.Array, column: str, location: RowLocation) -> pa.Array:
    """Return the raw values of a categorical feature: numbers, strings or booleans. Refuse null values."""
    values = _plain(values)
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    _no_nulls(values, column, location)
    if pa.types.is_integer(values.type):
        return _cast(values, pa.int64(), column, location)
    if pa.types.is_floating(values.type):
        return values.cast(pa.float64())
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values.cast(pa.large_string())
    if pa.types.is_boolean(values.type):
        return values
    raise InputError(
        f"{location.path}: column {column!r} has type {values.type}; a category must be a number, a string or a boolean"
    )


def ticks(values: pa.Array, column: str, location: RowLocation, unit: TimeUnit) -> NDArray[np.int64]:
    """Return times in microseconds. Refuse null and negative times, and those that must have another unit.

    Args:
        values: integers or floats in ``unit``, dates or timestamps.
        column, location: for messages.
        unit: the unit of numbers. Dates and timestamps have their own.
    """
    values = _plain(values)
    _no_nulls(values, column, location)
    kind = values.type
    if pa.types.is_date(kind):
        values, kind = values.cast(pa.timestamp("s")), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        raw, per_second = np.asarray(values.cast(pa.int64())), _PER_SECOND[kind.unit]
    elif pa.types.is_integer(kind):
        raw, per_second = np.asarray(_cast(values, pa.int64(), column, location)), _PER_SECOND[unit]
    elif pa.types.is_floating(kind):
        raw, per_second = np.asarray(values.cast(pa.float64())), _PER_SECOND[unit]
    else:
        raise InputError(
            f"{location.path}: column {column!r} has type {kind}; a time must be a number (in seconds, or in time_unit), a date "
            f"or a timestamp, not {values[0].as_py() if len(values) else None!r}"
        )
    limit = YEAR_10000 * per_second
    if len(raw) and not 0 <= raw.min() <= raw.max() < limit:  # also false for NaN
        row = int((~((raw >= 0) & (raw < limit))).argmax())
        raise InputError(
            f"{location.path}: {column} is {raw[row]} at row {location.row(row)}; a time is the number of seconds "
            "since 1970, at least 0 and before the year 10000; set time_unit for another unit, for example 'ms'"
        )
    if raw.dtype == np.float64:
        return np.floor(raw * (TICKS_PER_SECOND / per_second)).astype(np.int64)
    if per_second > TICKS_PER_SECOND:
        return raw // (per_second // TICKS_PER_SECOND)
    return raw * (TICKS_PER_SECOND // per_second)


def units_per_second(unit: TimeUnit) -> int:
    """How many of ``unit`` are a second."""
    return _PER_SECOND[unit]


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def list_lengths(values: pa.Array, column: str, location: RowLocation) -> NDArray[np.int64]:
    """Return the lengths ``[rows]`` of a list column. Refuse null lists."""
    _no_nulls(values, column, location)
    return np.asarray(pc.list_value_length(values).cast(pa.int64()))


def flatten_list(
    values: pa.Array, column: str, lengths: NDArray[np.int64], item: str, location: RowLocation
) -> pa.Array:
    """Return the elements of a list column. Each list must have the length, ``lengths [rows]``, of that in column ``item``."""
    if not is_list(values.type):
        raise InputError(
            f"{location.path}: column {column!r} has type {values.type}, but {item!r} has lists; it needs lists, too"
        )
    own = list_lengths(values, column, location)
    if (unequal := own != lengths).any():
        row = int(unequal.argmax())
        raise InputError(
            f"{location.path}: {column} has {own[row]} elements at row {location.row(row)}, {item} has {lengths[row]}"
        )
    return values.flatten()


def _plain(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _cast(values: pa.Array, kind: pa.DataType, column: str, location: RowLocation) -> pa.Array:
    try:
        return values.cast(kind)
    except pa.ArrowInvalid as error:
        raise InputError(f"{location.path}: column {column!r}: {error}") from error


def _no_nulls(values: pa.Array, column: str, location: RowLocation) -> None:
    if values.null_count:
        row = location.row(pc.index(values.is_null(), pa.scalar(True)).as_py())
        raise InputError(f"{location.path}: {column} is null at row {row}; fill the value, or remove the row")
