"""Checkpoints as a folder to which every rank writes its shards, readable on any number of ranks.

    NAME.ckpt/
      .metadata, __R_K.distcp    torch.distributed.checkpoint: the weights, sharded tables too, and the state of their optimizer
      meta.pt                    Lightning's entries: loops, callbacks, dense optimizers, schedulers, hyperparameters
      changes_R.pt               in an incremental checkpoint: what differs from the other files (see :mod:`.changes`)
      checksums.json             size and CRC-32 of every other file

In a remote store, the first two lie in a subfolder (see :mod:`~lightning_freescale.strategy.checkpoints.storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_freescale.runtime.errors import CheckpointError, FreeScaleError
from lightning_freescale.strategy.checkpoints import changes, storage
from lightning_freescale.strategy.checkpoints.changes import Piece
from lightning_freescale.strategy.checkpoints.safe_reading import (
    SafeFileReader,
    SafeLoadPlanner,
    SafeRemoteReader,
    SafeWholePlanner,
)
from lightning_freescale.strategy.checkpoints.storage import META
from lightning_freescale.strategy.control import Control

ENTRY = "freescale"  # The key of this package's entries in a checkpoint.
_FIRST_VERSION = "freescale_checkpoint"  # The key that marked folders before there was one for all entries.
Result = TypeVar("Result")
EXPORT_HINT = "`freescale export FOLDER FILE --lightning` turns the folder into one file that every strategy can read"


def raise_together(control: Control, error: Exception | None, where: str) -> None:
    """Raise a :class:`CheckpointError` on every rank if ``error`` is given on any rank. A collective."""
    if error is not None and not isinstance(error, FreeScaleError):
        wrapped = CheckpointError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        error = wrapped
    control.agree(error, where=where)


def run_together(control: Control, action: Callable[[], Result], where: str) -> Result:
    """The result of ``action()`` on this rank. Every rank raises :class:`CheckpointError` if it fails on any. A collective."""
    results: list[Result] = []
    error: Exception | None = None
    try:
        results.append(action())
    except Exception as failure:
        error = failure
    raise_together(control, error, where)
    return results[0]


# ---- save --------------------------------------------------------------------------------------------------------
def save(path: str, sharded: Mapping[str, Any], meta: Mapping[str, Any], control: Control) -> None:
    """Write a checkpoint folder. A collective.

    Args:
        path: local path or remote address of the folder. A checkpoint at that place is replaced.
        sharded: tensors, sharded or equal on all ranks, by name.
        meta: Lightning's entries and :data:`ENTRY`; rank 0 writes them.
    """
    target = storage.target_of(path)
    folder, error = "", None
    if control.rank == 0:
        try:
            folder = target.prepare()
        except Exception as failure:
            error = failure
    raise_together(control, error, where=f"saving {path}")
    folder = control.gather(folder)[0]
    write_tensors(folder, sharded, control, where=f"saving {path}")
    if control.rank == 0:
        try:
            with storage.open_file(storage.join(folder, META), "wb") as stream:
                torch.save(dict(meta), stream)
        except Exception as failure:
            error = failure
    raise_together(control, error, where=f"saving {path}")

    def checksums_of_share() -> storage.Checksums:
        names = storage.file_names(folder)[control.rank :: control.world_size]
        return {name: storage.checksum(storage.join(folder, name)) for name in names}

    own = run_together(control, checksums_of_share, where=f"saving {path}")
    checksums = {name: value for part in control.gather(own) for name, value in part.items()}
    if control.rank == 0:
        try:
            target.commit(checksums)
        except Exception as failure:
            error = failure
    raise_together(control, error, where=f"saving {path}")


def write_tensors(folder: str, sharded: Mapping[str, Any], control: Control, where: str) -> None:
    """Write the shards of this rank to ``folder``, and on rank 0 the list of the shards of all ranks. A collective."""
    try:
        dcp.save(dict(sharded), storage_writer=_writer(folder), process_group=control.group)
    except BaseException as failure:  # DCP's CheckpointException is no Exception. It is raised on every rank.
        if isinstance(failure, KeyboardInterrupt):
            raise
        raise CheckpointError(f"rank {control.rank}: {where} failed: {_reason(failure, control)}") from failure


def _reason(failure: BaseException, control: Control) -> str:
    """Why DCP has failed. If a connection broke, the rank that is missing is named."""
    return f"{control.exchange_reports(failure)} ({failure})" if "gloo" in str(failure) else str(failure)


def _writer(folder: str) -> FileSystemWriter:
    return FileSystemWriter(folder) if storage.is_local(folder) else FsspecWriter(folder, sync_files=False)


def _reader(folder: str) -> FileSystemReader:
    return SafeFileReader(folder) if storage.is_local(folder) else SafeRemoteReader(folder)


# ---- load --------------------------------------------------------------------------------------------------------
def verify(path: str, control: Control) -> None:
    """Raise :class:`CheckpointError` on every rank unless the folder ``path`` is complete and undamaged. A collective."""
    error: Exception | None = None
    try:
        expected = storage.read_checksums(path)
        for name in sorted(expected)[control.rank :: control.world_size]:
            storage.check_file(path, name, expected[name])
    except Exception as failure:
        error = failure
    raise_together(control, error, where="loading a checkpoint")


def load_meta(path: str, weights_only: bool | None = None) -> dict[str, Any]:
    """Lightning's entries and :data:`ENTRY`. ``weights_only`` is that of ``torch.load``."""
    file = storage.join(storage.data_folder(path), META)
    try:
        with storage.open_file(file, "rb") as stream:
            meta = torch.load(stream, map_location="cpu", weights_only=weights_only)
    except Exception as failure:
        raise CheckpointError(f"{file} cannot be read: {failure}. {UNPICKLE_HINT}") from failure
    if not isinstance(meta, dict):
        raise CheckpointError(f"{file} is damaged or foreign: it holds a {type(meta).__name__}")
    if _FIRST_VERSION in meta:
        names = ("table_optimizer_steps", "balance")
        meta[ENTRY] = {name: meta.pop(name) for name in names if name in meta}
    if not isinstance(meta.get(ENTRY), dict):
        raise CheckpointError(f"{path} was not written by this strategy")
    return meta


