"""Checks checkpoints without a Trainer, and finds the last one from which a training can resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fsspec.core import url_to_fs

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.runtime.log import logger
from lightning_freescale.strategy.checkpoints import file, folder, storage

SUFFIX = ".ckpt"  # of the names that Lightning gives to checkpoints


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint whose checksums are right."""

    path: str
    format: str  # "file" or "sharded"
    size: int  # bytes
    step: int | None  # global step; ``None`` if Lightning's part holds Python objects that must not be loaded
    epoch: int | None


def verify(
    path: str | os.PathLike[str], progress: Callable[[Iterable[str]], Iterable[str]] = iter
) -> VerifiedCheckpoint:
    """Read the whole checkpoint ``path`` and compare its checksums. No code from the checkpoint is run.

    Args:
        path: a file or a folder.
        progress: gets the names of the files of a folder, and returns them one by one; for a progress bar.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or foreign. The message names the part.
    """
    found = storage.find(os.fspath(path))
    if storage.is_folder(found):
        expected = storage.read_checksums(found)
        for name in progress(sorted(expected)):
            storage.check_file(found, name, expected[name])
        size = sum(length for length, _ in expected.values())
        return VerifiedCheckpoint(
            found, "sharded", size, *_position(lambda: folder.load_meta(found, weights_only=True))
        )
    file.check_records(found)
    fs, inner = url_to_fs(found)
    return VerifiedCheckpoint(
        found, "file", fs.size(inner), *_position(lambda: file.read_alone(found, weights_only=True))
    )


def _position(read: Callable[[], dict[str, Any]]) -> tuple[int | None, int | None]:
    """The step and the epoch of a checkpoint."""
    try:
        entries = read()
    except CheckpointError as error:
        if "weights_only" not in str(error) and "WeightsUnpickler" not in str(error):
            raise
        return None, None
    return entries.get("global_step"), entries.get("epoch")


def last_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The newest undamaged checkpoint in ``directory``, for ``trainer.fit(..., ckpt_path=...)``; ``None`` if there is none.

    A newer checkpoint that is damaged is named in the log and left where it is. Every rank that calls it reads the whole
    checkpoint. Ranks that call it while nothing is written find the same one.

    Args:
        directory: the folder or remote address of the checkpoints, ``ModelCheckpoint(dirpath=...)``.
    """
    fs, inner = url_to_fs(os.fspath(directory))
    if not fs.isdir(inner):
        return None
    fs.invalidate_cache()
    names = {_name_of(entry["name"]): entry["name"] for entry in fs.ls(inner, detail=True)}
    found = [(fs.modified(path), name) for name, path in names.items() if name.endswith(SUFFIX)]
    for _, name in sorted(found, reverse=True):
        path = storage.join(os.fspath(directory), name)
        try:
            return verify(path).path
        except CheckpointError as error:
            logger.warning("%s is not used: %s", path, error)
    return None


def _name_of(entry: str) -> str:
    """The name of a checkpoint. A crash may have left it under the name of its predecessor."""
    name = entry.rstrip("/").rsplit("/", 1)[-1]
    return name.removeprefix(".").removesuffix(".previous") if name.endswith(f"{SUFFIX}.previous") else name
