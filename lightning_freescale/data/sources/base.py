"""``Source``: the base class of all sources, and ``Events``, what every source yields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.data.cache import fingerprint
from lightning_freescale.data.columns import TimeUnit
from lightning_freescale.runtime.errors import ConfigurationError, InputError


@dataclass(frozen=True)
class Events:
    """A chunk of ``n`` events, in the order of the file.

    Attributes:
        users: raw ids of the users: ``[n]``, or ``[rows]`` if ``lengths`` is given.
        items: ``[n]`` raw ids of the items.
        ticks: ``[n]`` times in microseconds.
        features: by name, ``[n]`` raw values.
        lengths: ``[rows]`` number of events of each row; ``None`` if every row is one event.
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
        path: the file or folder.
        columns: the column of each role (``"user"``, ``"item"``, ``"time"``). Missing roles are found by usual names.
        feature_columns: the columns with categorical features of the events.
        time_unit: the unit of numeric times.
    """

    path: Path
    columns: Mapping[str, str | None] = field(default_factory=dict)
    feature_columns: Sequence[str] = ()
    time_unit: TimeUnit = "s"

    def __post_init__(self) -> None:
        if taken := [name for name in self.feature_columns if name in (HISTORY, NEGATIVES)]:
            raise ConfigurationError(f"feature_columns: {taken[0]!r} is a reserved key of the batch; rename the column")
        if len(set(self.feature_columns)) < len(self.feature_columns):
            raise ConfigurationError(f"feature_columns: {list(self.feature_columns)} contains a column twice")

    # In a text file an id is text. Whether all ids are integers is known only after all of them are read.
    parses_text: ClassVar[bool] = False

    @abstractmethod
    def events(self) -> Iterator[Events]:
        """Yield all events from the start. Raises :class:`InputError` if the file has bad content."""

    def files(self) -> list[Path]:
        """Return all files of the source."""
        return [self.path]

    def identity(self) -> dict[str, Any]:
        """Return everything that the events depend on, as JSON types."""
        return {
            "source": type(self).__name__,
            "files": fingerprint(self.files()),
            "columns": dict(self.columns),
            "features": list(self.feature_columns),
            "time_unit": self.time_unit,
        }

    @property
    def num_events(self) -> int | None:
        """The number of events, or ``None`` if it is not known in advance."""
        return None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors while reading ``path`` into an :class:`InputError` that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
