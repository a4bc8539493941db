"""``CsvSource`` and ``TextSource``: events from text files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from lightning_freescale.data.columns import (
    TICKS_PER_SECOND,
    RowLocation,
    categories,
    find_roles,
    ids,
    require_column,
    ticks,
)
from lightning_freescale.data.sources.base import Events, Source, readable
from lightning_freescale.runtime.errors import ConfigurationError, InputError

_BLOCK_BYTES = 64 << 20  # bytes of text that are read at a time


@dataclass(frozen=True)
class CsvSource(Source):
    """One row per event, with a header. The ``ratings.csv`` of MovieLens needs no further options."""

    parses_text: ClassVar[bool] = True

    def events(self) -> Iterator[Events]:
        delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
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
            location = RowLocation(self.path)
            for batch in csv.open_csv(self.path, csv.ReadOptions(block_size=_BLOCK_BYTES), parse, convert):
                position = np.arange(location.first_row, location.first_row + len(batch)) * TICKS_PER_SECOND
                yield Events(
                    users=ids(batch[roles.user], roles.user, location),
                    items=ids(batch[roles.item], roles.item, location),
                    ticks=ticks(batch[roles.time], roles.time, location, self.time_unit) if roles.time else position,
                    features={name: categories(batch[name], name, location) for name in self.feature_columns},
                )
                location = RowLocation(self.path, location.first_row + len(batch))


@dataclass(frozen=True)
class TextSource(Source):
    """A user and an item per line, separated by blanks. The lines are in time order; line numbers serve as times."""

    parses_text: ClassVar[bool] = True

    def events(self) -> Iterator[Events]:
        if self.columns or self.feature_columns:
            raise ConfigurationError(
                f"columns, feature_columns: {self.path.name} is a text file without column names; leave both out"
            )
        first_line = 1
        # Read each line as one column: the delimiter occurs in no text, and quotes have no meaning.
        parse = csv.ParseOptions(delimiter="\x1f", quote_char=False, ignore_empty_lines=False)
        read = csv.ReadOptions(column_names=["line"], block_size=_BLOCK_BYTES)
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
                        f"{self.path}: line {first_line + at} is {lines[at].as_py()!r}; each line needs a user and an item"
                    )
                pairs = words.flatten()
                yield Events(
                    users=pairs.take(pa.array(np.arange(0, len(pairs), 2))),
                    items=pairs.take(pa.array(np.arange(1, len(pairs), 2))),
                    ticks=(first_line + filled) * TICKS_PER_SECOND,
                    features={},
                )
                first_line += len(batch)
