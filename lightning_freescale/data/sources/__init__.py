"""Sources: files of events, read a few million events at a time.

* ``base.py``: the base class ``Source``, and ``Events``, what every source yields.
* ``parquet.py``: ``ParquetSource``, one row per user or one row per event.
* ``text.py``: ``CsvSource``, one row per event, and ``TextSource``, a user and an item per line.

``open_source`` chooses the class by the format of the file.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Literal

from lightning_freescale.data.sources.base import Events, Source, readable
from lightning_freescale.data.sources.parquet import ParquetSource
from lightning_freescale.data.sources.text import CsvSource, TextSource
from lightning_freescale.runtime.errors import ConfigurationError, InputError

__all__ = ["CsvSource", "Events", "Format", "ParquetSource", "Source", "TextSource", "open_source", "readable"]

Format = Literal["parquet", "csv", "text"]

_SOURCES: dict[str, type[Source]] = {"parquet": ParquetSource, "csv": CsvSource, "text": TextSource}
_SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text"}


def open_source(path: str | PathLike[str], format: str | None = None, **options: Any) -> Source:
    """Return the source for a path.

    Args:
        path: a file, or a folder of Parquet files.
        format: ``"parquet"``, ``"csv"`` or ``"text"``; by default the suffix decides.
        options: further arguments of the source.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"data: {path} does not exist")
    if format is None:
        format = "parquet" if path.is_dir() else _SUFFIXES.get(path.suffix.lower())
        if format is None:
            raise InputError(f"data: the suffix of {path} tells no known format; pass format= ({', '.join(_SOURCES)})")
    if format not in _SOURCES:
        raise ConfigurationError(f"format: {format!r} is unknown; choose one of {', '.join(_SOURCES)}")
    return _SOURCES[format](path, **options)
