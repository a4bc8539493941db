"""``freescale recommend``: writes the best items of every user of a file, by a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from tqdm import tqdm

from lightning_freescale.cli.recommender_files import (
    MODEL_HELP,
    add_event_arguments,
    event_options,
    load_recommender,
)
from lightning_freescale.models.recommendation import Recommendations
from lightning_freescale.runtime.errors import ConfigurationError

SUFFIXES = (".parquet", ".csv")
DEFAULT_K = 10


class RecommendationWriter:
    """Writes recommendations to a Parquet or CSV file while they are made. A row has a user, a rank from 1, an item and a score.

    ``with RecommendationWriter(path) as writer: writer.write(found)``. The file appears at the end of the block.

    Args:
        path: the file; its suffix is ``.parquet`` or ``.csv``.
    """

    def __init__(self, path: Path):
        if path.suffix not in SUFFIXES:
            raise ConfigurationError(f"output: {path} must end with {' or '.join(SUFFIXES)}")
        self.path, self.users = path, 0
        self._partial = path.with_name(f".{path.name}.partial")
        self._writer: Any = None

    def __enter__(self) -> RecommendationWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def write(self, found: Recommendations) -> None:
        table = as_table(found)
        if self._writer is None:
            parquet = self.path.suffix == ".parquet"
            kind = pyarrow.parquet.ParquetWriter if parquet else pyarrow.csv.CSVWriter
            self._writer = kind(self._partial, table.schema)
        self._writer.write_table(table)
        self.users += len(found.users)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if error is None and self._writer is not None:
            self._partial.replace(self.path)
        else:
            self._partial.unlink(missing_ok=True)


def as_table(found: Recommendations) -> pa.Table:
    """One row per user and item. Users with few candidates have fewer rows."""
    users, places = np.nonzero(np.isfinite(found.scores))
    return pa.table(
        {
            "user": found.users[users],
            "rank": (places + 1).astype(np.int32),
            "item": found.items[users, places],
            "score": found.scores[users, places],
        }
    )


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``freescale recommend``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the best items of every user of a file of events, with scores. The items and users have the ids of "
        "the file. Items of the user's history are left out. An exported model needs no TorchRec.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("data", metavar="DATA", help="a Parquet, CSV or text file of events")
    parser.add_argument("--batch-size", type=int, metavar="N", default=64, help="users per step (default: %(default)s)")
    parser.add_argument("--keep-seen", action="store_true", help="also rank items that are in the user's history")
    add_event_arguments(parser)
    parser.add_argument("--k", type=int, help=f"items per user (default: {DEFAULT_K})")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("recommendations.parquet"),
        metavar="FILE",
        help="Parquet or CSV; default %(default)s",
    )
    options = parser.parse_args(argv)
    if options.batch_size < 1:
        raise ConfigurationError(f"--batch-size: must be at least 1, not {options.batch_size}")
    writer, how = RecommendationWriter(options.output), event_options(options)
    recommender = load_recommender(options.model)
    k = min(DEFAULT_K, recommender.num_items) if options.k is None else recommender.check_k(options.k, "--k")
    histories = recommender.read_events(options.data, **how)
    with writer, tqdm(total=histories.num_users, unit=" users", desc="recommending", disable=None) as progress:
        for samples in recommender.batches(histories, options.batch_size):
            found = recommender.recommend(samples, k, filter_seen=not options.keep_seen)
            writer.write(found._replace(users=histories.user_ids[samples.users]))
            progress.update(len(samples.users))
    print(f"{options.output}: at most {k} items for each of {writer.users:,} users")
    return 0
