"""The options with which every command reads a file of events: ``--format`` and ``--column``."""

from __future__ import annotations

import argparse

from lightning_freescale.runtime.errors import ConfigurationError

ROLES = ("user", "item", "time")


def add_file_options(parser: argparse.ArgumentParser, default_columns: str) -> None:
    """Add ``--format`` and ``--column``. ``default_columns`` says which columns are read without ``--column``."""
    parser.add_argument("--format", choices=["parquet", "csv", "text"], help="format of DATA (default: by its suffix)")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help=f"name of a column; ROLE is user, item or time (can be repeated; default: {default_columns})",
    )


def columns_of(options: argparse.Namespace) -> dict[str, str]:
    """The name of the column of each role that ``--column`` has named."""
    columns = {}
    for pair in options.column:
        role, equals, name = pair.partition("=")
        if not equals or role not in ROLES:
            raise ConfigurationError(f"--column: {pair!r} is not ROLE=NAME with the role user, item or time")
        columns[role] = name
    return columns
