"""What ``freescale recommend``, ``evaluate`` and ``serve`` share: a trained model of a file, and the options of events."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from lightning_freescale.cli.event_file_options import add_file_options, columns_of
from lightning_freescale.inference import Recommender, model_file
from lightning_freescale.runtime.errors import CheckpointError, CheckpointNotFoundError
from lightning_freescale.runtime.requirements import TORCHREC_PROBLEM

MODEL_HELP = "checkpoint of an HSTU (a file or a folder), or the file of freescale export --inference"


def add_event_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a file of events is read."""
    add_file_options(parser, default_columns="as in the training")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="folder for preprocessed data")


def event_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`add_event_arguments` as arguments of ``Recommender.read_events``."""
    return {"format": options.format, "columns": columns_of(options), "cache_dir": options.cache_dir}


def load_recommender(path: str) -> Recommender:
    """The model of an exported file or of a checkpoint, on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model_file.is_exported(path):
        return Recommender.load(path, device)
    if TORCHREC_PROBLEM is None:
        from lightning_freescale.cli import trained_model

        return Recommender(trained_model.inference_content(path), device, path)
    if not Path(path).exists():
        raise CheckpointNotFoundError(f"{path}: there is no such file")
    if Path(path).is_dir():
        raise CheckpointError(
            f"{path}: a folder is a checkpoint. To read it, {TORCHREC_PROBLEM}. Or write it as one file where TorchRec is "
            "installed: freescale export --inference CKPT OUT"
        )
    return Recommender.load(path, device)  # raises the error that says what is wrong with the file
