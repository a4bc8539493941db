"""Columns of a file to what preprocessing takes: ids, times, categories. Everything wrong with them is said here."""

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
TICKS_PER_SECOND = 1_000_000  # times are ordered by the microsecond and stored by the second
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_USUAL_NAMES = {  # compared without case and underscores
    "user": ("user", "userid", "uid"),
    "item": ("item", "itemid", "items", "itemids", "movieid", "history"),
    "time": ("timestamp", "timestamps", "time", "times", "ts"),
}


class Roles(NamedTuple):
    """Which column is what. ``user`` may be ``None`` with one row per user, ``time`` where rows are in time order."""

    user: str | None
    item: str
    time: str | None


class Place(NamedTuple):
    """Where a run of values stands, for messages. Rows count from 0, without the header.

    Attributes:
        path: the file.
        first_row: row of the first value.
        rows: ``[n]`` row of each value after ``first_row``, for values that come out of lists.
    """

    path: Path
    first_row: int = 0
    rows: NDArray[np.int64] | None = None

    def row(self, at: int) -> int:
        return self.first_row + int(at if self.rows is None else self.rows[at])


def find_roles(available: Iterable[str], named: Mapping[str, str | None], path: Path, user_optional: bool) -> Roles:
    """Take the columns the caller named; look for the usual names of the others.

    Args:
        available: the columns there are.
        named: role (``"user"``, ``"item"``, ``"time"``) to column; a time of ``None`` says that rows are in time order.
        path: for messages.
        user_optional: a file may do without users, its rows being users.
    """
    available = list(available)
    if unknown := set(named) - set(_USUAL_NAMES):
        raise ConfigurationError(f"columns: {unknown.pop()!r} is no role; the roles are {', '.join(_USUAL_NAMES)}")
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
            problem = f"columns {usual} could each be the {role}" if usual else f"no column looks like the {role}"
            hint = f" or, with rows in time order, columns={{{role!r}: None}}" if role == "time" else ""
            raise InputError(
                f"{path}: {problem}; name it with columns={{{role!r}: ...}}{hint} (columns: {', '.join(available)})"
            )
    if found["item"] is None or (found["user"] is None and not user_optional):
        raise ConfigurationError(f"columns: {path.name} needs a user and an item column, not {dict(named)}")
    if guessed := [f"{column!r} as the {role}" for role, column in found.items() if column and role not in named]:
        log_once(f"{path.name}: takes column {', '.join(guessed)}")
    return Roles(found["user"], found["item"], found["time"])


def require_column(column: str, available: Iterable[str], path: Path) -> None:
    if column not in (available := list(available)):
        raise InputError(f"{path}: no column {column!r} (columns: {', '.join(available)})")


def ids(values: pa.Array, column: str, place: Place) -> pa.Array:
    """Raw ids as int64 or large_string, none of them null or negative."""
    values = _plain(values)
    _no_nulls(values, column, place)
    if pa.types.is_integer(values.type):
        values = _cast(values, pa.int64(), column, place)
        if len(values) and (low := np.asarray(values)).min() < 0:
            row = int((low < 0).argmax())
            raise InputError(f"{place.path}: {column} is {low[row]} at row {place.row(row)}; ids are not negative")
        return values
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values.cast(pa.large_string())
    raise InputError(f"{place.path}: column {column!r} has type {values.type}; ids are integers or strings")


def categories(values: pa.Array, column: str, place: Place) -> pa.Array:
    """Raw values of a categorical feature: numbers, strings or booleans, none of them null."""
    values = _plain(values)
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    _no_nulls(values, column, place)
    if pa.types.is_integer(values.type):
        return _cast(values, pa.int64(), column, place)
    if pa.types.is_floating(values.type):
        return values.cast(pa.float64())
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values.cast(pa.large_string())
    if pa.types.is_boolean(values.type):
        return values
    raise InputError(f"{place.path}: column {column!r} has type {values.type}; a category is a number or a string")


def ticks(values: pa.Array, column: str, place: Place, unit: TimeUnit) -> NDArray[np.int64]:
    """Times in microseconds, none of them null or negative.

    Args:
        values: integers or floats in ``unit``, dates or timestamps.
        column, place: for messages.
        unit: of numbers; dates and timestamps know theirs.
    """
    values = _plain(values)
    _no_nulls(values, column, place)
    kind = values.type
    if pa.types.is_date(kind):
        values, kind = values.cast(pa.timestamp("s")), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        raw, per_second = np.asarray(values.cast(pa.int64())), _PER_SECOND[kind.unit]
    elif pa.types.is_integer(kind):
        raw, per_second = np.asarray(_cast(values, pa.int64(), column, place)), _PER_SECOND[unit]
    elif pa.types.is_floating(kind):
        raw, per_second = np.asarray(values.cast(pa.float64())), _PER_SECOND[unit]
    else:
        raise InputError(
            f"{place.path}: column {column!r} has type {kind}; a time is a number (seconds, or time_unit), date or "
            f"timestamp, not {values[0].as_py() if len(values) else None!r}"
        )
    limit = np.iinfo(np.int64).max / TICKS_PER_SECOND * per_second
    if len(raw) and not 0 <= raw.min() <= raw.max() < limit:  # false for NaN, too
        row = int((~((raw >= 0) & (raw < limit))).argmax())
        raise InputError(
            f"{place.path}: {column} is {raw[row]} at row {place.row(row)}; a time is a number of seconds "
            "since 1970 (time_unit names another unit), not negative"
        )
    if raw.dtype == np.float64:
        return np.floor(raw * (TICKS_PER_SECOND / per_second)).astype(np.int64)
    if per_second > TICKS_PER_SECOND:
        return raw // (per_second // TICKS_PER_SECOND)
    return raw * (TICKS_PER_SECOND // per_second)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def list_lengths(values: pa.Array, column: str, place: Place) -> NDArray[np.int64]:
    """``[rows]`` lengths of a list column without nulls."""
    _no_nulls(values, column, place)
    return np.asarray(pc.list_value_length(values).cast(pa.int64()))


def flatten_list(values: pa.Array, column: str, lengths: NDArray[np.int64], item: str, place: Place) -> pa.Array:
    """The elements of a list column whose rows are as long as those of the column ``item``."""
    if not is_list(values.type):
        raise InputError(
            f"{place.path}: column {column!r} has type {values.type}, but {item!r} has lists; it needs lists as well"
        )
    own = list_lengths(values, column, place)
    if (unequal := own != lengths).any():
        row = int(unequal.argmax())
        raise InputError(
            f"{place.path}: {column} has {own[row]} elements at row {place.row(row)}, {item} has {lengths[row]}"
        )
    return values.flatten()


def _plain(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _cast(values: pa.Array, kind: pa.DataType, column: str, place: Place) -> pa.Array:
    try:
        return values.cast(kind)
    except pa.ArrowInvalid as error:
        raise InputError(f"{place.path}: column {column!r}: {error}") from error


def _no_nulls(values: pa.Array, column: str, place: Place) -> None:
    if values.null_count:
        row = place.row(pc.index(values.is_null(), pa.scalar(True)).as_py())
        raise InputError(f"{place.path}: {column} is null at row {row}; fill it or leave the row out")
