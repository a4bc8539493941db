"""``freescale recommend``: writes the best items of every user of a file, by a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from lightning_freescale.cli import trained_model
from lightning_freescale.models.recommendation import Recommendations
from lightning_freescale.runtime.errors import ConfigurationError

SUFFIXES = (".parquet", ".csv")
DEFAULT_K = 10


class RecommendationWriter(pl.Callback):
    """Writes predictions to a Parquet or CSV file while they are made. A row has a user, a rank from 1, an item and a score.

    Args:
        path: the file; its suffix is ``.parquet`` or ``.csv``. It appears when all rows are written.
    """

    def __init__(self, path: Path):
        if path.suffix not in SUFFIXES:
            raise ConfigurationError(f"output: {path} must end with {' or '.join(SUFFIXES)}")
        self.path, self.users = path, 0
        self._partial = path.with_name(f".{path.name}.partial")
        self._writer: Any = None

    def on_predict_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Recommendations,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        table = as_table(outputs)
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            parquet = self.path.suffix == ".parquet"
            kind = pyarrow.parquet.ParquetWriter if parquet else pyarrow.csv.CSVWriter
            self._writer = kind(self._partial, table.schema)
        self._writer.write_table(table)
        self.users += len(outputs.users)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self._writer.close()
        self._partial.replace(self.path)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()
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
        "the file. Items of the user's history are left out.",
    )
    trained_model.add_arguments(parser)
    parser.add_argument("--k", type=int, help=f"items per user (default: {DEFAULT_K})")
    parser.add_argument(
        "--output", type=Path, default=Path("recommendations.parquet"), metavar="FILE", help="Parquet or CSV"
    )
    options = parser.parse_args(argv)
    writer = RecommendationWriter(options.output)
    checkpoint = trained_model.read_checkpoint(options.checkpoint)
    model = trained_model.load_model(options.checkpoint, checkpoint, filter_seen=not options.keep_seen)
    k = min(DEFAULT_K, model.num_items) if options.k is None else options.k
    if not 1 <= k <= model.num_items:
        raise ConfigurationError(f"--k: must be from 1 to {model.num_items}, the number of items, not {k}")
    model.hparams["top_k"] = k
    data = trained_model.read_data(options.checkpoint, checkpoint, options, min_events=1)
    trained_model.make_trainer(callbacks=[writer]).predict(model, datamodule=data, return_predictions=False)
    print(f"{options.output}: {k} items for each of {writer.users:,} users")
    return 0
