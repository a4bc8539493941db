"""Checkpoints as one plain Lightning file: full tensors that ``torch.load`` and every other strategy can read."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.checkpoints import storage
from lightning_freescale.strategy.checkpoints.folder import EXPORT_HINT, UNPICKLE_HINT, raise_together
from lightning_freescale.strategy.checkpoints.format import is_lightnings_io
from lightning_freescale.strategy.control import Control


def write(io: Any, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
    """Write ``checkpoint`` through Lightning's ``CheckpointIO``. A folder at the same place is replaced."""
    replaces = storage.is_local(path) or is_lightnings_io(io)  # Another CheckpointIO may use addresses of its own.
    if replaces:
        storage.set_aside(path, unless="file")
    io.save_checkpoint(checkpoint, path, storage_options=storage_options)
    if replaces:
        storage.remove(storage.previous_of(path))


def read(io: Any, path: str, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint file through Lightning's ``CheckpointIO``."""
    options = {} if weights_only is None else {"weights_only": weights_only}  # Older versions have no such argument.
    try:
        checkpoint = io.load_checkpoint(path, **options)
    except CheckpointError:
        raise
    except Exception as failure:
        raise CheckpointError(
            f"{path} cannot be read: {type(failure).__name__}: {failure}. {UNPICKLE_HINT}"
        ) from failure
    checkpoint = check(path, checkpoint)
    if "pytorch-lightning_version" not in checkpoint:  # Lightning's own code needs this entry next.
        raise CheckpointError(f"{path} is not a Lightning checkpoint: it has no entry 'pytorch-lightning_version'")
    return checkpoint


def check(path: str, checkpoint: Any) -> dict[str, Any]:
    """Raise :class:`CheckpointError` unless ``checkpoint`` has the entries of a Lightning checkpoint."""
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("state_dict"), Mapping):
        return checkpoint
    if isinstance(checkpoint, Mapping) and checkpoint and all(isinstance(v, torch.Tensor) for v in checkpoint.values()):
        raise CheckpointError(
            f"{path} holds bare weights, not a checkpoint. Call model.load_state_dict(torch.load(...)) instead of passing "
            f"it as ckpt_path; {EXPORT_HINT}"
        )
    raise CheckpointError(f"{path} is not a Lightning checkpoint: it has no entry 'state_dict'")


def verify(path: str, control: Control) -> None:
    """Raise :class:`CheckpointError` on every rank if a part of the file ``path`` is damaged. A collective.

    PyTorch writes zip archives with a CRC-32 of every record, but does not compare them when it loads a file. The ranks
    share this work. Files of other kinds are left to the ``CheckpointIO``.
    """
    error: Exception | None = None
    try:
        if torch.serialization.get_crc32_options():
            check_records(path, control.rank, control.world_size)
    except Exception as failure:
        error = failure
    raise_together(control, error, where="loading a checkpoint")


def check_records(path: str, first: int = 0, step: int = 1) -> None:
    """Raise :class:`CheckpointError` if one of the records ``first``, ``first + step``, ... of a file by PyTorch is damaged."""
    with storage.open_file(path, "rb") as stream:
        if stream.read(2) != b"PK":
            return
        try:
            with zipfile.ZipFile(stream) as archive:
                for record in archive.infolist()[first::step]:
                    with archive.open(record) as content:
                        while content.read(1 << 22):
                            pass
        except zipfile.BadZipFile as failure:
            raise CheckpointError(
                f"{path} is damaged or incomplete: {failure}. If it was written after "
                "torch.serialization.set_crc32_options(False), make the same call before loading it"
            ) from failure


def read_alone(path: str, weights_only: bool | None = None) -> dict[str, Any]:
    """Verify and read a checkpoint file without other ranks."""
    check_records(path)
    try:
        with storage.open_file(path, "rb") as stream:
            checkpoint = torch.load(stream, map_location="cpu", weights_only=weights_only)
    except Exception as failure:
        raise CheckpointError(f"{path} cannot be read: {type(failure).__name__}: {failure}") from failure
    return check(path, checkpoint)
