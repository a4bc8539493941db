"""Lets Lightning's own loading functions read checkpoint folders, for ``Model.load_from_checkpoint`` and other strategies.

Lightning opens a checkpoint as one file. The functions here take the place of its loading function, read a folder of this
package into one dictionary of full tensors, and leave every other path to Lightning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.strategy.checkpoints import folder, storage


def read_whole(path: str, weights_only: bool | None, optimizer_states: bool = True) -> dict[str, Any]:
    """The folder ``path`` as one Lightning checkpoint with full tensors on the CPU. Needs no process group.

    Args:
        path: a local path or a remote address.
        weights_only: that of ``torch.load``.
        optimizer_states: read the states of the optimizers, too.
    """
    for name, expected in storage.read_checksums(path).items():
        storage.check_file(path, name, expected)
    checkpoint = folder.load_meta(path, weights_only)
    if not optimizer_states:
        checkpoint.pop("optimizer_states", None)
    elif "optimizer_states" in checkpoint:
        checkpoint[folder.ENTRY]["table_optimizer"] = folder.read_unsharded(path, "table_optimizer")
    return {**checkpoint, "state_dict": folder.read_unsharded(path, "state_dict")}


def install(package: str) -> None:
    """Let the loading functions of ``package``, ``"lightning"`` or ``"pytorch_lightning"``, read folders."""
    compat.wrap_load_from_checkpoint(package, lambda load: _reads_folders(load, optimizer_states=False))
    compat.wrap_checkpoint_io(package, lambda load: _reads_folders(load, optimizer_states=True))


def _reads_folders(load: Callable[..., Any], optimizer_states: bool) -> Callable[..., Any]:
    def load_file_or_folder(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not isinstance(path_or_url, (str, os.PathLike)) or not storage.is_checkpoint_folder(os.fspath(path_or_url)):
            return load(path_or_url, map_location=map_location, weights_only=weights_only)
        path = storage.find(os.fspath(path_or_url))
        return _place(read_whole(path, weights_only, optimizer_states), map_location)

    return load_file_or_folder


def _place(checkpoint: dict[str, Any], map_location: Any) -> dict[str, Any]:
    """The checkpoint with its tensors where ``torch.load`` would put tensors of the CPU with this ``map_location``."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or map_location is None:
            return value
        if callable(map_location):
            placed = map_location(value.untyped_storage(), "cpu")
            return value if placed is None else value.to(placed.device)
        return value.to(map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location)

    return tree_map(move, checkpoint)
