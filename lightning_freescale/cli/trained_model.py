"""What the commands read from a checkpoint: a trained model, the ids of its items, and how its data are read."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import lightning.pytorch as pl

from lightning_freescale.cli.dense_items import with_dense_items
from lightning_freescale.cli.recommender_files import event_options
from lightning_freescale.data.catalogue import Catalogue
from lightning_freescale.data.datamodule import SeqRecDataModule
from lightning_freescale.inference import model_file
from lightning_freescale.inference.recommender import read_events
from lightning_freescale.models import HSTU
from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.checkpoints import file, storage
from lightning_freescale.strategy.checkpoints.plain_loading import read_whole

DATA_STATE = SeqRecDataModule.__qualname__  # the key under which Lightning saves the state of the data module


def read_checkpoint(path: str, trusted: bool = False) -> dict[str, Any]:
    """The checkpoint with full tensors, without the states of optimizers. ``trusted`` allows objects that may run code.

    Zero-collision ids become numbers of items.
    """
    place = storage.find(path)
    if storage.is_folder(place):
        found = read_whole(place, weights_only=not trusted, optimizer_states=False)
    else:
        found = file.read_alone(place, weights_only=not trusted)
    return with_dense_items(path, found, DATA_STATE)


def load_model(path: str, checkpoint: dict[str, Any], filter_seen: bool = False) -> HSTU:
    """The model of ``checkpoint`` for evaluation, on the CPU."""
    hyper_parameters = dict(checkpoint.get("hyper_parameters", {}))
    if "num_items" not in hyper_parameters:
        raise CheckpointError(
            f"{path}: hyper_parameters has no num_items, so it is no checkpoint of an HSTU. For another model use "
            "trainer.predict(); a plain state dict has no hyperparameters, so export it with --inference or --lightning"
        )
    model = HSTU(**{**hyper_parameters, "filter_seen": filter_seen, "meta_tables": False})
    model.on_load_checkpoint(checkpoint)
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its weights do not fit an HSTU: {error}") from error
    return model.eval()


def data_state(path: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What the data module saved in ``checkpoint``: ``catalogue`` and ``reading``."""
    state = checkpoint.get(DATA_STATE)
    if not state or "catalogue" not in state:
        raise CheckpointError(
            f"{path}: it does not hold the ids of the items, because it was not trained with SeqRecDataModule, or by an "
            "earlier version; resume the training with SeqRecDataModule for one step and save again"
        )
    return state


def inference_content(path: str, trusted: bool = False) -> dict[str, Any]:
    """The entries of the exported file of a checkpoint (:mod:`lightning_freescale.inference.model_file`)."""
    checkpoint = read_checkpoint(path, trusted)
    model = load_model(path, checkpoint)
    state = data_state(path, checkpoint)
    return model_file.contents(dict(model.hparams), model.state_dict(), state["catalogue"], state["reading"])


def read_data(path: str, checkpoint: dict[str, Any], options: argparse.Namespace, min_events: int) -> SeqRecDataModule:
    """The events of a file as data of the model, with the row numbers of the model's own catalogue."""
    state = data_state(path, checkpoint)
    reading, catalogue = dict(state["reading"]), Catalogue.from_state_dict(state["catalogue"])
    histories = read_events(reading, catalogue, options.data, min_events=min_events, **event_options(options))
    return SeqRecDataModule(histories, batch_size=options.batch_size, max_history=reading["max_history"], balance="off")


def make_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on one device that writes no files."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    return pl.Trainer(
        accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False, **options
    )
