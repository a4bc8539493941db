"""What ``freescale recommend`` and ``freescale evaluate`` share: a trained model, and a file of events read with its ids."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_freescale.data.catalogue import Catalogue
from lightning_freescale.data.datamodule import SeqRecDataModule
from lightning_freescale.data.preprocess import read_histories
from lightning_freescale.data.sources import open_source
from lightning_freescale.models import HSTU
from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints import file, storage
from lightning_freescale.strategy.checkpoints.plain_loading import read_whole

DATA_STATE = SeqRecDataModule.__qualname__  # the key under which Lightning saves the state of the data module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint of an HSTU (a file or a folder)")
    parser.add_argument("data", metavar="DATA", help="a Parquet, CSV or text file of events")
    parser.add_argument("--batch-size", type=int, metavar="N", default=64, help="users per step (default: %(default)s)")
    parser.add_argument("--keep-seen", action="store_true", help="also rank items that are in the user's history")
    parser.add_argument("--format", choices=["parquet", "csv", "text"], help="format of DATA (default: by its suffix)")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="name of a column; ROLE is user, item or time (can be repeated; default: as in the training)",
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="folder for preprocessed data")


def read_checkpoint(path: str) -> dict[str, Any]:
    """The checkpoint with full tensors, without the states of optimizers."""
    place = storage.find(path)
    if storage.is_folder(place):
        return read_whole(place, weights_only=True, optimizer_states=False)
    return file.read_alone(place, weights_only=True)


def load_model(path: str, checkpoint: dict[str, Any], filter_seen: bool) -> HSTU:
    """The model of ``checkpoint`` for evaluation, on the CPU."""
    hyper_parameters = dict(checkpoint.get("hyper_parameters", {}))
    if "num_items" not in hyper_parameters:
        raise CheckpointError(
            f"{path}: hyper_parameters has no num_items, so it is no checkpoint of an HSTU. For another model use "
            "trainer.predict(); a plain state dict has no hyperparameters, so export it with --lightning"
        )
    model = HSTU(**{**hyper_parameters, "filter_seen": filter_seen, "meta_tables": False})
    model.on_load_checkpoint(checkpoint)
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its weights do not fit an HSTU: {error}") from error
    return model.eval()


def read_data(path: str, checkpoint: dict[str, Any], options: argparse.Namespace, min_events: int) -> SeqRecDataModule:
    """The events of a file as data of the model, with the row numbers of the model's own catalogue."""
    state = checkpoint.get(DATA_STATE)
    if not state or "catalogue" not in state:
        raise CheckpointError(
            f"{path}: it does not hold the ids of the items, because it was not trained with SeqRecDataModule, or by an "
            "earlier version; resume the training with SeqRecDataModule for one step and save again"
        )
    reading = dict(state["reading"])
    columns = {**reading["columns"], **_named_columns(options.column)}
    source = open_source(
        options.data,
        options.format,
        columns=columns,
        feature_columns=tuple(reading["feature_columns"]),
        time_unit=reading["time_unit"],
    )
    catalogue = Catalogue.from_state_dict(state["catalogue"])
    histories, left_out = catalogue.recode(read_histories(source, min_events, options.cache_dir), min_events)
    if left_out:
        log_once(
            f"{source.path.name}: {left_out:,} events are left out: the model does not know their item or feature value, or "
            "their user has too few other events",
            logging.WARNING,
        )
    return SeqRecDataModule(histories, batch_size=options.batch_size, max_history=reading["max_history"], balance="off")


def make_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on one device that writes no files."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    return pl.Trainer(
        accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False, **options
    )


def _named_columns(pairs: list[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        role, found, name = pair.partition("=")
        if not found or role not in ("user", "item", "time"):
            raise ConfigurationError(f"--column: {pair!r} is not ROLE=NAME with the role user, item or time")
        columns[role] = name
    return columns
