"""Turns a checkpoint into one plain file, without process groups and without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs

from lightning_freescale.strategy.checkpoints import file, folder, id_map, storage
from lightning_freescale.strategy.checkpoints.plain_loading import read_whole


def export(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    *,
    lightning: bool = False,
    weights_only: bool | None = None,
) -> dict[str, torch.Tensor]:
    """Write the weights of ``checkpoint`` to the file ``output`` as one unsharded state dict, and return them.

    ``model.load_state_dict(torch.load(output))`` then works on the unsharded model. For each table with zero-collision ids, a
    Parquet file beside ``output`` says which row belongs to which id (see :mod:`.id_map`).

    Args:
        checkpoint: a checkpoint of this strategy, file or folder; a path or a remote address.
        output: the file to write.
        lightning: write a full Lightning checkpoint instead, for ``Model.load_from_checkpoint(output)`` and for Trainers
            with any strategy. It holds the hyperparameters, the loops and the optimizer states, too.
        weights_only: as for ``torch.load``; ``False`` is needed if the checkpoint holds objects of your own.
    """
    path = storage.find(os.fspath(checkpoint))
    if storage.is_folder(path):
        whole = read_whole(path, weights_only) if lightning else {"state_dict": _read_weights(path)}
    else:
        whole = file.read_alone(path, weights_only)
    _write(whole if lightning else dict(whole["state_dict"]), os.fspath(output))
    id_map.write(whole["state_dict"], os.fspath(output))
    return dict(whole["state_dict"])


def _read_weights(path: str) -> dict[str, Any]:
    for name, expected in storage.read_checksums(path).items():
        storage.check_file(path, name, expected, whole=False)
    return folder.read_unsharded(path, "state_dict")


def _write(content: dict[str, Any], target: str) -> None:
    if not storage.is_local(target):
        with storage.open_file(target, "wb") as stream:
            torch.save(content, stream)
        return
    path = Path(url_to_fs(target)[1])
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, partial)
    partial.replace(path)
