"""Checks of the lines of a record file. A file may come from anywhere, so every field is checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning_freescale.bubbles.spans import Kind

_KINDS = {kind.value for kind in Kind}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_span(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 5
        and isinstance(value[0], str)
        and value[0] in _KINDS
        and isinstance(value[1], str)
        and all(map(_is_time, value[2:]))
    )


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _values(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_STEP: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "start": _is_number,
    "wall": _is_time,
    "spans": _list_of(_is_span),
    "counts": _values(_is_number),
    "histograms": _values(_list_of(_is_count)),
}
_HEADER: dict[str, Callable[[Any], bool]] = {
    "freescale": lambda value: type(value) is int,
    "world": _is_count,
    "settings": lambda value: isinstance(value, dict),
}


def problem_of(record: Any) -> str | None:
    """What is wrong with a line, with the name of the field; ``None`` if nothing is."""
    if not isinstance(record, dict):
        return f"the line is {str(record)[:40]!r} and not an object"
    header = "freescale" in record
    for name, check in (_HEADER if header else _STEP).items():
        if name not in record:
            if header:
                continue  # Every field of a header but the format may be missing.
            return f"{name} is missing"
        if not check(record[name]):
            return f"{name} is {str(record[name])[:40]!r}, which this field cannot be"
    return None