UNPICKLE_HINT = (
    "If it holds objects of your own and you trust the file, pass weights_only=False to fit(), validate(), test() or "
    "predict(), or allow their types with torch.serialization.add_safe_globals([...])"
)


def read_metadata(path: str) -> Metadata:
    return _reader(storage.data_folder(path)).read_metadata()


def stored_shapes(path: str, part: str = "state_dict") -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in the folder, by name. ``part`` is ``"state_dict"`` or ``"table_optimizer"``."""
    return {
        name.removeprefix(f"{part}."): tuple(entry.size)
        for name, entry in read_metadata(path).state_dict_metadata.items()
        if name.startswith(f"{part}.") and isinstance(entry, TensorStorageMetadata)
    }


def load_sharded(path: str, state: Mapping[str, Any], control: Control) -> None:
    """Fill the tensors of ``state`` in place. Any number of ranks may have written them. A collective."""
    try:
        wanted = {key: part for key, part in state.items() if part}  # DCP looks for empty mappings, too.
        reader = _reader(storage.data_folder(path))
        dcp.load(wanted, storage_reader=reader, planner=SafeLoadPlanner(), process_group=control.group)
    except BaseException as failure:  # DCP's CheckpointException is no Exception. It is raised on every rank.
        if isinstance(failure, KeyboardInterrupt):
            raise
        raise CheckpointError(f"rank {control.rank}: {path} cannot be loaded: {_reason(failure, control)}") from failure
    error: Exception | None = None
    try:
        flat = {f"{part}.{name}": value for part, values in wanted.items() for name, value in values.items()}
        changes.apply_all(path, flat, _local_pieces)
    except Exception as failure:
        error = failure
    raise_together(control, error, where="loading a checkpoint")


def _local_pieces(value: Any) -> Iterable[Piece]:
    """The shards of a tensor on this rank, which changes are written to."""
    shards = value.local_shards() if hasattr(value, "local_shards") else ()
    return [Piece(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in shards]


def read_unsharded(path: str, part: str, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Read full tensors from the folder, without other ranks.

    Args:
        part: ``"state_dict"`` or ``"table_optimizer"``.
        leave_out: names that are not read.
    """
    left_out = {f"{part}.{name}" for name in leave_out}
    keys = {
        key for key in read_metadata(path).state_dict_metadata if key.startswith(f"{part}.") and key not in left_out
    }
    nested: dict[str, Any] = {}
    if keys:
        reader = _reader(storage.data_folder(path))
        try:
            _load_state_dict(nested, storage_reader=reader, planner=SafeWholePlanner(keys=keys), no_dist=True)
        except BaseException as failure:  # DCP's CheckpointException is no Exception.
            if isinstance(failure, KeyboardInterrupt):
                raise
            raise CheckpointError(f"{path} cannot be read: {type(failure).__name__}: {failure}") from failure
    found = nested.get(part, {})
    flat = {f"{part}.{name}": value for name, value in found.items() if isinstance(value, torch.Tensor)}
    changes.apply_all(path, flat, lambda value: [Piece((0,) * value.dim(), value)])
    return found


class FolderStateDict(dict):
    """``checkpoint["state_dict"]`` of a folder, for hooks: all weights but the tables, which stay in their shards."""

    def __init__(self, weights: Mapping[str, Any], tables: Iterable[str], path: str):
        super().__init__(weights)
        self._tables, self._path = frozenset(tables), path

    def __missing__(self, key: str) -> Any:
        if key not in self._tables:
            raise KeyError(key)
        raise CheckpointError(
            f"checkpoint['state_dict'][{key!r}]: {self._path} is a folder of sharded tables, so hooks see the other weights "
            f"only. For hooks that need the tables, save with FreeScaleStrategy(checkpoint='file'); {EXPORT_HINT}"
        )
